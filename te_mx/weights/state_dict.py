"""Frozen weights in a state_dict.

A module without masters saves, for each weight, ``<name>`` (float8_e4m3fn [out, in]) and
``<name>_scale`` (uint8 [out, ceil(in/32)], E8M0): the names and layouts of MXFP8 checkpoints of
compressed-tensors and ModelOpt; scales named ``<name>_scale_inv`` are read too. Codes of fewer than
8 bits are saved as they are packed, uint8; the shapes tell 4 bits from 6, and the scales of 6-bit
codes carry the element in their name, ``<name>_scale_e2m3``. Formats with fp32 scales save these as
``<name>_scale_inv`` (float32 [ceil(out/128), ceil(in/128)] for blocks of 128 x 128), the names and
layouts of DeepSeek-V3's checkpoints; the value is code * scale. Such scales in bf16 (Qwen's), and
E8M0 ones of 128 x 128 in uint8 or float8_e8m0fnu, are read as fp32, which holds them exactly. NVFP4
is saved as ModelOpt does: codes uint8 [out, in/2], ``<name>_scale`` float8_e4m3fn [out, in/16] and
``<name>_scale_2`` float32 [], all multiplied with each other.

What such a state_dict is loaded into becomes frozen without masters;
te_mx.unfreeze_weights(dequantize=True) makes parameters that train. 4-bit weights under the names
of others are read too.

The recipe, which names the format, goes with them in the metadata of the state_dict, which
``torch.save(state_dict)`` keeps; formats that hold tensors only, such as safetensors, lose it. The
module's own, or the one bound to it, stands in then if its codes are such, or else the default
recipe with the one format of weights that has such tensors; for float32 scales DeepSeekV3, or the
same with weights in blocks of 1 x 128; for E8M0 scales of 128 x 128 Float8BlockScaling, whose
inputs have scales that are powers of two as well.

4-bit weights in a state_dict under the names of others, for a weight called <name>:

compressed-tensors  ``<name>_packed`` [.., out, in/2] and ``<name>_scale`` [.., out, in/32]; NVFP4
                    has ``<name>_global_scale`` beside ``<name>_scale`` [.., out, in/16]
gpt-oss             ``<name>_blocks`` [.., out, in/32, 16] and ``<name>_scales`` [.., out, in/32]

They become ``<name>`` and ``<name>_scale``; te_mx saves those.

Checkpoints of Transformer Engine hold `_extra_state` of modules that have none in te_mx.

Loading a state_dict into one module: all of it or, where something is wrong, nothing."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx import formats
from te_mx.formats import mxfp4_checkpoints, nvfp4_checkpoints
from te_mx.formats.format import every_name
from te_mx.recipe import BlockScaling, DeepSeekV3, Float8BlockScaling
from te_mx.recipes.resolve import DEFAULT_SETTINGS
from te_mx.recipes.settings import Settings
from te_mx.runtime.arguments import is_dense, shown
from te_mx.weights.formats import NOTHING, Fixed

_ENDS = {  # of codes -> of their scales, and what makes te_mx's of both
    "_packed": ("_scale", mxfp4_checkpoints.from_compressed_tensors),
    "_blocks": ("_scales", mxfp4_checkpoints.from_gpt_oss),
}


def adapt(module: Any, state_dict: Any, prefix: str, error_msgs: list[str]) -> None:
    """Give such entries of a module te_mx's names and shapes, in place; what does not fit is
    appended to the messages."""
    keys = tuple(prefix + key for key in module._weight_keys)
    for name in keys:
        if hasattr(given := state_dict.get(name), "per_tensor_scale"):  # torchao's NVFP4Tensor
            try:
                parts = nvfp4_checkpoints.from_torchao(given)
                state_dict[name], state_dict[f"{name}_scale"], state_dict[name + WHOLE] = parts
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{name}: {error}")
        scale = state_dict.get(f"{name}_scale")
        dense = all(isinstance(one, Tensor) and is_dense(one) for one in (given, scale))
        if dense and scale.dtype == torch.float32 and given.itemsize == 1 and given.dim() > 1:
            _repeat_scale(state_dict, name, given, scale)
    for given in [name for name in state_dict if name.startswith(keys)]:
        for end, (scale_end, read) in _ENDS.items():
            name = given.removesuffix(end)
            if name == given or name.rstrip("0123456789") not in keys:  # a part of groups: weight7
                continue
            if name in state_dict:
                error_msgs.append(f"{name} and {given} are both there; keep the one that is meant")
            elif name + scale_end not in state_dict:
                error_msgs.append(f"{name}{scale_end}: missing beside {given}")
            else:
                try:
                    _adapt(state_dict, name, end, scale_end, read)
                except (TypeError, ValueError) as error:
                    error_msgs.append(f"{given}, {name}{scale_end}: {error}")
    if any(key in state_dict for key in keys):  # what quantizes inputs elsewhere
        for name in [n for n in state_dict if n.startswith(prefix) and n.endswith(_OF_INPUTS)]:
            if "." not in name[len(prefix) :]:
                del state_dict[name]


def _repeat_scale(state_dict: Any, name: str, codes: Tensor, scale: Tensor) -> None:
    """Codes with one fp32 scale, or of stacks one for each part [groups, parts, 1] of whole blocks
    (gate and up), as those of blocks of 128 x 128 that all have it."""
    groups, (rows, k) = codes.shape[:-2], codes.shape[-2:]
    parts = scale.shape[1] if len(groups) == 1 and scale.dim() == 3 else 1
    down, across = formats.get("fp8_e4m3_128x128").scales_shape(rows, k)
    if scale.numel() == math.prod(groups) * parts and (parts == 1 or rows % (parts * 128) == 0):
        each = scale.reshape(*groups, parts, 1).repeat_interleave(down // parts, -2)
        del state_dict[f"{name}_scale"]
        state_dict[f"{name}_scale_inv"] = each.expand(*groups, down, across).contiguous()


def _adapt(state_dict: Any, name: str, end: str, scale_end: str, read: Any) -> None:
    given = state_dict.pop(name + end), state_dict.pop(name + scale_end)
    for key, one in zip((name + end, name + scale_end), given, strict=True):
        if not isinstance(one, Tensor) or not is_dense(one) or not one.dim():
            raise TypeError(f"{key} must be a dense tensor of codes or scales, got {shown(one)}")
    if end == "_packed" and name + RECIPROCAL in state_dict:
        parts = nvfp4_checkpoints.from_compressed_tensors(*given, state_dict.pop(name + RECIPROCAL))
        state_dict[name], state_dict[f"{name}_scale"], state_dict[name + WHOLE] = parts
    elif end == "_packed" and given[0].shape[-1] == 24 * given[1].shape[-1]:  # 6 bits
        state_dict[name], state_dict[f"{name}_scale_e2m3"] = given
    else:
        state_dict[name], state_dict[f"{name}_scale"] = read(*given)


class WithoutExtraState:
    """Mixin, before nn.Module: loads state_dicts with an ``_extra_state`` of this module, which is
    ignored, under strict=True too."""

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key = prefix + "_extra_state"
        if key in unexpected_keys:
            unexpected_keys.remove(key)


def load_module(
    module: Any, load_plain: Callable[..., None], state_dict: Any, prefix: str,
    local_metadata: Any, strict: bool, missing_keys: list[str], unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:  # fmt: skip
    """nn.Module._load_from_state_dict, for codes too. `load_plain` is nn.Module's own, which
    overwrites one parameter after the other and only says what did not fit.

    Missing and unexpected keys are reported as ever and keep nothing else from being loaded:
    checkpoints in several files come in calls that each have a part."""
    before = len(error_msgs)
    rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    hooks = module._load_state_dict_pre_hooks
    for hook in hooks.values():  # before the checks, because they may rename
        hook(state_dict, prefix, *rest)
    adapt(module, state_dict, prefix, error_msgs)
    module._adapt_state_dict(state_dict, prefix, error_msgs)
    codes = read_codes(module, state_dict, prefix, local_metadata, missing_keys, error_msgs)
    assign = local_metadata.get("assign_to_params_buffers", False)
    _check(module, state_dict, prefix, codes.names, assign, error_msgs)
    if len(error_msgs) > before:
        for key in [k for k in state_dict if k.startswith(prefix) and "." in k[len(prefix) :]]:
            del state_dict[key]  # of parametrizations, which load by themselves after this
        return
    # Codes last: nothing of them can fail any more, and nn.Module knows no codes.
    plain = {key: value for key, value in state_dict.items() if key not in codes.names}
    known, undo = len(missing_keys), _way_back(module, plain, prefix)
    module.__dict__["_load_state_dict_pre_hooks"] = OrderedDict()
    try:
        load_plain(plain, prefix, *rest)
        failed = len(error_msgs) > before
    except BaseException:
        undo()
        raise
    finally:
        module.__dict__["_load_state_dict_pre_hooks"] = hooks
    replaced = {prefix + name for key in codes.made for name in module._held_by(key)}
    missing_keys[known:] = [key for key in missing_keys[known:] if key not in replaced]
    if failed:
        undo()
        return
    if codes.made:
        module._take_codes(codes.made, codes.settings, codes.fixed)
    if prefix + "_extra_state" in unexpected_keys:  # Transformer Engine saves it
        unexpected_keys.remove(prefix + "_extra_state")
    module._forget_copies()


def _way_back(module: Any, state_dict: Any, prefix: str) -> Callable[[], None]:
    """What gives the module's parameters back what they hold now. Values are kept only where
    copying into one may fail, which dense tensors of floating point numbers do not."""
    held = dict(module._parameters)
    given = {name: state_dict.get(prefix + name) for name, old in held.items() if old is not None}
    given = {name: value for name, value in given.items() if value is not None}
    if all(_copies(held[name], value) for name, value in given.items()):
        kept = []
    else:
        olds = [held[name] for name in given]
        olds = [old for old in olds if not (old.is_meta or old.is_inference())]
        kept = [(old, old.detach().clone()) for old in olds]

    def undo() -> None:
        module._parameters.update(held)
        with torch.no_grad():
            for old, value in kept:
                old.copy_(value)

    return undo


def _copies(parameter: Any, value: Any) -> bool:
    """Whether a value surely can be copied into a parameter of its shape."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return (
        type(parameter) in plain
        and type(value) in plain
        and value.is_floating_point()
        and parameter.is_contiguous()
        and not parameter.is_inference()
    )


