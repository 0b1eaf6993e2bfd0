"""Fused and frozen models on few rows on Hopper: the numbers of their steps, whatever rows are
beside a row, and in a CUDA graph."""

from __future__ import annotations

import copy

import pytest
import torch
from mlp_blocks import BF16, Gated
from torch import nn

import te_mx
from te_mx._ops.fused import act_quantize_2d, norm_quantize_2d
from te_mx.autograd import linear_recipe
from te_mx.dispatch.fused import Activation, ActStep, Norm, NormStep, Target
from te_mx.nn.guards import ON_FROZEN, RAN

pytestmark = pytest.mark.usefixtures("poisoned", "direct")
NO_CODES = Target("", "", "rceil")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(128, eps=1e-6), Gated(hidden=128, inner=320)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def made(fmt):
    """(a fused and frozen model, the same that is not fused)."""
    torch.manual_seed(0)
    fused = Model().to("cuda", BF16).eval().requires_grad_(False)
    fused.norm.weight.uniform_(0.5, 2)
    plain = copy.deepcopy(fused)
    for model, fuse in ((fused, True), (plain, False)):
        te_mx.convert_model(model, fuse=fuse)
        te_mx.freeze_weights(model, fmt=fmt, activations="mxfp8")
    return fused, plain


def run(model, x):
    with torch.no_grad(), te_mx.autocast():
        return model(x)


def by_steps(plain, x):
    m, weight, norm = plain.mlp, plain.norm.weight.float(), Norm("RMSNorm", 1e-6)
    z = norm_quantize_2d(NormStep(x, weight, None, norm, BF16, True, NO_CODES)).z
    h = torch.cat((run(m.gate_proj, z), run(m.up_proj, z)), 1)
    a = act_quantize_2d(ActStep(h, None, Activation("swiglu"), BF16, True, NO_CODES)).out
    return x + run(m.down_proj, a)


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4"])
def test_a_block_is_its_steps(fmt):
    fused, plain = made(fmt)
    x = torch.randn(32, 128, device="cuda", dtype=BF16)
    whole = run(fused, x)
    for rows in (1, 3, 8, 9, 32):
        y = run(fused, x[:rows])
        assert fused.mlp.__dict__[RAN] == ON_FROZEN
        assert torch.equal(y, by_steps(plain, x[:rows])) and torch.equal(y, whole[:rows])


@pytest.mark.parametrize(("fmt", "rows"), [("mxfp8_e4m3", 65), ("mxfp8_e4m3", 300), ("mxfp4", 700)])
def test_a_block_of_many_rows_is_its_steps(fmt, rows, monkeypatch):
    """The last layer finds its input quantized."""
    fused, plain = made(fmt)
    x = torch.randn(rows, 128, device="cuda", dtype=BF16)
    want, widths, real = by_steps(plain, x), [], linear_recipe.quantized
    monkeypatch.setattr(
        linear_recipe, "quantized", lambda x, to: widths.append(x.shape[1]) or real(x, to)
    )
    assert torch.equal(run(fused, x), want)
    assert fused.mlp.__dict__[RAN] == ON_FROZEN and 320 not in widths


def test_in_a_cuda_graph():
    fused, _ = made("mxfp4")
    x = torch.randn(2, 128, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(fused, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(fused, x)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        assert torch.equal(y, run(fused, x))
