"""The decode kernel of te_mx._sm90 in plain torch, on addresses of CPU memory, as fake_sm90."""

from __future__ import annotations

import copy

import torch

from te_mx import formats
from te_mx.layouts import SM90_DECODE

WORKSPACE = 320  # bytes asked for by more than 16 rows
NAMES = {0: "mxfp8_e4m3", 1: "mxfp8_e5m2", 6: "mxfp4"}
FACTORS = {0: "fp8_e4m3_1x128", 1: "fp8_e5m2_1x128"}
CALLS: list[tuple[int, int, int]] = []  # m, n, k of the calls
EXACT: list[bool] = []  # whether they were to be exact


class DecodeArgs:
    """The fields of the native record."""

    def __init__(self, **fields: int) -> None:
        self.m = self.n = self.k = self.w = self.w_element = self.x = self.ldx = 0
        self.x_dtype = self.x_scales = self.x_element = self.rule = self.out = self.ldo = 0
        self.x_as_is = self.factors = self.exact = self.activates = False
        self.amax_epsilon, self.act = 0.0, 1
        self.out_dtype = self.bias = self.bias_dtype = self.device = self.stream = 0
        self.workspace = self.workspace_bytes = 0
        self._set(fields)

    def _set(self, fields: dict[str, int]) -> None:
        for name, value in fields.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def copy(self, **fields: int) -> DecodeArgs:
        made = copy.copy(self)
        made._set(fields)
        return made


def decode_workspace(m: int, k: int) -> int:
    return 0 if m <= 16 else WORKSPACE


def decode(a: DecodeArgs) -> int:
    from fake_sm90 import _DTYPES, _RULES, at

    assert not a.activates
    if a.workspace_bytes < decode_workspace(a.m, a.k):
        return 3
    if a.workspace_bytes:
        at(a.workspace, (a.workspace_bytes,)).fill_(0xFF)
    assert a.ldx >= a.k and a.ldo == a.n and a.x_element in (0, 1)
    x = at(a.x, ((a.m - 1) * a.ldx + a.k,), _DTYPES[a.x_dtype]).as_strided((a.m, a.k), (a.ldx, 1))
    names = FACTORS if a.factors else NAMES
    x_fmt, w_fmt = formats.get(names[a.x_element]), formats.get(names[a.w_element])
    if a.x_as_is:
        exact = x.double()
    else:
        rule = _RULES[a.rule] + (f":{a.amax_epsilon}" if a.amax_epsilon else "")
        codes = x_fmt.quantize(x.contiguous(), rule)
        exact = x_fmt.dequantize(*codes, a.k, torch.float64)
    weight = at(a.w, SM90_DECODE.shapes(w_fmt, a.n, a.k)[0])
    rows = torch.empty((a.n, 1), dtype=torch.uint8)
    values = SM90_DECODE.values(w_fmt, weight, rows, a.k, torch.float64)
    sums = exact @ values.t()
    if a.bias:
        sums += at(a.bias, (a.n,), _DTYPES[a.bias_dtype])
    at(a.out, (a.m, a.n), _DTYPES[a.out_dtype]).copy_(sums)
    CALLS.append((a.m, a.n, a.k))
    EXACT.append(a.exact)
    return 0
