"""What native code has names for and no kernel yet is refused as unsupported, before anything runs.

What cannot be meant at all is a bad argument. The Hopper module answers without a GPU.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from te_mx.backends.base import ALIGNED, LAYOUTS, SCALE_RULES

cpu = pytest.importorskip("te_mx._native")
try:
    sm90 = importlib.import_module("te_mx._sm90")
except ImportError:
    sm90 = None
built = pytest.mark.skipif(sm90 is None, reason="te_mx was built without Hopper kernels")
BAD_ARGUMENT, UNSUPPORTED = 1, 2
FORMATS = [("element", 2), ("element", 5), ("scale_type", 1), ("block_k", 128), ("block_rows", 128)]
NO_SUMS = [("element", 6)]  # what row_sums refuses beside
UNKNOWN = [("element", 7), ("element", -1), ("block_k", 0)]

memory = torch.zeros(1 << 16, dtype=torch.uint8)
AT = memory.data_ptr()


def operand(native, order="k_last"):
    return native.Operand(codes=AT, scales=AT, rows=32, k=32, layout=LAYOUTS[order])


def matrix(native):
    return native.Matrix(data=AT, rows=32, cols=32, row_stride=32)


def gemm_args(native, order):
    side = operand(native, order)
    return native.GemmArgs(lhs=side, rhs=side, out=AT, ldo=32, kernel=-1 if native is sm90 else 1)


def grouped_args(native, order):
    made = gemm_args(native, order)
    return native.GroupedGemmArgs(gemm=made)


def quantize_args(native, kind, order):
    args = getattr(native, kind)(row_codes=AT, row_scales=AT, row_layout=LAYOUTS[order])
    if hasattr(args, "x_data"):
        args.x = matrix(native)
    return args


# Name, arguments, and the prefix of the fields that say the format.
ON_CPU = [
    ("quantize", lambda n: quantize_args(n, "QuantizeArgs", "k_last"), ""),
    ("quantize_grouped", lambda n: quantize_args(n, "GroupedQuantizeArgs", "k_last"), ""),
    ("dequantize", lambda n: n.DequantizeArgs(operand=operand(n), out=AT), ""),
    ("pack", lambda n: n.PackArgs(operand=operand(n), out_codes=AT, kernel=1), ""),
    ("pack_many", lambda n: n.PackArgs(operand=operand(n), out_codes=AT, kernel=1), ""),
    ("gemm", lambda n: gemm_args(n, "k_last"), "lhs_"),
    ("gemm", lambda n: gemm_args(n, "k_last"), "rhs_"),
    ("gemm_grouped", lambda n: grouped_args(n, "k_last"), "rhs_"),
    ("normalize", lambda n: quantize_args(n, "NormArgs", "k_last"), ""),
    ("activate", lambda n: quantize_args(n, "ActArgs", "k_last").copy(h=matrix(n)), ""),
]
ON_HOPPER = [
    ("quantize", lambda n: quantize_args(n, "QuantizeArgs", "sm90"), ""),
    ("quantize_grouped", lambda n: quantize_args(n, "GroupedQuantizeArgs", "sm90_rows"), ""),
    ("dequantize", lambda n: n.DequantizeArgs(operand=operand(n), out=AT), ""),
    ("row_sums", lambda n: n.RowSumsArgs(operand=operand(n), out=AT), ""),
    ("pack", lambda n: n.PackArgs(operand=operand(n), out_layout=LAYOUTS["sm90"]), ""),
    ("columns_of_stacked", lambda n: n.PackArgs(operand=operand(n), out_layout=2), ""),
    ("gemm", lambda n: gemm_args(n, "sm90"), "lhs_"),
    ("gemm", lambda n: gemm_args(n, "sm90"), "rhs_"),
    ("gemm_grouped", lambda n: grouped_args(n, "sm90_k").copy(along_k=True), "rhs_"),
    ("normalize", lambda n: quantize_args(n, "NormArgs", "sm90"), ""),
    ("activate", lambda n: quantize_args(n, "ActArgs", "sm90").copy(h=matrix(n)), ""),
]


def check(native, name, args, prefix):
    def status(field, value):
        said = getattr(native, name)(args.copy(**{prefix + field: value}))
        return said[0] if isinstance(said, tuple) else said

    for field, value in FORMATS + NO_SUMS * (name == "row_sums"):
        assert status(field, value) == UNSUPPORTED, (name, field, value)
    for field, value in UNKNOWN:
        assert status(field, value) == BAD_ARGUMENT, (name, field, value)
    if hasattr(args, "rule") and name != "pack" and name != "pack_many":
        words = len(native.SCALE_RULES)  # three of MX formats first
        assert {status("rule", rule) for rule in range(3, words)} == {UNSUPPORTED}
        assert status("rule", words) == BAD_ARGUMENT


@pytest.mark.parametrize(("name", "make", "prefix"), ON_CPU, ids=lambda v: v if v else None)
def test_formats_of_other_kernels_on_the_cpu(name, make, prefix):
    check(cpu, name, make(cpu), prefix)


@built
@pytest.mark.parametrize(("name", "make", "prefix"), ON_HOPPER, ids=lambda v: v if v else None)
def test_formats_of_other_kernels_on_hopper(name, make, prefix):
    check(sm90, name, make(sm90), prefix)


@pytest.mark.parametrize("order", ["sm90", "sm90_rows", "sm90_k"])
def test_the_cpu_reads_no_layout_of_hopper(order):
    assert cpu.gemm(gemm_args(cpu, order))[0] == UNSUPPORTED
    assert cpu.dequantize(cpu.DequantizeArgs(operand=operand(cpu, order), out=AT)) == UNSUPPORTED
    assert (
        cpu.pack(cpu.PackArgs(operand=operand(cpu, order), out_codes=AT, kernel=1)) == UNSUPPORTED
    )
    wrong = quantize_args(cpu, "QuantizeArgs", "k_last").copy(row_layout=LAYOUTS[order])
    assert cpu.quantize(wrong) == UNSUPPORTED


@built
@pytest.mark.parametrize("order", ["k_last", "k_first", "sm90_rows", "sm90_k"])
def test_the_gemm_of_hopper_reads_tiles_alone(order):
    assert sm90.gemm(gemm_args(sm90, order)) == UNSUPPORTED


BLOCKWISE = {"scale_type": 1, "block_k": 128, "rule": SCALE_RULES["pow2"]}


@built
def test_hopper_aligns_powers_of_two_in_rows():
    """Refused before anything is launched."""
    args = quantize_args(sm90, "QuantizeArgs", "sm90").copy(
        **BLOCKWISE, col_codes=AT, col_scales=AT, col_layout=ALIGNED["sm90"], spread=8
    )
    assert sm90.quantize(args.copy(rule=SCALE_RULES["fp32"])) == BAD_ARGUMENT
    assert sm90.quantize(args.copy(block_rows=128)) == BAD_ARGUMENT
    assert sm90.quantize(args.copy(spread=10)) == BAD_ARGUMENT
    assert sm90.quantize(args.copy(col_layout=ALIGNED["sm90_k"])) == UNSUPPORTED


@built
def test_groups_of_hopper_have_blocks_of_one_row():
    args = quantize_args(sm90, "GroupedQuantizeArgs", "sm90_rows").copy(
        **BLOCKWISE, groups_count=1, groups_rows=32, groups_ends=AT
    )
    assert sm90.quantize_grouped(args.copy(block_rows=128)) == UNSUPPORTED
    scaling = {name: value for name, value in BLOCKWISE.items() if name != "rule"}
    sides = {f"{side}_{name}": scaling[name] for side in ("lhs", "rhs") for name in scaling}
    along_k = grouped_args(sm90, "sm90_k").copy(
        **sides, along_k=True, groups_count=1, groups_rows=32, groups_ends=AT
    )
    assert sm90.gemm_grouped(along_k.copy(rhs_block_rows=128)) == BAD_ARGUMENT
    assert sm90.gemm_grouped(along_k.copy(lhs_block_rows=128)) == UNSUPPORTED
    assert sm90.gemm_grouped(along_k.copy(rhs_scale_type=0, rhs_block_k=32)) == UNSUPPORTED


@built
def test_hopper_has_no_bias_gradient_of_an_operand():
    args = gemm_args(sm90, "sm90").copy(bias_grad=AT, bias_grad_kind=1)
    assert sm90.gemm(args) == UNSUPPORTED
    assert sm90.gemm(args.copy(bias_grad_kind=0)) == BAD_ARGUMENT


def test_groups_on_the_cpu_are_numbers_of_the_host():
    args = grouped_args(cpu, "k_last")
    for field, value in (("groups_ends_int32", True), ("groups_capacity", 4), ("first_rows", AT),
                         ("gelu", 1), ("aux", AT)):  # fmt: skip
        assert cpu.gemm_grouped(args.copy(**{field: value}))[0] == UNSUPPORTED
