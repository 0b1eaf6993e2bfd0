"""What stands in a module while Transformers loads codes into it, scales in the dtypes that others
give them, and what is made of both."""

from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from te_mx import formats
from te_mx.formats.nvfp4_checkpoints import tensor_scale
from te_mx.fusion.experts import ExpertsModule
from te_mx.integrations.checkpoints.plan import Plan, storage
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


class _EachTensor(ConversionOps):
    """A step of Transformers' conversions that does something to every tensor by itself."""

    def of(self, name: str, given: Tensor) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The same tensors, or lists of tensors, changed."""
        name = kwargs.get("full_layer_name") or ""
        return {
            pattern: [self.of(name or pattern, one) for one in given]
            if isinstance(given, list)
            else self.of(name or pattern, given)
            for pattern, given in input_dict.items()
        }


class Scales(_EachTensor):
    """The first step for scales of blocks: what is merged then is of one dtype, bytes or fp32, and
    does not depend on what torch makes of several."""

    def __init__(self, as_bytes: bool) -> None:
        self.as_bytes = as_bytes

    def of(self, name: str, given: Tensor) -> Tensor:
        return (scale_bytes if self.as_bytes else scale_floats)(name, given)

    @property
    def reverse_op(self) -> ConversionOps:
        """They are saved as they are."""
        return self


class Numbers(_EachTensor):
    """The first step for a number a matrix, of this shape in files: [1, 1], merged as matrices."""

    def __init__(self, shape: tuple[int, ...], back: bool = False) -> None:
        self.shape, self.back = shape, back

    def of(self, name: str, given: Tensor) -> Tensor:
        return given.reshape(self.shape if self.back else (1, 1))

    @property
    def reverse_op(self) -> ConversionOps:
        """The other way."""
        return Numbers(self.shape, not self.back)


class OneAMatrix(_EachTensor):
    """The last step for numbers of the parts of matrices, [experts, parts, 1], which are the same:
    [experts]. back: the other way."""

    def __init__(self, parts: int, back: bool = False) -> None:
        self.parts, self.back = parts, back

    def of(self, name: str, given: Tensor) -> Tensor:
        if self.back:
            return given.reshape(-1, 1, 1).repeat(1, self.parts, 1)
        flat = given.flatten(1)
        if (differ := (flat != flat[:, :1]).any(1)).any():
            expert = int(differ.nonzero()[0])
            raise ValueError(
                f"{name}: the parts of expert {expert}, gate and up, have tensor scales of their "
                f"own, {flat[expert].tolist()}, and te_mx multiplies them as one matrix with one; "
                "quantize them with a common one, as vLLM wants it too"
            )
        return flat[:, 0].contiguous()

    @property
    def reverse_op(self) -> ConversionOps:
        """The other way."""
        return OneAMatrix(self.parts, not self.back)


def refuse_casts(files: Any, plan: Plan) -> None:
    """Raise ValueError for codes, and scales that are to be bytes, in another dtype in safetensors
    files where Transformers would cast them: before 5.21 it asks no quantizer."""
    if hasattr(HfQuantizer, "get_new_dtype"):
        return
    code_end, scale_end = plan.ends[:2]
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
            elif len(plan.ends) == 3:
                wanted |= dict.fromkeys(scales, "F8_E4M3")
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


def parts_of(module: MXModule, key: str) -> int:
    """Of how many matrices of the files a weight is made: experts' gate and up are two."""
    return 2 if isinstance(module, ExpertsModule) and key.startswith("gate_up") else 1


