"""The path of operands packed for Hopper, run in plain torch on any machine: what the quantizer,
the GEMM and the modules do with operands of order "sm90".
"""

from __future__ import annotations

import as_on_hopper
import pytest
import torch

import te_mx
from te_mx import _ops as ops
from te_mx._ops import Epilogue
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.dispatch import operand_layouts, registry
from te_mx.dispatch.problem import Place, Problem
from te_mx.runtime.kernel_log import LAST_RUN

KINDS = ("gauss", "rows", "spread", "zeros")
E4M3 = "mxfp8_e4m3"
# No CPU kernel takes these operands, and te_mx says so.
pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")


def data(rows: int, cols: int, kind: str) -> torch.Tensor:
    x = torch.randn(rows, cols)
    if kind == "rows":
        x *= torch.exp2(torch.randint(-20, 20, (rows, 1)).float())
    if kind == "spread":
        x *= torch.exp2(torch.randint(-15, 15, (rows, cols)).float())
    if kind == "zeros":
        x[torch.rand(rows, cols) < 0.95] = 0
    return x


def packed(x: torch.Tensor, spread: int, **kwargs: object) -> ops.Quantized:
    spec = f"{E4M3}@sm90:{spread}"
    return ops.quantize_2d(x, spec, spec, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 70), (130, 257), (1, 1)])
@pytest.mark.parametrize("spread", [0, 8])
def test_packed_quantization_is_quantization_then_packing(shape, kind, spread):
    x = data(*shape, kind)
    got = packed(x, spread, col_sum=True)
    rounded = packed(x, spread, col_sum=True, sum_dtype=torch.bfloat16)
    assert torch.equal(rounded.col_sum, x.sum(0).bfloat16())
    plain = ops.quantize_2d(x, f"{E4M3}@rows", f"{E4M3}@rows", col_sum=True)
    assert torch.equal(got.col_sum, x.sum(0))
    for made, o in zip(got[:2], plain[:2], strict=True):
        expected = sm90_tiles.pack(o.codes, o.scales, "e4m3", spread)
        assert torch.equal(made.codes, expected.codes[:, : o.k])
        assert torch.equal(made.scales, expected.scales)
        assert made.codes.stride(0) % 16 == 0 or made.codes.shape[0] == 1
        assert (made.spec, made.rows, made.k) == (f"{E4M3}@sm90:{spread}", o.rows, o.k)