def _check(
    module: Any, state_dict: Any, prefix: str, done: tuple[str, ...], assign: bool,
    error_msgs: list[str],
) -> None:  # fmt: skip
    """Append what keeps an entry from being a parameter of the module."""
    for name, parameter in module.named_parameters():
        key = prefix + name
        if key in done or key not in state_dict:
            continue
        value = state_dict[key]
        if not torch.overrides.is_tensor_like(value):
            error_msgs.append(f"{key} must be a tensor, got {type(value).__name__}")
        elif isinstance(value, torch.Tensor) and not is_dense(value):
            error_msgs.append(f"{key} must be a dense tensor, got {shown(value)}")
        elif value.element_size() == 1:
            error_msgs.append(codes_alone(key, value, state_dict))
        elif value.is_meta and not (assign or parameter.is_meta):
            error_msgs.append(f"{key} is on the meta device and has no values")
        elif value.shape != parameter.shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from "
                f"checkpoint, the shape in current model is {tuple(parameter.shape)}"
            )


_NAMED = {  # 6-bit codes look alike
    fmt.name: f"_scale_{fmt.element.name}" for fmt in map(formats.get, formats.names())
    if fmt.element.bits == 6
}  # fmt: skip
_EIGHT_BITS = {
    fmt.element.torch_dtype for fmt in map(formats.get, formats.names()) if fmt.element.bits == 8
}
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
SCALES = ("_scale", "_scale_inv", *_NAMED.values())
WHOLE = "_scale_2"  # behind the name of a weight: its tensor scale
RECIPROCAL = "_global_scale"  # compressed-tensors'
_OF_INPUTS = "input_scale", "input_global_scale"  # of ModelOpt and compressed-tensors
_RECIPE, _FIXED = "te_mx_recipe", "te_mx_frozen"  # in the metadata of a module