def put_placeholders(
    module: MXModule, plan: Plan, number: tuple[int, ...]
) -> dict[str, nn.Parameter]:
    """Put parameters as the files have them in the place of the weights, which are returned.
    number: the shape of what is a number a matrix."""
    fmt, layer = formats.get(plan.fmt), cast(Any, module)
    experts = isinstance(module, ExpertsModule)
    if experts and layer._transposed != plan.experts_only:
        raise ValueError(f"{module._label()}: no names are known for codes of such experts")
    masters = {}
    for key in module._weight_keys:
        if experts and layer._cuts_a_block(key, fmt):
            half = module._shape_of(key)[-2] // 2
            raise ValueError(
                f"{module._label()}: gate and up have {half} rows each, no whole blocks of "
                f"{plan.fmt}; their scales do not go together in one stack"
            )
        whole = module._whole(key)
        groups, (rows, k) = whole.shape[:-2], whole.shape[-2:]
        masters[key] = layer._parameters[key]
        layer._parameters[key] = None
        if plan.ends[0]:  # what Transformers initializes and finds done already
            layer.__dict__[key] = done = torch.empty(0, device="cpu")
            done._is_hf_initialized = True  # type: ignore[attr-defined]
        codes = (*groups, *fmt.codes_shape(rows, k))
        if plan.experts_only:  # the bytes of a block have a dimension of their own
            codes = (*groups, rows, k // 32, 16)
        each = (*groups, parts_of(module, key), 1) if experts else number
        scales = each if plan.of_tensor else (*groups, *fmt.scales_shape(rows, k))
        of_scales = torch.float8_e4m3fn if fmt.tensor_scaled else fmt.scaling.storage
        made = [(codes, storage(fmt)), (scales, of_scales)]
        made += [(tuple(groups) if experts else number, torch.float32)] * (len(plan.ends) - 2)
        names = [key + end for end in plan.ends]
        if plan.inputs:
            names.append(of_inputs(key, plan))
            made.append((each, torch.float32))
        for name, (shape, dtype) in zip(names, made, strict=True):
            value = torch.empty(shape, dtype=dtype, device="meta")
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return masters


def of_inputs(key: str, plan: Plan) -> str:
    """The name of the scale of inputs that a weight of this name multiplies."""
    return plan.inputs if key == "weight" else f"{key}_{plan.inputs}"


def _is_there(value: Tensor) -> bool:
    return not value.is_meta and getattr(value, "_is_hf_initialized", False)


def take(name: str, module: MXModule, masters: dict[str, nn.Parameter], plan: Plan) -> None:
    """Give a module what was loaded into its placeholders, which Transformers marks then."""
    layer, fmt = cast(Any, module), formats.get(plan.fmt)
    loaded, aside = {}, {}
    for key, master in masters.items():
        layer.__dict__.pop(key, None)
        held = layer._parameters
        for end in plan.ends:
            loaded[key + end] = held[key] if not end else held.pop(key + end)
        if plan.inputs and _is_there(beside := held.pop(of_inputs(key, plan))):
            aside[of_inputs(key, plan)] = beside.detach()
        layer._parameters[key] = master
    if missing := [f"{name}.{key}" for key, value in loaded.items() if not _is_there(value)]:
        raise ValueError(
            f"the checkpoint has no {', '.join(missing)}, though its quantization_config says that "
            "the layer is quantized; name the layer among those that are left out there"
        )
    state = {key: value.detach() for key, value in loaded.items()}
    for key in masters:
        scales = state.pop(key + plan.ends[1])
        if plan.of_tensor:
            aside[key + plan.ends[1]] = scales
        elif not fmt.tensor_scaled:
            read = scale_bytes if plan.has_bytes else scale_floats
            scales = read(f"{name}.{key}{plan.ends[1]}", scales)
        for end in plan.ends[2:]:
            aside[key + end] = given = state.pop(key + end)
            whole = tensor_scale(f"{name}.{key}{end}", given, plan.reciprocal)
            state[f"{key}_scale_2"] = whole.reshape(module._shape_of(key)[:-2])
        end = plan.ends[1] if fmt.element.bits != 6 else f"_scale_{fmt.element.name}"
        state[key + end] = scales
        if plan.ends[0] == "_packed":
            state[key] = state.pop(f"{key}_packed")
    try:
        layer.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"{name}: {' '.join(str(error).split())}; correct what the quantization_config says of "
            "this layer, or the file"
        ) from None
    if module._source.saved is None:
        raise ValueError(f"{name}: the checkpoint's tensors are no codes with scales")
    if aside:
        module._saved_with = aside
    if plan.powers:  # then those of inputs are, too
        module._source.settings = Float8BlockScaling().settings
