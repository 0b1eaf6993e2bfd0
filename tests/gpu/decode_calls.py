"""Calls of the decode kernel of Hopper as the native module has them, and what goes into them."""

from __future__ import annotations

import torch

from te_mx import formats
from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.decode import Decode
from te_mx.layouts import get as layout_of
from te_mx.layouts.operand import Operand, Stack
from te_mx.recipe import BlockScaling, Float8BlockScaling

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MX = {"mxfp8_e4m3": 0}
FACTORS = {"fp8_e4m3_1x128": 0, "fp8_e4m3_128x128": 0}
ELEMENTS = MX | FACTORS


def spread(rows, k, span, seed):
    """Normal numbers with a power of two for every block."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, k, generator=g, device="cuda")
    powers = torch.randint(-span, span, (rows, -(-k // 32)), generator=g, device="cuda")
    return x * torch.exp2(powers.float()).repeat_interleave(32, 1)[:, :k]


def quantized(values, fmt, rule="rceil"):
    """Codes, scales, and what they stand for in fp64."""
    codes, scales = formats.get(fmt).quantize(values, rule)
    exact = formats.get(fmt).dequantize(codes, scales, values.shape[1], torch.float64)
    return codes, scales, exact


def rule_of(w_fmt, number=0):
    """A scale rule of x for weights in a format."""
    return (("pow2", "fp32") if w_fmt in FACTORS else ("rceil", "floor", "even"))[number]


def recipe_of(w_fmt):
    """A recipe with inputs as these weights want them."""
    if w_fmt in FACTORS:
        return Float8BlockScaling()
    return BlockScaling(x="mxfp8_e4m3", w=w_fmt, g="mxfp8_e5m2")


def kernel_of(w_fmt):
    """That of few rows."""
    return "sm90_mxfp4" if w_fmt == "mxfp4" else "sm90_decode"


def x_format(w_fmt, e5m2=False):
    element = "e5m2" if e5m2 else "e4m3"
    return f"fp8_{element}_1x128" if w_fmt in FACTORS else f"mxfp8_{element}"


def decode(w, w_fmt, x, out, k, scales=None, **how):
    """The native call on values, or on codes with their scales."""
    native = binding.native()
    (m, n), bias, act = out.shape, how.pop("bias", None), how.pop("act", None)
    x_fmt, rule = how.pop("x_fmt", x_format(w_fmt)), how.pop("rule", rule_of(w_fmt))
    args = native.DecodeArgs(
        m=m, n=n, k=k, w=w.codes.data_ptr(), ldw=w.codes.stride(-2), w_scales=w.scales.data_ptr(),
        w_packed=w.layout.name != "rows", w_element=ELEMENTS[w_fmt], factors=w_fmt in FACTORS,
        factor_rows=128 if "128x128" in w_fmt else 1,
        x=x.data_ptr(), ldx=x.stride(0), x_dtype=FLOAT_DTYPES.get(x.dtype, 0),
        x_element=int("e5m2" in x_fmt), rule=SCALE_RULES[rule],
        x_as_is=how.pop("as_is", False), exact=how.pop("exact", False),
        x_scales=0 if scales is None else scales.data_ptr(), out=out.data_ptr(),
        ldo=out.stride(0), out_dtype=FLOAT_DTYPES[out.dtype],
    )  # fmt: skip
    if bias is not None:
        args.bias, args.bias_dtype = bias.data_ptr(), FLOAT_DTYPES[bias.dtype]
    if act is not None:
        args.activates, args.act = True, act
    gate, x_act = how.pop("gate", (None, 0))
    if gate is not None:
        args.gate, args.ldgate, args.x_act = gate.data_ptr(), gate.stride(0), x_act
    binding.set_execution(args, 0)
    args.kernel = how.pop("split", -1)
    ends = how.pop("ends", None)
    if ends is not None:
        args.groups = native.Groups(
            count=len(ends), rows=m, ends=ends.data_ptr(), ends_int32=ends.dtype == torch.int32
        )
    nbytes = native.decode_workspace(m, k, 0 if ends is None else len(ends))
    assert not how
    room = torch.empty(max(nbytes, 16), dtype=torch.uint8, device="cuda")
    args.workspace, args.workspace_bytes = room.data_ptr(), nbytes
    assert native.decode(args) == 0
    return out


def packed(w, w_fmt, lies="rows"):
    """A weight as the kernel reads it, plain or as the GEMM does ("packed"), and what that stands
    for in fp64."""
    codes, scales, exact = quantized(w, w_fmt, rule_of(w_fmt))
    if lies == "rows":
        return form_of(codes, scales, w_fmt, w.shape[1]), exact
    form = form_of(codes, scales, w_fmt, w.shape[1], lies_of(w_fmt))
    return form, form.values(torch.float64)


def lies_of(w_fmt):
    """The layout of the GEMM."""
    return "sm90_factors" if w_fmt in FACTORS else "sm90:8"


def form_of(codes, scales, w_fmt, k, lies="rows"):
    fmt = formats.get(w_fmt)
    parts = layout_of(lies).pack(fmt, codes, scales, k)
    form = Decode().form(Operand(*parts, f"{w_fmt}@{lies}", len(codes), k))
    assert form is not None
    return form


def stack_of(forms):
    """Those of several groups."""
    one = forms[0]
    codes, scales = (torch.stack([getattr(f, name) for f in forms]) for name in ("codes", "scales"))
    return Decode().form(Stack(codes, scales, one.spec, len(forms), one.rows, one.k))


def nothing(m, n, dtype=F32):
    return torch.full((m, n + 3), torch.nan, dtype=dtype, device="cuda")


def bits(t):
    return t.contiguous().view(torch.int32 if t.element_size() == 4 else torch.int16)
