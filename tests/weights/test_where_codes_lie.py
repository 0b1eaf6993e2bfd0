"""`repr` and te_mx.audit say in which layouts the codes of a frozen weight lie now, and how many
bytes they take."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import te_mx

FAMILY = {
    "Linear": lambda: te_mx.Linear(128, 64),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(128, 64),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(128, 64, activation="swiglu"),
    "GroupedLinear": lambda: te_mx.GroupedLinear(3, 128, 64),
}
every = pytest.mark.parametrize("kind", FAMILY)


@every
@pytest.mark.parametrize(
    ("fmt", "size"), [("mxfp8_e4m3", "1.03"), ("mxfp4", "0.53"), ("fp8_e4m3_128x128", "1.00")]
)
def test_codes_alone(kind, fmt, size):
    layer = FAMILY[kind]()
    te_mx.freeze_weights(layer, drop_master=True, fmt=fmt)
    said = f"lies as {fmt}@rows, {size} bytes a parameter"
    assert f", {said}, frozen, no master" in repr(layer)
    report = te_mx.audit(layer)
    assert {row.lies for row in report} == {said} and str(report).count(said) == len(report)
    assert said in repr(copy.deepcopy(layer)) and said not in layer._label()
    te_mx.unfreeze_weights(layer, dequantize=True)
    assert "lies" not in repr(layer) and {row.lies for row in te_mx.audit(layer)} == {""}


@every
def test_copies_beside_masters(kind):
    """What is kept beside the master is counted by its bytes; a copy of the module has none."""
    layer = FAMILY[kind]()
    assert "lies" not in repr(layer)
    te_mx.freeze_weights(layer)
    kept = layer._source.kept.values()
    numbers = sum(w.numel() for key in layer._weight_keys for w in layer._each_of(key))
    tensors = [t for k in kept for t in k.row if isinstance(t, torch.Tensor)]
    size = sum(t.nbytes for t in tensors) / numbers
    said = re.search(
        r"lies as (mxfp8_e4m3@\w+.*), (\d\.\d\d) bytes a parameter, frozen", repr(layer)
    )
    assert said is not None and said[2] == f"{size:.2f}"
    assert "lies" not in repr(copy.deepcopy(layer))


def test_layers_of_other_libraries():
    """What their class says of itself stays, in front of it."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    experts = modeling.MixtralExperts(modeling.MixtralConfig(**sizes))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    model = torch.nn.Sequential(experts)
    before = repr(model)
    te_mx.convert_model(model)
    assert repr(model) == before
    te_mx.freeze_weights(model, drop_master=True)
    said = "lies as mxfp8_e4m3@rows, 1.03 bytes a parameter"
    assert f"{said}, frozen, no master" in repr(model)
    assert [row.lies for row in te_mx.audit(model)] == [said, said]
