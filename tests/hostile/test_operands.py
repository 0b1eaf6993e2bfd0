"""The ops below modules and functions: operands that do not belong together are refused before an
address of theirs is taken, whether the op is called directly or through the dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_mx import ops
from te_mx.backends.fused import Activation, Norm, Wanted
from te_mx.backends.grouped import StackedOperand
from te_mx.ops.fused import act_quantize_2d, dact_quantize_2d, norm_backward_2d, norm_quantize_2d
from te_mx.ops.grouped_gemm import gemm_rows
from te_mx.ops.grouped_quantize import quantize_grouped
from te_mx.ops.grouped_weights import columns_of_weights, quantize_weights
from te_mx.ops.grouped_wgrad import gemm_k

R, K, N, G = 24, 70, 40, 3
F32 = torch.float32
X, WEIGHT, VECTOR = torch.ones(R, K), torch.ones(N, K), torch.ones(K)
OFFS = torch.tensor([5, 5, 20])
NORM, WANTED = Norm("LayerNorm", 1e-5), Wanted("e4m3", True, "plain", "rceil")
SWIGLU = Activation("swiglu")


def quantized(x: Tensor) -> ops.Operand:
    q = ops.quantize_2d(x, "e4m3", rowwise=True, columnwise=None, scale_rule="rceil")
    return ops.Operand(q.row_codes, q.row_scales, "e4m3", "k_last")


def in_groups(x: Tensor) -> tuple[ops.Operand, ops.Operand]:
    q = quantize_grouped(x, OFFS, "e4m3", rowwise=True, columnwise=True, scale_rule="rceil")
    row = ops.Operand(q.row_codes, q.row_scales, "e4m3", "k_last")
    return row, ops.Operand(q.col_codes, q.col_scales, "e4m3", "k_first")


A, B = quantized(WEIGHT), quantized(X)
ROWS, COLUMNS = in_groups(X)
WEIGHTS: StackedOperand = quantize_weights(
    [WEIGHT] * G, "e4m3", columnwise=False, scale_rule="rceil"
)[0]
WORDS = {"rowwise": True, "columnwise": None, "scale_rule": "rceil"}

# Calls that are right, and then one argument of each that is not.
CALLS: dict[str, Callable[..., Any]] = {
    "quantize": functools.partial(ops.quantize_2d, x=X, fmt="e4m3", **WORDS),
    "dequantize": functools.partial(
        ops.dequantize_2d, codes=A.codes, scales=A.scales, fmt="e4m3", order="k_last", dtype=F32
    ),
    "gemm": functools.partial(ops.gemm_2d, a=A, b=B, out_dtype=F32),
    "pack": functools.partial(ops.pack_2d, operand=A, role="a"),
    "norm": functools.partial(
        norm_quantize_2d, x=X, weight=VECTOR, bias=VECTOR, norm=NORM, dtype=F32, want_z=True,
        wanted=WANTED,
    ),
    "norm backward": functools.partial(
        norm_backward_2d, dz=X, x=X, weight=VECTOR, mean=torch.ones(R), rstd=torch.ones(R),
        dtype=F32,
    ),
    "act": functools.partial(
        act_quantize_2d, h=X, act=SWIGLU, dtype=F32, want_out=True, wanted=WANTED
    ),
    "act backward": functools.partial(
        dact_quantize_2d, grad=X[:, : K // 2], h=X, act=SWIGLU, dtype=F32, want_out=True,
        wanted=WANTED,
    ),
    "groups": functools.partial(
        quantize_grouped, x=X, offs=OFFS, fmt="e4m3", rowwise=True, columnwise=True,
        scale_rule="rceil",
    ),
    "weights": functools.partial(
        quantize_weights, weights=[WEIGHT] * G, fmt="e4m3", columnwise=True, scale_rule="rceil"
    ),
    "columns": functools.partial(columns_of_weights, row=WEIGHTS, scale_rule="rceil"),
    "rows": functools.partial(
        gemm_rows, a=WEIGHTS, b=ROWS, offs=OFFS, bias=torch.ones(G, N), out_dtype=F32
    ),
    "k": functools.partial(gemm_k, a=COLUMNS, b=COLUMNS, offs=OFFS, out_dtype=F32),
}  # fmt: skip


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def codes(operand: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return operand._replace(codes=change(operand.codes))


def scales(operand: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return operand._replace(scales=change(operand.scales))


def short(tensor: Tensor) -> Tensor:
    return tensor[..., :1].clone()


WRONG = [
    # Words and dtypes.
    ("quantize", {"x": X.double()}, TypeError, "torch.float32, .*got torch.float64"),
    ("quantize", {"x": X[0]}, ValueError, r"must be a matrix, got shape \(70,\)"),
    ("quantize", {"fmt": "e3m4"}, ValueError, "element format must be one of 'e4m3', 'e5m2'"),
    ("quantize", {"scale_rule": "ceil"}, ValueError, "scale rule must be one of .*got 'ceil'"),
    ("quantize", {"columnwise": "turned"}, ValueError, "columnwise must be one of"),
    ("quantize", {"spread": 9}, ValueError, "spread must be 0 to 8"),
    ("dequantize", {"order": "sm90"}, ValueError, "order k_last and k_first"),
    ("dequantize", {"dtype": torch.int32}, TypeError, "dtype must be one of"),
    ("gemm", {"gelu": "relu"}, ValueError, "gelu must be one of"),
    ("gemm", {"bias_grad": "sum"}, ValueError, "bias_grad one of"),
    ("gemm", {"a": A._replace(order="rows")}, ValueError, "a: order must be one of"),
    ("gemm", {"bias": torch.ones(N).double()}, TypeError, "got torch.float64"),
    ("norm", {"norm": Norm("GroupNorm", 1e-5)}, ValueError, "normalization must be one of"),
    ("norm", {"dtype": torch.float64}, TypeError, "got torch.float64"),
    ("act", {"act": Activation("tanh")}, ValueError, "activation must be one of"),
    ("groups", {"x": X.double()}, TypeError, "got torch.float64"),
    ("weights", {"weights": [WEIGHT, WEIGHT.double()]}, TypeError, "got torch.float64"),
    # Shapes.
    ("dequantize", {"scales": short(A.scales)}, ValueError, "need uint8 scales"),
    ("gemm", {"a": codes(A, torch.flatten)}, ValueError, "a: codes must be a matrix"),
    ("gemm", {"b": scales(B, short)}, ValueError, "b: k_last codes .* need uint8 scales"),
    ("pack", {"operand": scales(A, short)}, ValueError, "need uint8 scales"),
    ("norm", {"weight": torch.ones(3)}, ValueError, r"weight .* must be float32 \[70\]"),
    ("norm", {"bias": VECTOR.double()}, ValueError, r"bias .* float32 \[70\] .*got torch.float64"),
    ("norm backward", {"dz": X[:3]}, ValueError, r"dz must be a matrix as x, \(24, 70\)"),
    ("norm backward", {"mean": torch.ones(3)}, ValueError, r"mean must be float32 \[24\]"),
    ("norm backward", {"rstd": torch.ones(3)}, ValueError, r"rstd must be float32 \[24\]"),
    ("norm backward", {"weight": torch.ones(3)}, ValueError, r"weight .*must be float32 \[70\]"),
    ("act", {"h": X[:, :69]}, ValueError, "swiglu halves the columns of h"),
    ("act backward", {"grad": X}, ValueError, r"grad must be \[24, 35\]"),
    ("groups", {"offs": OFFS.float()}, ValueError, "offs must be a vector of end offsets"),
    ("weights", {"weights": [WEIGHT, WEIGHT[:3]]}, ValueError, "alike, got .* for group 1"),
    ("columns", {"row": scales(WEIGHTS, short)}, ValueError, "row: k_last codes .* need scales"),
    ("columns", {"row": WEIGHTS._replace(order="k_first")}, ValueError, "must have order k_last"),
    ("rows", {"bias": torch.ones(G, 3)}, ValueError, r"bias must be \[3, 40\]"),
    ("rows", {"offs": OFFS[:2]}, ValueError, "an entry for each of 3 groups"),
    ("rows", {"a": scales(WEIGHTS, short)}, ValueError, "a: k_last codes .* need scales"),
    ("rows", {"a": codes(WEIGHTS, Tensor.int)}, ValueError, "both uint8, got"),
    ("rows", {"b": scales(ROWS, Tensor.int)}, ValueError, "b: order k_last needs uint8 codes"),
    ("k", {"out": torch.ones(G, K, K - 1)}, ValueError, r"out must be contiguous \(3, 70, 70\)"),
    ("k", {"a": scales(COLUMNS, short)}, ValueError, "a must be k_first with codes"),
    # Devices.
    ("dequantize", {"scales": meta(A.scales)}, ValueError, "scales of the matrix is on meta"),
    ("gemm", {"a": scales(A, meta)}, ValueError, "scales of a is on meta"),
    ("gemm", {"a": A._replace(codes=meta(A.codes), scales=meta(A.scales))}, ValueError, "a is on"),
    ("gemm", {"bias": meta(torch.ones(N))}, ValueError, "bias is on meta"),
    ("gemm", {"gelu": "tanh", "gelu_in": meta(torch.ones(R, N))}, ValueError, "gelu_in is on meta"),
    ("gemm", {"out": meta(torch.ones(R, N))}, ValueError, "out is on meta"),
    ("gemm", {"a": A._replace(packed=meta(A.codes))}, ValueError, "packed form of a is on meta"),
    ("norm", {"weight": meta(VECTOR)}, ValueError, "float32 .70. on cpu, got .* on meta"),
    ("norm", {"bias": meta(VECTOR)}, ValueError, "float32 .70. on cpu, got .* on meta"),
    ("norm backward", {"dz": meta(X)}, ValueError, "on cpu, got .* on meta"),
    ("act backward", {"grad": meta(X[:, : K // 2])}, ValueError, "on cpu .*on meta"),
    ("groups", {"offs": meta(OFFS)}, ValueError, "offs is on meta"),
    ("weights", {"weights": [WEIGHT, meta(WEIGHT)]}, ValueError, "on cpu .* on meta for group 1"),
    ("rows", {"bias": meta(torch.ones(G, N))}, ValueError, "bias is on meta"),
    ("rows", {"a": codes(scales(WEIGHTS, meta), meta)}, ValueError, "a is on meta"),
    ("rows", {"offs": meta(OFFS)}, ValueError, "offs is on meta"),
    ("k", {"a": codes(scales(COLUMNS, meta), meta)}, ValueError, "a is on meta"),
    ("k", {"out": meta(torch.ones(G, K, K))}, ValueError, "out .*on meta"),
]


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_right(name: str):
    CALLS[name]()


@pytest.mark.parametrize("dispatched", [False, True], ids=["direct", "dispatched"])
@pytest.mark.parametrize(("name", "wrong", "error", "message"), WRONG)
def test_one_wrong_argument(name: str, wrong: dict, error: type, message: str, dispatched: bool):
    if dispatched:  # a profiler watches the dispatcher
        with torch.profiler.profile(), pytest.raises(error, match=message):
            CALLS[name](**wrong)
        return
    with pytest.raises(error, match=message):
        CALLS[name](**wrong)
