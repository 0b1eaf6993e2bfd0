"""Operands with a tensor scale (NVFP4) in every op: the third part travels, and is missed."""

from __future__ import annotations

import pytest
import torch

import te_mx
from te_mx import _ops as ops
from te_mx._ops import Epilogue, Stack
from te_mx._ops.grouped_gemm import gemm_k, gemm_rows
from te_mx._ops.grouped_quantize import columns_of_weights, quantize_grouped, quantize_weights
from te_mx._ops.moe import moe_gemm
from te_mx.backends.reference import grouped
from te_mx.dispatch.calls import Groups, Mode, QuantizeGroups
from te_mx.dispatch.groups import device_bounds
from te_mx.dispatch.kernels import kernels
from te_mx.dispatch.moe import RoutedGemm, Routing
from te_mx.dispatch.problem import Place, Problem

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")

OPS = torch.ops.te_mx
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
RHT = "nvfp4+rht16:0x2b1d2b1d"


def made(x, spec, rule="te"):
    """The operand of x for a layout: by rows, or of its columns."""
    if spec.endswith("cols"):
        return ops.quantize_2d(x.t(), "", spec, rule=rule).col
    return ops.quantize_2d(x, spec, "", rule=rule).row


def exact(operand):
    bare = operand._replace(tensor_scale=torch.ones_like(operand.tensor_scale))
    return ops.dequantize_2d(bare, F64) * operand.tensor_scale.double()


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        ("nvfp4@rows", "nvfp4_16x16@rows"),
        ("nvfp4_rows@rows", "nvfp4_16x16@cols"),
        (f"{RHT}@cols", f"{RHT}@cols"),
    ],
)
def test_products(lhs, rhs):
    """Every layout, with tails of k and rows: fp32 sums times the product of tensor scales."""
    torch.manual_seed(0)
    a, b = made(torch.randn(9, 50), lhs), made(torch.randn(21, 50) * 1e-3, rhs)
    out = ops.gemm_2d(a, b, out_dtype=F32).out
    bare = [ops.dequantize_2d(s._replace(tensor_scale=torch.ones_like(s[6])), F64) for s in (a, b)]
    sums = (bare[0] @ bare[1].t()).float()
    assert torch.equal(out, sums * (a.tensor_scale * b.tensor_scale.t()))
    assert ((out.double() - exact(a) @ exact(b).t()).abs() <= 2.0**-22 * out.abs()).all()
    sides = [x for s in (a, b) for x in (s.codes, s.scales, None, *s[2:5])]
    rest = (None, "", None, "", "adaptive", 8, False)
    wholes = (a.tensor_scale, b.tensor_scale)
    torch.library.opcheck(OPS.gemm, (*sides, *rest, BF16, None, -1, *wholes))
    into = torch.zeros(9, 21)
    OPS.gemm_out(*sides, *rest, into, True, None, -1, *wholes)
    assert torch.equal(into, out)
    sums = ops.gemm_2d(a, b, Epilogue(bias_grad="operand"), out_dtype=F32).bias_grad
    torch.testing.assert_close(sums.double(), exact(a).sum(1), rtol=1e-6, atol=1e-6)


def test_both_directions_and_back():
    """A columnwise operand has the amax of what its codes are of: of the transformed matrix."""
    x = torch.randn(50, 40)
    x[3, 4] = 100
    q = ops.quantize_2d(x, "nvfp4@rows", f"{RHT}@cols", rule="te")
    assert q.row.tensor_scale == 100 / 2688 > 2 * q.col.tensor_scale
    torch.library.opcheck(OPS.quantize, (x, q.row.spec, q.col.spec, "te", True, F32))
    for side, value in ((q.row, x), (q.col, x.t())):
        assert (ops.restored_2d(side, F32) - value).norm() < 0.12 * value.norm()
        torch.library.opcheck(OPS.dequantize, (*side[:5], BF16, side.tensor_scale))
    there = ops.convert_2d(q.col, f"{RHT}@rows")
    assert torch.equal(ops.dequantize_2d(there, F32), ops.dequantize_2d(q.col, F32))
    assert torch.equal(ops.convert_2d(there, q.col.spec).codes, q.col.codes)
    torch.library.opcheck(OPS.convert, (*q.col[:5], there.spec, q.col.tensor_scale))


def test_stochastic_rounding():
    """Codes are neighbours of x, and x in the mean; the same bits for the same seed and place."""
    x, seed = torch.randn(64, 64), torch.tensor([7])
    nearest = ops.quantize_2d(x, "nvfp4@rows", rule="te").row
    drawn = [
        ops.quantize_2d(x, "nvfp4@rows", "nvfp4@cols", rule="te+sr", seed=seed + i)
        for i in (0, 0, *range(1, 200))
    ]
    assert torch.equal(drawn[0].row.codes, drawn[1].row.codes)
    values = torch.stack([ops.dequantize_2d(q.row, F32) for q in drawn[1:]])
    step = ops.dequantize_2d(nearest._replace(codes=nearest.codes * 0 + 0x77), F32) / 3
    assert ((values - x).abs() <= step).all() and (values.std(0) > 0).float().mean() > 0.9
    assert ((values.mean(0) - x).abs() <= 6 * step / 200**0.5).all()
    for q in drawn[:3]:
        assert torch.equal(nearest.scales, q.row.scales)
    with pytest.raises(ValueError, match="a seed belongs to rules"):
        ops.quantize_2d(x, "nvfp4@rows", rule="te+sr")


