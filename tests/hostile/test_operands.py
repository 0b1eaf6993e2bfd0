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

from te_mx import _ops as ops
from te_mx._ops.fused import act_quantize_2d, norm_backward_2d, norm_quantize_2d
from te_mx._ops.grouped_gemm import gemm_k, gemm_rows
from te_mx._ops.grouped_quantize import columns_of_weights, quantize_grouped, quantize_weights
from te_mx.dispatch.calls import Groups
from te_mx.dispatch.fused import Activation, ActStep, Norm, NormStep, Target

R, K, N, G = 24, 70, 40, 3
F32 = torch.float32
BY_ROWS, BY_COLS, IN_GROUPS = (f"mxfp8_e4m3@{name}" for name in ("rows", "cols", "grouped_cols"))
X, WEIGHT, VECTOR = torch.ones(R, K), torch.ones(N, K), torch.ones(K)
OFFS = torch.tensor([5, 5, 20])
NORM, TARGET = Norm("LayerNorm", 1e-5), Target(BY_ROWS, BY_COLS, "rceil")
SWIGLU = Activation("swiglu")


def in_groups(x: Tensor) -> ops.Quantized:
    return quantize_grouped(x, Groups(OFFS), BY_ROWS, IN_GROUPS, rule="rceil")


RHS, LHS = (ops.quantize_2d(x, BY_ROWS).row for x in (WEIGHT, X))
ROWS, COLUMNS, _ = in_groups(X)
WEIGHTS: ops.Stack = quantize_weights([WEIGHT] * G, BY_ROWS, rule="rceil")[0]


def norm(**step: Any) -> Any:
    return norm_quantize_2d(
        NormStep(**{"x": X, "weight": VECTOR, "bias": VECTOR, "norm": NORM, "dtype": F32,
                    "keep": True, "target": TARGET} | step)
    )  # fmt: skip


def act(**step: Any) -> Any:
    return act_quantize_2d(
        ActStep(**{"h": X, "grad": None, "act": SWIGLU, "dtype": F32, "keep": True,
                   "target": TARGET} | step)
    )  # fmt: skip


def groups(offs: Tensor = OFFS, **call: Any) -> ops.Quantized:
    return quantize_grouped(
        **{"x": X, "groups": Groups(offs), "row": BY_ROWS, "col": IN_GROUPS, "rule": "rceil"} | call
    )


def rows(offs: Tensor = OFFS, **call: Any) -> Tensor:
    return gemm_rows(
        **{"lhs": ROWS, "rhs": WEIGHTS, "groups": Groups(offs), "bias": torch.ones(G, N),
           "out_dtype": F32} | call
    )  # fmt: skip


def gemm(lhs: ops.Operand, rhs: ops.Operand, out: Tensor | None = None, **more: Any) -> Any:
    dtype = more.pop("out_dtype", F32)
    return ops.gemm_2d(lhs, rhs, ops.Epilogue(**more), out=out, out_dtype=dtype)


