"""Arguments of Transformer Engine that te_mx refuses: by name, and without looking at values."""

from __future__ import annotations

import pytest
import torch

import te_mx


class Silent(torch.Tensor):
    """A tensor that nobody may print: on a GPU the host would wait for its values."""

    def __repr__(self, **kwargs):
        raise AssertionError("an error printed a tensor")


def test_a_refusal_prints_no_tensor():
    value = torch.ones(3, 4).as_subclass(Silent)
    shown = r"=tensor torch.float32 \(3, 4\) on cpu is not supported"
    grouped = te_mx.GroupedLinear(2, 4, 4)
    for name in ("out", "dgrad_out"):
        with pytest.raises(NotImplementedError, match=f"te_mx.GroupedLinear: {name}{shown}"):
            grouped(torch.ones(3, 4), [1, 2], **{name: value})
    with pytest.raises(NotImplementedError, match=f"te_mx.LayerNormMLP: tp_group{shown}"):
        te_mx.LayerNormMLP(4, 4, tp_group=value)
    with pytest.raises(NotImplementedError, match="tp_group=list of 1 is not supported"):
        te_mx.Linear(4, 4, tp_group=[value])
