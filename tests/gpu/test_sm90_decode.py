"""The decode kernel of Hopper: its numbers against fp64, the same bits for a row whatever is beside
it, tails, NaN; frozen layers that run on it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from decode_calls import (
    BF16,
    ELEMENTS,
    F16,
    F32,
    FACTORS,
    MX,
    bits,
    decode,
    form_of,
    kernel_of,
    lies_of,
    nothing,
    packed,
    quantized,
    recipe_of,
    rule_of,
    spread,
    x_format,
)
from torch.nn import functional as F

import te_mx
from te_mx import formats
from te_mx._ops.fused import act_quantize_2d
from te_mx.dispatch.fused import Activation, ActStep, Target
from te_mx.runtime.kernel_log import LAST_RUN

pytestmark = pytest.mark.usefixtures("poisoned")

ULP = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-10}
# The FP8 tensor cores keep 13 bits below the largest product of a sum of 32.
CUT = 33 * 2.0**-13
# Of kDecodeSplits all that there are: parts of a tile in CTAs of four warpgroups are 16 at most.
SPLITS = [i for i in range(40) if i not in (28, 31, 34, 37)]
SHAPES = [  # m, n, k
    (64, 96, 128),
    (48, 64, 256),
    (65, 130, 100),
    (33, 257, 1000),
    (40, 33, 4160),
    (1, 1, 1),
    (64, 520, 14336),
    (16, 2304, 6144),
    (8, 4096, 7168),
]
every_weight = pytest.mark.parametrize("w_fmt", ELEMENTS)
as_it_lies = pytest.mark.parametrize("lies", ["rows", "packed"])


def cuts(x, w, w_fmt):
    """What the FP8 tensor cores may cut off."""
    total = 0.0
    for at in range(0, x.shape[1], 128):
        a, b = x[:, at : at + 128].abs(), w[:, at : at + 128].abs()
        if w_fmt in FACTORS:  # one chain, and the sum before an instruction counts
            total = total + 4 * CUT * (a @ b.t())
            continue
        for i in range(0, a.shape[1], 32):
            c, d = a[:, i : i + 32], b[:, i : i + 32]
            total = total + CUT * (c.amax(1)[:, None] * d.amax(1)).minimum(c @ d.t())
    return total


def lost(x, scales, w, w_fmt, lies):
    """The same, and what aligning x takes from the last places of blocks beside larger ones, where
    MXFP8 weights lie in tiles."""
    if w_fmt not in MX or lies == "rows":
        return cuts(x, w, w_fmt)
    moved = torch.exp2(scales.double() - 129).repeat_interleave(32, 1)[:, : x.shape[1]]
    return cuts(x, w, "fp8_e4m3_1x128") + moved @ w.abs().t()


@every_weight
@as_it_lies
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_within_the_bound_of_the_contract(shape, exact, lies, w_fmt):
    m, n, k = shape
    form, w = packed(spread(n, k, (8, 3)[lies == "packed"], 1), w_fmt, lies)
    for number, dtype in enumerate((BF16, F32, F16)):
        x_fmt = x_format(w_fmt, e5m2=number == 2)
        how = {"x_fmt": x_fmt, "rule": rule_of(w_fmt, number % 2), "exact": exact}
        values = spread(m, k, 6, 2).to(dtype)
        codes, scales, x = quantized(values, x_fmt, how["rule"])
        how["bias"] = bias = torch.randn(n, device="cuda", dtype=dtype)
        sums, size = x @ w.t() + bias.double(), x.abs() @ w.abs().t() + bias.double().abs()
        near = (k + 2) * 2.0**-24 * size + 2.0**-150
        if not (exact or number == 2):
            near += lost(x, scales, w, w_fmt, lies)
        for out_dtype in (F32, BF16, F16):
            out = nothing(m, n, out_dtype)
            decode(form, w_fmt, values, out[:, :n], k, **how)
            limit = near + ULP[out_dtype] * sums.abs() + 2.0**-24 * (out_dtype == F16)
            good = (out[:, :n].double() - sums).abs() <= limit
            assert bool((good | (sums.abs() > torch.finfo(out_dtype).max / 2)).all())
            assert bool(out[:, n:].isnan().all())  # nothing is written beside it
            same = decode(form, w_fmt, codes, torch.empty_like(out)[:, :n], k, scales, **how)
            assert torch.equal(bits(same), bits(out[:, :n]))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("w_fmt", ["mxfp8_e4m3", "fp8_e4m3_128x128"])
def test_every_split(w_fmt, split):
    n, k = 1000, 3000
    form, w = packed(spread(n, k, 4, 1), w_fmt)
    values = spread(64, k, 4, 2).bfloat16()
    x = quantized(values, x_format(w_fmt), rule_of(w_fmt))[2]
    limit = (k + 2) * 2.0**-24 * (x.abs() @ w.abs().t()) + cuts(x, w, w_fmt)
    out = decode(form, w_fmt, values, nothing(64, n)[:, :n], k, split=split)
    assert bool(((out.double() - x @ w.t()).abs() <= limit).all())
    for rows in (1, 9, 17):
        few = decode(form, w_fmt, values[:rows], nothing(rows, n)[:, :n], k, split=split)
        assert torch.equal(bits(few), bits(out[:rows]))


@pytest.mark.parametrize("split", [16, 20, 21])
@pytest.mark.parametrize("w_fmt", ["mxfp8_e4m3", "fp8_e4m3_128x128"])
def test_rows_have_the_same_bits_whoever_prepares_them(w_fmt, split):
    """8 rows of a long k are prepared by a kernel before, one and those apart by every CTA."""
    n, k = 40, 21000
    form, _ = packed(spread(n, k, 4, 1), w_fmt)
    values = spread(17, k, 4, 2).bfloat16()
    apart = torch.empty(17, k + 1, dtype=BF16, device="cuda")[:, :k]
    apart.copy_(values)
    out = decode(form, w_fmt, values, nothing(17, n)[:, :n], k, split=split)
    for x in (values, apart):
        for rows in (1, 8, 16):
            few = decode(form, w_fmt, x[:rows], nothing(rows, n)[:, :n], k, split=split)
            assert torch.equal(bits(few), bits(out[:rows]))


def test_activations():
    n, k = 100, 512
    form, _ = packed(spread(n, k, 1, 1), "mxfp8_e4m3")
    x, bias = torch.randn(9, k, device="cuda").bfloat16(), torch.randn(n, device="cuda")
    h = decode(form, "mxfp8_e4m3", x, nothing(9, n)[:, :n], k, bias=bias)
    acts = {0: lambda v: F.gelu(v, approximate="tanh"), 1: F.relu, 3: F.silu, 7: F.gelu}
    for act, apply in acts.items():
        for dtype, close in ((F32, 2.0**-20), (BF16, 2.0**-8)):
            out = decode(form, "mxfp8_e4m3", x, nothing(9, n, dtype)[:, :n], k, bias=bias, act=act)
            torch.testing.assert_close(out.double(), apply(h.double()), rtol=close, atol=close)


@pytest.mark.parametrize(("act", "name"), [(3, "silu"), (4, "qgelu"), (0, "gelu")])
@pytest.mark.parametrize("w_fmt", ["mxfp8_e4m3", "fp8_e4m3_128x128"])
def test_gates_are_those_of_the_activation_kernel(w_fmt, act, name):
    n, k = 100, 648
    form, _ = packed(spread(n, k, 1, 1), w_fmt, "packed")
    gated = {"silu": "swiglu", "qgelu": "qgeglu", "gelu": "geglu"}[name]
    for dtype in (BF16, F16):
        h = spread(40, 2 * k, 3, 2).to(dtype)
        h[3, 5], h[4, 7], h[7, k + 9] = -torch.inf, torch.nan, torch.inf
        step = ActStep(h, None, Activation(gated), dtype, True, Target("", "", "rceil"))
        a, (x, gate) = act_quantize_2d(step).out, h.split(k, 1)
        for m in (1, 8, 11, 40):
            for how in ({}, {"exact": True}, {"x_fmt": x_format(w_fmt, e5m2=True)}):
                expected = decode(form, w_fmt, a[:m], nothing(m, n)[:, :n], k, **how)
                out = nothing(m, n)[:, :n]
                decode(form, w_fmt, x[:m], out, k, gate=(gate[:m], act), **how)
                assert torch.equal(bits(out), bits(expected))


@every_weight
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_as_they_are_are_within_the_bound(shape, dtype, w_fmt):
    m, n, k = shape
    form, w = packed(spread(n, k, 8, 1), w_fmt)
    for shift in (1.0, 2.0**-10, 2.0**4):
        x = (spread(m, k, 6, 2) * shift).to(dtype)
        out = decode(form, w_fmt, x, nothing(m, n)[:, :n], k, as_is=True)
        sums, size = x.double() @ w.t(), x.double().abs() @ w.abs().t()
        limit = (k + 2) * 2.0**-24 * size + 2.0**-150
        if w_fmt in FACTORS:  # fp16 holds numbers to 2^-40 of the largest of their 128
            limit += 2.0**-30 * size
        assert bool(((out.double() - sums).abs() <= limit).all())
        few = decode(form, w_fmt, x[:1], nothing(1, n)[:, :n], k, as_is=True)
        assert torch.equal(bits(few), bits(out[:1]))


def test_inputs_as_they_are_from_one_end_of_bf16_to_the_other():
    n, k = 16, 96
    ones = torch.ones(n, k, device="cuda")
    form, _ = packed(ones, "mxfp8_e4m3")
    x = torch.zeros(4, k, dtype=BF16, device="cuda")
    x[0, 0], x[0, 40] = 3e38, -1e-38
    x[1, :8] = torch.tensor([2.0, 2.0**-30, 3.0, -5.0, 2.0**-31, 0, 1, 1])
    x[2, 5], x[3, 70] = torch.inf, torch.nan
    out = decode(form, "mxfp8_e4m3", x, torch.empty(4, n, device="cuda"), k, as_is=True)
    assert torch.equal(
        out[:2].double(), x[:2].double().sum(1, keepdim=True).float().double().expand(2, n)
    )
    assert bool((out[2] == torch.inf).all()) and bool(out[3].isnan().all())


@every_weight
@pytest.mark.parametrize("shape", [(2304, 6144), (100, 1000)], ids=str)
def test_a_row_has_the_same_bits_whatever_is_beside_it(shape, w_fmt):
    n, k = shape
    form, _ = packed(spread(n, k, 4, 1), w_fmt, "packed")
    x = spread(64, k, 4, 2).bfloat16()
    cases = ((0, 1), (3, 5), (7, 8), (20, 11), (30, 16), (16, 17), (10, 40))
    for first, rows in cases:
        # Blockwise FP8 of more rows has another kernel.
        among = 32 if w_fmt in FACTORS and rows <= 32 else 64
        start = min(first, 64 - among)
        few, out = (
            decode(form, w_fmt, x[at : at + m], torch.empty(m, n, device="cuda"), k)
            for at, m in ((first, rows), (start, among))
        )
        assert torch.equal(bits(few), bits(out[first - start : first - start + rows]))


@pytest.mark.parametrize("first", range(1, 301, 25))
@every_weight
def test_every_number_of_rows(w_fmt, first):
    """Each row has the bits that it has among all, where one kernel takes all of them."""
    # NOTE: K in four parts or fewer lets CTAs share the rows that they make.
    n, k, lies = 300, 1024 if first > 50 else 504, "rows" if w_fmt == "mxfp4" else "packed"
    form, w = packed(spread(n, k, 3, 1), w_fmt, lies)
    values = spread(300, k, 6, 2).bfloat16()
    _, scales, x = quantized(values, x_format(w_fmt), rule_of(w_fmt))
    limit = (k + 2) * 2.0**-24 * (x.abs() @ w.abs().t()) + lost(x, scales, w, w_fmt, lies)
    sums, whole = x @ w.t(), decode(form, w_fmt, values, nothing(300, n)[:, :n], k)
    for m in range(first, first + 25):
        out = nothing(m, n)
        decode(form, w_fmt, values[:m], out[:, :n], k)
        assert bool(((out[:, :n].double() - sums[:m]).abs() <= limit[:m]).all()), m
        assert w_fmt in FACTORS or torch.equal(bits(out[:, :n]), bits(whole[:m])), m
        assert bool(out[:, n:].isnan().all()), m


@as_it_lies
@pytest.mark.parametrize("w_fmt", MX)
@pytest.mark.parametrize("m", [2, 20, 100])
def test_nan_and_inf_stay_where_they_are(m, w_fmt, lies):
    n, k = 70, 300
    fmt = formats.get(w_fmt)
    codes, scales = fmt.quantize(spread(n, k, 4, 1), "rceil")
    scales[5, 3] = scales[17, 0] = 255
    form = form_of(codes, scales, w_fmt, k, lies_of(w_fmt) if lies == "packed" else lies)
    x = spread(m, k, 4, 2)
    x[1, 40] = torch.inf
    out = decode(form, w_fmt, x, torch.empty(m, n, device="cuda"), k)
    expected = torch.zeros(m, n, dtype=torch.bool, device="cuda")
    expected[:, 5] = expected[:, 17] = expected[1] = True
    assert torch.equal(out.isnan(), expected)


def test_scales_at_both_ends_multiply_exactly():
    """The scale of x may be anything, those of weights what the layout lets through."""
    n, k = 16, 64
    codes = torch.full((n, k), 0x38, dtype=torch.uint8, device="cuda")  # 1
    for w_byte, x_byte in ((24, 254), (215, 0), (127, 0), (127, 230), (40, 60)):
        scales = torch.full((n, 2), w_byte, dtype=torch.uint8, device="cuda")
        form = form_of(codes, scales, "mxfp8_e4m3", k)
        x_scales = torch.full((1, 2), x_byte, dtype=torch.uint8, device="cuda")
        out = torch.empty(1, n, device="cuda")
        decode(form, "mxfp8_e4m3", codes[:1], out, k, x_scales)
        assert bool((out.double() == 64.0 * 2.0 ** (w_byte + x_byte - 254)).all())


def test_unaligned_and_strided_rows():
    n, k = 48, 72
    forms = [packed(spread(n, k, 4, 1), "mxfp8_e4m3", lies)[0] for lies in ("rows", "packed")]
    for dtype, form in product((BF16, F32), forms):
        x = spread(9, k, 4, 2).to(dtype)
        wide = torch.zeros(9, k + 5, dtype=dtype, device="cuda")
        wide[:, 1 : k + 1] = x
        whole, part = (
            decode(form, "mxfp8_e4m3", rows, torch.empty(9, n, device="cuda"), k)
            for rows in (x, wide[:, 1 : k + 1])
        )
        assert torch.equal(whole, part)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("w_fmt", [*MX, "mxfp4", "fp8_e4m3_128x128"])
def test_frozen_layers_in_a_cuda_graph(w_fmt, drop):
    recipe = recipe_of(w_fmt)
    layer = te_mx.Linear(512, 400, dtype=BF16, device="cuda")
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().double()
    te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe)
    x = spread(5, 512, 4, 2).bfloat16()

    def forward():
        with torch.no_grad(), te_mx.autocast(recipe=recipe):
            return layer(x)

    eager = forward()
    assert LAST_RUN[layer._tag] == kernel_of(w_fmt)
    rule = rule_of(w_fmt)
    exact = quantized(x, x_format(w_fmt), rule)[2] @ quantized(weight, w_fmt, rule)[2].t() + bias
    torch.testing.assert_close(eager.double(), exact, rtol=2.0**-7, atol=2.0**-7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for seed in (3, 4):
        x.copy_(spread(5, 512, 4, seed).bfloat16())
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, forward())


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("act", ["gelu", "relu", "swiglu"])
@pytest.mark.parametrize("w_fmt", ["mxfp8_e4m3", "mxfp4"])
def test_frozen_normalized_mlps(w_fmt, act):
    """Against a loop of frozen te_mx.Linear, of which the first gives fp32."""
    recipe = recipe_of(w_fmt)
    layer = te_mx.LayerNormMLP(
        256, 384, dtype=BF16, device="cuda", activation=act, return_layernorm_output=True
    )
    linears = []
    for name, dtype in (("fc1", F32), ("fc2", BF16)):
        weight = layer.get_parameter(f"{name}_weight")
        linears.append(te_mx.Linear(*weight.shape[::-1], dtype=dtype, device="cuda"))
        with torch.no_grad():
            linears[-1].weight.copy_(weight)
            linears[-1].bias.copy_(layer.get_parameter(f"{name}_bias").normal_())
        te_mx.freeze_weights(linears[-1], recipe=recipe)
    te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        y, z = layer(torch.randn(9, 256, device="cuda").to(BF16))
        assert LAST_RUN[layer._tag] == LAST_RUN[layer._tag + 3] == kernel_of(w_fmt)
        h = linears[0](z.float())
        if act == "swiglu":
            gate, up = h.to(BF16).float().chunk(2, 1)
            a = F.silu(gate) * up
        else:
            a = F.relu(h) if act == "relu" else F.gelu(h, approximate="tanh")
        expected = linears[1](a.to(BF16)).float()
    # An activation that is rounded the other way moves a code of FP8 by a step.
    torch.testing.assert_close(y.float(), expected, rtol=2.0**-7, atol=0.01 * expected.std().item())
