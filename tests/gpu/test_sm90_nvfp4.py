"""NVFP4 and MXFP4 weights that stand still on Hopper: products with inputs as they are, and as the
values of their codes, against fp64, the same bits for a row whatever is beside it, groups, tails,
NaN; what such a weight stands for."""

from __future__ import annotations

import pytest
import torch
from others_experts import stand_alone

import te_mx
from te_mx import formats
from te_mx._ops import quantize_2d
from te_mx.backends.base import FLOAT_DTYPES, LAYOUTS
from te_mx.backends.native import fields_of
from te_mx.backends.reference import quantize as reference
from te_mx.backends.sm90 import binding, gemm, grouped, nvfp4, nvfp4_grouped
from te_mx.backends.sm90.layouts import SM90_NVFP4, SM90_VALUES
from te_mx.backends.sm90.layouts.tiles import BY_ROWS
from te_mx.backends.sm90.nvfp4 import (
    MOST_DENSE,
    PRODUCT,
    QUANTIZED,
    Product,
    QuantizedProduct,
    Rest,
)
from te_mx.dispatch import registry
from te_mx.dispatch.calls import Groups, Mode, Quantize, QuantizeGroups, QuantizeWeights
from te_mx.dispatch.linear import FrozenCall, Gate
from te_mx.dispatch.moe import Experts
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.run import dequantize, quantize
from te_mx.layouts.operand import Operand, stacked
from te_mx.layouts.plain import COLS
from te_mx.moe.experts import ACTIVATIONS, _of_values
from te_mx.recipe import MXFP4BlockScaling
from te_mx.runtime.kernel_log import LAST_RUN
from te_mx.weights import decode

pytestmark = pytest.mark.usefixtures("poisoned")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ULP = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-11}
SHAPES = [  # m, n, k
    (1, 64, 1),
    (8, 200, 1000),
    (16, 64, 4096),
    (33, 130, 136),
    (64, 320, 500),
    (130, 192, 384),
    (300, 320, 264),
    (16, 2304, 6144),
    (128, 2112, 7168),
]


