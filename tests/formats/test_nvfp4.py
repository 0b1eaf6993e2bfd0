"""NVFP4: the bytes of four writers, what they mean, and what te_mx makes of them."""

from __future__ import annotations

import copy
import io
import pickle

import ml_dtypes
import nvfp4_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import te_mx
from te_mx import formats
from te_mx.backends.cpu.binding import native

RULES = ("te", "torchao", "modelopt", "compressed_tensors")
FOUR_OVER_SIX = ("te_4over6", "te_4over6_mse", "te_4over6_448", "te_4over6_mse_448")
NVFP4, TILES = formats.get("nvfp4"), formats.get("nvfp4_16x16")
BYTE, F32, F64, BF16 = torch.uint8, torch.float32, torch.float64, torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # no kernel has it yet


def data(rows, k, seed, kind):
    """Numbers that tell writers apart: rows of every size, outliers, zeros of both signs."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=rng)
    if kind == "rows":
        x *= torch.exp(3 * torch.randn(rows, 1, generator=rng))
    elif kind == "outliers":
        x[torch.rand(rows, k, generator=rng) < 0.02] *= 1e4
    elif kind == "ties":
        x = torch.randint(-24, 25, (rows, k), generator=rng) / 4
    elif kind == "wide":
        x *= torch.exp2(torch.randint(-60, 20, (rows, k), generator=rng).float())
    x[::3, : k // 2] = 0.0
    x[:, ::5] *= torch.tensor(-0.0)
    return x


def to_numpy(x):
    if x.dtype == BF16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*RULES, *FOUR_OVER_SIX, "te, tiles", *(f"{r}, tiles" for r in FOUR_OVER_SIX)]),
    st.sampled_from([F32, BF16]),
    st.sampled_from(["rows", "outliers", "ties", "wide", "zeros"]),
    st.sampled_from([(0, 7), (3, 0), (1, 1), (5, 16), (4, 33), (19, 47)]),
    st.integers(0, 99),
)
def test_the_bytes_of_every_writer(rule, dtype, kind, shape, seed):
    x = torch.zeros(shape) if kind == "zeros" else data(*shape, seed, kind)
    x, (rule, _, tiles) = x.to(dtype), rule.partition(",")
    fmt = TILES if tiles else NVFP4
    height = fmt.scaling.block[0]
    codes, scales, whole = fmt.quantize(x, rule)
    expected = oracle.quantize(to_numpy(x), rule, height)
    assert fmt.unpack(codes, shape[1]).tolist() == expected[0].tolist()
    assert scales.tolist() == expected[1].tolist()
    assert whole.shape == () and whole.item() == expected[2]
    bare = fmt.dequantize(codes, scales, shape[1], F64)
    assert bare.numpy().tolist() == oracle.values(*expected[:2], height).tolist()


def row(*blocks):
    """A row of blocks, the first numbers of each given, the rest zero."""
    return torch.tensor([[*block, *[0.0] * (16 - len(block))] for block in blocks]).view(1, -1)


# amax 2688 makes the tensor scale 1. A block of its largest, one of every tie, a small one whose
# scale is a subnormal E4M3 number, one whose scale rounds to 0, zeros of both signs.
EDGES = row(
    [2688.0, -2688.0, 1344.0],
    [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, -0.1],
    [6 * 2.0**-9, 3 * 2.0**-9],
    [2.0**-9, -(2.0**-9)],
    [0.0, -0.0],
)
SCALES = {
    "te": [0x7E, 0x38, 0x01, 0x00, 0x00],
    "torchao": [0x7E, 0x38, 0x08, 0x08, 0x08],
    "modelopt": [0x7E, 0x38, 0x01, 0x01, 0x38],
    "compressed_tensors": [0x7E, 0x38, 0x01, 0x20, 0x20],
}


@pytest.mark.parametrize("rule", RULES)
def test_golden_bytes(rule):
    codes, scales, whole = NVFP4.quantize(EDGES, rule)
    assert whole.item() == 1.0 and scales.tolist() == [SCALES[rule]]
    found = codes.view(5, 8).tolist()
    assert found[0] == [0xF7, 0x05, 0, 0, 0, 0, 0, 0]
    assert found[1] == [0x07, 0x22, 0x44, 0x66, 0xE8, 0x08, 0, 0]
    last = {
        "te": [0x57, 0xF7, 0x80],
        "torchao": [0x12, 0x80, 0x80],  # 0.75 and 0.375 of 2^-6; 1/8
        "modelopt": [0x57, 0xA2, 0x00],
        "compressed_tensors": [0x57, 0x80, 0x00],
    }
    assert [block[0] for block in found[2:]] == last[rule]
    assert all(not any(block[1:]) for block in found[2:])


def test_a_tensor_of_zeros_and_none():
    zeros = {"te": 0x00, "torchao": 0x08, "modelopt": 0x38, "compressed_tensors": 0x20}
    for rule in RULES:
        codes, scales, whole = NVFP4.quantize(torch.zeros(2, 17), rule)
        assert not codes.any() and (scales == zeros[rule]).all() and whole == 1
        assert NVFP4.quantize(torch.zeros(0, 5), rule)[0].shape == (0, 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(bad):
    x = torch.randn(4, 40)
    good = NVFP4.quantize(x, "te")
    x[1, 20] = bad
    q = te_mx.quantize(x, fmt="nvfp4", columnwise=True)
    assert q.scales[1, 1] == 0x7F
    rowwise, columnwise = q.dequantize(), q.dequantize(usage="columnwise")
    assert rowwise.isnan().nonzero().tolist() == [[1, j] for j in range(16, 32)]
    assert columnwise.isnan().nonzero().tolist() == [[i, 20] for i in range(4)]
    whole = x[x.isfinite()].abs().amax()
    assert q.tensor_scale == 1 / (2688 / whole)
    if q.tensor_scale == good[2]:
        assert torch.equal(q.codes[2:], good[0][2:])


def test_every_product_of_an_element_and_a_scale_is_exact_in_bf16():
    codes, scales = torch.arange(16, dtype=BYTE), torch.arange(127, dtype=BYTE)
    grid = NVFP4.pack(codes.repeat(127, 1)), scales[:, None]
    exact = NVFP4.dequantize(*grid, 16, F64)
    assert torch.equal(NVFP4.dequantize(*grid, 16, BF16).double(), exact)
    assert exact.unique().numel() > 300


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_torchao_has_the_same_bytes(dtype):
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    for kind in ("rows", "outliers", "ties"):
        x = data(64, 128, 3, kind).to(dtype)
        whole = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
        theirs = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole)
        q = te_mx.quantize(x, fmt="nvfp4", scale_rule="torchao")
        assert torch.equal(q.codes, theirs.qdata)
        assert torch.equal(q.scales, theirs.scale.view(BYTE)) and q.tensor_scale == whole


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("transposed", [None, False, True])
def test_an_mxtensor(name, transposed):
    x = torch.randn(3, 7, 50)
    fmt = formats.get(name)
    q = te_mx.quantize(x, fmt=name, columnwise=True, columnwise_transposed=transposed)
    codes, scales, whole = fmt.quantize(x.view(21, 50), "te")
    assert (q.format, q.fmt, q.shape) == (fmt, name, (3, 7, 50))
    assert torch.equal(q.codes, codes) and torch.equal(q.scales, scales)
    assert q.tensor_scale == whole and q.rowwise_scale.dtype == torch.float8_e4m3fn
    values = fmt.dequantize(codes, scales, 50, F32) * whole
    assert torch.equal(q.dequantize(), values.view(3, 7, 50))
    assert torch.equal(q.dequantize(BF16), values.view(3, 7, 50).to(BF16))
    across = fmt.quantize(x.view(21, 50).t(), "te")
    turned = fmt.dequantize(*across[:2], 21, F32).t() * whole
    assert torch.equal(q.dequantize(usage="columnwise"), turned.reshape(3, 7, 50))
    if fmt is TILES:  # tiles are the same in both directions
        assert torch.equal(turned, values)
    parts = q.codes, q.scales, q.columnwise_data, q.columnwise_scale, q.tensor_scale
    assert q.nbytes == sum(part.nbytes for part in parts)
    file = io.BytesIO()
    torch.save({"w": q}, file)
    file.seek(0)
    for other in (torch.load(file)["w"], pickle.loads(pickle.dumps(q)), copy.deepcopy(q)):
        assert q.equal(other) and repr(other) == repr(q)
    assert te_mx.prepack(q) is q and q.to("meta").tensor_scale.is_meta
    given = {"rowwise_data": q.rowwise_data, "rowwise_scale": q.rowwise_scale}
    same = te_mx.MXTensor(x.shape, name, tensor_scale=whole.view(1), **given)
    assert torch.equal(same.dequantize(), q.dequantize())
    twice = te_mx.MXTensor(x.shape, name, tensor_scale=2 * whole, **given)
    assert not twice.equal(same) and torch.equal(twice.dequantize(), 2 * q.dequantize())


def test_a_scale_a_row():
    """Every row has the bytes that it has alone."""
    x = data(6, 40, 5, "rows")
    q = te_mx.quantize(x, fmt="nvfp4_rows")
    assert q.tensor_scale.shape == (6, 1) and q.equal(pickle.loads(pickle.dumps(q)))
    for i, alone in enumerate(x.split(1)):
        codes, scales, whole = NVFP4.quantize(alone, "te")
        assert torch.equal(q.codes[i : i + 1], codes) and torch.equal(q.scales[i : i + 1], scales)
        assert q.tensor_scale[i] == whole
        assert torch.equal(q.dequantize()[i], NVFP4.dequantize(codes, scales, 40, F32)[0] * whole)
    assert te_mx.quantize(torch.ones(0, 40), fmt="nvfp4_rows").tensor_scale.shape == (0, 1)
    with pytest.raises(ValueError, match="nvfp4_rows has a scale a row"):
        te_mx.quantize(x, fmt="nvfp4_rows", columnwise=True)
    parts = {"rowwise_data": q.codes, "rowwise_scale": q.scales}
    made = te_mx.MXTensor((6, 40), "nvfp4_rows", tensor_scale=q.tensor_scale.flatten(), **parts)
    assert made.equal(q)
    with pytest.raises(TypeError, match="tensor_scale must be a float32 tensor of 6 numbers"):
        te_mx.MXTensor((6, 40), "nvfp4_rows", tensor_scale=torch.ones(()), **parts)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_transform_is_transformer_engines(dtype):
    """Rounded to the dtype of x; the tensor scale is that of what is rounded."""
    x = data(19, 40, 3, "rows").to(dtype)
    fmt = formats.get("nvfp4+rht16:0xd7e8d7e8")
    turned = torch.from_numpy(oracle.hadamard(to_numpy(x).astype("float64"))).to(dtype)
    made = fmt.transform.apply(x).to(dtype)
    ulp = 2.0 ** -(8 if dtype == BF16 else 22)
    assert ((made - turned).abs() <= ulp * turned.abs().amax(1, keepdim=True)).all()
    codes, scales, whole = fmt.quantize(x, "te")
    for mine, theirs in zip((codes, scales, whole), NVFP4.quantize(made, "te"), strict=True):
        assert torch.equal(mine, theirs)
    q = te_mx.quantize(x, fmt=fmt.name)
    assert (q.dequantize() - x.float()).norm() < 0.12 * x.float().norm()


def test_four_over_six_has_smaller_errors():
    x = data(64, 256, 1, "rows")
    error = {
        rule: (te_mx.quantize(x, fmt=f"nvfp4+{rule}").dequantize() - x).square().sum()
        for rule in ("te", *FOUR_OVER_SIX)
    }
    assert max(error[rule] for rule in FOUR_OVER_SIX) < 0.95 * error["te"]
    assert error["te_4over6_mse"] <= error["te_4over6"]


def sides(a, b):
    """Both copies of A [9, 50] and B [12, 50] as two formats, and their values."""
    torch.manual_seed(0)
    made = []
    for name, size in ((a, 9), (b, 12)):
        x = torch.randn(size, 50) * torch.exp(torch.randn(size, 1))
        if name == "bf16":
            made.append((x.to(BF16), x.to(BF16).double()))
        else:
            q = te_mx.quantize(x, fmt=name)
            bare = q.dequantize(F64)
            if q.tensor_scale is not None:
                bare = q.format.dequantize(q.codes, q.scales, 50, F64) * q.tensor_scale.double()
            made.append((q, bare))
    return made


@pytest.mark.parametrize("out_dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("nvfp4", "nvfp4"),
        ("nvfp4", "bf16"),
        ("e4m3", "nvfp4"),
        ("nvfp4", "fp8_e4m3_1x128"),
        ("nvfp4_16x16", "nvfp4_rows"),
        ("nvfp4_rows", "nvfp4_rows"),
        ("nvfp4_rows", "bf16"),
    ],
)
def test_gemm(a, b, out_dtype):
    (A, a64), (B, b64) = sides(a, b)
    made = te_mx.gemm(A, B, bias=torch.ones(9), gelu="tanh", out_dtype=out_dtype, aux_dtype=F32)
    exact = b64 @ a64.t() + 1
    bound = 51 * 2.0**-24 * (b64.abs() @ a64.abs().t() + 1)
    assert ((made.aux.double() - exact).abs() <= bound).all()
    plain = te_mx.gemm(A, B, out_dtype=out_dtype).out
    half = 2.0**-24 if out_dtype == F32 else 2.0**-8
    assert ((plain.double() + 1 - exact).abs() <= bound + half * (exact - 1).abs()).all()
    sums = te_mx.gemm(A, B, grad=True, bias=True, out_dtype=F32).bias_grad
    torch.testing.assert_close(sums.double(), b64.sum(1), rtol=1e-5, atol=1e-5)
    out = plain.clone()
    te_mx.gemm(A, B, out=out, accumulate=True)
    torch.testing.assert_close(out, 2 * plain, rtol=1e-2, atol=1e-5)


def test_layouts_of_gemm():
    """The columnwise copies are read where a layout says so; tiles have the same values in both."""
    w, g = torch.randn(24, 40), torch.randn(33, 24)
    for transposed in (False, True):
        how = {"columnwise": True, "columnwise_transposed": transposed}
        W = te_mx.quantize(w, fmt="nvfp4_16x16", **how)
        G = te_mx.quantize(g, fmt="nvfp4", **how)
        dx = te_mx.gemm(W, G, "NN", out_dtype=F32).out
        expected = G.dequantize(F64) @ W.dequantize(F64)
        torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-4)
        X = te_mx.quantize(torch.randn(33, 40), fmt="nvfp4", **how)
        dw = te_mx.gemm(X, G, "NT", out_dtype=F32).out
        columns = [one.dequantize(F64, usage="columnwise") for one in (G, X)]
        expected = columns[0].t() @ columns[1]
        torch.testing.assert_close(dw.double(), expected, rtol=1e-5, atol=1e-4)


def test_compiled():
    x, w = torch.randn(5, 50), te_mx.quantize(torch.randn(8, 50), fmt="nvfp4")
    product = torch.compile(
        lambda x: te_mx.gemm(w, te_mx.quantize(x, fmt="nvfp4")).out, backend="eager", fullgraph=True
    )
    assert torch.equal(product(x), te_mx.gemm(w, te_mx.quantize(x, fmt="nvfp4")).out)
    for name in ("nvfp4_16x16", "nvfp4_rows"):
        op, specs = torch.ops.te_mx.quantize.default, (f"{name}@rows", "")
        torch.library.opcheck(op, (torch.randn(17, 50), *specs, "te", False, F32))


def test_explain_says_what_multiplies():
    (A, _), (B, _) = sides("e4m3", "nvfp4")
    kernel = te_mx.explain(A, B).kernel
    assert (kernel == "reference") == (native() is None)
    with pytest.raises(ValueError, match="counts tiles of MXFP8 and MXFP4 tensors, B is nvfp4"):
        te_mx.explain(A, B, classes=True)
    with pytest.raises(TypeError, match="decodes the other side and torch multiplies"):
        te_mx.explain(torch.randn(9, 50).to(BF16), B)
    with pytest.raises(ValueError, match="needs the same k"):
        te_mx.explain(A, te_mx.quantize(torch.randn(3, 40), fmt="nvfp4"))


def test_nothing_else_takes_it():
    """No operation may drop the tensor scale: whatever does not know it says so."""
    layer = te_mx.Linear(64, 64)
    assert "nvfp4" not in formats.names() and formats.get("nvfp4") is NVFP4
    for call in (
        lambda: te_mx.recipe.BlockScaling(x="nvfp4", w="mxfp4", g="mxfp8_e4m3"),
        lambda: te_mx.freeze_weights(layer, fmt="nvfp4"),  # its masters have the recipe's rule
    ):
        with pytest.raises(ValueError, match=r"one of|among"):
            call()


def test_bad_input():
    q = te_mx.quantize(torch.randn(4, 40), fmt="nvfp4")
    parts = {"rowwise_data": q.codes, "rowwise_scale": q.scales}
    with pytest.raises(ValueError, match=r"nvfp4 needs tensor_scale, .* that is the reciprocal"):
        te_mx.MXTensor((4, 40), "nvfp4", **parts)
    with pytest.raises(TypeError, match="tensor_scale must be a float32 tensor of one number"):
        te_mx.MXTensor((4, 40), "nvfp4", tensor_scale=torch.ones(2), **parts)
    wrong = {"rowwise_data": q.codes, "rowwise_scale": q.scales.float()}
    with pytest.raises(TypeError, match=r"rowwise_scale .* use .to\(torch.float8_e4m3fn\)"):
        te_mx.MXTensor((4, 40), "nvfp4", tensor_scale=q.tensor_scale, **wrong)
    mx = te_mx.quantize(torch.randn(4, 64))
    with pytest.raises(ValueError, match="tensor_scale is for formats with one, got fmt='mxfp8"):
        given = {"rowwise_data": mx.codes, "rowwise_scale": mx.scales}
        te_mx.MXTensor((4, 64), "e4m3", tensor_scale=q.tensor_scale, **given)
    with pytest.raises(ValueError, match="scale_rule must be one of 'te', 'torchao', 'modelopt'"):
        te_mx.quantize(torch.randn(4, 40), fmt="nvfp4", scale_rule="rceil")
    with pytest.raises(TypeError, match="2688 / amax overflows in float16"):
        te_mx.quantize(torch.randn(4, 40).half(), fmt="nvfp4", scale_rule="compressed_tensors")
    with pytest.raises(ValueError, match="has a tensor scale of its own in each direction"):
        te_mx.quantize(torch.randn(32, 32), fmt="nvfp4+rht16:0x1", columnwise=True)
    with pytest.raises(ValueError, match="layout NN reads the columnwise copy of A"):
        te_mx.gemm(te_mx.quantize(torch.randn(4, 40), fmt="nvfp4"), q, "NN")
