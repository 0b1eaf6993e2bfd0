"""What the modules that run in MXFP8 share: settings of a forward, kept weights, names, checks and
checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx import context
from te_mx.autograd.linear import GEMMS
from te_mx.autograd.operands import capturing
from te_mx.autograd.wgrad import Queue, WeightGradient
from te_mx.context import backward_pass_id, innermost, is_tracing
from te_mx.nn.checks import Checked
from te_mx.nn.delayed_wgrad import DelayedWgrad
from te_mx.nn.frozen_state import load_codes, save_codes
from te_mx.nn.frozen_weight import Freezable
from te_mx.recipe import Settings

STEPS = 2  # linear steps of a module, at most
NEVER: Any = object()
TRANSIENT = ("_seen", "_microbatch", "_tag", "_delayed")  # what a copy starts without

_tags = itertools.count(step=STEPS * len(GEMMS))


def output_dtype(x: Tensor) -> torch.dtype:
    """torch.autocast's dtype where that is on for the device of x, else the dtype of x."""
    kind = x.device.type
    if kind == "meta":  # torch.autocast does not know it
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def one_dtype(
    owner: str, dtype: torch.dtype | None, params_dtype: torch.dtype | None
) -> torch.dtype | None:
    """The dtype that two names of one argument ask for."""
    if None not in (dtype, params_dtype) and dtype != params_dtype:
        raise ValueError(
            f"{owner}: dtype={dtype} and params_dtype={params_dtype} disagree; they mean the same, "
            "give one"
        )
    return dtype if params_dtype is None else params_dtype


class MXModule(Freezable, DelayedWgrad, Checked):
    """Mixin of the modules, beside an nn.Module."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    name: str | None = None
    fuse_wgrad_accumulation: bool = False
    _seen: Settings | None = NEVER  # what the last forward ran with, for recomputation and audit
    _tag: int = -1  # first slot in te_mx.engine.explain.LAST_RUN, three for each linear step
    _microbatch: dict[str, Any] | None = None  # weights kept for micro-batches, by key

    # --------------------------------------------------------------------------- running a forward
    def _held(self, *names: str) -> tuple[Any, ...]:
        """Parameters by name, without nn.Module's slow look-up where they are plain."""
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        return tuple(
            [parameters[name] if name in parameters else getattr(self, name) for name in names]
        )

    def _settings(self) -> Settings | None:
        """Settings that a forward runs with, None outside te_mx.autocast."""
        settings = context.current_settings() if is_tracing() else self._settings_now()
        if settings is None and self._frozen is not None and self._frozen.dropped:
            return self._frozen.settings  # there is no high-precision weight to run on
        return settings

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
            and self._seen is not NEVER
        ):
            return self._seen
        self.__dict__["_seen"] = settings  # nn.Module.__setattr__ is slow
        return settings

    def _tag_now(self) -> int:
        """The first slot of this module; compiled code records nothing."""
        if is_tracing():
            return -1
        if self._tag < 0:
            self.__dict__["_tag"] = next(_tags)
        return self._tag

    def _keep(
        self, kept: Any, frozen: bool, first: bool | None, settings: Settings,
        device: torch.device, need_dx: bool,
    ) -> tuple[Any, bool]:  # fmt: skip
        """The kept weight that serves this call or None, and whether a new one is to be kept.

        A CUDA graph is replayed on later weights: only frozen ones may be older than it. Neither it
        nor compiled code keeps anything between its calls.
        """
        tracing = is_tracing()
        capture = not tracing and capturing(device)
        fresh = not frozen and (first or capture)
        if not fresh and kept is not None and kept.serves(settings, device, need_dx):
            return kept if tracing else kept.on_current_stream(), False
        return None, not (tracing or capture)

    def _kept_weight(
        self, key: str, first: bool | None, settings: Settings, device: torch.device, need_dx: bool
    ) -> Any:
        """What stands in for a weight: what is kept of a frozen one or for the micro-batches of a
        step, or made now and kept; None where this call quantizes.
        """
        frozen = self._frozen
        if frozen is None and first is None:
            return None
        kept = self._microbatch or {} if frozen is None else frozen.kept
        use, keep = self._keep(
            kept.get(key), frozen is not None, first, settings, device, need_dx
        )  # fmt: skip
        if not keep:
            return use
        made = self._standing_weight(key, settings, need_dx)
        if frozen is None:
            self.__dict__["_microbatch"] = {**kept, key: made}
        else:
            frozen.kept[key] = made
        return made

    # ------------------------------------------------- weight gradients with a place of their own
    def _routed(self) -> bool:
        """Whether weight gradients do not simply go back to autograd."""
        return self.fuse_wgrad_accumulation or self.delay_wgrad_compute

    def _sink(
        self, parameters: Sequence[Tensor], first: bool | None, queue: Queue | None
    ) -> WeightGradient | None:
        """The place of the gradient of one weight in this call; None when there will be none."""
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return None
        if self.delay_wgrad_compute and not all(p.is_leaf for p in parameters):
            raise RuntimeError(
                f"{self._label()}: delay_wgrad_compute=True needs weights that are parameters, but "
                "something computes one (a parametrization, functional_call); build the module "
                "without delay_wgrad_compute"
            )
        fuse = self.fuse_wgrad_accumulation
        return WeightGradient(parameters, self._label(), fuse, first is True, queue)

    # ---------------------------------------------------------------------------------------- names
    def _label(self) -> str:
        kind = f"te_mx.{type(self).__name__}"
        return f"{kind} {self.name!r}" if self.name else f"{kind}({self.extra_repr()})"  # type: ignore[attr-defined]

    # ---------------------------------------------------------------------------------- checkpoints
    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without what a forward makes again."""
        state = {k: v for k, v in self.__dict__.items() if k not in TRANSIENT}
        if self._frozen is not None:
            state["_frozen"] = self._frozen.without_copies()
        return state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._is_dropped():
            save_codes(self, destination, prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        ours = load_codes(self, state_dict, prefix, local_metadata, error_msgs)
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for key in (*ours, prefix + "_extra_state"):  # Transformer Engine saves _extra_state
            if key in unexpected_keys:
                unexpected_keys.remove(key)
        # What was kept of the weights before is old now.
        self.__dict__.pop("_microbatch", None)
        if self._frozen is not None:
            self._frozen.kept.clear()
