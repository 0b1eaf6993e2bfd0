"""Malformed calls of the public functions: whatever is wrong, te_mx says so itself.

Each argument of each function gets values of every kind. A call passes when it works, or when it
raises a ValueError, TypeError or NotImplementedError that names the argument, from a `raise` of
te_mx: not an error that something below stumbled over.
"""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any

import numpy as np
import pytest
import torch

import te_mx
from te_mx.recipe import Format, MXFP8BlockScaling, resolve_recipe

OWN = (ValueError, TypeError, NotImplementedError)


class Unprintable:
    """repr() of a tensor on a GPU would wait for it."""

    def __repr__(self) -> str:
        raise AssertionError("an error printed a value of unknown type")

    __str__ = __repr__


class Silent(torch.Tensor):
    """A tensor that nobody may print."""

    def __repr__(self, **kwargs: Any) -> str:
        raise AssertionError("an error printed a tensor")


def values() -> list[Any]:
    """Things that an argument may not be, or may."""
    dense = torch.randn(40, 24)
    return [
        None, True, False, 0, 3, -1, 2**70, 1.5, float("nan"), 1j, "", "x", b"x", object(), int,
        len, slice(1), range(3), (), [], {}, set(), [1, 2], [[1], [2]], [None], ["a"], [1.5],
        [float("nan")], {"a": 1}, (i for i in range(3)), [dense, dense], Unprintable(),
        dense.as_subclass(Silent), torch.tensor(1.0), torch.empty(0), torch.arange(3),
        torch.ones(2, dtype=torch.bool), dense.double(), dense.cfloat(), dense.to_sparse(),
        dense.to_sparse_csr(), torch.nested.nested_tensor([dense, dense[:3]]),
        dense.to(torch.float8_e4m3fn), torch.empty(40, 24, device="meta"),
        torch._neg_view(torch.randn(40, 24)), torch.zeros(40, 64, dtype=torch.uint8),
        torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8), torch.float32, torch.int8,
        torch.device("cpu"), np.ones((40, 24)), np.int64(3), np.bool_(True), Format.E4M3,
        MXFP8BlockScaling(), te_mx.Linear(4, 4), te_mx.quantize(dense, columnwise=True),
    ]  # fmt: skip