class Codes(NamedTuple):
    """What a state_dict has of a module's quantized weights: codes and scales by key, the recipe,
    the names that need no further look, and what freezing fixed (None: what it is fixed to)."""

    made: dict[str, tuple[Tensor, ...]]
    settings: Settings | None
    names: tuple[str, ...]
    fixed: Fixed | None = None


def save_codes(module: Any, destination: Any, prefix: str) -> None:
    """state_dict entries of a module without masters."""
    frozen = module._source
    metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
    if metadata is not None:
        metadata[_RECIPE] = frozen.settings._asdict()
        metadata[_FIXED] = frozen.fixed._asdict()
    for key in module._weight_keys:
        codes = saved_codes(module, key)
        destination.update(named_codes(module, prefix, key, codes, frozen.settings.w))
    for name, value in module._saved_with.items():
        destination.setdefault(prefix + name, value)


_WITHOUT_VALUES = ContextVar("codes without values", default=False)


@contextmanager
def codes_without_values() -> Iterator[None]:
    """Meanwhile a state_dict says names, shapes and dtypes of codes alone: no layout is undone."""
    token = _WITHOUT_VALUES.set(True)
    try:
        yield
    finally:
        _WITHOUT_VALUES.reset(token)


def saved_codes(module: Any, key: str) -> list[Tensor]:
    """Codes and scales, and the tensor scale, of a weight without a master, by rows."""
    if not _WITHOUT_VALUES.get() or module._saved_as:  # some names follow from values
        return module._codes(key)
    fmt, (*groups, n, k) = formats.get(module._source.settings.w), module._source.shapes[key]
    shapes: list[tuple[int, ...]] = [fmt.codes_shape(n, k), fmt.scales_shape(n, k)]
    dtypes = [torch.uint8, fmt.scaling.storage]
    if fmt.tensor_scaled:
        shapes.append(fmt.tensor_scale_shape(n))
        dtypes.append(torch.float32)
    of_each = zip(shapes, dtypes, strict=True)
    return [torch.empty((*groups, *one), dtype=dtype, device="meta") for one, dtype in of_each]


