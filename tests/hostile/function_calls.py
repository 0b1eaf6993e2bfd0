"""The table of te_mx.quantize, te_mx.gemm and te_mx.MXTensor."""

from __future__ import annotations

from typing import Any

import torch
from judge import Call
from malformed import (
    COUNT,
    DEVICE,
    DTYPE,
    FLAG,
    OPTIONAL_DTYPE,
    OPTIONAL_FLAG,
    OPTIONAL_WORD,
    UPPER_CASE,
    WORD,
    Kind,
    changed,
    other_than,
    values,
)
from malformed_tensors import (
    ENDLESS,
    LAYOUTS,
    NO_TENSOR,
    NOT_FLOATS,
    SCALAR,
    SHAPED,
    SHARED_ROWS,
    STRIDES,
    VECTOR,
    output,
)
from torch import Tensor

import te_mx

N, M, K = 4, 8, 70


def floats(device: str, *shape: int) -> Tensor:
    return torch.randn(shape).to(device)


def quantized(device: str, *shape: int) -> te_mx.MXTensor:
    return te_mx.quantize(floats(device, *shape), columnwise=True)


def mx(usage: str) -> Kind:
    """An MXTensor that the layout reads by rows or by columns."""
    return (
        other_than()
        | values(a_pair=lambda: (torch.ones(2), torch.ones(2)), a_word=torch.float8_e4m3fn)
        | changed(
            None,
            meta=lambda x: x.to("meta"),
            another_k=lambda x: te_mx.quantize(torch.ones(x.rows, x.cols + 1), columnwise=True)
            .to(x.device),
            without_the_copy=lambda x: te_mx.quantize(
                torch.ones(x.shape), rowwise=usage != "row", columnwise=usage == "row"
            ).to(x.device),
            its_codes=lambda x: x.rowwise_data,
        )
    )  # fmt: skip


GEMM_KINDS = {
    "A": mx("row"), "B": mx("row"), "layout": WORD | UPPER_CASE | values(TT="TT"),
    "out_dtype": DTYPE | values(float64=torch.float64, complex64=torch.complex64),
    "precision": WORD | UPPER_CASE, "split_k": FLAG, "accumulate": FLAG, "grad": FLAG,
    "alignment_spread": COUNT | values(nine=9),
}  # fmt: skip
QUANTIZE = Call(
    "te_mx.quantize", lambda d: te_mx.quantize,
    lambda d: {"x": floats(d, 33, K), "fmt": "e4m3", "rowwise": True, "columnwise": True,
               "columnwise_transposed": None, "scale_rule": "rceil", "rounding": "stochastic",
               "seed": 7, "packed": False},
    {"x": NO_TENSOR | NOT_FLOATS | LAYOUTS | SCALAR | ENDLESS | STRIDES.but("on the cpu")
          | SHARED_ROWS,
     "fmt": WORD | UPPER_CASE, "rowwise": FLAG, "columnwise": FLAG,
     "columnwise_transposed": OPTIONAL_FLAG,
     "scale_rule": OPTIONAL_WORD | UPPER_CASE | values(with_rounding="rceil+sr"),
     "rounding": WORD | UPPER_CASE | values(without_a_seed="nearest"), "packed": FLAG,
     "seed": other_than("an int") | values(
         beyond_64_bits=1 << 63, below_64_bits=-(1 << 63) - 1,
         two=lambda: torch.tensor([1, 2]), int32=lambda: torch.tensor([1], dtype=torch.int32),
         meta=lambda: torch.tensor([1]).to("meta"), scalar=lambda: torch.tensor(1))},
)  # fmt: skip


PREPACK = Call(
    "te_mx.prepack", lambda d: te_mx.prepack, lambda d: {"q": quantized(d, N, K)},
    {"q": other_than() | changed(None, its_codes=lambda x: x.rowwise_data)},
)  # fmt: skip


def _gemm(d: str, **more: Any) -> dict[str, Any]:
    return {"A": quantized(d, M, K), "B": quantized(d, N, K), **more}


USED = 40  # rows of B: many, which run on operands that are packed


def _used(d: str) -> dict[str, Any]:
    """Tensors that were multiplied before, so that all is prepared for the next call."""
    given = {"A": quantized(d, M, 2 * K), "B": quantized(d, USED, 2 * K)}
    for out in (None, None, None, torch.ones(USED, M, dtype=torch.bfloat16, device=d)):
        te_mx.gemm(**given, out=out)
    return given


