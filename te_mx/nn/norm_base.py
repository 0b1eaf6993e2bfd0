"""What te_mx.LayerNormLinear and te_mx.LayerNormMLP share: the normalization's parameters, weights
that stand still, checks and checkpoints.

Normalizations outside of MXFP8: torch's own functions, in fp32 where torch's would add up the
gradients of 16-bit parameters in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_mx.autograd.grad_target import Queue
from te_mx.autograd.norm import NormStep, normalized
from te_mx.autograd.saved import flatten
from te_mx.context.region import backward_pass_id, output_dtype
from te_mx.dispatch.fused import NORMS, Norm, Target
from te_mx.nn.base import MXModule
from te_mx.recipes.resolve import DEFAULT_SETTINGS
from te_mx.runtime.arguments import check_number, check_one_of

NARROW = torch.bfloat16, torch.float16


def sums_in_fp32(x: Tensor) -> bool:
    """Whether `layer_norm` computes in fp32 what torch would add up in 16 bits."""
    return x.device.type == "cpu" and x.dtype in NARROW


def layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm over the last dimensions `shape`; of x's dtype or, on CPUs, in fp32 for a 16-bit x.

    There torch adds up the gradients of weight and bias, one number for every row, in the dtype of
    x: of 8,192 ones in bf16 that makes 256. Here x, weight and bias are fp32 inside, and each
    gradient is rounded once, to the dtype of what it belongs to.
    """
    if sums_in_fp32(x):
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    return F.layer_norm(x, shape, weight, bias, eps)


_STD = 0.023  # of Transformer Engine's default weights


def default_init(weight: Tensor) -> Tensor:
    """Transformer Engine's default initialization of a weight."""
    return nn.init.normal_(weight, 0.0, _STD)


class NormModule(MXModule, nn.Module):
    """A module that normalizes its input and runs linear steps on the result."""

    _norms: tuple[str | None, ...] = NORMS
    layer_norm_weight: nn.Parameter | None
    layer_norm_bias: nn.Parameter | None
    return_bias: bool
    return_layernorm_output: bool

    def _start(
        self, size: int, eps: float, normalization: str | None, zero_centered_gamma: bool
    ) -> None:
        """Attributes of the normalization; called before the parameters are made."""
        owner = f"te_mx.{type(self).__name__}"
        check_one_of(f"{owner}: normalization", normalization, self._norms)
        self.eps = check_number(f"{owner}: eps", eps, 0)
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self._size = size

    def _norm_parameters(self, device: Any, dtype: torch.dtype | None) -> None:
        for kind, norms in (("weight", NORMS), ("bias", NORMS[:1])):
            value = torch.empty(self._size, device=device, dtype=dtype)
            made = nn.Parameter(value) if self.normalization in norms else None
            self.register_parameter(f"layer_norm_{kind}", made)

    def reset_layer_norm_parameters(self) -> None:
        """Weights that scale by 1 (0 where they are zero-centered), biases 0."""
        if self.layer_norm_weight is None:
            return
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    # --------------------------------------------------------------------------- running a forward
    def _step(self, inp: Tensor) -> NormStep:
        norm = None if self.normalization is None else Norm(self.normalization, self.eps)
        return NormStep(norm, self.zero_centered_gamma, output_dtype(inp))

    def _plain_norm(self, inp: Tensor) -> Tensor:
        """The normalization outside te_mx.autocast: torch's own, in the dtype of the module's
        result."""
        if self.normalization is None:
            return inp
        weight: Tensor | None = self.layer_norm_weight
        bias: Tensor | None = self.layer_norm_bias
        if weight is None:
            self._refuse_parameter("layer_norm_weight", None, (self._size,), inp.device)
        is_layer_norm = self.normalization == "LayerNorm"
        wide = weight.dtype != inp.dtype or (is_layer_norm and sums_in_fp32(inp))
        if wide and weight.dtype in NARROW:
            weight = weight.float()  # torch mixes dtypes where the parameters are fp32
            bias = bias.float() if bias is not None and bias.dtype in NARROW else bias
        if self.zero_centered_gamma:
            weight = weight + 1
        shape = (self._size,)
        if is_layer_norm:
            z = layer_norm(inp, shape, weight, bias, self.eps)
        else:
            z = nn.functional.rms_norm(inp, shape, weight, self.eps)
        return z.to(output_dtype(inp))

    def _normalized(self, inp: Tensor) -> Tensor:
        """The normalized input of a step that quantizes, itself; differentiable."""
        weight, bias, step = self.layer_norm_weight, self.layer_norm_bias, self._step(inp)
        if weight is None:
            return inp.to(step.dtype)
        target = Target("", "", DEFAULT_SETTINGS.scale_rule)
        return normalized(inp, weight, bias, step, target)

    def _few_normalized(self, inp: Tensor, few: Any) -> tuple[Tensor, dict[str, Any]]:
        """The normalized input of a product of few rows, and what that may read beside it: the same
        quantized, in a graph of any number of rows."""
        target = few.target(inp.device)
        if target is None:
            return self._normalized(inp), {}
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        made = self._step(inp).forward(flatten(inp), weight, bias, True, target)
        assert made.z is not None
        return made.z.view(inp.shape), {"row": made.quantized.row}

    def _returned(self, out: Tensor, bias: Tensor | None, z: Tensor | None) -> Any:
        extra: tuple[Tensor | None, ...] = (bias,) if self.return_bias else ()
        extra += (z,) if self.return_layernorm_output else ()
        return (out, *extra) if extra else out

    # ----------------------------------------------------------------------------- checks and names
    def _check(
        self, inp: Tensor, size_name: str, weight: Tensor | None, bias: Tensor | None
    ) -> None:
        """Check the input, and the parameters of the normalization."""
        size = self._size
        self._check_shape(inp, size_name, size)
        self._check_kind(inp)
        device = inp.device
        if self.normalization is not None:
            self._check_parameter("layer_norm_weight", weight, (size,), device)
        if bias is not None:
            self._check_parameter("layer_norm_bias", bias, (size,), device)

    def _norm_repr(self) -> str:
        shown = f"eps={self.eps}, normalization={self.normalization!r}"
        return shown + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")


class Together:
    """A queue for the weight gradients of one call: those of one backward pass go into `queue` as
    one, for one `backward_dw`."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._pass = queue, -1
        self._runs: list[Callable[[], None]] = []

    def append(self, run: Callable[[], None]) -> None:
        now = backward_pass_id()
        if self._runs and now == self._pass:
            self._runs.append(run)
            return
        self._pass = now
        runs = self._runs = [run]

        def run_all() -> None:
            while runs:
                runs.pop(0)()

        self._queue.append(run_all)
