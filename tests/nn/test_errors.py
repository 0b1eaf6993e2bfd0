# ruff: noqa: E501 - one case a line reads best
"""User errors: raised before anything runs, with what, got, expected and the remedy."""

from __future__ import annotations

import pytest
import torch

import te_mx

bf16 = torch.bfloat16


@pytest.mark.parametrize(
    ("x", "kwargs", "error", "message"),
    [
        ([1.0], {}, TypeError, "x must be a tensor, got list"),
        (torch.ones(4, dtype=torch.float64), {}, TypeError, r"float16, got torch.float64; convert it, e.g. x.float\(\)"),
        (torch.ones(4, dtype=torch.int32), {}, TypeError, "got torch.int32"),
        (torch.ones(4, 4).to_sparse(), {}, TypeError, r"dense tensor, got torch.sparse_coo; use x.to_dense\(\)"),
        (torch.tensor(1.0), {}, ValueError, r"got a scalar; use x.reshape\(1\)"),
        (torch.ones(4), {"fmt": "e2m1"}, ValueError, "fmt must be one of .*'e4m3', .*'e5m2', .*'mxfp4', .*got 'e2m1'"),
        (torch.ones(4), {"fmt": 8}, ValueError, "fmt must be one of .*'mxfp8_e5m2', .*'mxfp4', .*got 8"),
        (torch.ones(4), {"scale_rule": "ceil"}, ValueError, "scale_rule must be one of 'rceil', 'floor', 'even' for mxfp8_e4m3, got 'ceil'"),
        (torch.ones(4), {"scale_rule": "pow2"}, ValueError, "scale_rule must be .* for mxfp8_e4m3, got 'pow2'"),
        (torch.ones(4), {"fmt": "fp8_e4m3_1x128", "scale_rule": "rceil"}, ValueError, "scale_rule must be one of 'pow2', 'fp32', or .* for fp8_e4m3_1x128, got 'rceil'"),
        (torch.ones(4), {"rowwise": False}, ValueError, "pass rowwise=True, columnwise=True or both"),
        (torch.ones(4), {"columnwise_transposed": True}, ValueError, "columnwise_transposed=True needs columnwise=True"),
    ],
)  # fmt: skip
def test_quantize(x, kwargs, error, message):
    with pytest.raises(error, match=message):
        te_mx.quantize(x, **kwargs)


def q(*shape: int, **kwargs) -> te_mx.MXTensor:
    return te_mx.quantize(torch.ones(shape), **kwargs)


F32_OUT = {"out": torch.empty(4, 8)}


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"layout": "TT"}, ValueError, 'layout must be "TN", "NN" or "NT", got \'TT\' .TT: swap the operands'),
        ({"layout": "XX"}, ValueError, "got 'XX'"),
        ({"layout": "NN"}, ValueError, r"NN reads the columnwise copy of A, but A = MXTensor\(shape=\(8, 32\).* has none; "
                                       r"make it with te_mx.quantize\(x, columnwise=True\)"),
        ({"A": torch.ones(8, 32)}, TypeError, "A must be an MXTensor, or a bfloat16 .* got tensor torch.float32"),
        ({"B": None}, TypeError, "B must be an MXTensor, got NoneType"),
        ({"B": q(4, 64)}, ValueError, r"TN needs the same k in A \[., k\] and B \[., k\], got 32 \(A is 8 x 32\) and 64 \(B is 4 x 64\)"),
        ({"B": q(4, 32).to("meta")}, ValueError, r"A is on cpu and B on meta; move one"),
        ({"bias": torch.ones(4)}, ValueError, r"bias must have shape \(8,\) \(one value for every row of A\), got \(4,\)"),
        ({"bias": torch.ones(8, dtype=torch.float64)}, TypeError, "the dtype of bias must be float32, bfloat16 or float16, got torch.float64"),
        ({"bias": torch.ones(8, device="meta")}, ValueError, r"bias is on meta and A and B on cpu; move one"),
        ({"bias": True}, TypeError, "bias=True asks for a bias gradient and needs grad=True"),
        ({"bias": 1.0}, TypeError, r"bias must be a tensor of shape \(8,\), got float"),
        ({"gelu": "relu"}, ValueError, 'gelu must be None, "tanh" or "erf", got \'relu\''),
        ({"gelu_in": torch.ones(4, 8)}, ValueError, "gelu_in is for the backward pass; pass grad=True"),
        ({"grad": True, "gelu": "tanh"}, ValueError, r"needs gelu_in \[4, 8\], the aux of the forward call"),
        ({"grad": True, "gelu_in": torch.ones(8, 4)}, ValueError, r"gelu_in must have shape \(4, 8\)"),
        ({"grad": True, "bias": torch.ones(8)}, ValueError, r"bias must have shape \(4,\) \(the bias gradient sums B over k\)"),
        ({"grad": True, "gelu_in": torch.ones(4, 8), "bias": torch.ones(4)}, ValueError, r"\(8,\) \(it sums D over n\)"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype must be float32, bfloat16 or float16, got torch.float64"),
        ({"gelu": "erf", "aux_dtype": torch.int8}, TypeError, "aux_dtype must be"),
        ({"accumulate": True}, ValueError, "accumulate=True adds to out; pass the tensor as out="),
        ({"out": torch.empty(8, 4)}, ValueError, r"out must have shape \(4, 8\)"),
        ({"out": torch.empty(8, 4).t()}, ValueError, "out must be contiguous, got strides"),
        ({"out": torch.empty(4, 8, dtype=torch.int8)}, TypeError, "the dtype of out must be"),
        ({**F32_OUT, "out_dtype": torch.float16}, ValueError, "out is torch.float32 but out_dtype is torch.float16"),
        ({**F32_OUT, "grad": True, "gelu_in": F32_OUT["out"]}, ValueError, "share memory; pass another out"),
    ],
)  # fmt: skip
def test_gemm(kwargs, error, message):
    arguments = {"A": q(8, 32), "B": q(4, 32), **kwargs}
    out = arguments.get("out")
    before = out.clone() if out is not None else None
    with pytest.raises(error, match=message):
        te_mx.gemm(**arguments)
    if out is not None:
        torch.testing.assert_close(out, before, rtol=0, atol=0, equal_nan=True)


def test_missing_rowwise_copy():
    A = q(8, 32, rowwise=False, columnwise=True)
    with pytest.raises(
        ValueError, match=r"TN reads the rowwise copy of A.*te_mx.quantize\(x, rowwise=True\)"
    ):
        te_mx.gemm(A, q(4, 32))