def weight(n, k, seed=0, fmt="nvfp4"):
    """One with zeros, subnormal and large scales, by rows."""
    g = torch.Generator("cuda").manual_seed(seed)
    w = torch.randn(n, k, generator=g, device="cuda")
    w *= torch.exp2(torch.randint(-9, 9, (n, 1), generator=g, device="cuda").float())
    if fmt == "mxfp4":
        codes, scales = formats.get(fmt).quantize(w, "rceil")
        codes[: n // 2, :16] = 0
        scales[: n // 2, 0] = torch.randint(0, 135, (n // 2,), generator=g, device="cuda")
        return Operand(codes, scales, f"{fmt}@rows", n, k)
    codes, scales, whole = formats.get(fmt).quantize(w, "te")
    scales.view(-1)[:: 1 + scales.numel() // 7] = 0
    return Operand(codes, scales, f"{fmt}@rows", n, k, None, whole)


def product(x, held, out_dtype=BF16, bias=None, offs=None, act=None, fmt="", gate=None):
    groups, lhs = 0 if offs is None else len(offs), f"{fmt}@any" if fmt else ""
    problem = Problem(
        "linear_frozen", place_of(torch.device("cuda", 0)), lhs, held.spec, len(x), held.rows,
        held.k, groups=groups, dtype=x.dtype,
    )  # fmt: skip
    kernel = QuantizedProduct() if fmt else Product()
    assert kernel.accepts(problem) is None
    made = kernel.plan(problem)(FrozenCall(x, held, bias, out_dtype, offs, act, gate))
    return None if made is None else made[0]


@pytest.mark.parametrize("tile", [1, 2, 3])
@pytest.mark.parametrize("parts", [0, 1, 2, 3, 6, 8])
@pytest.mark.parametrize("shape", [(300, 200, 1160), (129, 200, 1100), (520, 6144, 400)], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("out_dtype", [BF16, F32], ids=str)
def test_every_tile_of_many_rows(tile, parts, shape, fmt, out_dtype):
    """Which would be chosen or not, k in so many parts, or what is left of tiles in some."""
    m, n, k = shape
    row = weight(n, k, m, fmt)
    held, bias = Rest().rest(row), torch.randn(n, device="cuda", dtype=BF16)
    x = (torch.randn(m, -(-k // 8) * 8, device="cuda") / 64).to(BF16)[:, :k]
    whole = row.tensor_scale.reshape(1) if row.tensor_scale is not None else None
    out = torch.full((m, n), torch.nan, dtype=out_dtype, device="cuda")
    args = binding.native().Nvfp4Args(
        m=m, n=n, k=k, mx=fmt == "mxfp4", w=held.codes.data_ptr(), w_scales=held.scales.data_ptr(),
        x=x.data_ptr(), ldx=x.stride(0), x_dtype=FLOAT_DTYPES[BF16], out=out.data_ptr(), ldo=n,
        out_dtype=FLOAT_DTYPES[out_dtype], bias=bias.data_ptr(), bias_dtype=FLOAT_DTYPES[BF16],
        kernel=16 * tile + parts,
    )  # fmt: skip
    if whole is not None:
        args.scale = whole.data_ptr()
    binding.set_execution(args, 0)
    assert binding.supported(binding.native().nvfp4_product(args))
    check(out, x, row.values(torch.float64), bias)


def values(x, fmt):
    """What x is multiplied as."""
    return dequantize(quantize_2d(x, f"{fmt}@rows").row, F32) if fmt else x


def check(y, x, w, bias=None, act=None):
    exact, size = x.double() @ w.t(), x.double().abs() @ w.abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    if act is not None:
        exact = act(exact)
    # fp32 sums in any order, of which the tensor cores cut off what is small.
    allowed = ULP[y.dtype] * exact.abs() + 2.0**-17 * size + 1e-7
    assert (y.double() - exact).abs().le(allowed).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_products_are_those_of_the_values(shape, dtype):
    m, n, k = shape
    row = weight(n, k, m)
    held = Rest().rest(row)
    assert held.layout is SM90_NVFP4
    codes, scales = SM90_NVFP4.plain(held.format, held, k)
    assert torch.equal(codes, row.codes) and torch.equal(scales, row.scales)
    w, x = row.values(torch.float64), (torch.randn(m, k, device="cuda") / 64).to(dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)  # none beyond fp16
    check(product(x, held), x, w)
    check(product(x, held, dtype, bias), x, w, bias)
    check(product(x, held, F32, None, None, "relu"), x, w, None, torch.relu)
    wide = (torch.randn(m, k + 3, device="cuda") / 64).to(dtype)[:, 3:]  # rows that start anywhere
    check(product(wide, held), wide, w)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", ""])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_products_of_quantized_rows_with_mxfp4(shape, fmt, dtype):
    m, n, k = shape
    if not fmt and dtype == F32:
        dtype = F16
    row = weight(n, k, m, "mxfp4")
    held = Rest().rest(row)
    assert held.layout is SM90_NVFP4
    codes, scales = SM90_NVFP4.plain(held.format, held, k)
    assert torch.equal(codes, row.codes) and torch.equal(scales, row.scales)
    w = row.values(torch.float64)
    for step in (k, k + 3):
        x = (torch.randn(m, step, device="cuda") / 64).to(dtype)[:, step - k :]
        x[:, : k // 2] *= 1000
        bias = torch.randn(n, device="cuda", dtype=dtype)
        check(product(x, held, F32, bias, None, None, fmt), values(x, fmt), w, bias)
    if fmt in ("mxfp8_e4m3", "mxfp8_e5m2"):
        check(product(x, held, BF16, None, None, "relu", fmt), values(x, fmt), w, None, torch.relu)
    x, up = (torch.randn(m, k, device="cuda").to(dtype) for _ in range(2))
    y = product(x, held, F32, None, None, None, fmt, Gate(up, "silu"))
    if fmt in ("mxfp8_e4m3", "mxfp8_e5m2") and k % 8 == 0 and dtype != F32:
        gated = (torch.nn.functional.silu(x.float()) * up.float()).to(dtype)
        exact = values(gated, fmt).double() @ w.t()
        size = values(gated, fmt).double().abs() @ w.abs().t()
        assert (y.double() - exact).abs().le(2.0**-4 * size + 1e-6).all()
    else:
        assert y is None


@pytest.mark.parametrize("shape", [(192, 1160), (640, 6144)], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_a_row_has_the_same_bits_beside_any_others(fmt, shape):
    held = Rest().rest(weight(*shape, 0, fmt))
    x = torch.randn(64, shape[1], device="cuda", dtype=BF16)
    for of in {"nvfp4": ("",), "mxfp4": ("", "mxfp8_e4m3")}[fmt]:
        all_rows = product(x, held, F32, fmt=of)
        for m in (1, 7, 8, 16, 30):
            assert torch.equal(product(x[64 - m :], held, F32, fmt=of), all_rows[64 - m :])


@pytest.mark.parametrize("each", ["2.1", "3.4"])
@pytest.mark.parametrize(("fmt", "of"), [("mxfp4", "mxfp8_e4m3"), ("mxfp4", ""), ("nvfp4", "")])
def test_more_tiles_than_two_for_every_multiprocessor(fmt, of, each):
    n, k = 64 * int(float(each) * gemm.multiprocessors(0)) + 8, 136
    row = weight(n, k, 0, fmt)
    held, w = Rest().rest(row), row.values(torch.float64)
    x = torch.randn(16, k, device="cuda").to(BF16)
    rows = product(x, held, F32, fmt=of)
    check(rows, values(x, of), w)
    for m in (1, 8):
        assert torch.equal(product(x[16 - m :], held, F32, fmt=of), rows[16 - m :])


BOUNDARIES = 383, 384, 385, 511, 512, 513, 640, 769, 1023, 1025


@pytest.mark.parametrize("first", [*range(1, 301, 25), 0])
@pytest.mark.parametrize(("fmt", "of"), [("mxfp4", "mxfp8_e4m3"), ("mxfp4", ""), ("nvfp4", "")])
def test_every_number_of_rows(fmt, of, first, monkeypatch):
    monkeypatch.setattr(nvfp4, "MOST_DENSE", max(BOUNDARIES))
    n, k = 136, 392
    row = weight(n, k, first, fmt)
    held, w = Rest().rest(row), row.values(torch.float64)
    for m in range(first, first + 25) if first else BOUNDARIES:
        x = torch.randn(m, k, device="cuda").to(BF16)
        check(product(x, held, F32, fmt=of), values(x, of), w)


def test_nan_and_scales_of_rows():
    row = weight(128, 256)
    row.scales[70, 3] = 0x7F
    whole = torch.linspace(0.5, 2.0, 128, device="cuda")[:, None]
    row = row._replace(tensor_scale=whole)
    held = Rest().rest(row)
    x = torch.randn(5, 256, device="cuda", dtype=BF16)
    y = product(x, held, F32)
    assert y[:, 70].isnan().all()
    keep = torch.arange(128, device="cuda") != 70
    check(y[:, keep], x, row.values(torch.float64)[keep])
    for dtype in (BF16, F16):
        made = dequantize(held, dtype)
        assert torch.equal(made.nan_to_num(7.0), row.values(dtype).nan_to_num(7.0))


@pytest.mark.parametrize("sizes", [(3, 0, 9, 1), (70, 20, 0), (1,) * 40], ids=str)
@pytest.mark.parametrize(
    ("fmt", "of", "dtype"),
    [("nvfp4", "", BF16), ("mxfp4", "", F16), ("mxfp4", "mxfp8_e4m3", BF16)],
)
def test_groups(sizes, fmt, of, dtype):
    n, k, groups = 128, 392, len(sizes)
    rows = [weight(n, k, i, fmt) for i in range(groups)]
    held = Rest().rest(stacked(rows))
    ends = torch.tensor(sizes, dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    m = sum(sizes) + 4  # rows of no group
    x, bias = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(groups, n, device="cuda")
    y, x = product(x, held, F32, bias, ends, None, of), values(x, of)
    start = 0
    for i, end in enumerate(ends.tolist()):
        check(y[start:end], x[start:end], rows[i].values(torch.float64), bias[i])
        start = end
    assert not y[start:].any()


@pytest.mark.parametrize("inputs", ["nvfp4", "nvfp4_rows", "mxfp8"])
def test_the_one_copy_and_quantized_inputs(inputs, monkeypatch):
    layer = te_mx.nn.Linear(264, 128, params_dtype=BF16, device="cuda")
    w = formats.get("nvfp4").quantize(layer.weight.detach(), "te")
    w = Operand(*w[:2], "nvfp4@rows", 128, 264, None, w[2]).values(torch.float64)
    te_mx.freeze_weights(layer, drop_master=True, fmt="nvfp4", activations=inputs)
    monkeypatch.setattr(type(SM90_NVFP4), "unpack", None)  # nobody turns it into plain codes
    x = torch.randn(130, 264, device="cuda", dtype=BF16)
    with torch.no_grad():
        y = layer(x)
    assert LAST_RUN[layer._tag_now()] == PRODUCT
    rule, fmt = ("rceil", "mxfp8_e4m3") if inputs == "mxfp8" else ("te", inputs)
    spec = f"{fmt}@rows"
    quantized = quantize(Quantize(x, spec, "", rule)).row
    check(y, quantized.values(torch.float64), w, layer.bias)


@pytest.mark.parametrize("shape", [(64, 128), (190, 1000), (320, 33)], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_16x16", "nvfp4_rows"])
def test_values(shape, fmt):
    row = weight(*shape, 3, fmt)
    row.scales[1, 0] |= 0x80
    row.scales[0, 1] = 0x7F
    scales = row.scales & 0x7F
    turned = zip(("codes", "scales"), COLS.pack(row.format, *row[:2], row.k), strict=True)
    turned = row._replace(spec=f"{fmt}@cols", **dict(turned))
    each = [row, row._replace(tensor_scale=None), turned]
    if fmt != "nvfp4_rows":
        each += [Rest().rest(one._replace(scales=scales)) for one in each[:2]]
    for held in each:
        for dtype in (BF16, F16, F32):
            scales_of = scales if held.layout is SM90_NVFP4 else row.scales
            wanted = row._replace(scales=scales_of, tensor_scale=held.tensor_scale)
            made = dequantize(held, dtype)
            assert torch.equal(made.nan_to_num(7.0), wanted.values(dtype).nan_to_num(7.0))


@pytest.mark.parametrize("shape", [(64, 128), (190, 1000), (320, 33)], ids=str)
def test_values_of_mxfp4(shape):
    row = weight(*shape, 3, "mxfp4")
    for dtype in (BF16, F16, F32):
        assert torch.equal(dequantize(Rest().rest(row), dtype), row.values(dtype))


@pytest.mark.parametrize("spread", [8, BY_ROWS])
# Scales of a tile 11 octaves apart and more, all over the range, and at its end.
@pytest.mark.parametrize("span", [None, (112, 124), (111, 124), (60, 135), (2, 9)], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (190, 1000), (321, 33), (64, 7168)], ids=str)
def test_mxfp4_is_unpacked_to_the_tiles_of_plain_codes(shape, span, spread):
    native, row, made = binding.native(), weight(*shape, 5, "mxfp4"), []
    if span is not None:
        row.scales.copy_(torch.randint(*span, row.scales.shape))
    nbytes, scales_at = native.packed_bytes(*shape)
    for one in (row, Rest().rest(row)):
        room = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        args = native.PackArgs(
            rows=shape[0], k=shape[1], out_layout=LAYOUTS["sm90"], spread=spread,
            codes=one.codes.data_ptr(), scales=one.scales.data_ptr(), out_codes=room.data_ptr(),
            out_scales=room.data_ptr() + scales_at, **fields_of(one.spec),
        )  # fmt: skip
        binding.set_execution(args, 0)
        assert binding.supported(native.unpack(args))
        made.append(room)
    assert torch.equal(*made)


def test_scales_without_a_place_stay_by_rows():
    row = weight(64, 64)
    row.scales[5, 1] |= 0x80
    assert Rest().rest(row) is row
    for place, scale in (((40, 0), 136), ((40, 1), 255), ((40, 1), 1)):
        row = weight(64, 64, 0, "mxfp4")
        row.scales[place] = scale
        row.codes[40] |= 1
        assert Rest().rest(row) is row
    assert binding.native() is not None


@pytest.mark.usefixtures("direct")
def test_a_frozen_layer_at_any_number_of_rows(monkeypatch):
    n, k = 128, 264
    row = weight(n, k)
    layer = te_mx.nn.Linear(k, n, params_dtype=BF16, device="cuda")
    codes = {
        "weight": row.codes, "weight_scale": row.scales.view(torch.float8_e4m3fn),
        "weight_scale_2": row.tensor_scale,
    }  # fmt: skip
    layer.load_state_dict(codes | {"bias": layer.bias})
    te_mx.freeze_weights(layer, activations="bf16")
    assert "lies as nvfp4@sm90_nvfp4" in repr(layer)
    x = torch.randn(1600, k, device="cuda", dtype=BF16)
    monkeypatch.setattr(decode, "capturing", lambda device: True)  # the first call, too
    for m in (1, 65, 600, 1600):
        with torch.no_grad():
            y = layer(x[:m])
        assert LAST_RUN[layer._tag_now()] == PRODUCT
        check(y, x[:m], row.values(torch.float64), layer.bias)
    again = layer.state_dict()
    assert all(torch.equal(again[name], codes[name]) for name in codes)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("most", [0, grouped.MOST_IN_LOOP])
@pytest.mark.parametrize("drop", [True, False])
def test_many_rows_of_groups_become_tiles(drop, most, monkeypatch):
    """Band by band, or where they are multiplied."""
    layer = te_mx.GroupedLinear(3, 136, 320, params_dtype=BF16, device="cuda")
    recipe = MXFP4BlockScaling(x="mxfp8_e4m3")
    with te_mx.autocast(recipe=recipe):
        te_mx.freeze_weights(layer, drop_master=drop)
    x, sizes = torch.randn(70, 136, device="cuda", dtype=BF16), [40, 0, 30]
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        few = layer(x, sizes)
        assert LAST_RUN[layer._tag_now()] == QUANTIZED
        monkeypatch.setattr(nvfp4, "MOST_GROUPED", 1)
        monkeypatch.setattr(grouped, "BAND_BYTES", 1)
        monkeypatch.setattr(grouped, "MOST_IN_LOOP", most)
        monkeypatch.setattr(type(SM90_NVFP4), "unpack", None)  # nobody turns it into plain codes
        registry.forget()
        many = layer(x, sizes)
        assert LAST_RUN[layer._tag_now()] == "sm90_adaptive"
    registry.forget()
    assert (few - many).float().norm() <= 6e-3 * few.float().norm()


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("precision", ["adaptive", "invariant"])
def test_many_rows_of_mxfp4_from_the_one_copy(precision, monkeypatch):
    layer = te_mx.nn.Linear(264, 192, params_dtype=BF16, device="cuda")
    te_mx.freeze_weights(layer, drop_master=True, fmt="mxfp4", activations="mxfp8")
    w = layer._one_copy("weight").values(torch.float64)
    monkeypatch.setattr(type(SM90_NVFP4), "unpack", None)  # nobody turns it into plain codes
    x = torch.randn(MOST_DENSE + 1, 264, device="cuda", dtype=BF16)
    with torch.no_grad(), te_mx.autocast(recipe=MXFP4BlockScaling(precision=precision)):
        y = layer(x)
    assert te_mx.audit(layer)["(root)"].fprop == f"sm90_{precision}"
    y, exact = y.double(), values(x, "mxfp8_e4m3").double() @ w.t() + layer.bias.double()
    assert (y - exact).norm() <= 4e-3 * exact.norm()


TURNED, WIDE = "nvfp4+rht16:0xd7e8d7e8", "nvfp4+rht32:0xd7e81234"
BY_ROWS = ("rows", "rows"), ("rows", "cols")
DIRECTIONS = [  # rows, columns, what is drawn, by which rule
    ("nvfp4", TURNED, None, "te"),
    ("nvfp4", TURNED, 5, "te"),
    ("nvfp4_16x16", "nvfp4_16x16", None, "te"),
    ("nvfp4_rows", "nvfp4", 7, "te"),
    ("nvfp4_rows", TURNED, None, "te"),
    ("nvfp4_rows", "nvfp4_rows", None, "te"),
    ("nvfp4+rht16:0x1234abcd", "nvfp4+rht16:0x1234abcd", -9, "te"),
    ("nvfp4_16x16", "", 3, "te"),
    ("", "nvfp4", None, "te"),
    ("nvfp4", TURNED, None, "te_4over6"),
    ("nvfp4_16x16", "nvfp4_16x16", None, "te_4over6_mse_448"),
    ("nvfp4_rows", "nvfp4", 7, "te_4over6_448"),
    ("nvfp4", WIDE, None, "te"),
    (WIDE, WIDE, 5, "te"),
    (WIDE, TURNED, None, "te"),
    ("nvfp4", WIDE, None, "te_4over6"),
    (WIDE, WIDE, 5, "te_4over6_mse_448"),
]


def wide(shape, dtype):
    """Rows of all sizes, zeros of both signs, ties."""
    x = torch.randn(shape, device="cuda") * torch.exp2(
        torch.randint(-20, 12, (shape[0], 1), device="cuda").float()
    )
    x[::3] = torch.randint(-24, 25, x[::3].shape, device="cuda").float() / 4
    x.view(-1)[::97] = 0
    x.view(-1)[1::101] = -0.0
    return x.clamp(-60000, 60000).to(dtype)


@pytest.mark.parametrize(
    "shape", [(64, 64), (33, 1000), (130, 77), (1, 16), (256, 520), (144, 32), (17, 1)], ids=str
)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
def test_quantized_to_the_bytes_of_the_specification(shape, dtype, directions):
    row, col, drawn, rule = directions
    x = wide(shape, dtype)
    bad = x.clone()
    bad[0, 0], bad[-1, -1] = torch.nan, torch.inf
    beside = torch.zeros(shape[0], shape[1] + 3, dtype=dtype, device="cuda")[:, 3:].copy_(x)
    tiny, rule = torch.full_like(x, 2.0**-24), rule if drawn is None else f"{rule}+sr"
    seed = None if drawn is None else torch.tensor([drawn], device="cuda")
    for case in (x, torch.zeros_like(x), tiny, bad, beside):
        for layouts in (*BY_ROWS, [layout.name for layout in SM90_VALUES]):
            names = zip((row, col), layouts, strict=True)
            specs = (f"{one}@{layout}" if one else "" for one, layout in names)
            what = Quantize(case, *specs, rule, seed=seed, first=(1 << 32) - 20)
            wanted = reference.quantize(what)
            for made, one in zip(quantize(what)[:2], wanted[:2], strict=True):
                assert (made is None) == (one is None)
                if made is not None:
                    parts = zip(made[:2], one[:2], strict=True)
                    if layouts not in BY_ROWS:  # of which a NaN may be any
                        parts = [
                            (m.view(BF16).nan_to_num(7), w.view(BF16).nan_to_num(7))
                            for m, w in [(made.codes, one.codes)]
                        ]
                    assert all(torch.equal(m, w) for m, w in parts)
                    assert torch.equal(made.tensor_scale, one.tensor_scale)


def same_parts(made, one):
    """Of values, in which a NaN may be any."""
    codes = [part.codes for part in (made, one)]
    if made.layout in SM90_VALUES:
        codes = [part.view(BF16).nan_to_num(7) for part in codes]
    assert torch.equal(*codes) and torch.equal(made.scales, one.scales)
    assert torch.equal(made.tensor_scale, one.tensor_scale)


@pytest.mark.parametrize(
    ("sizes", "capacity"),
    [((3, 0, 40, 17), 0), ((130, 0, 1, 260, 64), 0), ((1,) * 40, 0), ((9, 0, 140), 150)],
    ids=str,
)
@pytest.mark.parametrize("lies", ["codes", "values"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    ("row", "col", "drawn", "rule"),
    [
        ("nvfp4", TURNED, 5, "te"),
        ("nvfp4", WIDE, None, "te"),
        ("nvfp4_rows", "nvfp4", None, "te_4over6"),
        ("nvfp4", WIDE, None, "te_4over6"),
        ("nvfp4", "", None, "te"),
        ("", TURNED, 11, "te"),
    ],
    ids=str,
)
def test_groups_are_quantized_as_each_alone(sizes, capacity, lies, dtype, row, col, drawn, rule):
    starts = [i * capacity for i in range(len(sizes))]
    if not capacity:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    rows = capacity * len(sizes) or ends[-1] + 19
    x = wide((rows, 200), dtype)
    outside = torch.ones(rows, dtype=torch.bool)
    for start, end in zip(starts, ends, strict=True):
        outside[start:end] = False
    x[outside.cuda()] = torch.nan
    layouts = ("rows", "grouped_cols") if lies == "codes" else [one.name for one in SM90_VALUES]
    row, col = (
        f"{one}@{layout}" if one else "" for one, layout in zip((row, col), layouts, strict=True)
    )
    seed = None if drawn is None else torch.tensor([drawn], device="cuda")
    rule = rule if drawn is None else f"{rule}+sr"
    for offs in (torch.tensor(ends), torch.tensor(ends, dtype=torch.int32, device="cuda")):
        what = QuantizeGroups(x, Groups(offs, capacity), row, col, rule, False, seed)
        problem = Problem(
            "quantize_grouped", place_of(x.device), row, col, *x.shape, groups=len(sizes),
            dtype=dtype, rule=rule,
        )  # fmt: skip
        assert nvfp4_grouped.HopperNvfp4Groups().accepts(problem) is None
        whole = nvfp4_grouped.quantize_groups(what)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            parts = [part and part.group(start, end, i) for part in whole[:2]]
            specs = [part.spec if part else "" for part in parts]
            if start == end:
                assert not any(part and part.tensor_scale.ne(1).any() for part in parts)
                continue
            one = Quantize(x[start:end], *specs, rule, seed=seed, first=start)
            for made, wanted in zip(parts, reference.quantize(one)[:2], strict=True):
                assert (made is None) == (wanted is None)
                if made is not None:
                    same_parts(made, wanted)
        for part in whole[:2]:
            assert part is None or not part.codes[outside.cuda()].any()
        if whole.row is not None and lies == "codes":
            assert not whole.row.scales[outside.cuda()].any()
        if whole.col is not None and lies == "codes":
            used = [
                s // 16 + i + j for i, s in enumerate(starts) for j in range(-(-sizes[i] // 16))
            ]
            free = [i for i in range(len(whole.col.scales)) if i not in used]
            assert not whole.col.scales[free].any()


@pytest.mark.parametrize("shape", [(3, 128, 64), (70, 16, 48), (5, 200, 136)], ids=str)
@pytest.mark.parametrize("lies", ["codes", "values"])
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_16x16", WIDE])
@pytest.mark.parametrize("one", [True, False])
def test_weights_of_groups_are_quantized_as_each_alone(shape, lies, fmt, one):
    x = wide((shape[0] * shape[1], shape[2]), BF16).view(shape)
    layouts = ("rows", "cols") if lies == "codes" else [layout.name for layout in SM90_VALUES]
    specs = [f"{fmt}@{layout}" for layout in layouts]
    problem = Problem(
        "quantize_weights", place_of(x.device), *specs, *shape[1:], groups=shape[0], dtype=BF16,
        rule="te",
    )  # fmt: skip
    assert nvfp4_grouped.HopperNvfp4Weights().accepts(problem) is None
    weights = x if one else [part.clone() for part in x]
    made = nvfp4_grouped.quantize_weights(QuantizeWeights(weights, *specs, "te"))
    for i, part in enumerate(x):
        wanted = reference.quantize(Quantize(part, *specs, "te"))
        for side, other in zip(made, wanted[:2], strict=True):
            same_parts(side.group(i), other)


@pytest.mark.usefixtures("direct")
def test_experts_are_frozen_without_the_reference():
    layer = te_mx.nn.GroupedLinear(3, 256, 128, params_dtype=BF16, device="cuda")
    weights = [getattr(layer, f"weight{i}").detach().clone() for i in range(3)]
    biases = [getattr(layer, f"bias{i}") for i in range(3)]
    te_mx.freeze_weights(layer, fmt="nvfp4", activations="bf16", drop_master=True)
    x, sizes = torch.randn(20, 256, device="cuda", dtype=BF16), [3, 0, 17]
    with torch.no_grad():
        y = layer(x, sizes)
    start = 0
    for size, w, bias in zip(sizes, weights, biases, strict=True):
        codes, scales, whole = formats.get("nvfp4").quantize(w, "te")
        values = Operand(codes, scales, "nvfp4@rows", 128, 256, None, whole).values(torch.float64)
        check(y[start : start + size], x[start : start + size], values, bias)
        start += size


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize(("fmt", "dtype"), [("nvfp4", BF16), ("nvfp4", F16), ("mxfp4", BF16)])
@pytest.mark.parametrize(
    ("tokens", "experts", "elsewhere"),
    [(1, 6, False), (2, 24, False), (9, 6, True), (90, 6, False)],
)
def test_mixtures_of_tokens_as_they_are(tokens, experts, elsewhere, fmt, dtype, monkeypatch):
    """Against steps on what codes stand for; each slot by itself, and slots that are sorted."""
    torch.manual_seed(tokens)
    hidden, inner, top_k = 136, 80, 3
    given = [
        te_mx.quantize(torch.randn(experts, *size, device="cuda") / 8, fmt=fmt)
        for size in ((2 * inner, hidden), (hidden, inner))
    ]
    held = [te_mx.moe.pack_experts(one, activations="bf16") for one in given]
    assert all(one.stack.layout is SM90_NVFP4 for one in held)
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    ids = torch.rand(tokens, experts, device="cuda").argsort(1)[:, :top_k]
    ids[0, 1] = -1
    local = torch.tensor([2, -1, 0, 1, 3, 5], device="cuda") if elsewhere else None
    scores, biases = torch.rand(tokens, top_k, device="cuda"), [None, None]
    if tokens > 1:
        biases = [torch.randn(experts, n, device="cuda") for n in (2 * inner, hidden)]
    call = x, *held, scores, ids, "swigluoai"
    how = {"interleaved": True, "expert_map": local, "biases": biases}
    with monkeypatch.context() as patch:
        patch.setattr("te_mx.moe.experts._of_values", None)  # nothing goes by steps
        made = te_mx.moe.fused_experts(*call, **how)
    want = _of_values(
        Experts(
            x.double().float(), *(one.stack for one in held), ids.int(), scores.flatten(),
            None if local is None else local.int(), tuple(biases), ACTIVATIONS["swigluoai"], True,
            "", "rceil", Mode(),
        )
    )  # fmt: skip
    assert made.dtype == dtype and (made.float() - want).norm() <= 2.0**-7 * want.norm()


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("turned", [False, True])
def test_experts_of_others_run_from_codes(turned, monkeypatch):
    """A converted module of Transformers, of which only codes are left."""
    pytest.importorskip("transformers", minversion="5.0")
    experts = others_experts(turned)
    te_mx.convert_model(experts)
    values = [getattr(experts, key).detach().clone() for key in experts._weight_keys]
    te_mx.freeze_weights(experts, fmt="nvfp4", activations="bf16", drop_master=True)
    x = torch.randn(13, 64, device="cuda", dtype=BF16)
    index = torch.rand(13, 5, device="cuda").argsort(1)[:, :2]
    scores = torch.rand(13, 2, device="cuda")
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr("te_mx.weights.weight_only.grouped", None)  # what decodes all experts
        made = experts(x, index, scores)
    for value in values:
        by_rows = value.mT if turned else value
        made_of = torch.stack([
            te_mx.quantize(one.contiguous(), fmt="nvfp4").dequantize() for one in by_rows
        ])  # fmt: skip
        value.copy_(made_of.mT if turned else made_of)
    plain = others_experts(turned).float()
    for key, value in zip(experts._weight_keys, values, strict=True):
        getattr(plain, key).data.copy_(value)
    if turned:
        for key in experts._weight_keys:
            getattr(plain, f"{key}_bias").data.copy_(getattr(experts, f"{key}_bias"))
    with torch.no_grad():
        want = plain(x.float(), index, scores)
    assert (made.float() - want).norm() <= 2.0**-5 * want.norm()


def others_experts(turned):
    return stand_alone("gpt_oss" if turned else "mixtral", inner=48, std=0.1).to("cuda", BF16)