A = te_mx.quantize(torch.randn(24, 64), columnwise=True)
B = te_mx.quantize(torch.randn(40, 64), columnwise=True)
SIZES = {"m": 3, "n": 4, "k": 5}
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "quantize": (te_mx.quantize, {
        "x": torch.randn(40, 64), "fmt": "e4m3", "rowwise": True, "columnwise": True,
        "columnwise_transposed": None, "scale_rule": "rceil", "packed": False,
    }),
    "prepack": (te_mx.prepack, {"q": B}),
    "gemm": (te_mx.gemm, {
        "A": A, "B": B, "layout": "TN", "bias": None, "gelu": None, "gelu_in": None, "grad": False,
        "out": None, "out_dtype": torch.float32, "aux_dtype": None, "accumulate": False,
        "precision": "adaptive", "alignment_spread": 8, "split_k": True,
    }),
    "gemm backward": (te_mx.gemm, {
        "A": A, "B": B, "grad": True, "bias": None, "gelu": None, "gelu_in": None, "out": None,
    }),
    "MXTensor": (te_mx.MXTensor, {
        "shape": (40, 64), "fmt": "e4m3", "rowwise_data": B.rowwise_data,
        "rowwise_scale": B.rowwise_scale, "columnwise_data": B.columnwise_data,
        "columnwise_scale": B.columnwise_scale, "columnwise_transposed": False,
    }),
    "MXTensor.dequantize": (B.dequantize, {"dtype": torch.float32, "usage": "rowwise"}),
    "MXTensor.operand": (B.operand, {"usage": "rowwise"}),
    "MXTensor.to": (B.to, {"device": "cpu", "non_blocking": False}),
    "MXTensor.equal": (B.equal, {"other": B}),
    "explain": (te_mx.explain, {"A": A, "B": B, "layout": "TN", "m": None, "device": None,
                                "classes": True, "alignment_spread": 8}),
    "explain sizes": (te_mx.explain, {**SIZES, "layout": "TN", "device": "cpu", "split_k": True,
                                      "precision": "adaptive", "alignment_spread": 8}),
    "explain_grouped": (te_mx.explain_grouped, {
        "m_splits": [1, 20], "in_features": 3, "out_features": 4, "device": None,
        "precision": "adaptive",
    }),
    "MXFP8BlockScaling": (MXFP8BlockScaling, {
        field.name: field.default for field in dataclasses.fields(MXFP8BlockScaling)
    }),
    "resolve_recipe": (resolve_recipe, {"recipe": None}),
    "is_mxfp8_available": (te_mx.is_mxfp8_available, {"return_reason": False}),
    "autocast": (te_mx.autocast, {"enabled": True, "calibrating": False, "recipe": None}),
    "fp8_autocast": (te_mx.fp8_autocast, {"enabled": True, "fp8_recipe": None}),
    "workspace.reserve": (te_mx.workspace.reserve, {"device": "cpu", "nbytes": 10}),
    "workspace.reset": (te_mx.workspace.reset, {"device": None}),
    "audit": (te_mx.audit, {"model": te_mx.Linear(3, 3)}),
}  # fmt: skip
# Errors that speak of something else than the argument's name.
OTHER_WORDS = {
    "usage": "usage|dequantize", "other": "equal compares MXTensors", "calibrating": "recipe|calib",
    "shape": "shape|_data", "device": "device|not here|moves between devices",
    "A": "A |two MXTensors", "B": "B |two MXTensors", "m": "sizes|m must",
    "columnwise_transposed": "columnwise", "fp8_recipe": "recipe",
}  # fmt: skip
# What may be taken: other values of the type that a good one has.
TYPES: dict[Any, Any] = {
    bool: bool, str: str, int: (int, np.integer), torch.dtype: torch.dtype,
    "device": (str, int, torch.device, type(None)),
    "calibrating": (bool, MXFP8BlockScaling, type(None)), "scale_rule": (str, type(None)),
}  # fmt: skip
CASES = [(name, argument) for name, (_, given) in CALLS.items() for argument in given]


@pytest.fixture(scope="module")
def junk():
    return values()


@pytest.mark.parametrize(("name", "argument"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_malformed_argument(name, argument, junk):
    function, given = CALLS[name]
    expected = TYPES.get(argument) or TYPES.get(type(given[argument]), object)
    words = OTHER_WORDS.get(argument, argument).split("|")
    for value in junk:
        with torch.no_grad():
            try:
                function(**{**given, argument: value})
                assert expected is object or isinstance(value, expected), "it was taken"
            except OWN as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                assert "te_mx" in last.filename and last.line.startswith("raise"), (last, error)
                assert any(word in str(error) for word in words), (type(value), str(error))


def test_what_is_not_here():
    with pytest.raises(ValueError, match=r"cuda:99.* is not here: torch finds"):
        te_mx.explain(**SIZES, device="cuda:99")
    with pytest.raises(ValueError, match="got A=True, B=True, m=3"):
        te_mx.explain(A, B, m=3)
    with pytest.raises(KeyError, match=r"no linear layer is named 'x'; there are .root."):
        te_mx.audit(te_mx.Linear(3, 3))["x"]


@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_sizes_below_0(name):
    with pytest.raises(ValueError, match=f"{name} must be 0 or more, got -1"):
        te_mx.explain(**{**SIZES, name: -1})
    words = "precision must be one of 'adaptive', 'exact', 'invariant', 'fp8', got 'x'"
    with pytest.raises(ValueError, match=words):
        te_mx.explain(**SIZES, precision="x")
    with pytest.raises(ValueError, match=words):
        te_mx.explain_grouped([], in_features=3, out_features=4, precision="x")