@pytest.mark.parametrize(("row", "capacity"), [("nvfp4@rows", 0), ("nvfp4_rows@rows", 40)])
def test_groups(row, capacity):
    """A group of tokens has the bytes that it has alone, wherever its bounds are known, and every
    product those of its own."""
    torch.manual_seed(1)
    x, g = torch.randn(130, 48), torch.randn(130, 24) * 1e-2
    x[70:] *= 50
    ends = [33, 33, 71, 120] if not capacity else [33, 40, 95, 130]
    offs = torch.tensor(ends, dtype=torch.int32)
    groups, col = Groups(offs, capacity), f"{RHT}@grouped_cols"
    for one, rule, seed in ((x, "te", None), (x.to(BF16), "te+sr", torch.tensor([3]))):
        q = quantize_grouped(one, groups, row, col, rule=rule, seed=seed)
        what = QuantizeGroups(one, groups, row, col, rule, False, seed)
        there = grouped.quantize(what, *device_bounds(offs, capacity, 130))
        for one, other in ((q.row, there.row), (q.col, there.col)):
            assert all(torch.equal(s, t) for s, t in zip(one[:2], other[:2], strict=True))
            assert torch.equal(one.tensor_scale, other.tensor_scale)
    torch.library.opcheck(OPS.quantize_grouped, (x, offs, capacity, row, col, "te", False))
    q = quantize_grouped(x, groups, row, col, rule="te")
    q_g = quantize_grouped(g, groups, "", col, rule="te").col
    w, w_col = quantize_weights(
        torch.randn(4, 24, 48), "nvfp4_16x16@rows", "nvfp4_16x16@cols", rule="te"
    )
    assert w.tensor_scale.shape == (4,) and torch.equal(w.tensor_scale, w_col.tensor_scale)
    y = gemm_rows(q.row, w, groups, out_dtype=F32)
    dw = gemm_k(q_g, q.col, groups, out_dtype=F32)
    bounds = device_bounds(offs, capacity, 130)
    same, same_dw = torch.empty_like(y), torch.empty_like(dw)
    grouped.gemm_rows(q.row, w, *bounds, None, same)
    grouped.gemm_k(q_g, q.col, *bounds, same_dw, False)
    assert torch.equal(same, y) and torch.equal(same_dw, dw)
    for i, (start, end) in enumerate(zip(*(b.tolist() for b in bounds), strict=True)):
        own = ops.quantize_2d(x[start:end], row, f"{RHT}@cols", rule="te")
        assert torch.equal(y[start:end], ops.gemm_2d(own.row, w.group(i), out_dtype=F32).out)
        other = ops.quantize_2d(g[start:end], "", f"{RHT}@cols", rule="te").col
        assert torch.equal(dw[i], ops.gemm_2d(other, own.col, out_dtype=F32).out)
    sides = (*q.row[:5], w.codes, w.scales, None, w.spec, 4, 24, offs, capacity, None, BF16, -1)
    wholes = q.row.tensor_scale, w.tensor_scale
    torch.library.opcheck(OPS.gemm_rows, (*sides, "adaptive", 8, *wholes))
    sides = (*q_g[:4], *q.col[:5], offs, capacity, torch.zeros(4, 24, 48), True, -1, "adaptive", 8)
    torch.library.opcheck(OPS.gemm_k, (*sides, q_g.tensor_scale, q.col.tensor_scale))


def test_routed_rows_and_columns_of_weights():
    x, w = torch.randn(6, 48), torch.randn(3, 16, 48)
    tokens = made(x, "nvfp4_rows@rows")
    weights, _ = quantize_weights(list(w), "nvfp4@rows", rule="te")
    expert = torch.tensor([0, 2, 1, 2, 0, 1], dtype=torch.int32)
    routing = Routing(None, expert, torch.tensor([6], dtype=torch.int32), 1, 1, 1)
    out = torch.zeros(6, 16)
    moe_gemm(RoutedGemm(tokens, weights, routing, None, None, out, Mode()))
    for i, e in enumerate(expert.tolist()):
        whole = ops.gemm_2d(tokens, weights.group(e), out_dtype=F32).out
        assert torch.equal(out[i], whole[i])
    given = (*tokens[:5], *weights[:2], None, weights.spec, 3, 16, *routing, None, None, out, -1)
    wholes = tokens.tensor_scale, weights.tensor_scale
    torch.library.opcheck(OPS.moe_gemm, (*given, "adaptive", 8, *wholes))
    columns = columns_of_weights(weights, "nvfp4@cols", "te")
    for i in range(3):
        values = ops.dequantize_2d(weights.group(i), F32)
        again = ops.quantize_2d(values, "", "nvfp4@cols", rule="te").col
        for j in (0, 1, 6):
            assert torch.equal(columns.group(i)[j], again[j])
    given = *weights[:3], 16, 48, "nvfp4@cols", "te", weights.tensor_scale
    torch.library.opcheck(OPS.columns_of_weights, given)
    torch.library.opcheck(OPS.quantize_weights, (list(w), "nvfp4@rows", "nvfp4@cols", "te"))


