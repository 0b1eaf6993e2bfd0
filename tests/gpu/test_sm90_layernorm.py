"""LayerNormLinear and LayerNormMLP on Hopper: bit for bit their steps, and the bits of the CPU."""

from __future__ import annotations

import pytest
import torch
from norm_modules import assert_same, filled, gradients, one_after_the_other, relative
from test_layernorm_linear import RECIPES

import te_mx
from te_mx._ops.fused import norm_quantize_2d
from te_mx.backends.reference import fused
from te_mx.dispatch.fused import ACTIVATIONS, NORMS, Norm, NormStep, Target

BF16 = torch.bfloat16
SHAPES = ((77, 96, 130), (256, 384, 128))  # tokens, hidden size, out features or ffn hidden size


def case(kind, tokens, hidden, size, **kwargs):
    torch.manual_seed(1)
    m = filled(kind(hidden, size, device="cuda", dtype=BF16, **kwargs))
    return m, torch.randn(tokens, hidden, device="cuda", dtype=BF16)


def mxfp8(fn, recipe=None):
    return te_mx.autocast(recipe=recipe)(lambda *args: fn(*args))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_layernorm_linear_is_its_steps(shape, recipe):
    m, x = case(te_mx.LayerNormLinear, *shape)
    g = torch.randn(shape[0], shape[2], device="cuda", dtype=BF16)
    expected = gradients(m, x, mxfp8(one_after_the_other(m), recipe), g)
    assert_same(gradients(m, x, mxfp8(m, recipe), g), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if not a.startswith("gelu")])
def test_layernorm_mlp_is_its_steps(shape, activation):
    m, x = case(te_mx.LayerNormMLP, *shape, activation=activation)
    g = torch.randn_like(x)
    expected = gradients(m, x, mxfp8(one_after_the_other(m, m._act)), g)
    assert_same(gradients(m, x, mxfp8(m), g), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_erf"])
def test_gelu_inside_the_gemms(shape, activation):
    m, x = case(te_mx.LayerNormMLP, *shape, activation=activation)
    g = torch.randn_like(x)
    expected = gradients(m, x, mxfp8(one_after_the_other(m, m._act)), g)
    got = gradients(m, x, mxfp8(m), g)
    for name, value in expected[1].items():
        assert relative(got[1][name], value) < 2e-2, name
    rows = te_mx.audit(m)
    assert {row.fprop for row in rows} == {"sm90_adaptive"}


@pytest.mark.parametrize("kind", NORMS)
def test_normalization_has_the_bits_of_the_cpu(kind):
    x, weight, norm = torch.randn(77, 300, dtype=BF16), torch.randn(300), Norm(kind, 1e-5)
    target = Target("mxfp8_e4m3@rows", "mxfp8_e4m3@rows", "rceil")
    mean, rstd, z = fused.normalize(x, weight, None, norm, BF16)
    made = norm_quantize_2d(NormStep(x.cuda(), weight.cuda(), None, norm, BF16, True, target))
    assert torch.equal(made.rstd.cpu(), rstd) and torch.equal(made.z.cpu(), z)
    assert (mean is None) or torch.equal(made.mean.cpu(), mean)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_in_a_cuda_graph(activation):
    m, x = case(te_mx.LayerNormMLP, 256, 128, 384, activation=activation)
    expected = mxfp8(m)(x)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        mxfp8(m)(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = mxfp8(m)(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
