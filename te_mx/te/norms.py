"""LayerNorm, RMSNorm and L2Normalization of Transformer Engine, in torch's own functions."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_mx.context.region import output_dtype
from te_mx.nn import checks
from te_mx.nn.norm_base import NARROW, layer_norm, sums_in_fp32
from te_mx.nn.tensor_parallel import Marked
from te_mx.runtime.arguments import check_flag, check_number, check_size, shown
from te_mx.te import attention_checks
from te_mx.te.modules import default_device
from te_mx.weights.state_dict import WithoutExtraState


def _shape(owner: str, normalized_shape: Any, hidden_size: Any) -> tuple[int, ...]:
    if (normalized_shape is None) == (hidden_size is None):
        raise ValueError(
            f"{owner}: give normalized_shape, or hidden_size, its older name, got "
            f"{shown(normalized_shape)} and {shown(hidden_size)}"
        )
    name, given = "normalized_shape", normalized_shape
    if given is None:
        name, given = "hidden_size", hidden_size
    listed = given if isinstance(given, tuple | list) else (given,)
    sizes = tuple(check_size(f"{owner}: {name}", size) for size in listed)
    if not sizes or math.prod(size or 1 for size in sizes) >= 1 << 47:
        raise ValueError(f"{owner}: {name} must be sizes that memory holds, got {shown(given)}")
    return sizes


class _Norm(Marked, WithoutExtraState, nn.Module):
    """What both have: the weight, and its form around 0."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    _biased = False

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__()
        owner = f"te_mx.{type(self).__name__}"
        self.normalized_shape = _shape(owner, normalized_shape, hidden_size)
        self.eps = check_number(f"{owner}: eps", eps, 0)
        checks.flags(owner, zero_centered_gamma=zero_centered_gamma)
        if sequence_parallel is not None:
            check_flag(f"{owner}: sequence_parallel", sequence_parallel)
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        device, dtype = checks.parameter_place(owner, device, dtype, params_dtype)
        device = default_device() if device is None else device
        for name in ("weight", "bias"):
            made = torch.empty(self.normalized_shape, device=device, dtype=dtype)
            has = name == "weight" or self._biased
            self.register_parameter(name, nn.Parameter(made) if has else None)
        if device.type != "meta":
            self.reset_parameters()
        self._mark()

    def _mark(self) -> None:
        if self.sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)
        self._mark()
        return moved

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Scale by 1 and add 0; parameters on the meta device are made real first.

        Args:
            defer_init: Transformer Engine's: True changes nothing.

        Raises:
            TypeError: `defer_init` is no bool.
        """
        check_flag("reset_parameters: defer_init", defer_init)
        if defer_init:
            return
        for name, parameter in list(self._parameters.items()):
            if parameter is not None and parameter.is_meta:
                made = torch.empty_like(parameter, device=default_device())
                self._parameters[name] = nn.Parameter(made, parameter.requires_grad)
        self._mark()
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _checked(self, inp: Any) -> Tensor:
        shape, owner = self.normalized_shape, f"te_mx.{type(self).__name__}"
        attention_checks.tensor(owner, "inp", inp)
        if tuple(inp.shape[-len(shape) :]) != shape or not attention_checks.is_float(inp):
            raise ValueError(
                f"{owner}: inp must be [.., {', '.join(map(str, shape))}] of a float dtype, got "
                f"{shown(inp)}"
            )
        return inp

    def _gamma(self, dtype: torch.dtype) -> Tensor:
        weight: Tensor = self.weight
        if self.zero_centered_gamma:  # 1 + weight would lose a small weight in 16 bits
            weight = (weight.float() if weight.dtype in NARROW else weight) + 1
        return weight.to(dtype)

    def extra_repr(self) -> str:
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.normalized_shape}, eps={self.eps}{centered}"


_ARGUMENTS = """

    Args:
        normalized_shape: the last sizes of the input, an int or several; hidden_size is its older
            name.
        eps: added to what the root is taken of.
        sequence_parallel: not None: an attribute of that value on the parameters, which
            Megatron-LM reads.
        params_dtype, dtype: of the parameters.
        zero_centered_gamma: scale by ``1 + weight``, which then starts at 0.
        device: of the parameters; None: the GPU where there is one.
        sm_margin: Transformer Engine's, of no effect: torch launches its kernels as it likes.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name.
    """


class LayerNorm(_Norm):
    __doc__ = (
        "``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, in fp32 and rounded once."
        + _ARGUMENTS
    )
    _biased = True

    def forward(self, inp: Tensor) -> Tensor:
        """inp [.., *normalized_shape] -> the same shape, of torch.autocast's dtype, or inp's."""
        x = self._checked(inp)
        assert self.bias is not None
        dtype = torch.float32 if sums_in_fp32(x) else x.dtype
        gamma, beta = self._gamma(dtype), self.bias.to(dtype)
        y = layer_norm(x, self.normalized_shape, gamma, beta, self.eps)
        return y.to(output_dtype(x))


class RMSNorm(_Norm):
    __doc__ = "``x / sqrt(mean(x^2) + eps) * weight``." + _ARGUMENTS

    def forward(self, inp: Tensor) -> Tensor:
        """inp [.., *normalized_shape] -> the same shape, of torch.autocast's dtype, or inp's."""
        x = self._checked(inp)
        y = F.rms_norm(x, self.normalized_shape, self._gamma(x.dtype), self.eps)
        return y.to(output_dtype(x))


class L2Normalization(WithoutExtraState, nn.Module):
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, in fp32 and rounded once."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, inp: Tensor) -> Tensor:
        """inp [.., n] -> the same shape and dtype."""
        x = inp.float()
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)).to(inp.dtype)