def test_a_tensor_scale_that_does_not_belong_there():
    a, b = made(torch.randn(9, 48), "nvfp4@rows"), made(torch.randn(5, 48), "nvfp4_rows@rows")
    mx = ops.quantize_2d(torch.randn(9, 48), "mxfp8_e4m3@rows").row
    weights, _ = quantize_weights(torch.randn(3, 16, 48), "nvfp4@rows", rule="te")
    tokens = quantize_grouped(torch.randn(4, 48), Groups(torch.tensor([2, 4, 4])), "nvfp4@rows",
                              rule="te")  # fmt: skip
    one = torch.ones(())
    for wrong, said in (
        (a._replace(tensor_scale=None), r"lhs: nvfp4 \[9, 48\] needs a tensor scale, got none"),
        (mx._replace(tensor_scale=one), r"lhs: mxfp8_e4m3 \[9, 48\] has no tensor scale"),
        (
            a._replace(tensor_scale=one.double()),
            r"scale \(\) or \(9, 1\) on cpu, got torch.f",
        ),
        (a._replace(tensor_scale=one.view(1)), r"\(9, 1\) on cpu, got .* \(1,\)"),
        (b._replace(tensor_scale=one), r"nvfp4_rows \[5, 48\] needs a float32 tensor scale \(5, 1"),
        (a._replace(tensor_scale=one.to("meta")), r"on cpu, got torch.float32 \(\) on meta"),
        (tokens.row, r"tensor scale \(\) or \(4, 1\) on cpu, got torch.float32 \(3,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            ops.gemm_2d(wrong, a, out_dtype=F32)
    for stack in (weights._replace(tensor_scale=one), weights._replace(tensor_scale=None)):
        with pytest.raises(ValueError, match=r"rhs: nvfp4 \[3, 16, 48\] needs a .*tensor scale"):
            gemm_rows(tokens.row, stack, Groups(torch.tensor([2, 4, 4])), out_dtype=F32)
    assert isinstance(weights, Stack)
    with pytest.raises(ValueError, match="the scale rule of nvfp4 must be one of 'te', 'torchao'"):
        ops.quantize_2d(torch.randn(4, 48), "nvfp4@rows")
    with pytest.raises(ValueError, match="blocks hold several rows, which may belong to several"):
        quantize_grouped(torch.randn(4, 48), Groups(torch.tensor([4])), "nvfp4_16x16@rows",
                         rule="te")  # fmt: skip


def test_te_mx_takes_them_in_groups_and_mixtures():
    x, w = torch.randn(6, 48), torch.randn(3, 16, 48)
    q = te_mx.quantize(x, fmt="nvfp4_rows")
    stack = te_mx.quantize(w, fmt="nvfp4")
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    y = te_mx.grouped_gemm(q, stack, offs=offs, out_dtype=F32)
    values, weights = q.dequantize(F64), stack.dequantize(F64)
    expected = torch.cat([values[:2] @ weights[0].t(), values[2:] @ weights[2].t()])
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)
    each = [te_mx.quantize(one, fmt="nvfp4_16x16") for one in w]
    y = te_mx.grouped_gemm(q, each, offs=offs, out_dtype=F32)
    expected = torch.cat(
        [values[:2] @ each[0].dequantize(F64).t(), values[2:] @ each[2].dequantize(F64).t()]
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("lhs", "rhs", "said"),
    [
        ("nvfp4", "nvfp4_16x16", None),
        ("mxfp8_e4m3", "nvfp4", None),
        ("nvfp4_rows", "mxfp4", None),
        ("mxfp8_e4m3", "mxfp4", "decodes formats with a tensor scale"),
        ("fp8_e4m3_1x128", "nvfp4", "multiplies what bf16 holds, not fp8_e4m3_1x128 with nvfp4"),
    ],
)
def test_gpus_multiply_what_bf16_holds(lhs, rhs, said):
    decoded = next(kernel for kernel in kernels("gemm") if kernel.name == "decoded")
    problem = Problem("gemm", Place("cuda", 0), f"{lhs}@rows", f"{rhs}@cols", 64, 64, 64)
    why = decoded.accepts(problem)
    assert why is said if said is None else said in why
    assert "runs on CUDA" in decoded.accepts(problem._replace(place=Place("cpu")))
