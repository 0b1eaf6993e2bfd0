"""te_mx.Linear: nn.Linear that runs in MXFP8 under te_mx.autocast."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_mx import context
from te_mx.autograd.linear import GEMMS, StandingWeight, infer, linear, standing_weight
from te_mx.context import backward_pass_id, innermost, is_tracing
from te_mx.nn.frozen_weight import FrozenWeight, load_codes, save_codes
from te_mx.recipe import Settings

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))

_tags = itertools.count(step=len(GEMMS))
_NEVER: Any = object()


def output_dtype(x: Tensor) -> torch.dtype:
    """torch.autocast's dtype where that is on for the device of x, else the dtype of x."""
    kind = x.device.type
    if kind == "meta":  # torch.autocast does not know it
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Linear(nn.Linear):
    """``y = x @ weight.T + bias``, in MXFP8 inside `te_mx.autocast` and exactly nn.Linear outside.

    Parameters, their names, their default initialization and the state_dict are those of nn.Linear,
    so checkpoints go both ways; ``_extra_state`` of a Transformer Engine checkpoint is accepted and
    ignored.

    In MXFP8 the input, the weight and the output gradient are quantized in blocks of 32 along the
    reduction dimension of the GEMM that they enter, and each is read once. What backward needs is
    saved as codes and scales, 1.03 bytes an element. The weight is quantized at every forward, so
    that a change is never missed; `is_first_microbatch` and `te_mx.freeze_weights` say when it
    stands still.

    Args:
        in_features, out_features: any sizes, 0 and 1 included; they need not divide by 32.
        bias: with a bias [out_features].
        device, dtype: of the parameters; dtype is fp32, bf16 or fp16.
        init_method: called as ``init_method(weight)`` after the default initialization.
        return_bias: return ``(x @ weight.T, bias)`` without adding the bias; bias is None for a
            layer without one.
        params_dtype: Transformer Engine's name for `dtype`.
        name: shown in errors and by `te_mx.audit`.
    """

    # Class attributes, not set in __init__: convert_model turns an nn.Linear into this class in
    # place.
    name: str | None = None
    return_bias: bool = False
    init_method: Callable[[Tensor], Any] | None = None
    _seen: Settings | None = _NEVER  # what the last forward ran with, for recomputation and audit
    _microbatch: StandingWeight | None = None
    _frozen: FrozenWeight | None = None
    _tag: int = -1  # first of three slots in te_mx.engine.explain.LAST_RUN

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        if params_dtype is not None:
            if dtype is not None and dtype != params_dtype:
                raise ValueError(
                    f"te_mx.Linear: dtype={dtype} and params_dtype={params_dtype} disagree; they "
                    "mean the same, give one"
                )
            dtype = params_dtype
        # nn.Linear.__init__ calls reset_parameters, which reads it.
        self.__dict__["init_method"] = init_method
        super().__init__(in_features, out_features, bias, device, dtype)
        self.return_bias = return_bias
        self.name = name

    def reset_parameters(self) -> None:
        """nn.Linear's default initialization, then `init_method` on the weight."""
        super().reset_parameters()
        if self.init_method is not None:
            self.init_method(self.weight)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """inp [..., in_features] -> [..., out_features], or a pair with the bias under
        `return_bias`.

        Args:
            inp: fp32, bf16 or fp16 (any dtype of nn.Linear outside autocast); any strides.
            is_first_microbatch: None quantizes the weight now. True quantizes and keeps it, False
                uses what is kept: for the micro-batches of one optimizer step, between which the
                weight stands still. What is kept is replaced when the recipe or the device changed,
                or when it lacks the direction that backward needs. Compiled code quantizes each
                time, with the same result.

        The dtype of the result is torch.autocast's where that is on, else that of `inp`.

        Raises:
            ValueError: the last dimension of `inp` is not in_features, or its device is not that of
                the weight.
            TypeError: the dtype of `inp` or of the weight cannot be quantized.
            RuntimeError: a gradient is asked of a layer whose high-precision weight was dropped.
        """
        settings = context.current_settings() if is_tracing() else self._settings_now()
        frozen = self._frozen
        if settings is None:
            if frozen is None or not frozen.dropped:
                return self._high_precision(inp)
            # There is no high-precision weight to run on.
            settings = frozen.settings
        if frozen is not None and frozen.dropped:
            return self._run_dropped(inp, settings)
        weight: Tensor | None = self._parameters.get("weight")
        if weight is None:  # a parametrization or weight_norm computes it
            weight = self.weight
        bias = self.bias
        self._check(inp, weight.device, weight.dtype)
        if frozen is None and is_first_microbatch is None:
            standing = None
        else:
            standing = self._standing_weight(inp, weight, settings, is_first_microbatch)
        tag = -1 if is_tracing() else self._tag if self._tag >= 0 else self._new_tag()
        added = None if self.return_bias else bias
        out = linear(inp, weight, added, standing, settings, output_dtype(inp), tag)
        return (out, bias) if self.return_bias else out

    def _settings_now(self) -> Settings | None:
        """Settings of the active region; in a recomputation those that the recomputed forward ran
        with.

        torch.utils.checkpoint runs the forward again inside the backward pass, where the region of
        the first forward is usually gone. So inside a backward pass only regions that were entered
        in this same pass count.
        """
        region = innermost.get()
        settings = None if region is None else region.settings
        running = backward_pass_id()
        if (
            running != -1
            and (region is None or region.backward_pass != running)
            and self._seen is not _NEVER
        ):
            return self._seen
        self.__dict__["_seen"] = settings  # nn.Module.__setattr__ is slow
        return settings

    def _new_tag(self) -> int:
        tag = self.__dict__["_tag"] = next(_tags)
        return tag

    def _high_precision(self, inp: Tensor) -> Any:
        if self.return_bias:
            return nn.functional.linear(inp, self.weight), self.bias
        return nn.functional.linear(inp, self.weight, self.bias)

    def _run_dropped(self, inp: Tensor, settings: Settings) -> Any:
        codes: Tensor = self.weight_codes  # type: ignore[assignment]
        if torch.is_grad_enabled() and inp.requires_grad:
            raise RuntimeError(
                f"{self._label()} was frozen with drop_master=True and cannot be differentiated: "
                "only the codes that the forward needs are left. Freeze with drop_master=False, "
                "or get a weight back with te_mx.unfreeze_weights(model, dequantize=True), or "
                "run under torch.no_grad()"
            )
        self._check(inp, codes.device)
        row = self._frozen.operand(self)  # type: ignore[union-attr]
        tag = -1 if is_tracing() else self._tag if self._tag >= 0 else self._new_tag()
        bias = self.bias
        out = infer(inp, row, None if self.return_bias else bias, settings, output_dtype(inp), tag)
        return (out, bias) if self.return_bias else out

    def _standing_weight(
        self, inp: Tensor, weight: Tensor, settings: Settings, is_first_microbatch: bool | None
    ) -> StandingWeight | None:
        need_col = torch.is_grad_enabled() and inp.requires_grad
        frozen = self._frozen
        kept = self._microbatch if frozen is None else frozen.weight
        fresh = frozen is None and is_first_microbatch
        if not fresh and kept is not None and kept.serves(settings, inp.device, need_col):
            return kept
        if is_tracing():  # a graph keeps nothing between its calls
            return None
        made = standing_weight(weight, settings, need_col)
        if frozen is None:
            self.__dict__["_microbatch"] = made
        else:
            frozen.weight = made
        return made

    # ----------------------------------------------------------------------------- checks and names
    def _label(self) -> str:
        return f"te_mx.Linear {self.name!r}" if self.name else f"te_mx.Linear({self.extra_repr()})"

    def _check(
        self, inp: Tensor, device: torch.device, weight_dtype: torch.dtype = torch.float32
    ) -> None:
        shape = inp.shape
        if not shape or shape[-1] != self.in_features:
            raise ValueError(
                f"{self._label()}: the last dimension of inp must be "
                f"in_features={self.in_features}, got inp of shape {tuple(shape)}"
            )
        if inp.dtype not in FLOATS or weight_dtype not in FLOATS:
            raise TypeError(
                f"{self._label()}: MXFP8 takes float32, bfloat16 and float16, got inp "
                f"{inp.dtype} and weight {weight_dtype}; convert them, or run this layer under "
                "te_mx.autocast(enabled=False)"
            )
        if inp.device != device:
            raise ValueError(
                f"{self._label()}: inp is on {inp.device} and the weight on {device}; move one"
            )

    def extra_repr(self) -> str:
        extra = (
            ""
            if self._frozen is None
            else ", frozen, no master"
            if self._frozen.dropped
            else ", frozen"
        )
        return super().extra_repr() + extra

    # ---------------------------------------------------------------------------------- checkpoints
    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without what a forward makes again."""
        state = {
            k: v for k, v in self.__dict__.items() if k not in ("_seen", "_microbatch", "_tag")
        }
        if self._frozen is not None:
            state["_frozen"] = self._frozen.without_codes()
        return state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._frozen is not None and self._frozen.dropped:
            save_codes(self, destination, prefix, keep_vars)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        ours = load_codes(self, state_dict, prefix, local_metadata, error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for key in (*ours, prefix + "_extra_state"):  # Transformer Engine saves _extra_state
            if key in unexpected_keys:
                unexpected_keys.remove(key)
        self.__dict__.pop("_microbatch", None)
        if self._frozen is not None:
            self._frozen.weight = None
