"""Activation checkpointing of ``transformer_engine.pytorch.distributed``."""

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torchs

from te_mx.pytorch.absent import reader
from te_mx.runtime.arguments import check_default, check_flag, shown

__all__ = ["checkpoint"]

__getattr__ = reader(__name__)

_OF_TORCH = ("context_fn", "determinism_check", "debug", "preserve_rng_state")


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, run again in backward instead of keeping what it keeps:
    ``torch.utils.checkpoint.checkpoint``, which te_mx binds to the region of the first forward.

    Args:
        function: a module or function.
        args: its arguments.
        kwargs: use_reentrant (True, as in Transformer Engine), context_fn, determinism_check,
            debug and preserve_rng_state of torch's function; distribute_saved_activations,
            get_rng_state_tracker and tp_group of Transformer Engine's, at their defaults; others
            are the function's.

    Raises:
        TypeError: `function` cannot be called, use_reentrant is no bool.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """
    if not callable(function):
        raise TypeError(f"checkpoint: function must be callable, got {shown(function)}")
    for name, default, reason in (
        ("distribute_saved_activations", False, "each process keeps its own inputs"),
        ("get_rng_state_tracker", None, "torch restores its own generators"),
        ("tp_group", None, "it is of distribute_saved_activations"),
    ):
        check_default(f"checkpoint: {name}", kwargs.pop(name, default), default, reason)
    reentrant = kwargs.pop("use_reentrant", True)
    check_flag("checkpoint: use_reentrant", reentrant)
    how = {name: kwargs.pop(name) for name in _OF_TORCH if name in kwargs}
    run = functools.partial(function, **kwargs) if kwargs else function
    return torchs.checkpoint(run, *args, use_reentrant=reentrant, **how)