def named_codes(
    module: Any, prefix: str, key: str, made: Sequence[Tensor], fmt: str,
    names: tuple[str, ...] = (),
) -> dict[str, Tensor]:  # fmt: skip
    """Codes and scales of a weight in a format, and its tensor scale if it has one, as a state_dict
    names them; names: of one of several parameters, whose codes these are."""
    dtype, single = _dtype_of(fmt), names or module._held_by(key) == (key,)
    code_end, end, *ends = module._saved_as or ("", _end_of(fmt), WHOLE)
    # Weights of several parameters are stacked: one part for each.
    parts = [[part] if single else part.unbind(0) for part in made]
    named: dict[str, Tensor] = {}
    for name, code, scale, *whole in zip(names or module._held_by(key), *parts, strict=True):
        code = code.view(dtype)
        scale = scale.view(torch.float8_e4m3fn) if whole else scale
        if code_end == "_blocks":  # gpt-oss: the bytes of a block have a dimension of their own
            code = code.unflatten(-1, (scale.shape[-1], -1))
        named[prefix + name + code_end] = code
        named |= {prefix + n: t for n, t in _scales_as(module, name, end, scale).items()}
        for whole_end, one in zip(ends, whole, strict=False):
            read = module._saved_with.get(name + whole_end)
            named[prefix + name + whole_end] = _whole_as(whole_end, one, read)
    return named


