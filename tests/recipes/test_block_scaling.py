"""The recipe BlockScaling: every registered format in every role, through every module, against
te_mx.quantize and products of what it makes. Weights that stand still: test_block_scaling_state.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import oracles
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import te_mx
from te_mx import formats
from te_mx.recipe import BlockScaling, MXFP8BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")

F32 = torch.float32
MX = [name for name in formats.names() if name.startswith("mx")]
M, K, N = 150, 170, 141  # no multiple of a block, nor of the codes that share bytes
SPLITS = [18, 0, 132]
# Every pair of MX formats in each of the three GEMMs.
ROLES = [
    (x, w, MX[(i + j) % len(MX)], ("rceil", "floor", "even")[(i + j) % 3])
    for (i, x), (j, w) in itertools.product(enumerate(MX), repeat=2)
]
# Blockwise FP8: weights in both kinds of blocks, gradients of another element, both rules.
ROLES += [
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e4m3_1x128", "pow2"),
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e5m2_1x128", "fp32"),
    ("fp8_e4m3_1x128", "fp8_e4m3_1x128", "fp8_e4m3_1x128", "fp32:0.25"),
    ("fp8_e4m3fnuz_1x128", "fp8_e4m3fnuz_128x128", "fp8_e5m2fnuz_1x128", "fp32"),
]
FP4 = BlockScaling(x="mxfp8_e4m3", w="mxfp4", g="mxfp8_e5m2", scale_rule="even")
FP8 = BlockScaling(*ROLES[-3])


# --------------------------------------------------------------------- the same, one step at a time
def quantized(x: Tensor, fmt: str, rule: str) -> te_mx.MXTensor:
    return te_mx.quantize(x, fmt=fmt, columnwise=True, scale_rule=rule)


def product(a: te_mx.MXTensor, b: te_mx.MXTensor, layout: str, **epilogue) -> te_mx.GemmOutput:
    """te_mx.gemm, whose sums `test_linear` checks in fp64, for every pair of formats and layout."""
    return te_mx.gemm(a, b, layout, out_dtype=F32, **epilogue)


def checked(a: te_mx.MXTensor, b: te_mx.MXTensor, layout: str, **epilogue) -> te_mx.GemmOutput:
    """The same, checked."""
    usages = {"TN": ("rowwise",) * 2, "NN": ("columnwise", "rowwise"), "NT": ("columnwise",) * 2}
    sides = []
    for q, usage in zip((a, b), usages[layout], strict=True):
        values = q.dequantize(torch.float64, usage)
        sides.append((values if usage == "rowwise" else values.t()).contiguous().numpy())
    oracles.assert_gemm(product(a, b, layout).out, *sides)
    return product(a, b, layout, **epilogue)


def linear(
    recipe: BlockScaling, x: Tensor, w: Tensor, b: Tensor, g: Tensor, product=product
) -> tuple[Tensor, ...]:
    """y, dx, dw and db."""
    rule = recipe.scale_rule
    xq, wq, gq = (
        quantized(t, fmt, rule)
        for t, fmt in ((x, recipe.x), (w, recipe.w), (g, recipe.g))
    )  # fmt: skip
    y = product(wq, xq, "TN", bias=b).out
    return y, product(wq, gq, "NN").out, product(xq, gq, "NT").out, g.sum(0)


def mlp(
    recipe: BlockScaling, z: Tensor, weights: list[Tensor], g: Tensor, act: str
) -> tuple[Tensor, ...]:
    """y, dz, dw1, db1, dw2 and db2."""
    rule, (w1, b1, w2, b2) = recipe.scale_rule, weights
    zq, gq = quantized(z, recipe.x, rule), quantized(g, recipe.g, rule)
    q1, q2 = quantized(w1, recipe.w, rule), quantized(w2, recipe.w, rule)
    if act == "gelu":
        a, h, _ = product(q1, zq, "TN", bias=b1, gelu="tanh")
    else:
        h = product(q1, zq, "TN", bias=b1).out
        a = h.relu()
    aq = quantized(a, recipe.x, rule)
    y = product(q2, aq, "TN", bias=b2).out
    if act == "gelu":
        dh, _, db1 = product(q2, gq, "NN", grad=True, gelu="tanh", gelu_in=h, bias=True)
    else:
        dh = product(q2, gq, "NN").out * (h > 0)
        db1 = dh.sum(0)
    dhq = quantized(dh, recipe.g, rule)
    dw1, dw2 = product(zq, dhq, "NT").out, product(aq, gq, "NT").out
    return y, product(q1, dhq, "NN").out, dw1, db1, dw2, g.sum(0)


def check(got: Iterator[Tensor], *expected: Tensor) -> None:
    """The same bits; of sums over the rows, nearly."""
    for mine, theirs in zip(got, expected, strict=True):
        if theirs.dim() == 1:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(mine, theirs)


def step(module, recipe, *args) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """x, its gradient, a gradient of the result, and the results."""
    x = torch.randn(M, K, requires_grad=True)
    with te_mx.autocast(recipe=recipe):
        made = module(x, *args)
    made = list(made) if isinstance(made, tuple) else [made]
    g = torch.randn_like(made[0])
    made[0].backward(g)
    return x.detach(), x.grad, g, [t.detach() for t in made]


def check_norm(module, x: Tensor, z: Tensor, dz: Tensor, dx: Tensor) -> None:
    """What the normalization makes of x, and its gradients, from those of z."""
    weight, bias = module.layer_norm_weight, module.layer_norm_bias
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    normal = functional.layer_norm(wide[0], (K,), *wide[1:])
    normal.backward(dz.double())
    near = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(z.double(), normal.detach(), **near)
    for mine, theirs in zip((dx, weight.grad, bias.grad), wide, strict=True):
        torch.testing.assert_close(mine.double(), theirs.grad, **near)


# ------------------------------------------------------------------------------------ every format
@pytest.fixture(params=ROLES, ids=lambda roles: " ".join(roles))
def recipe(request) -> BlockScaling:
    return BlockScaling(*request.param)


def test_linear(recipe):
    layer = te_mx.Linear(K, N)
    x, dx, g, (y,) = step(layer, recipe)
    got = y, dx, layer.weight.grad, layer.bias.grad
    check(got, *linear(recipe, x, layer.weight.detach(), layer.bias.detach(), g, checked))


def test_grouped_linear(recipe):
    layer = te_mx.GroupedLinear(3, K, N)
    x, dx, g, (y,) = step(layer, recipe, SPLITS)
    for i, (xi, dxi, gi, yi) in enumerate(
        zip(*(t.split(SPLITS) for t in (x, dx, g, y)), strict=True)
    ):
        weight, bias = getattr(layer, f"weight{i}"), getattr(layer, f"bias{i}")
        expected = linear(recipe, xi, weight.detach(), bias.detach(), gi)
        check((yi, dxi, weight.grad, bias.grad), *expected)


def test_layernorm_linear(recipe):
    layer = te_mx.LayerNormLinear(K, N, return_layernorm_output=True)
    x, dx, g, (y, z) = step(layer, recipe)
    y_, dz, dw, db = linear(recipe, z, layer.weight.detach(), layer.bias.detach(), g)
    check((y, layer.weight.grad, layer.bias.grad), y_, dw, db)
    check_norm(layer, x, z, dz, dx)


def test_layernorm_mlp(recipe):
    roles = dataclasses.astuple(recipe)[:3]
    place = [one[:3] for one in ROLES].index(roles)
    act = ("gelu", "relu")[place % 2]  # every format has both, in each role
    layer = te_mx.LayerNormMLP(K, N, activation=act, return_layernorm_output=True)
    x, dx, g, (y, z) = step(layer, recipe)
    parameters = layer.fc1_weight, layer.fc1_bias, layer.fc2_weight, layer.fc2_bias
    y_, dz, *grads = mlp(recipe, z, [p.detach() for p in parameters], g, act)
    check((y, *(p.grad for p in parameters)), y_, *grads)
    check_norm(layer, x, z, dz, dx)


def test_scale_rules():
    """Each is followed, in every role."""
    layer, made = te_mx.Linear(K, N), []
    for rule in ("rceil", "floor", "even"):
        recipe = BlockScaling(x="mxfp4", w="mxfp6_e3m2", g="mxfp4", scale_rule=rule)
        layer.zero_grad()
        torch.manual_seed(1)
        x, dx, g, (y,) = step(layer, recipe)
        expected = linear(recipe, x, layer.weight.detach(), layer.bias.detach(), g)
        made.append((y, dx, layer.weight.grad))
        check(made[-1], *expected[:3])
    for one, other in itertools.combinations(made, 2):
        assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -------------------------------------------------------------------------- what backward runs on
@pytest.mark.parametrize(
    "change",
    [
        {"backward_override": "high_precision"},
        {"backward_override": "dequantized"},
        {"wgrad_with_hp": True},
        {"one_copy_weights": True},
    ],
    ids=lambda change: next(iter(map(str, change.values()))),
)
@pytest.mark.parametrize("kind", [te_mx.Linear, te_mx.LayerNormLinear, te_mx.GroupedLinear])
@pytest.mark.parametrize("base", [FP4, FP8, dataclasses.replace(FP8, w="fp8_e4m3_1x128")], ids=str)
def test_ways_of_backward(kind, change, base):
    recipe, grouped = dataclasses.replace(base, **change), kind is te_mx.GroupedLinear
    layer = kind(1, K, N) if grouped else kind(K, N)
    more = {"return_layernorm_output": True} if kind is te_mx.LayerNormLinear else {}
    layer = kind(K, N, **more) if more else layer
    x, dx, g, (y, *z) = step(layer, recipe, *([[M]] if grouped else []))
    weight, bias = (layer.weight0, layer.bias0) if grouped else (layer.weight, layer.bias)
    w, source = weight.detach(), z[0] if z else x
    wq, xq, gq = (
        quantized(t, fmt, base.scale_rule)
        for t, fmt in ((w, base.w), (source, base.x), (g, base.g))
    )  # fmt: skip
    check((y,), product(wq, xq, "TN", bias=bias.detach()).out)
    dz, dw = product(wq, gq, "NN").out, product(xq, gq, "NT").out
    if recipe.one_copy_weights:
        # Square blocks are turned, and others decoded to what holds their values.
        held = torch.float32 if base.w.startswith("fp8") else torch.bfloat16
        w_again = w if base.w.endswith("128x128") else wq.dequantize(held)
        dz = product(quantized(w_again, base.w, base.scale_rule), gq, "NN").out
    elif recipe.wgrad_with_hp:
        dw = g.t() @ source
    else:
        kept = recipe.backward_override == "dequantized"
        dz, dw = g @ (wq.dequantize() if kept else w), g.t() @ (xq.dequantize() if kept else source)
    torch.testing.assert_close(weight.grad, dw, rtol=1e-5, atol=1e-5)
    if z:
        check_norm(layer, x, source, dz, dx)
    else:
        torch.testing.assert_close(dx, dz, rtol=1e-5, atol=1e-5)


def test_defaults_are_mxfp8():
    assert BlockScaling().settings == MXFP8BlockScaling().settings
    layer, x = te_mx.Linear(K, N), torch.randn(M, K)
    made = []
    for recipe in (BlockScaling(), MXFP8BlockScaling()):
        with te_mx.autocast(recipe=recipe):
            made.append(layer(x))
    assert torch.equal(*made)


@pytest.mark.parametrize(
    "recipe", [FP4, FP8, dataclasses.replace(FP8, one_copy_weights=True)], ids=str
)
def test_audit_and_compile(recipe):
    layer, x = te_mx.Linear(K, N), torch.randn(M, K)

    def run(x):
        with te_mx.autocast(recipe=recipe):
            return layer(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for call in (run, compiled):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        y = call(given)
        y.square().sum().backward()
        results.append((y.detach(), given.grad, layer.weight.grad, layer.bias.grad))
    torch.compiler.reset()
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    told = te_mx.audit(layer)["(root)"]
    if recipe is not FP4:
        return
    assert told.fprop == told.dgrad == told.wgrad == te_mx.explain(m=K, n=N, k=M).kernel
