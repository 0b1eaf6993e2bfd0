"""FSDP2 (fully_shard) and te_mx modules: weights that are gathered as codes and scales, and the
parameters that weight gradients belong to.

Under `quantized_all_gather` each rank quantizes its rows of a weight and FSDP2 gathers these codes,
1.03 bytes a parameter in MXFP8 where bf16 takes 2. Blocks run along k and shards are rows, so the
codes are those of the whole weight. There is no high-precision copy of the whole weight: dgrad
starts from the rowwise codes, as under the recipe's one_copy_weights, with the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from te_mx import formats
from te_mx.distributed.gathered import GatheredWeight
from te_mx.distributed.shard_codes import SIGNATURE, Model, Place, ShardCodes, restored
from te_mx.fusion.transposed_linear import TransposedLinear
from te_mx.nn.base import MXModule
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.recipe import resolve_recipe
from te_mx.recipes.settings import Mixed, Settings
from te_mx.runtime.arguments import check_module
from te_mx.torch_internals import fsdp_params, gradient_hook, wrapper_of
from te_mx.weights.ranks import shard_of


def quantized_all_gather(model: nn.Module, *, recipe: Any = None) -> int:
    """Have FSDP2 gather the weights of the te_mx modules in `model` as codes and scales.

    Called after fully_shard, before the first forward. Shards, optimizer states and checkpoints
    stay as they are. The modules then run in MXFP8 only, with weights in the format of `recipe`,
    and dgrad starts from the rowwise codes (``one_copy_weights``), whatever the active recipe says
    of that.

    Args:
        model: sharded by fully_shard; te_mx modules in it that are not sharded, or over one rank
            only, are left alone.
        recipe: its format and its scale rule quantize the weights; None means what
            `te_mx.convert_model` bound to a module, or else the default recipe.

    Returns:
        The number of weights that are gathered as codes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no te_mx module with sharded weights; or a weight cannot be gathered
            so: it is sharded along another dimension than its rows, in parts of different sizes or
            across blocks, offloaded to the CPU, sharded over fewer ranks after forward, one of
            several of a te_mx.GroupedLinear that are not stacked, a part (parameters_split) beside
            others that are not sharded, or [.., in, out] as those of GPT-2 and gpt-oss are. Nothing
            is changed then.
        RuntimeError: a forward has run already.
    """
    check_module(model)
    given = None if recipe is None else resolve_recipe(recipe)
    found = [
        (*one, settings) for one in _weights(model)
        if (settings := _settings_of(one[0], given)) is not None
    ]  # fmt: skip
    if wrapper_of is None:
        raise NotImplementedError(
            f"quantized_all_gather: this PyTorch ({torch.__version__}) makes no tensors without "
            "values; leave it out, and fully_shard gathers weights in high precision"
        )
    if not found:
        raise ValueError(
            f"no te_mx module in {type(model).__name__} has weights that fully_shard sharded; call "
            "te_mx.convert_model and fully_shard first"
        )
    for module, key, param, chosen in found:
        if problem := _why_not(module, param, chosen):
            raise ValueError(f"{module._label()}: {key} {problem}")
        if gathered_parameter(param) is not None and key not in (module._gathers or {}):
            raise RuntimeError(
                f"{module._label()}: fully_shard has gathered {key} in high precision already; "
                "call te_mx.distributed.quantized_all_gather before the first forward"
            )
    together = Model()
    for module, key, _, chosen in found:
        module.__dict__["_gathers"] = {**(module._gathers or {}), key: chosen}
        module.__dict__["_gathered_with"] = together
    for module in {id(module): module for module, *_ in found}.values():
        attach(module)
    return len(found)


def _settings_of(module: Any, recipe: Any) -> Settings | None:
    """Those that the weights of a module are gathered for; None: in high precision.

    Raises:
        ValueError: its weights have different ones.
    """
    chosen = module._chosen(recipe, "")
    if isinstance(chosen, Mixed):
        raise ValueError(
            f"{module._label()}: its weights have different recipes ({chosen.formats}), and those "
            "of a module are gathered for one; pass recipe="
        )
    return chosen


def attach(module: Any) -> None:
    """Tell FSDP2 how to gather the weights of a module. What loading or moving made new has to be
    told again."""
    model = module._gathered_with
    if model is None:
        model = module.__dict__["_gathered_with"] = Model()
    for key, settings in module._gathers.items():
        parameter = module._parameters[key]
        if isinstance(parameter, DTensor) and not isinstance(shard_of(parameter), GatheredWeight):
            known = params_of(module).get(key)
            _extend(shard_of(parameter), settings, Place(module, known, _groups), model)


def _extend(shard: Any, settings: Settings, place: Place, model: Model) -> None:
    """FSDP2's extension of one sharded weight, as attributes of the tensor that it shards: no other
    class of tensor reaches optimizers and checkpoints."""
    codes, held = ShardCodes(shard, settings, place, model), weakref.ref(shard)

    def fsdp_pre_all_gather(
        mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What this rank sends: codes and scales of its rows, in the dtype of the computation."""
        return codes.sent(mp_policy.param_dtype), codes.forms

    def fsdp_post_all_gather(
        all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight as a forward gets it; FSDP2 fills the same memory every time."""
        if out is not None:
            return None
        last: int = held().shape[-1]  # type: ignore[union-attr]
        parts = restored(all_gather_outputs, metadata)
        made = GatheredWeight(*parts, last, param_dtype, settings.w)
        return made, ()  # it has no memory but that of what FSDP2 gathered, which it frees

    fsdp_pre_all_gather.__signature__ = SIGNATURE  # type: ignore[attr-defined]
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = (
        fsdp_pre_all_gather,
        fsdp_post_all_gather,
    )


# ----------------------------------------------------------------------- parameters of fully_shard
# By module. What fully_shard knows of a parameter holds its module, so neither is held here.
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[Any]]]
_known = weakref.WeakKeyDictionary()
_at: dict[int, weakref.ref[Any]] = {}  # what it knows of one, by the id of that or of the whole
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of its parameters


def params_of(module: nn.Module) -> dict[str, Any]:
    """What fully_shard knows of the parameters of a module, by name; it sits at the module that was
    wrapped, somewhere above."""
    if module not in _known and not _note(module):
        _at.clear()
        for param, group in fsdp_params():
            _groups[param] = weakref.ref(group)
            for held in (param.sharded_param, gathered_parameter(param)):
                if held is not None:
                    _at[id(held)] = weakref.ref(param)
        _note(module)
    found = {name: ref() for name, ref in _known.get(module, {}).items()}
    return {name: param for name, param in found.items() if param is not None}


def _note(module: nn.Module) -> bool:
    """Find those of a module, which holds them sharded or whole, in `_at`."""
    found: dict[str, weakref.ref[Any]] = {}
    for name, held in module._parameters.items():
        ref = None if held is None else _at.get(id(held))
        if ref is None or (param := ref()) is None:
            continue
        if param.sharded_param is held or gathered_parameter(param) is held:
            found[name] = ref
    if found:
        _known[module] = found
    return bool(found)


def gathered_parameter(param: Any) -> Any:
    """The parameter that fully_shard lends to a module for a forward, None before the first."""
    return getattr(param, "unsharded_param", None)


def _weights(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """(module, key, its FSDPParam) of the weights of te_mx modules."""
    _known.clear()
    for module in model.modules():
        if isinstance(module, MXModule):
            params = params_of(module)
            for key in module._weight_keys:
                for name in module._parts_of(key):
                    info = params[name].mesh_info if name in params else None
                    if getattr(info, "shard_mesh_size", 1) > 1:  # replicate's has none
                        yield module, name, params[name]


def _why_not(module: Any, param: Any, settings: Settings) -> str:
    """Why a weight is not gathered as codes, or an empty string."""
    ranks, dim = param.mesh_info.shard_mesh_size, param.fsdp_placement.dim
    sharded = param.sharded_param
    cuts = enumerate(sharded.placements)  # by tensor parallelism too
    sizes = [sharded.device_mesh.size(i) for i, p in cuts if getattr(p, "dim", None) == dim]
    rows = sharded.shape[dim] * ranks // prod(sizes)
    grouped = isinstance(module, GroupedLinear)
    known = params_of(module)
    own = next(name for name, one in known.items() if one is param)
    parts = next(p for p in map(module._parts_of, module._weight_keys) if own in p)
    if rest := [name for name in parts if name not in known]:
        return (
            f"is a part of a weight of which fully_shard does not shard {', '.join(rest)}; have it "
            "shard all of them, or none (ignored_params)"
        )
    if grouped and not module.single_grouped_weight:
        return "is one of several that are not stacked; build it with single_grouped_weight=True"
    if isinstance(module, TransposedLinear) or getattr(module, "_transposed", False):
        return (
            "is held with the inputs of a product in front of its outputs, and blocks run along "
            "the inputs; call quantized_all_gather on the modules beside it, one by one"
        )
    if state := module._source.standing:
        return f"is {state}; unfreeze it first"
    if dim != 0:
        return f"is sharded along dimension {dim}, and blocks run along it; shard dimension 0"
    after = param.post_forward_mesh_info
    if after is not None and after.shard_mesh_size != ranks:
        return (
            f"is sharded over {after.shard_mesh_size} ranks after forward (reshard_after_forward="
            f"{after.shard_mesh_size}), of which FSDP2 gathers values; use "
            "reshard_after_forward=True or False"
        )
    if param.offload_to_cpu:
        return "is offloaded to the CPU, where FSDP2 does not gather codes; use no CPUOffloadPolicy"
    if rows % ranks:
        return (
            f"has {rows} rows, which {ranks} ranks have in parts of different sizes; make it "
            f"{-(-rows // ranks) * ranks}"
        )
    if formats.get(settings.w).tensor_scaled:
        return (
            f"is quantized to {settings.w}, whose tensor scale needs the largest magnitude of all "
            "ranks; FSDP2 gathers its values, without this call"
        )
    height = 1 if sharded.ndim == 3 else formats.get(settings.w).scaling.block[0]
    if rows // ranks % height:
        return (
            f"has {rows // ranks} rows on a rank, which are no whole blocks of {height} rows "
            f"of {settings.w}; use a recipe with weights in blocks of one row"
        )
    return ""


class Sharded:
    """The owner of a weight that fully_shard lends for a forward: the parameter that the optimizer
    has. `before` is the owner of the lent one where tensor parallelism shards it too.

    Raises:
        NotImplementedError: FSDP2 has a hook for gradients, which sees those that it reduces.
    """

    def __init__(self, module: Any, param: Any, before: Any = None) -> None:
        if gradient_hook(_group_of(param)) is not None:
            raise NotImplementedError(
                f"{module._label()}: fully_shard has a hook for gradients "
                "(set_all_reduce_hook), which does not see those that fuse_wgrad_accumulation or "
                "delay_wgrad_compute add to main_grad or grad; build the layer without both, or "
                "use a mesh of two dimensions (HSDP) in place of the hook"
            )
        self.parameter = param.sharded_param
        self._param, self._before, self.reached = param, before, before is None

    def reduced(self, dw: Tensor) -> Tensor:
        """The mean over the ranks of data parallelism, or what FSDP2 was told to make instead, and
        of it the rows of this rank."""
        info, sharded = self._param.mesh_info, self._param.sharded_param
        mesh = info.mesh
        if self._before is not None:
            dw = self._before.reduced(dw).to_local()
        dw = dw / _divisor(self._param)
        made = DTensor.from_local(dw, mesh, [Partial()] * mesh.ndim, run_check=False)
        wanted: list[Any] = [Replicate()] * mesh.ndim
        if getattr(info, "shard_mesh_dim", None) is not None:  # else replicate's: each has all
            wanted[info.shard_mesh_dim] = Shard(self._param.fsdp_placement.dim)
        return DTensor.from_local(
            made.redistribute(placements=wanted).to_local(), sharded.device_mesh,
            sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride(),
        )  # fmt: skip


def _group_of(param: Any) -> Any:
    """The parameters that are reduced together with one, as FSDP2 knows them."""
    known = _groups.get(param)
    return None if known is None else known()


def _divisor(param: Any) -> float:
    """What FSDP2 divides the sum over the ranks by: what set_gradient_divide_factor was given, else
    their number. Which of the collectives divides (set_force_sum_reduction_for_comms) is no
    matter."""
    given = getattr(_group_of(param), "gradient_divide_factor", None)
    size: int = param.mesh_info.mesh.size()
    return size if given is None else given


def owners(module: Any, weights: Any) -> list[Any]:
    """The owners of weights that fully_shard lends to a module now; none where it does not."""
    module = module._local or module
    params = params_of(module)
    made = []
    for weight in weights:
        found = [p for p in params.values() if gathered_parameter(p) is weight]
        if not found:
            return []
        made.append(Sharded(module, found[0]))
    return made