def _scales_as(module: Any, name: str, end: str | None, scale: Tensor) -> dict[str, Tensor]:
    """Scales as files have them; an end of None: one a tensor, or a part of a stack, that all its
    blocks repeat."""
    if end is not None:
        return {name + end: scale}
    read = module._saved_with[f"{name}_scale"]
    parts = read.shape[-2] if read.dim() == 3 else 1
    one = scale[..., :: max(scale.shape[-2] // parts, 1), :1]
    if not torch.equal(one.repeat_interleave(scale.shape[-2] // parts, -2).expand_as(scale), scale):
        return {f"{name}_scale_inv": scale}  # other codes came meanwhile
    return {f"{name}_scale": one.reshape(read.shape).clone()}


def _whole_as(end: str, whole: Tensor, read: Tensor | None) -> Tensor:
    """A tensor scale as files have it: what was read of one, while the weight is that."""
    if end == WHOLE:
        return whole
    if read is not None:  # on whatever device the file was read to
        read = read.to(whole.device)
        if torch.equal(read.float().reciprocal().reshape(whole.shape), whole):
            return read
    return whole.reciprocal().reshape(whole.shape or (1,))


def read_codes(
    module: Any, state_dict: Any, prefix: str, local_metadata: Any, missing_keys: list[str],
    error_msgs: list[str],
) -> Codes:  # fmt: skip
    """The quantized weights in a state_dict, which change nothing yet; what is missing of them and
    what is wrong with them is appended to the lists."""
    weights = {key: prefix + key for key in module._weight_keys}
    scales: dict[str, str] = {}
    for key, name in weights.items():
        given = [name + end for end in SCALES if name + end in state_dict]
        if len(given) > 1:
            error_msgs.append(f"{' and '.join(given)} are both there; keep the one that is meant")
        if given:
            scales[key] = given[0]
    wholes = {key: name + WHOLE for key, name in weights.items() if name + WHOLE in state_dict}
    ours = (*weights.values(), *scales.values(), *wholes.values())
    nothing = Codes({}, None, ours)
    if not scales:
        if not module._source.dropped:
            return Codes({}, None, ())
        _refuse_plain(module, weights, state_dict, missing_keys, error_msgs)
        return nothing
    if len(scales) < len(weights):
        end = next(e for e in reversed(SCALES) if next(iter(scales.values())).endswith(e))
        missing = [f"{name}{end}" for key, name in weights.items() if key not in scales]
        error_msgs.append(
            f"{', '.join(missing)}: missing beside {next(iter(scales.values()))}; the weights of "
            "a module are frozen together"
        )
        return nothing
    key = next(iter(weights))
    end = scales[key].removeprefix(weights[key])
    stored = state_dict[scales[key]]
    first = _widened(stored, end, module._shape_of(key))
    powers = first is not stored and stored.dtype in _E8M0
    settings = _settings_for(
        module, local_metadata.get(_RECIPE), state_dict.get(weights[key]), first, end, powers,
        prefix, error_msgs, bool(wholes),
    )  # fmt: skip
    meant = _end_of(settings.w)
    if end != meant and (end in _NAMED.values() or meant in _NAMED.values()):
        error_msgs.append(
            f"{scales[key]}: the codes are {settings.w}, whose scales are called {weights[key]}"
            f"{meant}; rename them if that is the right format"
        )
        return nothing
    dropped, made = module._source.dropped, {}
    for key, name in weights.items():
        if not dropped and not module._is_held(key):
            error_msgs.append(
                f"{scales[key]}: a quantized weight does not load into a layer with "
                "parameters_split or a parametrized weight; build it without"
            )
            return nothing
        held = module._stored(key)[0] if dropped else module._sample(key)
        shape = module._shape_of(key)
        code, scale = state_dict.get(name), _widened(state_dict[scales[key]], end, shape)
        whole = state_dict[wholes[key]] if key in wholes else None
        problem = _problem(code, scale, shape, settings.w) or _whole_problem(
            whole, shape, settings.w, _RECIPE in local_metadata
        )
        assign = local_metadata.get("assign_to_params_buffers", False) or held.is_meta
        given = [code, scale] if whole is None else [code, scale, whole]
        if not (problem or assign) and any(part.is_meta for part in given):
            problem = "are on the meta device and have no values"
        if problem:
            error_msgs.append(f"{name}, {scales[key]}: {problem}")
            return nothing
        given = [_plain(part) for part in given]
        if not assign:
            given = [part.to(held.device, copy=True) for part in given]
        made[key] = tuple(given)
    fixed = None if _RECIPE not in local_metadata else NOTHING
    if (saved := local_metadata.get(_FIXED)) is not None:
        try:
            fixed = Fixed(**saved)
        except TypeError as error:
            error_msgs.append(
                f"{weights[key]}: was frozen in a way that this version of te_mx does not know, "
                f"{saved!r} ({error})"
            )
            return nothing
    return Codes(made, settings, ours, fixed)


def _plain(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, row after row: one of a column may have strides of any size."""
    if tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    tensor = tensor.detach().resolve_neg()
    return (tensor if tensor.dim() else tensor.view(1)).view(torch.uint8)


def _widened(scales: Any, end: str, shape: tuple[int, ...]) -> Any:
    """Scales of checkpoints that store in bf16, or in E8M0 bytes for blocks of 128 x 128, what
    others do in fp32; the latter are told from those of MXFP8 by their number."""
    if end != "_scale_inv" or not isinstance(scales, Tensor) or not is_dense(scales):
        return scales
    if scales.dtype == torch.bfloat16:
        return scales.float()
    of_mx, of_blocks = (
        (*shape[:-2], *formats.get(name).scales_shape(*shape[-2:]))
        for name in ("mxfp8_e4m3", "fp8_e4m3_128x128")
    )
    if scales.dtype in _E8M0 and of_mx != scales.shape == of_blocks:
        return scales.contiguous().view(torch.float8_e8m0fnu).float()
    return scales


def _refuse_plain(
    module: Any, weights: dict[str, str], state_dict: Any, missing_keys: list[str],
    error_msgs: list[str],
) -> None:  # fmt: skip
    """A state_dict without scales loads into anything but a module without masters."""
    for name in weights.values():
        value = state_dict.get(name)
        if value is None:
            missing_keys += [name, name + _end_of(module._source.settings.w)]
        elif isinstance(value, Tensor) and value.element_size() == 1:
            error_msgs.append(codes_alone(name, value))
        else:
            error_msgs.append(
                f"{name} is in high precision, but the layer is frozen without its master "
                "weight; call te_mx.unfreeze_weights(model, dequantize=True) before loading"
            )


def codes_alone(name: str, value: Tensor, state_dict: Any = ()) -> str:
    """The message for codes that have no scales beside them, or where a parameter takes none."""
    if given := [name + end for end in SCALES if name + end in state_dict]:
        return (
            f"{name} holds codes ({value.dtype}, scales in {given[0]}), and this layer takes them "
            "only as a whole weight: build it without parameters_split and without "
            "parametrizations, or dequantize the checkpoint first"
        )
    return (
        f"{name} holds codes ({value.dtype}) and there are no scales for them: {name}_scale is "
        f"missing, or {name}_scale_inv; load both, or dequantize the checkpoint first"
    )


def _dtype_of(name: str) -> torch.dtype:
    """The dtype that codes of a format have in a state_dict."""
    element = formats.get(name).element
    return element.torch_dtype if element.bits == 8 and element.torch_dtype else torch.uint8


def _end_of(name: str) -> str:
    """What is added to the name of a weight for its scales in a state_dict."""
    if name in _NAMED:
        return _NAMED[name]
    return SCALES[formats.get(name).scaling.scale == "fp32"]


def _problem(codes: Any, scales: Any, shape: tuple[int, ...], name: str) -> str:
    """What is wrong with a weight of this shape and format in a state_dict, or an empty string."""
    if codes is None:
        return "a weight_scale needs a weight of codes beside it"
    if not isinstance(codes, Tensor) or not isinstance(scales, Tensor):
        return f"must be tensors, got {type(codes).__name__} and {type(scales).__name__}"
    if not (is_dense(codes) and is_dense(scales)):
        return f"must be dense tensors, got {shown(codes)} and {shown(scales)}"
    fmt, dtype = formats.get(name), _dtype_of(name)
    if codes.dtype != dtype:
        told = f"codes must be {str(dtype).removeprefix('torch.')}, got {codes.dtype}"
        if codes.dtype in _EIGHT_BITS:
            told += "; bind a recipe with the format of these to the layer (te_mx.convert_model)"
        if codes.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            told += ", or make others of them by te_mx.formats.convert"
        if scales.dtype == torch.float8_e4m3fn and codes.dtype == torch.uint8:
            return _whole_problem(None, shape, "nvfp4", False)
        if codes.dtype == torch.uint8:
            four, sizes = formats.get("mxfp4"), shape[-2:]
            wanted = (
                str((*shape[:-2], *one(*sizes))) for one in (four.codes_shape, four.scales_shape)
            )
            told += (
                f"; MXFP4 has {' and '.join(wanted)} bytes of codes and scales for this weight, "
                f"got {tuple(codes.shape)} and {tuple(scales.shape)}"
            )
        return told
    if fmt.scaling.scale == "fp32" and scales.dtype != torch.float32:
        return f"scales of {name} must be float32, got {scales.dtype} {tuple(scales.shape)}"
    if fmt.tensor_scaled and scales.dtype not in (torch.uint8, torch.float8_e4m3fn):
        return (
            f"scales of {name} must be float8_e4m3fn, or their bytes, got {scales.dtype} "
            f"{tuple(scales.shape)}"
        )
    if fmt.scaling.scale == "e8m0" and scales.dtype not in _E8M0:
        known = (formats.get(f"fp8_e4m3_{block}") for block in ("128x128", "1x128"))
        wanted = (str((*shape[:-2], *each.scales_shape(*shape[-2:]))) for each in known)
        return (
            f"scales must be uint8 (E8M0 bytes), got {scales.dtype} {tuple(scales.shape)}; float32 "
            "scales of 128x128 or 1x128 blocks load beside float8_e4m3fn codes, for this weight "
            f"{' or '.join(wanted)}, those of tensors or channels belong to other formats, which "
            "do not load: dequantize the checkpoint first"
        )
    groups, sizes = shape[:-2], shape[-2:]
    expected = [(*groups, *fmt.codes_shape(*sizes)), (*groups, *fmt.scales_shape(*sizes))]
    got = [tuple(codes.shape), tuple(scales.shape)]
    if got != expected:
        height, width = fmt.scaling.block
        block = f"{width} columns" if height == 1 else f"block of {height} x {width}"
        return (
            f"shapes must be {expected[0]} and {expected[1]} (one scale per {block}), got "
            f"{got[0]} and {got[1]}"
        )
    return ""


def _whole_problem(whole: Any, shape: tuple[int, ...], name: str, ours: bool) -> str:
    """What is wrong with the tensor scale of a weight, or its absence. ours: te_mx wrote it."""
    fmt = formats.get(name)
    if not fmt.tensor_scaled:
        return "" if whole is None else f"there is a {WHOLE}, and {name} has no tensor scale"
    expected: tuple[int, ...] = (*shape[:-2], *fmt.tensor_scale_shape(shape[-2]))
    if whole is None:
        return f"{name} needs a tensor scale beside them, called as the weight with {WHOLE} behind"
    if not isinstance(whole, Tensor) or not is_dense(whole) or whole.dtype != torch.float32:
        return f"the tensor scale must be a float32 tensor, got {shown(whole)}"
    if whole.numel() != math.prod(expected):
        return f"the tensor scale must have shape {expected}, got {tuple(whole.shape)}"
    if ours or whole.is_meta:
        return ""
    if not bool(((whole >= 0) & whole.isfinite()).all()):
        return f"the tensor scale must be positive and finite, got {whole.flatten()[:4].tolist()}"
    return nvfp4_checkpoints.reciprocal_problem("the tensor scale", whole)


def _could_be(name: str, codes: Any, scales: Any, end: str) -> bool:
    """Whether codes and scales have the dtypes and the names of a format in a state_dict."""
    of_fp32 = formats.get(name).scaling.scale == "fp32"
    is_fp32 = getattr(scales, "dtype", None) == torch.float32
    if end in _NAMED.values() and end != _end_of(name):
        return False
    return _dtype_of(name) == getattr(codes, "dtype", None) and of_fp32 == is_fp32


def _settings_for(
    module: Any, saved: Any, codes: Any, scales: Any, end: str, powers: bool, prefix: str,
    error_msgs: list[str], has_whole: bool,
) -> Settings:  # fmt: skip
    """The settings that were saved with codes, or, without any, those that stand in for them.
    powers: fp32 scales were read from E8M0 bytes. has_whole: there are tensor scales."""
    default = DEFAULT_SETTINGS
    if saved is None:
        own = module._source.settings or module._bound
        own = own if isinstance(own, Settings) else None
        shape = module._shape_of(module._weight_keys[0])
        fits = own is not None and _could_be(own.w, codes, scales, end)
        if own is not None and fits and not _problem(codes, scales, shape, own.w):
            return own
        blockwise = (DeepSeekV3(), Float8BlockScaling(True, w_block_scaling_dim=1))
        for recipe in (Float8BlockScaling(),) if powers else blockwise:
            if getattr(scales, "dtype", None) == torch.float32 and not _problem(
                codes, scales, tuple(getattr(codes, "shape", ())), recipe.settings.w
            ):
                return recipe.settings
        packed = [
            name for name in every_name()
            if _end_of(name) == end and formats.get(name).element.bits < 8
            and formats.get(name).tensor_scaled == has_whole
            and not (has_whole and formats.get(name).tensor_scale_shape(1))
            and not _problem(codes, scales, shape, name)
        ]  # fmt: skip
        if has_whole and not packed:  # what does not fit is told of this one
            packed = ["nvfp4"]
        if len(packed) != 1:
            return own if own is not None and fits else default
        known = own is not None and formats.get(packed[0]).scaling.knows(own.scale_rule)
        return (own if own is not None and known else default)._replace(w=packed[0])
    try:
        return _settings_of(saved)
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        error_msgs.append(
            f"{prefix}{module._weight_keys[0]}: was frozen under a recipe that this version of "
            f"te_mx does not know, {saved!r} ({type(error).__name__}: {error})"
        )
        return default


def _settings_of(saved: dict[str, Any]) -> Settings:
    """The settings that were saved, checked as those of a recipe are."""
    saved = dict(saved)
    if "fwd_fmt" in saved:  # of an earlier version: one format for inputs and weights
        saved["x"] = saved["w"] = saved.pop("fwd_fmt")
        saved["g"] = saved.pop("bwd_fmt")
    settings = Settings(**saved)
    apart = {name: saved.get(name, "") for name in ("x_col", "w_col", "g_col", "g_rule", "w_rule")}
    for name in filter(None, (settings.x_col, settings.w_col, settings.g_col)):
        formats.get(name).check_rule(settings.scale_rule)
    formats.get(settings.g_columns).check_rule(settings.gradient_rule)
    roles = [formats.get(name) for name in (settings.w, settings.g)]
    w, g = (  # which may have a rule of their own
        fmt.name if fmt.scaling.knows(settings.scale_rule) else settings.x for fmt in roles
    )
    made = BlockScaling(
        settings.x, w, g, scale_rule=settings.scale_rule, precision=settings.precision,
        alignment_spread=settings.spread, backward_override=settings.backward,
        wgrad_with_hp=settings.wgrad_hp, one_copy_weights=settings.one_copy,
        split_k=settings.split_k,
    ).settings  # fmt: skip
    return made._replace(w=roles[0].name, g=roles[1].name, **apart)
