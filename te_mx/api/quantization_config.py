"""quantization_config: what config.json says of a model of codes, in its readers' words."""

from typing import Any

from torch import nn

from te_mx import formats
from te_mx.api.freeze import one_elsewhere
from te_mx.fusion.experts import ExpertsModule
from te_mx.integrations.checkpoints import STYLES
from te_mx.integrations.checkpoints.plan import Style
from te_mx.nn.base import MXModule
from te_mx.nn.linear import Linear
from te_mx.runtime.arguments import check_module, check_one_of
from te_mx.weights.freezing import Freezable
from te_mx.weights.missing import claim


def quantization_config(model: nn.Module, style: str) -> dict[str, Any]:
    """Have a model whose weights are codes save them as others name them, and say what they are.

    The state_dict of the model has these names from now on (te_mx loads all of them), and
    ``model.config.quantization_config`` becomes the result, where there is a config: then
    ``save_pretrained`` writes both.

    ====================  ===================  ==================================  ================
    style                 weights              names                               read by
    ====================  ===================  ==================================  ================
    "compressed-tensors"  MXFP8                ``weight``, ``weight_scale``        vLLM, SGLang
    ..                    MXFP6 (E2M3), MXFP4  ``weight_packed``, ``weight_scale``  ..
    ..                    NVFP4, inputs bf16   .., ``weight_global_scale``         ..
    "modelopt"            MXFP8                ``weight``, ``weight_scale``        vLLM, SGLang
    ..                    NVFP4, inputs bf16   .., ``weight_scale_2``              ..
    "mxfp8"               MXFP8                ``weight``, ``weight_scale_inv``    Transformers
    "fp8"                 FP8, blocks 128x128  ``weight``, ``weight_scale_inv``    Transformers, ..
    ====================  ===================  ==================================  ================

    Args:
        model: its te_mx layers were frozen by ``te_mx.freeze_weights(drop_master=True)``, all to
            one format; layers that were not are listed as left out.
        style: one of the four.

    Returns:
        The config, of values that JSON has.

    Raises:
        TypeError: model is no nn.Module.
        ValueError: the style is unknown, or does not have the format; no layer holds codes, or they
            are of several formats; inputs are not quantized (``activations="bf16"``) in some of
            these layers alone, or in a style that cannot say it; a layer with codes is no
            te_mx.Linear and no stack of Transformers' experts [E, out, in], which is what others
            read, or its rows are no whole blocks; it is the output embeddings, where these are tied
            to others or readers of the style expect values. Nothing is changed.
    """
    check_module(model)
    check_one_of("style", style, STYLES)
    chosen = STYLES[style]
    dropped = [
        (n or "(root)", m) for n, m in model.named_modules()
        if isinstance(m, MXModule) and m._source.saved is not None
    ]  # fmt: skip
    fmt, weight_only = _the_format(dropped)
    if fmt not in chosen.ends:
        raise ValueError(f"{style!r} has {' and '.join(chosen.ends)}, the layers hold {fmt}")
    if formats.get(fmt).tensor_scaled and not weight_only:
        raise ValueError(
            f"readers of {style!r} quantize inputs of {fmt} with a scale from calibration, which "
            "te_mx does not have: give te_mx.freeze_weights activations='bf16'"
        )
    if weight_only and not (chosen.says_inputs or formats.get(fmt).tensor_scaled):
        raise ValueError(
            f"{style!r} means inputs that are quantized, the layers were frozen with "
            "activations='bf16': take 'compressed-tensors', or give te_mx.freeze_weights other "
            "activations"
        )
    for name, module in dropped:
        if problem := _why_not(module, fmt) or _why_no_head(model, module, chosen):
            raise ValueError(f"{name}: {problem}")
    for group in one_elsewhere(dropped) if formats.get(fmt).tensor_scaled else ():
        scales = [float(module._codes("weight")[2]) for _, module in group]
        if len({*scales}) > 1:
            raise ValueError(
                f"{', '.join(name for name, _ in group)}: readers of {style!r} multiply them as "
                f"one, with one tensor scale, and they have {scales}; te_mx.freeze_weights gives "
                "layers that it freezes in one call a common one"
            )
    codes = {id(module) for _, module in dropped}
    linear = (nn.Linear, MXModule)
    left = [n for n, m in model.named_modules() if isinstance(m, linear) and id(m) not in codes]
    made = chosen.make(fmt, weight_only, left)
    claim(model, [(module, chosen.ends[fmt]) for _, module in dropped], made)
    if any(isinstance(module, ExpertsModule) for _, module in dropped):
        from te_mx.integrations.hf_conversions import convert_scales_too

        convert_scales_too(model, made)
    if getattr(model, "config", None) is not None and not isinstance(model.config, dict):
        model.config.quantization_config = made  # type: ignore[union-attr]
    return made


def _the_format(dropped: list[tuple[str, Any]]) -> tuple[str, bool]:
    """The format of all weights, and whether inputs are not quantized."""
    if not dropped:
        raise ValueError(
            "no layer holds codes: call te_mx.freeze_weights(model, drop_master=True) first"
        )
    found = {m._source.saved: n for n, m in dropped}
    if len({fmt for fmt, _ in found}) > 1:
        rows = ", ".join(f"{name} {fmt}" for (fmt, _), name in found.items())
        raise ValueError(f"the layers hold several formats ({rows}), and a config says one")
    if len(found) > 1:
        raise ValueError(
            f"inputs are left as they are in some layers ({found[next(iter(found))[0], True]}) and "
            "quantized in others, and a config says one; give te_mx.freeze_weights the same "
            "activations for all"
        )
    return next(iter(found))


def _why_not(module: Freezable, fmt: str) -> str:
    """Why others could not read what this module holds, or an empty string."""
    if not isinstance(module, Linear | ExpertsModule):
        return (
            f"is a {type(module).__name__}, for which others have no names; leave it out by "
            "filter_fn of te_mx.freeze_weights"
        )
    if isinstance(module, ExpertsModule) and module._transposed:
        return "holds codes of transposed weights, which others would read the other way round"
    width = formats.get(fmt).scaling.block[1]
    for key in module._weight_keys:
        *_, k = module._shape_of(key)
        if isinstance(module, ExpertsModule) and module._cuts_a_block(key, formats.get(fmt)):
            return f"{key}: a block of {fmt} reaches from gate into up, which others have apart"
        if width < 128 and k % width:
            return f"{key} has {k} columns; others have whole blocks of {width} only"
    return ""


def _why_no_head(model: Any, module: Any, style: Style) -> str:
    """Why readers would take the codes of the output embeddings for values, or an empty string."""
    find = getattr(model, "get_output_embeddings", None)
    if find is None or find() is not module:
        return ""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if style.has_head and not tied:
        return ""
    why = "are tied to the input embeddings" if tied else "stay in high precision for its readers"
    return f"output embeddings {why}; leave them out by filter_fn of te_mx.freeze_weights"
