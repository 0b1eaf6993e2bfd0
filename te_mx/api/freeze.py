"""freeze_weights and unfreeze_weights: weights that stand still, for inference."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from te_mx import formats
from te_mx.context.region import current_recipe
from te_mx.dispatch.problem import ENCODED, INVARIANT
from te_mx.nn.base import MXModule
from te_mx.nn.linear import Linear
from te_mx.recipe import Settings, resolve_recipe
from te_mx.recipes.settings import Mixed
from te_mx.runtime.arguments import check_flag, check_module, shown
from te_mx.weights.formats import WEIGHT_ONLY, Fixed, fixed_by
from te_mx.weights.missing import reads_now, take_back, weights_read

_M = TypeVar("_M")


def _modules(model: nn.Module) -> list[tuple[str, MXModule]]:
    check_module(model)
    found = [(name or "(root)", m) for name, m in model.named_modules() if isinstance(m, MXModule)]
    if not found:
        raise ValueError(
            f"no te_mx module in {type(model).__name__}: build it with te_mx.Linear "
            "or call te_mx.convert_model first"
        )
    return found


def freeze_weights(
    model: nn.Module,
    drop_master: bool = False,
    *,
    recipe: Any = None,
    fmt: str | None = None,
    activations: str | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> int:
    """Quantize the weights of every te_mx module in `model` (Linear, GroupedLinear,
    LayerNormLinear, LayerNormMLP, experts and Conv1D of Transformers) once, for inference, and use
    them from now on.

    The modules stop training (requires_grad of their parameters is set to False, and restored by
    `unfreeze_weights`); gradients still flow through them to their inputs.

    Where the parameters are kept, a change of one is noticed at the next forward, and the weight
    quantized anew: load_state_dict and torch.distributed.checkpoint, in-place operations, another
    tensor under ``weight.data``. Where a module runs with other tensors than those that were frozen
    (a parameter that was replaced, FSDP2, torch.func.functional_call) they are quantized at every
    forward; freezing again freezes what is there then. Under FSDP2 freezing says that nothing
    trains, and te_mx.distributed.quantized_all_gather that each rank sends codes.

    Not noticed are writes that torch does not count: in place through ``weight.data`` (as peft
    merges an adapter without ``safe_merge=True`` or te_mx.integrations.peft), NumPy, DLPack or a
    view made in inference_mode, by optimizers with ``fused=True`` while the parameter has a
    gradient but does not require one, and by FSDP1 or DeepSpeed. Captured CUDA graphs notice
    nothing. Code compiled by torch.compile notices what eager code does; where gradients are
    wanted, and in te_mx.GroupedLinear on many rows, by quantizing kept parameters at every call.
    After such a change call `unfreeze_weights`, then `freeze_weights`, and capture again.

    Modules without masters may cut K into parts on Hopper GPUs whatever the recipe's split_k says,
    where few tiles would leave the GPU idle: bits then depend on the number of rows beyond 64.

    A weight without a master lies once, as the kernels of its device read it for any number of
    rows: on Hopper GPUs in 1.03 to 1.04 bytes a number in MXFP8, in tiles that the state_dict is
    unpacked from, and 0.53 in MXFP4. Layers are frozen one after the other, so a model never takes
    more than itself and one layer of codes. Captured graphs read the copy, and make none. The
    kernel for at most 64 rows is in a CUDA graph if such a forward ran before the capture.

    Args:
        model: the modules in it that are frozen already stay so.
        drop_master: False keeps the parameters beside the quantized copies and, where the kernel of
            the device profits, a packed form of them: outside autocast the modules are plain as
            ever. True keeps the codes and scales only, 1.03 bytes a parameter in MXFP8 and 0.53 in
            MXFP4, in memory and in the state_dict: of a weight [out, in] ``<name>`` float8_e4m3fn
            [out, in] and ``<name>_scale`` uint8 [out, ceil(in/32)], e.g. ``weight`` and
            ``weight_scale``; those of a te_mx.GroupedLinear are stacked or apart as its parameters
            are. Codes of fewer than 8 bits are packed uint8, [out, ceil(in/2)] in MXFP4, and the
            scales of 6-bit codes are named after their element, ``<name>_scale_e2m3``; fp32 scales
            are ``<name>_scale_inv`` float32. NVFP4 ("nvfp4", 0.56 bytes) has a tensor scale
            beside them, ``<name>_scale_2`` float32 [], and float8_e4m3fn scales [out,
            ceil(in/16)]; layers that serving engines multiply as one (q_proj, k_proj and v_proj,
            gate_proj and up_proj, ..) have a common one. Such a state_dict loads into a new
            module. Such a
            module runs quantized outside autocast too. Gradients reach its input, biases and
            normalization: dgrad starts from these codes, as under one_copy_weights, of codes with
            fewer than 8 bits by way of MXFP8, and of NVFP4 from their values.
        recipe: its format and its scale rule quantize the weights; None means the active recipe,
            where none is that which `te_mx.convert_model` bound to the module, or the default one.
            A module that a te_mx.recipe.CustomRecipe leaves in high precision is not frozen.
        fmt: the format of the weights in place of the recipe's, a name of te_mx.formats.names()
            such as "mxfp4". It stays when a region with another one runs the module. Codes without
            masters of a format that does not know the recipe's scale rule (fp32 scales beside
            inputs in MXFP8) are made by the first rule of their own.
        activations: how inputs are multiplied with the weights, whatever region runs the module:
            quantized to a format such as "mxfp8" or "mxfp4", or "bf16" for weights only: inputs
            are not quantized (nor are those in fp16 and fp32), and meet the very values of the
            codes, which are decoded for the time of a product. That needs drop_master=True. None
            leaves it to the recipe that runs. What is frozen already can be given another one.
        filter_fn: ``filter_fn(module, fqn) -> bool`` for each te_mx module; False leaves it as it
            is. So one call freezes the experts to "mxfp4", and another one the rest.

    Returns:
        The number of modules that are frozen now.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no te_mx module, or `filter_fn` chose none; a weight has no values yet
            (meta device), a dtype that cannot be quantized, or is sharded or quantized by others;
            `drop_master` meets a weight that is computed (parametrized) or split into parameters,
            and so has no place of its own, or one that the forward of a module above reads itself
            (the fast path of nn.TransformerEncoderLayer, dt_proj of Mamba); a module is frozen to
            another format than `fmt` already; formats do not go together, or with the scale rule
            of the recipe.

    An error changes nothing. Only one that comes while masters are being dropped, such as a lack of
    memory, leaves those modules frozen that were done: dropped weights do not come back. Call again
    to go on.
    """
    if isinstance(drop_master, str):
        raise TypeError(
            f"drop_master must be a bool, got {shown(drop_master)}; pass a format as "
            "freeze_weights(model, fmt=...)"
        )
    check_flag("drop_master", drop_master)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn must be a function or None, got {shown(filter_fn)}")
    ambient = current_recipe() if recipe is None else resolve_recipe(recipe)
    modules = _modules(model)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing of it is imported here
    if fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules()):
        _check_sharded(model, modules, drop_master)
    wanted, how = modules, []
    if filter_fn is not None:
        wanted = [(name, module) for name, module in modules if filter_fn(cast(Any, module), name)]
        if not wanted:
            raise ValueError(f"filter_fn chose none of the {len(modules)} te_mx modules of model")
    if drop_master:
        _refuse_read(model, wanted)
    for name, module in wanted:
        if problem := module.why_not_frozen(drop_master):
            raise ValueError(f"{name}: {problem}")
        settings = module._chosen(ambient, name)
        if settings is None:
            continue
        if isinstance(settings, Mixed):
            raise ValueError(
                f"{name}: its weights have different recipes ({settings.formats}), and a module is "
                "frozen with one; pass recipe=, or leave it out by filter_fn"
            )
        how.append((module, *_formats(name, module, settings, (fmt, activations), drop_master)))
    done, amax = [], _common_amax(how, modules) if drop_master else {}
    try:
        for module, made, fixed in how:
            new = not module._source.standing
            module.freeze(made, drop_master, fixed, amax.get(id(module)))
            if new:
                done.append(module)
    except BaseException:
        for module in done:
            if module._source.saved is None:
                module.unfreeze()
        raise
    return sum(bool(module._source.standing) for _, module in modules)


# What serving engines multiply as one matrix; so writers of NVFP4 give it one tensor scale.
_ONE_ELSEWHERE = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip


def one_elsewhere(modules: Iterable[tuple[str, _M]]) -> list[list[tuple[str, _M]]]:
    """Those of these layers that are one in vLLM and SGLang, by name: q, k and v; gate and up."""
    found: dict[tuple[str, tuple[str, ...]], list[tuple[str, _M]]] = {}
    for name, module in modules:
        above, _, last = name.rpartition(".")
        for names in _ONE_ELSEWHERE:
            if last in names:
                found.setdefault((above, names), []).append((name, module))
    return [group for group in found.values() if len(group) > 1]


def _common_amax(
    how: list[tuple[MXModule, Settings, Fixed]], modules: list[tuple[str, MXModule]]
) -> dict[int, Tensor]:
    """The largest magnitude of layers that share a tensor scale, by the number of each."""
    scaled = {
        id(module) for module, made, _ in how
        if formats.get(made.w).tensor_scaled and module._source.saved is None
        and isinstance(module, Linear)
    }  # fmt: skip
    found: dict[int, Tensor] = {}
    for group in one_elsewhere([one for one in modules if id(one[1]) in scaled]):
        weights = [module._whole("weight").detach() for _, module in group]
        amax = torch.stack([_largest(one) for one in weights]).amax()
        found |= {id(module): amax for _, module in group}
    return found


def _largest(weight: Tensor) -> Tensor:
    return torch.where(weight.isfinite(), weight, 0).abs().amax().float().cpu()


def _refuse_read(model: nn.Module, wanted: list[tuple[str, MXModule]]) -> None:
    """Raise ValueError where modules of a model compute with weights that are to be dropped."""
    names = {id(module): name for name, module in wanted if module._source.saved is None}
    read: dict[str, str] = {}
    for owner in model.modules():
        if reads_now(owner):
            kind = type(owner)
            for _, module in weights_read(owner):
                if id(module) in names:
                    read[names[id(module)]] = kind.__name__
    if not read:
        return
    kinds = sorted(set(read.values()))
    off = ", or turn its fast path off first, torch.backends.mha.set_fastpath_enabled(False)"
    raise ValueError(
        f"{', '.join(read)}: the forward of {' and of '.join(kinds)} reads `weight` of these "
        "layers itself, and drop_master=True leaves only codes of it; leave them out by filter_fn, "
        "or use "
        f"drop_master=False{off if 'TransformerEncoderLayer' in kinds else ''}"
    )


def _formats(
    name: str, module: MXModule, settings: Settings, asked: tuple[Any, Any], drop_master: bool
) -> tuple[Settings, Fixed]:
    """What a module is frozen with, `settings` if it is not frozen yet, and what that fixes."""
    source = module._source
    settings, before = source.settings or settings, source.fixed
    codes = "now" if source.saved is not None else "then" if drop_master else ""
    made, fixed = fixed_by(settings, *asked, before, codes)
    if source.standing and made.w != settings.w:
        raise ValueError(
            f"{name}: it is frozen to {settings.w} already; call te_mx.unfreeze_weights first, or "
            "leave it out by filter_fn"
        )
    if fixed.weight_only and not codes:
        raise ValueError(
            f"{name}: activations={WEIGHT_ONLY!r} needs drop_master=True: it multiplies what the "
            "codes stand for, while parameters that are kept are quantized anew when they change"
        )
    if fixed.weight_only and settings.precision == INVARIANT:
        raise ValueError(
            f"{name}: activations={WEIGHT_ONLY!r} multiplies in torch, whose sums depend on the "
            "number of rows, which precision 'invariant' forbids; quantize inputs, or freeze with "
            "another recipe"
        )
    if fixed.weight_only and settings.precision == ENCODED:
        raise ValueError(
            f"{name}: activations={WEIGHT_ONLY!r} leaves inputs in 16 bits, and precision 'fp8' "
            "multiplies in FP8; quantize inputs, activations='mxfp8', or freeze with another recipe"
        )
    return made, fixed


def _check_sharded(model: nn.Module, modules: list[tuple[str, MXModule]], drop: bool) -> None:
    """Raise ValueError where modules that fully_shard sharded cannot be frozen."""
    name = type(model).__name__
    if drop:
        raise ValueError(
            f"{name} is sharded by fully_shard, which exchanges parameters at every forward: drop "
            "masters before sharding, or use drop_master=False"
        )
    for _, module in modules:
        if module._holds_lent():
            raise ValueError(
                f"{name} is sharded by fully_shard and not resharded: {module._label()} has lent "
                "parameters, which freezing would not outlive; call model.reshard() first"
            )


def unfreeze_weights(model: nn.Module, *, dequantize: bool = False) -> int:
    """Undo `freeze_weights`: weights are quantized at every forward again, and parameters train as
    before.

    Where all codes of a model are gone by that, so is the quantization_config that
    te_mx.quantization_config or te_mx.integrations.hf_quantizer gave it, and Transformers trains
    and saves it as one that was never quantized. A part leaves it to the whole, whose
    save_pretrained then refuses.

    Args:
        model: modules that are not frozen are left alone.
        dequantize: what to do where the master weights were dropped. False refuses; True makes
            parameters of the original dtype from the codes (the values that the frozen module
            computed with, not the original ones). A weight that was tied to one that `model` still
            has is that one again, one that a module got meanwhile (tie_weights) stays.

    Returns:
        The number of modules that were frozen.

    Raises:
        TypeError: an argument has the wrong type.
        RuntimeError: master weights were dropped and `dequantize` is False; nothing is changed.
    """
    check_flag("dequantize", dequantize)
    modules = [(name, module) for name, module in _modules(model) if module._source.standing]
    dropped = [name for name, module in modules if module._source.saved is not None]
    if dropped and not dequantize:
        raise RuntimeError(
            f"the high-precision weights of {len(dropped)} layers were dropped by "
            f"freeze_weights(drop_master=True), first {dropped[0]!r}: pass dequantize=True to "
            "make parameters from the codes, or load a checkpoint into a new model"
        )
    living = {p._te_mx_id: p for p in model.parameters() if hasattr(p, "_te_mx_id")}
    for _, module in modules:
        module.unfreeze(living)
    take_back(model)
    return len(modules)
