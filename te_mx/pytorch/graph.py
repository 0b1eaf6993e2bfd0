"""CUDA graphs under the arguments of ``transformer_engine.pytorch.graph``."""

from contextlib import nullcontext
from typing import Any

from te_mx.api.cuda_graphs import make_graphed_callables as captured
from te_mx.context.region import autocast
from te_mx.pytorch.absent import reader
from te_mx.recipe import get_default_recipe
from te_mx.runtime.arguments import check_default, check_flag

__all__ = ["make_graphed_callables"]

__getattr__ = reader(__name__)

_OLDER = {
    "fp8_enabled": "enabled", "fp8_calibrating": "calibrating", "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group", "fp8_weight_caching": "cache_quantized_params",
}  # fmt: skip
# At these values an argument asks for nothing that te_mx does not do.
_ABSENT: dict[str, tuple[tuple[Any, ...], str]] = {
    "sample_kwargs": ((None,), "bind keyword arguments first, e.g. with functools.partial"),
    "cache_quantized_params": ((None, False), "a graph quantizes weights in every call"),
    "_order": ((None,), "te_mx captures callables in the order in which they run"),
    "_num_layers_per_chunk": ((None,), "te_mx captures callables in the order in which they run"),
    "_reuse_graph_input_output_buffers": ((False,), "each graph has memory of its own"),
    "retain_graph_in_backward": ((False,), "torch's function does not retain it"),
    "clone_param_grads_on_return": ((True,), "gradients of parameters are their own memory"),
    "pre_warmup_hook": ((None,), "torch's function has no hooks"),
    "post_warmup_hook": ((None,), "torch's function has no hooks"),
    "capture_time_hooks": ((None,), "torch's function has no hooks"),
}


def make_graphed_callables(
    modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False,
    **given: Any,
) -> Any:  # fmt: skip
    """`te_mx.make_graphed_callables`, which see, with Transformer Engine's arguments.

    Args:
        modules, sample_args, num_warmup_iters, allow_unused_input: its first four.
        given: enabled (False; True captures inside ``autocast(recipe=recipe)``), recipe, pool;
            calibrating and amax_reduction_group, of no effect; the older names with ``fp8_``; the
            others of Transformer Engine's function at their defaults.

    Raises:
        TypeError, ValueError, RuntimeError: as te_mx.make_graphed_callables; both names of one
            argument.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """
    owner = "make_graphed_callables"
    for old, new in _OLDER.items():
        if old in given:
            if given.get(new) is not None:
                raise ValueError(f"{owner}: {old} is the older name of {new}, give one")
            given[new] = given.pop(old)
    enabled, recipe = given.pop("enabled", None), given.pop("recipe", None)
    pool = given.pop("pool", None)
    if isinstance(enabled, tuple):
        if len(set(enabled)) > 1:
            raise NotImplementedError(
                f"{owner}: enabled={enabled} is not supported: one call captures all with one "
                "recipe; call it once for each"
            )
        enabled = enabled[0] if enabled else False
    if enabled is not None:
        check_flag(f"{owner}: enabled", enabled)
    if given.pop("calibrating", None) not in (None, False, True):
        raise TypeError(f"{owner}: calibrating must be a bool or None")
    given.pop("amax_reduction_group", None)
    for name, value in given.items():
        if name not in _ABSENT:
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}")
        harmless, reason = _ABSENT[name]
        if not any(value is one for one in harmless):
            check_default(f"{owner}: {name}", value, harmless[0], reason)
    if enabled and recipe is None:
        recipe = get_default_recipe()
    with nullcontext() if enabled else autocast(enabled=False):
        return captured(
            modules, sample_args, num_warmup_iters, allow_unused_input, pool,
            recipe=recipe if enabled else None,
        )  # fmt: skip
