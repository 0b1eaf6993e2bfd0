"""The fused steps as one step after the other, on any device."""

import struct
from functools import lru_cache

import torch
from torch import Tensor

from te_mx.backends.reference import Reference
from te_mx.dispatch import run
from te_mx.dispatch.fused import LANES, Activation, ActParts, ActStep, Norm, NormParts, NormStep
from te_mx.dispatch.registry import register

# -------------------------------------------------------------------------------------- fused math
# Normalization and activations in plain torch: the specification of their numbers. Everything is
# fp32. Normalization is exact to the bit on every device: its sums have a fixed order. Activations
# other than relu and its kin use the device's exp and tanh, so last bits differ.
_F32 = torch.float32


def lane_sum(x_MK: Tensor) -> Tensor:
    """fp32 [M, 1]: the sum of each row. Lane l adds elements l, l + 256, ... in this order; then
    lane l adds lane l + d, for d = 128, 64, ... 1."""
    rows, k = x_MK.shape
    lanes = x_MK.new_zeros(rows, LANES)
    for start in range(0, k, LANES):
        chunk = x_MK[:, start : start + LANES]
        lanes[:, : chunk.shape[1]] += chunk
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


@lru_cache(maxsize=1024)
def inverse(cols: int) -> float:
    """1 / cols as the fp32 number that sums are multiplied by."""
    return struct.unpack("<f", struct.pack("<f", 1.0 / cols))[0] if cols else 0.0


@torch.no_grad()
def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(mean, rstd, z) of x [rows, cols]: mean = sum(x) / cols, rstd = 1 / sqrt(sum((x - mean)^2) /
    cols + eps), z = (x - mean) * rstd * weight + bias, rounded to dtype. RMSNorm has no mean.

    weight and bias are fp32 [cols]."""
    x = x.to(_F32)
    scale = inverse(x.shape[1])
    mean = None
    if norm.kind == "LayerNorm":
        mean = lane_sum(x) * scale
        x = x - mean
    # Root and reciprocal are rounded correctly through fp64: fp32 roots of torch may be an ulp off.
    root = (lane_sum(x * x) * scale + norm.eps).double().sqrt().to(_F32)
    rstd = root.double().reciprocal().to(_F32)
    z = x * rstd * weight
    if bias is not None:
        z = z + bias
    return None if mean is None else mean.squeeze(1), rstd.squeeze(1), z.to(dtype)


@torch.no_grad()
def normalize_backward(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx in dtype, dweight fp32, dbias fp32) of `normalize`. With h = (x - mean) * rstd and v = dz
    * weight: dx = (v - (sum(v) / cols + h * (sum(v h) / cols))) * rstd, where RMSNorm has no
    sum(v); dweight = sum of dz * h over the rows, dbias = sum of dz."""
    scale = inverse(x.shape[1])
    dz, h = dz.to(_F32), x.to(_F32)
    if mean is not None:
        h = h - mean.unsqueeze(1)
    h = h * rstd.unsqueeze(1)
    v = dz * weight
    drift = h * (lane_sum(v * h) * scale)
    if mean is not None:
        drift = lane_sum(v) * scale + drift
    dx = (v - drift) * rstd.unsqueeze(1)
    return dx.to(dtype), (dz * h).sum(0), dz.sum(0)


# -------------------------------------------------------------------------------------- activations
def _parts(h: Tensor, act: Activation) -> tuple[Tensor, Tensor | None]:
    """fp32 halves of h: what is activated, and the gate."""
    h = h.to(_F32)
    if not act.gated:
        return h, None
    cols = h.shape[1] // 2
    return h[:, :cols], h[:, cols:]


def _limited(x: Tensor, limit: float) -> Tensor:
    """min(x, limit); NaN stays."""
    return torch.where(x > limit, limit, x)


def _value(x: Tensor, act: Activation) -> Tensor:
    base = act.base
    if act.gelu_form or base == "gelu":
        return torch.nn.functional.gelu(x, approximate=_form(act))
    if base in ("relu", "srelu"):
        y = torch.where(x < 0, 0.0, x)
        return y if base == "relu" else y * y
    if base == "sigmoid":
        return x.sigmoid()
    if base == "clamped_silu":
        x = _limited(x, act.limit)
    return x * (_slope(act) * x).sigmoid()


def _form(act: Activation) -> str:
    return "none" if act.gelu_form == "erf" else "tanh"


def _slope(act: Activation) -> float:
    """alpha in x * sigmoid(alpha x)."""
    return {"silu": 1.0, "qgelu": 1.702}.get(act.base, act.alpha)


def _derivative(x: Tensor, act: Activation) -> Tensor:
    base = act.base
    if act.gelu_form or base == "gelu":
        return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=_form(act))
    if base == "relu":
        return (x > 0).to(_F32)
    if base == "srelu":
        y = 2 * x
        return torch.where(y < 0, 0.0, y)
    if base == "sigmoid":
        s = x.sigmoid()
        return s * (1 - s)
    limited = _limited(x, act.limit) if base == "clamped_silu" else x
    u = _slope(act) * limited
    s = u.sigmoid()
    slope = u * (s * (1 - s)) + s
    return torch.where(x > act.limit, 0.0, slope) if base == "clamped_silu" else slope


def _gate(b: Tensor, act: Activation) -> tuple[Tensor, Tensor | None]:
    """The factor that a gate column makes, and where its gradient passes (None: everywhere)."""
    if act.base != "clamped_silu":
        return b, None
    clamped = torch.where(b > act.limit, act.limit, torch.where(b < -act.limit, -act.limit, b))
    passes = ~((b > act.limit) | (b < -act.limit))
    return clamped + act.offset, passes.to(_F32)


@torch.no_grad()
def activate(h: Tensor, act: Activation, dtype: torch.dtype) -> Tensor:
    """f(a), or f(a) * gate(b) of the halves a, b of the columns of h; rounded to dtype."""
    a, b = _parts(h, act)
    value = _value(a, act)
    if b is not None:
        value = value * _gate(b, act)[0]
    return value.to(dtype)


@torch.no_grad()
def activate_backward(grad: Tensor, h: Tensor, act: Activation, dtype: torch.dtype) -> Tensor:
    """The gradient of h, rounded to dtype: grad * f'(a), or the halves (grad * gate(b)) * f'(a) and
    grad * f(a) * gate'(b)."""
    a, b = _parts(h, act)
    grad = grad.to(_F32)
    if b is None:
        return (grad * _derivative(a, act)).to(dtype)
    factor, passes = _gate(b, act)
    d_gate = grad * _value(a, act)
    if passes is not None:
        d_gate = d_gate * passes
    return torch.cat([(grad * factor) * _derivative(a, act), d_gate], 1).to(dtype)


class NormComposed(Reference):
    op = "norm_quantize"

    def run(self, s: NormStep) -> NormParts:
        mean, rstd, z = normalize(s.x, s.weight, s.bias, s.norm, s.dtype)
        return NormParts(mean, rstd, z if s.keep else None, run.quantized(z, s.target))


class NormBackwardComposed(Reference):
    op, run = "norm_backward", staticmethod(normalize_backward)


class ActComposed(Reference):
    op = "act_quantize"

    def run(self, s: ActStep) -> ActParts:
        if s.grad is None:
            out = activate(s.h, s.act, s.dtype)
        else:
            out = activate_backward(s.grad, s.h, s.act, s.dtype)
        return ActParts(out if s.keep else None, run.quantized(out, s.target))


for _kernel in (NormComposed, NormBackwardComposed, ActComposed):
    register(_kernel())