def test_operands_that_lie_by_k_pack_like_their_transpose():
    x = data(70, 40, "spread")
    q = ops.quantize_2d(x, "", f"{E4M3}@cols").col
    want = packed(x, 8).col
    got = torch.ops.te_mx.convert(*q[:5], want.spec)
    for mine, theirs in zip(got, want[:2], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixed", [False, True])
def test_gemm_of_packed_operands_on_the_reference_backend(kind, mixed):
    w, x = data(24, 300, kind), data(20, 300, "gauss")
    rhs, lhs = packed(w, 8).row, packed(x, 8).row
    values = sm90_tiles.packed_values(lhs, 300, "e4m3")
    if mixed:
        lhs = te_mx.quantize(x).operand("rowwise")
        values = te_mx.quantize(x).dequantize(torch.float64)
    expected = values @ sm90_tiles.packed_values(rhs, 300, "e4m3").t()
    epilogue = Epilogue(bias_grad="operand")
    made = ops.gemm_2d(lhs, rhs, epilogue, out_dtype=torch.float32, tag=3)
    torch.testing.assert_close(made.out, expected.float())
    torch.testing.assert_close(made.bias_grad, values.sum(1).float())
    assert LAST_RUN[3] == "reference"


@pytest.mark.filterwarnings("default::te_mx.FallbackWarning")
def test_a_cpu_says_that_it_has_no_kernel_for_them(fresh_warnings):
    with pytest.warns(te_mx.FallbackWarning, match="quantize on the CPU .*not sm90:8"):
        o = packed(torch.randn(40, 70), 8).row
    with pytest.warns(te_mx.FallbackWarning, match="gemm on the CPU .*not sm90:8"):
        ops.gemm_2d(o, o, out_dtype=torch.float32)


def test_a_packed_operand_is_checked():
    o = packed(torch.randn(40, 70), 8).row
    said = (
        r"lhs: mxfp8_e4m3 \[40, 70\] in layout 'sm90:8' needs uint8 codes \(40, 70\) and "
        r"torch.int32 scales \(1, 2, 132\), got .*and torch.%s"
    )
    for bad, got in ((o.scales[:, :1], r"int32 \(1, 1, 132\)"), (o.scales.byte(), "uint8")):
        with pytest.raises(ValueError, match=said % got):
            ops.gemm_2d(o._replace(scales=bad), o, out_dtype=torch.float32)
    # Rows that do not lie as the kernels read them are copied.
    moved = o._replace(codes=o.codes.contiguous())
    assert moved.checked("lhs").codes.stride(0) == 80
    one = ops.gemm_2d(o, o, out_dtype=torch.float32).out
    assert torch.equal(ops.gemm_2d(moved, o, out_dtype=torch.float32).out, one)


@pytest.fixture
def hopper_forms():
    """Modules ask for operands as they do on Hopper; the reference multiplies them."""
    with as_on_hopper.hoppers_forms():
        yield


def gradients(layer, x, grad, **fields):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with te_mx.autocast(recipe=te_mx.recipe.MXFP8BlockScaling(**fields)):
        y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def test_modules_ask_for_packed_operands(hopper_forms):
    layer, x = te_mx.Linear(70, 33), torch.randn(40, 70, requires_grad=True)
    for fields, spec in (
        ({"alignment_spread": 3}, f"{E4M3}@sm90:3"),
        ({"precision": "exact"}, f"{E4M3}@rows"),
    ):
        for keep in (True, False):
            recipe = te_mx.recipe.MXFP8BlockScaling(**fields, keep_weight_columns=keep)
            with te_mx.autocast(recipe=recipe):
                y = layer(x)
            assert [kept.spec for kept in y.grad_fn.kept] == [spec, spec if keep else ""]


@pytest.mark.parametrize("shape", [(40, 70, 33), (1, 1, 1), (130, 260, 140)])
def test_linear_on_packed_operands(shape, hopper_forms):
    """With spread 0 nothing is rounded, so the exact path gives the same."""
    m, k, n = shape
    layer = te_mx.Linear(k, n)
    x, grad = data(m, k, "gauss"), data(m, n, "rows")
    exact = gradients(layer, x, grad, precision="exact")
    for spread, bound in ((0, 1e-6), (8, 2e-3)):
        for mine, theirs in zip(
            gradients(layer, x, grad, alignment_spread=spread), exact, strict=True
        ):
            scale = theirs.double().norm() + 1e-30
            assert (mine.double() - theirs.double()).norm() <= bound * scale


def test_kept_weights_follow_the_precision(hopper_forms):
    """A weight packed for one precision or spread is not used at another."""
    layer, x = te_mx.Linear(64, 48), torch.randn(8, 64)
    seen = []
    for fields in ({}, {"alignment_spread": 3}, {"precision": "exact"}, {"precision": "exact"}):
        with te_mx.autocast(recipe=te_mx.recipe.MXFP8BlockScaling(**fields)):
            layer(x, is_first_microbatch=not seen)
        seen.append(layer._source.kept["weight"])
    assert seen[0] is not seen[1] is not seen[2] and seen[2] is seen[3]


def test_explain_counts_classes():
    A, B = te_mx.quantize(data(300, 256, "gauss")), te_mx.quantize(data(40, 256, "spread"))
    note = te_mx.explain(A, B, classes=True).note
    assert "A has 6 tile-shared tiles; B has" in note
    with pytest.raises(ValueError, match="classes=True counts tiles of tensors"):
        te_mx.explain(m=1, n=1, k=1, classes=True)


def test_precision_errors():
    A = te_mx.quantize(torch.randn(4, 32))
    for make in (
        lambda **f: te_mx.gemm(A, A, **f),
        lambda **f: te_mx.recipe.MXFP8BlockScaling(**f),
    ):
        with pytest.raises(ValueError, match="precision must be one of 'adaptive', 'exact'"):
            make(precision="fast")
        with pytest.raises(ValueError, match="alignment_spread must be 0 to 8"):
            make(alignment_spread=9)
        with pytest.raises(TypeError, match="alignment_spread must be an int"):
            make(alignment_spread=2.0)


def test_other_gpus_are_named(monkeypatch):
    """What explain says on GPUs that are not Hopper."""
    cuda, sides = torch.device("cuda", 3), (f"{E4M3}@rows", f"{E4M3}@cols")
    monkeypatch.setitem(binding._problems, 3, "needs a Hopper GPU (sm_90), cuda:3 is sm_80")
    problem = Problem("gemm", Place("cuda", 3), *sides, 8, 8, 8)
    kernel, declined = registry.choose(problem)
    assert kernel.name == "reference"
    assert dict(declined)["sm90_adaptive"].endswith("cuda:3 is sm_80")
    monkeypatch.setitem(binding._problems, 3, None)
    assert registry.choose(problem)[0].name == "sm90_adaptive"
    assert registry.choose(problem._replace(precision="exact"))[0].name == "sm90_exact"

    def wanted(precision):
        registry.forget()
        return operand_layouts.operand_layouts(cuda, E4M3, E4M3, precision, 5)

    assert wanted("adaptive") == (f"{E4M3}@sm90:5", f"{E4M3}@sm90:5")
    assert wanted("exact") == (f"{E4M3}@rows", f"{E4M3}@rows")
    monkeypatch.setitem(binding._problems, 3, "no")
    assert wanted("adaptive") == (f"{E4M3}@rows", f"{E4M3}@cols")
    registry.forget()


@pytest.mark.parametrize(
    ("capability", "hip", "text"),
    [((8, 0), None, "is sm_80"), ((10, 0), None, "is sm_100"), ((9, 4), "6.0", "AMD")],
)
def test_reasons_of_a_device(monkeypatch, capability, hip, text):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert text in binding._find_problem(0)


def test_a_build_without_the_module_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(binding, "_native", None)
    monkeypatch.setattr(binding, "_import_error", "hidden by a test")
    assert "te_mx._sm90 cannot be imported (hidden by a test)" in binding._find_problem(0)