# Calls that are right, and then one argument of each that is not.
CALLS: dict[str, Callable[..., Any]] = {
    "quantize": functools.partial(ops.quantize_2d, x=X, row=BY_ROWS, rule="rceil"),
    "dequantize": functools.partial(ops.dequantize_2d, operand=RHS, dtype=F32),
    "gemm": functools.partial(gemm, lhs=LHS, rhs=RHS),
    "convert": functools.partial(ops.convert_2d, operand=RHS, spec="mxfp8_e4m3@sm90:8"),
    "kept": functools.partial(ops.kept_form, operand=RHS, side="rhs", mode=ops.Mode()),
    "norm": norm,
    "norm backward": functools.partial(
        norm_backward_2d, dz=X, x=X, weight=VECTOR, mean=torch.ones(R), rstd=torch.ones(R),
        dtype=F32,
    ),
    "act": act,
    "act backward": functools.partial(act, grad=X[:, : K // 2]),
    "groups": groups,
    "weights": functools.partial(
        quantize_weights, weights=[WEIGHT] * G, row=BY_ROWS, col=BY_COLS, rule="rceil"
    ),
    "columns": functools.partial(columns_of_weights, row=WEIGHTS, col=BY_COLS, rule="rceil"),
    "rows": rows,
    "k": functools.partial(gemm_k, lhs=COLUMNS, rhs=COLUMNS, groups=Groups(OFFS), out_dtype=F32),
}  # fmt: skip


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def codes(operand: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return operand._replace(codes=change(operand.codes))


def scales(operand: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return operand._replace(scales=change(operand.scales))


def short(tensor: Tensor) -> Tensor:
    return tensor[..., :1].clone()


def at(spec: str) -> Any:
    """The weights as if they lay otherwise, or were something else."""
    return RHS._replace(spec=spec)


WRONG = [
    # Words and dtypes.
    ("quantize", {"x": X.double()}, TypeError, "float32, .*got torch.float64"),
    ("quantize", {"x": X[0]}, ValueError, r"must be a matrix, got shape \(70,\)"),
    (
        "quantize",
        {"row": "e3m4@rows"},
        ValueError,
        "fmt must be one of .*'mxfp8_e4m3', .*got 'e3m4'",
    ),
    ("quantize", {"rule": "ceil"}, ValueError, "scale rule .*must be one of .*got 'ceil'"),
    ("quantize", {"col": "mxfp8_e4m3@turned"}, ValueError, "layout must be one of .*got 'turned'"),
    (
        "quantize",
        {"row": "mxfp8_e4m3@sm90:10"},
        ValueError,
        r"spread must be in 0..8, or 9 .*, got 10",
    ),
    ("dequantize", {"operand": at("mxfp8_e4m3@sm90:8")}, ValueError, "needs .* torch.int32 scales"),
    ("dequantize", {"operand": at("mxfp8_e4m3@turned")}, ValueError, "layout must be one of"),
    ("dequantize", {"dtype": torch.int32}, TypeError, "dtype must be .*got torch.int32"),
    ("gemm", {"gelu": "relu"}, ValueError, "gelu must be one of"),
    ("gemm", {"bias_grad": "sum"}, ValueError, "bias_grad one of"),
    ("gemm", {"rhs": at("mxfp8_e4m3@k_last")}, ValueError, "layout must be one of .*got 'k_last'"),
    (
        "gemm",
        {"rhs": at("e3m4@rows")},
        ValueError,
        "fmt must be one of .*'mxfp8_e4m3', .*got 'e3m4'",
    ),
    ("gemm", {"bias": torch.ones(N).double()}, TypeError, "got torch.float64"),
    ("gemm", {"out_dtype": torch.float64}, TypeError, "got torch.float64"),
    ("norm", {"norm": Norm("GroupNorm", 1e-5)}, ValueError, "normalization must be one of"),
    ("norm", {"dtype": torch.float64}, TypeError, "got torch.float64"),
    ("act", {"act": Activation("tanh")}, ValueError, "activation must be one of"),
    ("groups", {"x": X.double()}, TypeError, "got torch.float64"),
    ("groups", {"rule": "ceil"}, ValueError, "scale rule .*must be one of .*got 'ceil'"),
    (
        "groups",
        {"row": IN_GROUPS},
        ValueError,
        "row must lie in groups of rows: .*got grouped_cols",
    ),
    ("groups", {"col": BY_COLS}, ValueError, "col must lie in groups of k: .*, got cols"),
    (
        "rows",
        {"lhs": ROWS._replace(spec=BY_COLS)},
        ValueError,
        "lhs must lie in groups of rows: .*, got cols",
    ),
    ("weights", {"weights": [WEIGHT, WEIGHT.double()]}, TypeError, "got torch.float64"),
    # Shapes.
    ("dequantize", {"operand": scales(RHS, short)}, ValueError, "needs .*torch.uint8 scales"),
    ("gemm", {"rhs": codes(RHS, torch.flatten)}, ValueError, r"rhs: .* needs uint8 codes \(40, 70"),
    ("gemm", {"lhs": scales(LHS, short)}, ValueError, r"lhs: .*'rows' needs .*uint8 scales \(24"),
    (
        "gemm",
        {"lhs": LHS._replace(rows=R + 1)},
        ValueError,
        r"lhs: .*\[25, 70\] .*got .*\(24, 70\)",
    ),
    ("gemm", {"rhs": RHS._replace(k=K - 1)}, ValueError, r"rhs: .*\[40, 69\] .*got .*\(40, 70\)"),
    ("gemm", {"rhs": COLUMNS}, ValueError, "single matrix .*'grouped_cols'"),
    ("gemm", {"rhs": ops.quantize_2d(X[:, :64], BY_ROWS).row}, ValueError, "k, got 70 and 64"),
    ("convert", {"operand": scales(RHS, short)}, ValueError, "needs .*torch.uint8 scales"),
    ("kept", {"operand": scales(RHS, short)}, ValueError, "needs .*torch.uint8 scales"),
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
    ("columns", {"row": scales(WEIGHTS, short)}, ValueError, "row: .*'rows' needs .*uint8 scales"),
    (
        "columns",
        {"row": WEIGHTS._replace(spec=BY_COLS)},
        ValueError,
        "must lie by rows, got .*cols",
    ),
    ("rows", {"bias": torch.ones(G, 3)}, ValueError, r"bias must be \[3, 40\]"),
    ("rows", {"offs": OFFS[:2]}, ValueError, "an entry for each of 3 groups"),
    ("rows", {"rhs": scales(WEIGHTS, short)}, ValueError, "rhs: .*'rows' needs .*uint8 scales"),
    (
        "rows",
        {"rhs": codes(WEIGHTS, Tensor.int)},
        ValueError,
        "rhs: .*uint8 codes .*got torch.int32",
    ),
    ("rows", {"lhs": scales(ROWS, Tensor.int)}, ValueError, "lhs: .*'rows' needs uint8 codes"),
    ("k", {"out": torch.ones(G, K, K - 1)}, ValueError, r"out must be contiguous \(3, 70, 70\)"),
    ("k", {"rhs": scales(COLUMNS, short)}, ValueError, "rhs: .*'grouped_cols' needs uint8 codes"),
    (
        "k",
        {"rhs": COLUMNS._replace(spec=BY_ROWS)},
        ValueError,
        "rhs must lie in groups of k: .*, got rows",
    ),
    # Devices.
    ("dequantize", {"operand": scales(RHS, meta)}, ValueError, "matrix.* on meta"),
    ("gemm", {"rhs": scales(RHS, meta)}, ValueError, "rhs.* on meta"),
    ("gemm", {"rhs": codes(scales(RHS, meta), meta)}, ValueError, "rhs is on meta"),
    ("gemm", {"bias": meta(torch.ones(N))}, ValueError, "bias is on meta"),
    ("gemm", {"gelu": "tanh", "gelu_in": meta(torch.ones(R, N))}, ValueError, "gelu_in is on meta"),
    ("gemm", {"out": meta(torch.ones(R, N))}, ValueError, "out is on meta"),
    ("gemm", {"rhs": RHS._replace(packed=meta(RHS.codes))}, ValueError, "form of rhs is on meta"),
    ("norm", {"weight": meta(VECTOR)}, ValueError, "float32 .70. on cpu, got .* on meta"),
    ("norm", {"bias": meta(VECTOR)}, ValueError, "float32 .70. on cpu, got .* on meta"),
    ("norm backward", {"dz": meta(X)}, ValueError, "on cpu, got .* on meta"),
    ("act backward", {"grad": meta(X[:, : K // 2])}, ValueError, "on cpu .*on meta"),
    ("groups", {"offs": meta(OFFS)}, ValueError, "offs is on meta"),
    ("weights", {"weights": [WEIGHT, meta(WEIGHT)]}, ValueError, "on cpu .* on meta for group 1"),
    ("rows", {"bias": meta(torch.ones(G, N))}, ValueError, "bias is on meta"),
    ("rows", {"rhs": codes(scales(WEIGHTS, meta), meta)}, ValueError, "rhs is on meta"),
    ("rows", {"offs": meta(OFFS)}, ValueError, "offs is on meta"),
    ("k", {"rhs": codes(scales(COLUMNS, meta), meta)}, ValueError, "rhs is on meta"),
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
