"""The autograd function of a normalization that stands alone: z = norm(x), quantized in the read
that makes it, for the layers that read z next.

z is computed in fp32 and rounded once to the dtype of x. Saved for backward: x, which the residual
stream of a transformer keeps anyway, the weight, and mean and rstd in fp32, 8 bytes a row.

The normalization in front of a linear step, shared by LayerNormLinear and LayerNormMLP."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import FLOAT_DTYPES, Operand, Quantized, Target, quantized
from te_mx._ops.fused import norm_backward_2d, norm_quantize_2d, norm_rows
from te_mx.autograd import input_cache
from te_mx.autograd.node import needs_gradient, outputs, run_backward
from te_mx.autograd.saved import flatten, shaped
from te_mx.dispatch import fused
from te_mx.dispatch.fused import Norm, NormParts, NormRows

_F32 = torch.float32
_MANY = 2048  # columns
Saved = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NOTHING: Saved = (None, None, None, None)


class NormStep(NamedTuple):
    """A normalization and the dtype that its result z is rounded to. Zero-centered weights stand
    for 1 + weight. Without a normalization z is x."""

    norm: Norm | None
    zero_centered: bool
    dtype: torch.dtype

    def forward(
        self, x_MK: Tensor, weight_K: Tensor | None, bias_K: Tensor | None, want_z: bool,
        target: Target,
    ) -> NormParts:  # fmt: skip
        if self.norm is None or weight_K is None:
            z = x_MK.to(self.dtype) if want_z else None
            return NormParts(None, None, z, quantized(x_MK, target))
        bias = None if bias_K is None else bias_K.detach().to(_F32)
        return norm_quantize_2d(
            fused.NormStep(
                x_MK, self._weight(weight_K), bias, self.norm, self.dtype, want_z, target
            )
        )

    def saved(self, x: Tensor, weight_K: Tensor | None, made: NormParts) -> Saved:
        """What `backward` needs."""
        return (x, weight_K, made.mean, made.rstd) if made.rstd is not None else NOTHING

    def backward(
        self, dz_MK: Tensor, g_z: Tensor | None, saved: Saved, like: tuple[torch.Size, torch.dtype],
        need: Sequence[bool], bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of x, weight and bias as far as they are needed, in their dtypes.

        dz is that of z as the linear step sees it, g_z that of z as it was returned; x has the
        shape and dtype `like`."""
        dz_MK = dz_MK if g_z is None else dz_MK + flatten(g_z)
        x, weight_K, mean_M, rstd_M = saved
        if x is None or weight_K is None or rstd_M is None:
            return shaped(dz_MK.to(like[1]), like[0]) if need[0] else None, None, None
        dx, dweight, dbias = norm_backward_2d(
            dz_MK, flatten(x), self._weight(weight_K), mean_M, rstd_M, x.dtype
        )
        return (
            shaped(dx, like[0]) if need[0] else None,
            dweight.to(weight_K.dtype) if need[1] else None,
            dbias.to(bias_dtype) if need[2] else None,
        )

    def kernel_dtype(self, weight_K: Tensor | None, bias_K: Tensor | None) -> torch.dtype:
        """The dtype in which kernels take weight and bias: their own where that saves casts of few
        columns, which take longer than what they do; of many, kernels are faster in fp32."""
        if weight_K is None or self.zero_centered or len(weight_K) >= _MANY:
            return _F32
        dtype = weight_K.dtype
        alike = dtype in FLOAT_DTYPES and (bias_K is None or bias_K.dtype == dtype)
        return dtype if alike else _F32

    def as_read(
        self, weight_K: Tensor | None, bias_K: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias as kernels take them; where nothing is recorded for autograd."""
        weight, bias = [
            one if one is None or (one.dtype is dtype and one.is_contiguous())
            else one.to(dtype).contiguous()
            for one in (weight_K, bias_K)
        ]  # fmt: skip
        return weight + 1 if weight is not None and self.zero_centered else weight, bias

    def _weight(self, weight_K: Tensor) -> Tensor:
        weight = weight_K.detach().to(_F32)
        return weight + 1 if self.zero_centered else weight


class Source(NamedTuple):
    """What a z is made of: x, weight and bias of a normalization, and the normalization."""

    tensors: tuple[Tensor, Tensor, Tensor | None]
    step: NormStep

    def columns(self, target: Target) -> Operand:
        """The columnwise codes of z, as the forward pass would have made them: sums over a row
        have one order (docs/numerics.md), so they are the very bytes."""
        x, weight, bias = self.tensors
        wanted = Target("", target.col, target.rule)
        made = self.step.forward(flatten(x), weight, bias, False, wanted).quantized.col
        assert made is not None
        return made


# By id of the tensor whose memory z is, as long as z lives.
_sources: dict[int, tuple[weakref.ref[Tensor], int, Source]] = {}


def source_of(z: Tensor) -> Source | None:
    """What z was made of, if a normalization just made it. A view that is all of z is as good."""
    if torch.compiler.is_compiling():
        return None
    entry = _sources.get(_memory(z))
    made = None if entry is None else entry[0]()
    if entry is None or made is None or entry[1] != made._version:
        return None
    return entry[2] if made is z or input_cache.is_view_of_all(z, made) else None


def _memory(z: Tensor) -> int:
    return id(z if z._base is None else z._base)


def _remember(z: Tensor, source: Source) -> None:
    key = _memory(z)
    _sources[key] = weakref.ref(z, lambda _: _sources.pop(key, None)), z._version, source


class NormFunction(torch.autograd.Function):
    """z, in the shape of x; what it was quantized to is appended to `made`. In compiled code what
    reads z asks for its codes (_ops/made_of.py), which come with mean and rstd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, step: NormStep, target: Target,
        made: list[Quantized] | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        both = made is not None or not target.codes
        parts = step.forward(flatten(x), weight, bias, both, target)
        z = parts.z
        if not both:
            z = step.forward(flatten(x), weight, bias, True, Target("", "", target.rule)).z
        assert z is not None
        if made is not None:
            made.append(parts.quantized)
        ctx.step, ctx.like, ctx.grad_targets = step, (x.shape, x.dtype), ()
        ctx.bias_dtype = None if bias is None else bias.dtype
        return outputs(ctx, step.saved(x, weight, parts), shaped(z, x.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx: a fused normalization", ctx, *grads)


def _backward(ctx: Any, saved: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad[:3]
    made = ctx.step.backward(flatten(g), None, saved, ctx.like, need, ctx.bias_dtype)
    return *made, None, None, None


Tell = Callable[[bool], None]
_watched: dict[int, weakref.ref[Tensor]] = {}


def _watch(z: Tensor, asked: set[str], tell: Tell) -> None:
    """When z is gone, tell whether a layer asked for its columnwise codes to keep for backward."""
    key = id(z)

    def gone(_: object) -> None:
        _watched.pop(key, None)
        tell(bool(asked))

    _watched[key] = weakref.ref(z, gone)


def normalized(
    x: Tensor, weight: Tensor, bias: Tensor | None, step: NormStep, target: Target,
    tell: Tell | None = None, shared: bool = False,
) -> Tensor:  # fmt: skip
    """z of x [..., K], differentiable. Layers that ask for `target` find z quantized; those that
    would need its columnwise codes too find what to make them of. `tell` is told once whether a
    layer kept columnwise codes, where there are any. shared: layers are known to read z, and share
    what one of them quantizes it to."""
    tensors = (x, weight, bias)
    if needs_gradient(*tensors):
        if torch.compiler.is_compiling():
            return NormFunction.apply(*tensors, step, target, None)[0]
        made: list[Quantized] = []
        z: Tensor = NormFunction.apply(*tensors, step, target, made)[0]
        entry = input_cache.open_for(z) if target.codes or shared else None
        if tell is not None and target.col and entry is not None:
            _watch(z, entry.asked, tell)
        if target.codes:
            input_cache.put(z, target, made[0])
        still = x.detach(), weight.detach(), None if bias is None else bias.detach()
        _remember(z, Source(still, step))
        return z
    if step.norm is not None and not target.codes:
        rows = NormRows(flatten(x), weight, bias, step.norm, step.zero_centered, step.dtype)
        few = norm_rows(rows)
        if few is not None:
            return shaped(few, x.shape)
    parts = step.forward(flatten(x), weight, bias, True, target)
    assert parts.z is not None
    z = shaped(parts.z, x.shape)
    if target.codes:
        input_cache.open_for(z)
        input_cache.put(z, target, parts.quantized)
    return z
