"""te_mx.inspect on layers of Transformers that are converted where they stand: what it reads of
te_mx's own layers with the same weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import te_mx

transformers = pytest.importorskip("transformers", minversion="5.0")

H, F, TOKENS = 64, 96, 40


class Grouped(nn.Module):
    """Experts as two grouped layers."""

    def __init__(self, experts):
        super().__init__()
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)
            layer = te_mx.GroupedLinear(*weight.transpose(1, 2).shape, bias=False)
            for i in range(layer.num_gemms):
                layer.get_parameter(f"weight{i}").data.copy_(weight[i])
            setattr(self, name, layer)

    def forward(self, x, index, scores):
        order = index.flatten().argsort(stable=True)
        splits, rows = index.flatten().bincount(minlength=4).tolist(), order // index.shape[1]
        gate, up = self.gate_up_proj(x[rows], splits).chunk(2, -1)
        y = self.down_proj(nn.functional.silu(gate) * up, splits)
        return torch.zeros_like(x).index_add(0, rows, y * scores.flatten()[order, None])


def check_same(one, other):
    """All readings but for names of layers, up to the order of sums."""
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        assert mine[2:5] == theirs[2:5] and mine.elements == theirs.elements
        assert math.isclose(mine.sqnr, theirs.sqnr, rel_tol=1e-4), (mine, theirs)
        assert mine.tiles == theirs.tiles


@pytest.mark.parametrize("fuse", [False, True])
def test_experts(fuse):
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=H, intermediate_size=F, num_local_experts=4, num_experts_per_tok=2
    )
    experts = MixtralExperts(config)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.1)
    twin, x = Grouped(experts), torch.randn(TOKENS, H)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(TOKENS)])  # nobody asks the last one
    batch = x, index, torch.rand(TOKENS, 2)
    model = nn.ModuleDict({"experts": experts})
    te_mx.convert_model(model, fuse=fuse)
    with torch.no_grad():
        before = experts(*batch)
    report = te_mx.inspect(experts, batch, fmt=["mxfp8_e4m3", "mxfp4"], loss_fn=torch.sum)
    assert not report.about.never_ran and not report.about.skipped
    want = te_mx.inspect(twin, batch, fmt=["mxfp8_e4m3", "mxfp4"], loss_fn=torch.sum)
    check_same(list(report), list(want))
    with torch.no_grad():
        assert torch.equal(experts(*batch), before)


def test_conv1d():
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer, x = Conv1D(F, H), torch.randn(2, TOKENS, H)
    plain = nn.Linear(H, F)
    with torch.no_grad():
        plain.weight.copy_(layer.weight.t())
        plain.bias.copy_(layer.bias.normal_())
    te_mx.convert_model(model := nn.Sequential(layer))
    report = te_mx.inspect(model, x, fmt=["mxfp8_e4m3", "mxfp4"])
    assert not report.about.never_ran
    check_same(list(report), list(te_mx.inspect(plain, x, fmt=["mxfp8_e4m3", "mxfp4"])))
