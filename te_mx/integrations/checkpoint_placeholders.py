"""What stands in a module while Transformers loads codes into it, and what is made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_mx import formats
from te_mx.fusion.experts import ExpertsModule
from te_mx.integrations.checkpoint_plan import Plan
from te_mx.integrations.checkpoint_scales import scale_bytes, scale_floats
from te_mx.nn.base import MXModule
from te_mx.recipe import Float8BlockScaling


def put_placeholders(module: MXModule, plan: Plan) -> dict[str, nn.Parameter]:
    """Put parameters as the files have them in the place of the weights, which are returned."""
    fmt, (code_end, scale_end) = formats.get(plan.fmt), plan.ends
    layer: Any = module
    if isinstance(module, ExpertsModule) and module._transposed != plan.experts_only:
        raise ValueError(f"{module._label()}: no names are known for codes of such experts")
    masters = {}
    for key in module._weight_keys:
        if isinstance(module, ExpertsModule) and module._cuts_a_block(key, fmt):
            half = module._shape_of(key)[-2] // 2
            raise ValueError(
                f"{module._label()}: gate and up have {half} rows each, no whole blocks of "
                f"{plan.fmt}; their scales do not go together in one stack"
            )
        whole = module._whole(key)
        groups, (rows, k) = whole.shape[:-2], whole.shape[-2:]
        masters[key] = layer._parameters[key]
        layer._parameters[key] = None
        if code_end:  # what Transformers initializes and finds done already
            layer.__dict__[key] = done = torch.empty(0)
            done._is_hf_initialized = True  # type: ignore[attr-defined]
        codes = (*groups, *fmt.codes_shape(rows, k))
        if plan.experts_only:  # the bytes of a block have a dimension of their own
            codes = (*groups, rows, k // 32, 16)
        for end, shape, dtype in (
            (code_end, codes, torch.uint8 if fmt.element.bits < 8 else fmt.element.torch_dtype),
            (scale_end, (*groups, *fmt.scales_shape(rows, k)), fmt.scaling.storage),
        ):
            value = torch.empty(shape, dtype=dtype, device="meta")
            layer.register_parameter(key + end, nn.Parameter(value, requires_grad=False))
    return masters


def take(name: str, module: MXModule, masters: dict[str, nn.Parameter], plan: Plan) -> None:
    """Give a module what was loaded into its placeholders, which Transformers marks then."""
    layer: Any = module
    loaded = {}
    for key, master in masters.items():
        layer.__dict__.pop(key, None)
        for end in plan.ends:
            held = layer._parameters
            loaded[key + end] = held[key] if not end else held.pop(key + end)
        layer._parameters[key] = master
    missing = [
        f"{name}.{key}" for key, value in loaded.items()
        if value.is_meta or not getattr(value, "_is_hf_initialized", False)
    ]  # fmt: skip
    if missing:
        raise ValueError(
            f"the checkpoint has no {', '.join(missing)}, though its quantization_config says that "
            "the layer is quantized; name the layer among those that are left out there"
        )
    state = {key: value.detach() for key, value in loaded.items()}
    read = scale_bytes if plan.has_bytes else scale_floats
    for key in masters:
        scales = key + plan.ends[1]
        state[scales] = read(f"{name}.{scales}", state[scales])
    try:
        layer.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"{name}: {' '.join(str(error).split())}; correct what the quantization_config says of "
            "this layer, or the file"
        ) from None
    if not module._is_dropped():
        raise ValueError(f"{name}: the checkpoint's tensors are no codes with scales")
    if plan.powers:  # then those of inputs are, too
        assert module._frozen is not None
        module._frozen.settings = Float8BlockScaling().settings
