"""What stands in a module while Transformers loads codes into it, scales in the dtypes that others
give them, and what is made of both."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from te_mx import formats
from te_mx.fusion.experts import ExpertsModule
from te_mx.integrations.checkpoint_plan import Plan
from te_mx.nn.base import MXModule
from te_mx.recipe import Float8BlockScaling

_BIAS, _LARGEST = 127, 254  # of E8M0; 255 is NaN


def scale_bytes(name: str, scales: Tensor) -> Tensor:
    """E8M0 bytes of the scales of a tensor of this name: bytes, float8_e8m0fnu, which is the same,
    or the powers of two themselves in another floating dtype.

    Raises:
        ValueError: they are none of these.
    """
    if scales.dtype == torch.uint8:
        return scales
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.view(torch.uint8)
    got = str(scales.dtype)
    if scales.is_floating_point():
        mantissas, exponents = torch.frexp(scales.double())
        made = exponents + (_BIAS - 1)  # a mantissa is 1/2 and above
        wrong = (mantissas != 0.5) | (made < 0) | (made > _LARGEST)
        if not wrong.any():
            return made.to(torch.uint8)
        got += f" with {scales[wrong][0].item()}"
    raise ValueError(
        f"{name}: scales must be E8M0 bytes (uint8 or float8_e8m0fnu) or powers of two from 2^-127 "
        f"to 2^127 in a floating dtype, got {got}; if they are right, the format is another one: "
        "say so in the quantization_config, or dequantize the checkpoint with the tool that wrote "
        "it"
    )


def scale_floats(name: str, scales: Tensor) -> Tensor:
    """fp32 scales of a tensor of this name: what E8M0 bytes stand for, others as they are."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return scales.view(torch.float8_e8m0fnu).float()
    return scales


class Scales(ConversionOps):
    """The first step of Transformers' conversions of scales: what is merged then is of one dtype,
    bytes or fp32, and does not depend on what torch makes of several."""

    def __init__(self, as_bytes: bool) -> None:
        self.read = scale_bytes if as_bytes else scale_floats

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The same tensors, or lists of tensors, in this dtype."""
        name = kwargs.get("full_layer_name") or ""
        return {
            pattern: [self.read(name or pattern, one) for one in given]
            if isinstance(given, list)
            else self.read(name or pattern, given)
            for pattern, given in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """They are saved as they are."""
        return self


def refuse_casts(files: Any, plan: Plan) -> None:
    """Raise ValueError for codes, and scales that are to be bytes, in another dtype in safetensors
    files where Transformers would cast them: before 5.21 it does not ask quantizers
    (``get_new_dtype``)."""
    if hasattr(HfQuantizer, "get_new_dtype"):
        return
    code_end, scale_end = plan.ends
    end = scale_end if plan.experts_only else f"weight{scale_end}"  # not those of inputs
    codes = "F8_E4M3" if formats.get(plan.fmt).element.bits == 8 else "U8"
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, "pt") as file:
            scales = [name for name in file.keys() if name.endswith(end)]  # noqa: SIM118
            wanted = {name.removesuffix(scale_end) + code_end: codes for name in scales}
            if plan.has_bytes:
                wanted |= dict.fromkeys(scales, "U8")
            else:  # a cast of these to fp32 is none of bytes
                bytes_ = [one for one in scales if file.get_slice(one).get_dtype() == "U8"]
                wanted |= dict.fromkeys(bytes_, "F32")
            for name in wanted.keys() & set(file.keys()):
                if (dtype := file.get_slice(name).get_dtype()) != wanted[name]:
                    raise ValueError(
                        f"{name} must be {wanted[name]} for this version of Transformers, which "
                        f"would cast it to that, got {dtype}; install 5.21 or later, or correct "
                        "the file"
                    )


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
    if module._source.saved is None:
        raise ValueError(f"{name}: the checkpoint's tensors are no codes with scales")
    if plan.powers:  # then those of inputs are, too
        module._source.settings = Float8BlockScaling().settings
