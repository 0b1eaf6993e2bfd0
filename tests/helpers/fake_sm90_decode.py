"""The decode kernel of te_mx._sm90 in plain torch, on addresses of CPU memory, as fake_sm90."""

from __future__ import annotations

import copy

import torch

from te_mx import formats
from te_mx.backends.reference import fused
from te_mx.backends.sm90.layouts import SM90_FACTORS
from te_mx.dispatch.fused import Activation
from te_mx.layouts import ROWS, aligning

WORKSPACE = 320  # bytes asked for by more than 16 rows
NAMES = {0: "mxfp8_e4m3", 1: "mxfp8_e5m2", 6: "mxfp4"}
FACTORS = {0: "fp8_e4m3_1x128", 1: "fp8_e5m2_1x128"}
CALLS: list[tuple[int, int, int]] = []  # m, n, k of the calls
ACTS = {0: "gelu", 1: "relu", 2: "srelu", 3: "silu", 4: "qgelu", 7: "gelu_erf"}
GATED = {"gelu": "geglu", "silu": "swiglu", "qgelu": "qgeglu"}
GATES: list[str] = []  # activations of the calls with a gate
EXACT: list[bool] = []  # whether they were to be exact


class DecodeArgs:
    """The fields of the native record."""

    def __init__(self, **fields: int) -> None:
        self.ldw = self.w_scales = self.w_packed = 0
        self.factor_rows = 1
        self.m = self.n = self.k = self.w = self.w_element = self.x = self.ldx = 0
        self.x_dtype = self.x_scales = self.x_element = self.rule = self.out = self.ldo = 0
        self.x_as_is = self.factors = self.exact = self.activates = False
        self.spread = 8
        self.amax_epsilon, self.act, self.groups = 0.0, 1, None
        self.out_dtype = self.bias = self.bias_dtype = self.device = self.stream = 0
        self.workspace = self.workspace_bytes = 0
        self.gate = self.ldgate = 0
        self.x_act = 3
        self._set(fields)

    def _set(self, fields: dict[str, int]) -> None:
        for name, value in fields.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def copy(self, **fields: int) -> DecodeArgs:
        made = copy.copy(self)
        made._set(fields)
        return made


def decode_workspace(m: int, k: int, groups: int) -> int:
    return 0 if m <= 16 else WORKSPACE + groups


def rows_of(a) -> torch.Tensor:
    """x [m, k], or that behind an activation with its gate; None where these do not lie so."""
    from fake_sm90 import _DTYPES, at

    places, rows = None, a.m
    if getattr(a, "places", 0):
        rows = a.x_rows
        places = at(a.places, (a.m,), torch.int32).clamp(0, rows - 1)
    x = at(a.x, ((rows - 1) * a.ldx + a.k,), _DTYPES[a.x_dtype]).as_strided((rows, a.k), (a.ldx, 1))
    if not a.gate:
        return x if places is None else x[places]
    assert ACTS[a.x_act] in GATED and _DTYPES[a.x_dtype] != torch.float32
    if a.k % 8 or a.ldx % 8 or a.ldgate % 8 or a.x % 16 or a.gate % 16:
        return None
    gate = at(a.gate, ((a.m - 1) * a.ldgate + a.k,), x.dtype)
    gate = gate.as_strided((a.m, a.k), (a.ldgate, 1))
    GATES.append(ACTS[a.x_act])
    return fused.activate(torch.cat((x, gate), 1), Activation(GATED[ACTS[a.x_act]]), x.dtype)


def write_products(a, bounds, x, values) -> None:
    """out of a call: rows between bounds times values(i), and what comes after."""
    from fake_sm90 import _DTYPES, at

    out = at(a.out, (a.m, a.n), _DTYPES[a.out_dtype]).zero_()
    for i, (first, last) in enumerate(bounds):
        sums = x[first:last] @ values(i).t()
        if a.bias:
            sums += at(a.bias, (len(bounds), a.n), _DTYPES[a.bias_dtype])[i]
        if a.activates:
            sums = fused.activate(sums.float(), Activation(ACTS[a.act]), torch.float32)
        out[first:last] = sums
    CALLS.append((a.m, a.n, a.k))


def bounds_of_rows(a) -> list[tuple[int, int]]:
    """Where the rows of every weight begin and end."""
    from fake_sm90_grouped import bounds_of

    if a.groups is None:
        return [(0, a.m)]
    assert a.groups.rows == a.m and a.groups.capacity == 0
    return list(zip(*bounds_of(a.groups), strict=True))


def decode(a: DecodeArgs) -> int:
    from fake_sm90 import _RULES, at

    bounds = bounds_of_rows(a)
    if a.workspace_bytes < decode_workspace(a.m, a.k, 0 if a.groups is None else len(bounds)):
        return 3
    if a.workspace_bytes:
        at(a.workspace, (a.workspace_bytes,)).fill_(0xFF)
    assert a.ldx >= a.k and a.ldo == a.n and a.x_element in (0, 1)
    x = rows_of(a)
    if x is None:
        return 2
    names = FACTORS if a.factors else NAMES
    x_fmt, w_fmt = formats.get(names[a.x_element]), formats.get(names[a.w_element])
    if a.x_as_is:
        exact = x.double()
    else:
        rule = _RULES[a.rule] + (f":{a.amax_epsilon}" if a.amax_epsilon else "")
        codes = x_fmt.quantize(x.contiguous(), rule)
        exact = x_fmt.dequantize(*codes, a.k, torch.float64)
    if a.factor_rows > 1:
        w_fmt = formats.get("fp8_e4m3_128x128")
    layout = ROWS if not a.w_packed else SM90_FACTORS if a.factors else aligning(8)
    (_, row_bytes), scale_shape = layout.shapes(w_fmt, a.n, a.k)
    if a.w % 16 or a.ldw % 16:
        return 2
    weights = at(a.w, (len(bounds), a.n, a.ldw))[..., :row_bytes]
    scales = at(a.w_scales, (len(bounds), *scale_shape), layout.scales_dtype(w_fmt))
    write_products(
        a, bounds, exact,
        lambda i: layout.values(w_fmt, weights[i], scales[i], a.k, torch.float64),
    )  # fmt: skip
    EXACT.append(a.exact)
    return 0