GEMMS = (
    Call(
        "te_mx.gemm", lambda d: te_mx.gemm,
        lambda d: _gemm(
            d, layout="TN", bias=floats(d, M), gelu="tanh", grad=False, out_dtype=torch.bfloat16,
            aux_dtype=None, accumulate=False, precision="adaptive", alignment_spread=8,
            split_k=True,
        ),
        {**GEMM_KINDS, "bias": VECTOR.but("None"), "gelu": OPTIONAL_WORD | UPPER_CASE,
         "aux_dtype": OPTIONAL_DTYPE | values(float64=torch.float64)},
        says={"accumulate": "accumulate|out"},
    ),
    Call(
        "te_mx.gemm into out", lambda d: te_mx.gemm,
        lambda d: _gemm(
            d, bias=floats(d, M), out=torch.ones(N, M, device=d), accumulate=True,
        ),
        {"out": output("A", "B"), "accumulate": FLAG},
        covers="te_mx.gemm",
    ),
    Call(
        "te_mx.gemm once more", lambda d: te_mx.gemm,
        lambda d: {**_used(d), "layout": "TN", "bias": None, "gelu": None, "gelu_in": None,
                   "grad": False, "out": None, "out_dtype": torch.bfloat16, "aux_dtype": None,
                   "accumulate": False, "precision": "adaptive", "alignment_spread": 8,
                   "split_k": True},
        {**GEMM_KINDS, **dict.fromkeys(("bias", "gelu_in"), other_than("None", "a bool")),
         "out": other_than("None"), "gelu": OPTIONAL_WORD | UPPER_CASE,
         "aux_dtype": OPTIONAL_DTYPE | values(float64=torch.float64)},
        covers="te_mx.gemm", says={"accumulate": "accumulate|out"},
    ),
    Call(
        "te_mx.gemm once more into out", lambda d: te_mx.gemm,
        lambda d: {**_used(d), "out": torch.ones(USED, M, dtype=torch.bfloat16, device=d)},
        {"A": mx("row"), "B": mx("row"), "out": output("A", "B")},
        covers="te_mx.gemm",
    ),
    Call(
        "te_mx.gemm backward", lambda d: te_mx.gemm,
        lambda d: {"A": quantized(d, K, M), "B": quantized(d, N, K), "layout": "NN", "grad": True,
                   "gelu_in": floats(d, N, M), "bias": floats(d, M), "gelu": "erf",
                   "out": torch.zeros(N, M, device=d)},
        {"A": mx("column"), "gelu_in": SHAPED.but("None"), "bias": VECTOR.but("None", "a bool"),
         "out": output("B", "gelu_in")},
        covers="te_mx.gemm", says={"A": "A|gelu_in"},
    ),
    Call(
        "te_mx.gemm with the sums of B", lambda d: te_mx.gemm,
        lambda d: {"A": quantized(d, K, M), "B": quantized(d, K, N), "layout": "NT", "grad": True,
                   "bias": floats(d, N)},
        {"B": mx("column"), "bias": VECTOR.but("None", "a bool")},
        covers="te_mx.gemm",
    ),
)  # fmt: skip


# ----------------------------------------------------------------------------------------- MXTensor
def _parts(d: str) -> dict[str, Any]:
    q = quantized(d, 33, K)
    return {"shape": (33, K), "fmt": "e4m3", "rowwise_data": q.rowwise_data,
            "rowwise_scale": q.rowwise_scale, "columnwise_data": q.columnwise_data,
            "columnwise_scale": q.columnwise_scale,
            "columnwise_transposed": q.columnwise_transposed}  # fmt: skip


PARTS = (
        other_than()
        | changed(
            None, meta=lambda x: x.to("meta"), floats=lambda x: x.to(torch.float32),
            int8=lambda x: x.view(torch.int8), bools=lambda x: x.view(torch.uint8).bool(),
            another_float8=lambda x: x.view(torch.float8_e4m3fnuz), scalar=lambda x: x.view(-1)[0],
            column_less=lambda x: x[:, :-1], row_less=lambda x: x[:-1], a_line=lambda x: x.view(-1),
            sparse=lambda x: x.view(torch.uint8).to_sparse(), turned=lambda x: x.t(),
        )
        | changed(
            lambda x: x.clone(),
            bytes_=lambda x: x.view(torch.uint8),
            stored_transposed=lambda x: x.t().contiguous().t(),
            every_second=lambda x: torch.stack([x.view(torch.uint8)] * 2, -1)[..., 0],
        )
    )  # fmt: skip


MX_TENSOR = (
    Call(
        "te_mx.MXTensor", lambda d: te_mx.MXTensor, _parts,
        {"shape": other_than("a tensor") | values(
            of_floats=lambda: (33.0, 70.0), negative=lambda: (-33, -K), no_dimension=lambda: (),
            of_strings=lambda: ("33", "70"), of_bools=lambda: (True, True),
            another=lambda: (33, 71), turned=lambda: (K, 33),
            huge=lambda: (2**62, 2**62), beyond_64_bits=lambda: (2**70, 1),
            of_Nones=lambda: (None, None), nested=lambda: ((33,), (K,)),
            a_float_tensor=lambda: torch.tensor([33.0, 70.0])),
         "fmt": WORD | UPPER_CASE | values(another="e5m2"),
         **dict.fromkeys(("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale"),
                         PARTS),
         "columnwise_transposed": FLAG},
        says={"shape": "shape|rowwise_data", "fmt": "fmt|rowwise_data",
              "rowwise_data": "rowwise_data|columnwise_data",
              "columnwise_data": "rowwise_data|columnwise_data",
              "columnwise_transposed": "columnwise_transposed|columnwise_data"},
    ),
    Call(
        "te_mx.MXTensor.dequantize", lambda d: quantized(d, 33, K).dequantize,
        lambda d: {"dtype": torch.float32, "usage": "rowwise"},
        {"dtype": DTYPE | values(complex64=torch.complex64), "usage": WORD | UPPER_CASE},
    ),
    Call(
        "te_mx.MXTensor.operand", lambda d: quantized(d, 33, K).operand,
        lambda d: {"usage": "rowwise"}, {"usage": WORD | UPPER_CASE},
    ),
    Call(
        "te_mx.MXTensor.to", lambda d: quantized(d, 33, K).to,
        lambda d: {"device": d, "non_blocking": False},
        {"device": DEVICE | values(None_=None), "non_blocking": FLAG},
        says={"device": "devices?"},
    ),
    Call(
        "te_mx.MXTensor.equal", lambda d: quantized(d, 33, K).equal,
        lambda d: {"other": quantized(d, 33, K)},
        {"other": other_than() | changed(None, its_codes=lambda x: x.rowwise_data,
                                         meta=lambda x: x.to("meta"))},
        says={"other": "equal"},
    ),
)  # fmt: skip
