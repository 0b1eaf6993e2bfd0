"""Quantized checkpoints of Transformers as te_mx layers that hold their codes:

    import te_mx.integrations.hf_quantizer as hf_quantizer
    hf_quantizer.register()
    model = AutoModelForCausalLM.from_pretrained(folder)

After `register`, from_pretrained gives a model whose linear layers (and stacked experts) are those
of te_mx, frozen without masters, byte for byte what the files hold. Taken are the checkpoints that
``config.json`` describes so:

====================  ============================================================================
quant_method          what te_mx takes; the rest goes to Transformers as before
====================  ============================================================================
"mxfp8"               all
"fp8"                 ``weight_block_size`` [128, 128] with scales in fp32, bf16 or E8M0, [1, 32]
                      with E8M0 scales; ``scale_fmt`` "ue8m0" (DeepSeek-V3.1) quantizes inputs with
                      scales that are powers of two as well
"compressed-tensors"  ``format`` "mxfp8-quantized", "mxfp6-pack-quantized",
                      "mxfp4-pack-quantized" and "nvfp4-pack-quantized", one group
"modelopt"            ``quant_algo`` "MXFP8", "FP8", "NVFP4", "W4A16_NVFP4", and
                      "MIXED_PRECISION" of these
"quark"               MXFP8, MXFP6 and MXFP4: ``scale_format`` "e8m0" in groups of 32
"mxfp4"               all: experts in gpt-oss' layout
====================  ============================================================================

Layers of NVFP4 leave inputs as they are, whatever the checkpoint says of them, which loses less: a
ConversionWarning says so once. te_mx.freeze_weights(model, drop_master=True, activations="nvfp4")
quantizes them. A scale of inputs is kept for save_pretrained.

What goes to Transformers is said once, with the reason, by a ConversionWarning.

How: placeholders with the names and shapes of the files stand in the modules while Transformers
loads (renames, merges per-expert tensors, reads shards); then the modules take what has come.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from te_mx import formats
from te_mx.api.convert import convert_model
from te_mx.api.freeze import freeze_weights, unfreeze_weights
from te_mx.conversion.layers import protected_in
from te_mx.integrations.checkpoints import METHODS, Plan, plan_of
from te_mx.integrations.checkpoints.tensors import (
    Numbers,
    OneAMatrix,
    Scales,
    put_placeholders,
    refuse_casts,
    take,
)
from te_mx.nn.base import MXModule
from te_mx.nn.converted import ConversionWarning
from te_mx.weights.missing import claim

_CONFIGS: dict[str, Any] = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
_QUANTIZERS: dict[str, Any] = auto.AUTO_QUANTIZER_MAPPING
_SCALE_BYTES = ("U8", "F8_E8M0", torch.uint8, torch.float8_e8m0fnu)  # as files and torch say it
_before: dict[str, tuple[Any, Any]] = {}  # Transformers' own, by method
_said: set[str] = set()


class TeMxConfig(QuantizationConfigMixin):
    """A quantization_config that te_mx reads: its fields as they are in config.json."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.quant_method = fields["quant_method"]

    def to_dict(self) -> dict[str, Any]:
        """The fields, for config.json."""
        return dict(self.fields)

    def get_loading_attributes(self) -> dict[str, Any]:
        """Nothing that from_pretrained could change."""
        return {}


class TeMxQuantizer(HfQuantizer):
    """Loads such a checkpoint into te_mx layers."""

    requires_calibration = False

    def __init__(self, quantization_config: TeMxConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        found = plan_of(quantization_config.fields)
        assert isinstance(found, Plan)  # or there would be no TeMxConfig
        self.plan = found
        self._fields = quantization_config.fields
        # The shape of what is a number a matrix; files say it.
        self.number: tuple[int, ...] = (1,) if found.reciprocal else ()
        self._model: Any = None  # that is being loaded
        self._masters: list[tuple[str, MXModule, dict[str, nn.Parameter]]] = []

    @property
    def is_trainable(self) -> bool:
        """Adapters train on top of the codes."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Codes compile as other weights do."""
        return True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """save_pretrained writes the names that were read."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._model = model
        files = kwargs.get("checkpoint_files") or ()
        refuse_casts(files, self.plan)
        for end in self.plan.ends[1 if self.plan.of_tensor else 2 :]:
            self.number = next(_shapes_in(files, f"weight{end}"), self.number)
        self._refuse_protected(model, files)
        convert_model(model, filter_fn=self._is_quantized_in(model, files))
        for name, module in model.named_modules():
            if isinstance(module, MXModule):
                made = put_placeholders(module, self.plan.of(name), self.number)
                self._masters.append((name, module, made))

    def _refuse_protected(self, model: Any, files: Any) -> None:
        """Raise ValueError where files have codes of layers that the model keeps in fp32, which
        Transformers would load as values."""
        if not (protected := protected_in(model)):
            return
        held = _names_in(files)
        for name, module in model.named_modules():
            if id(module) in protected and f"{name}.weight{self.plan.ends[1]}" in held:
                raise ValueError(
                    f"{name}: the checkpoint holds codes of it, and {protected[id(module)]}; set "
                    "that to None on the class of the model to load them, or take a checkpoint "
                    "that leaves the layer out"
                )

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """What a tensor of the files is cast to: codes and E8M0 scales, which are bytes, to
        nothing; `take` looks at them as they are."""
        held = param.get_dtype() if hasattr(param, "get_dtype") else param.dtype
        if dtype is not None and (dtype.itemsize == 1 or held in _SCALE_BYTES):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _is_quantized_in(self, model: Any, files: Any) -> Callable[[nn.Module, str], bool]:
        plan, head = self.plan, model.get_output_embeddings()
        named = [name for name, module in model.named_modules() if module is head]
        # Configs leave the head out without saying so, and list nothing where it is quantized too.
        if head is not None and not _names_in(files).isdisjoint(
            f"{name}.weight{plan.ends[1]}" for name in named
        ):
            head = None

        def chosen(module: "nn.Module", name: str) -> bool:
            if plan.experts_only:
                return not isinstance(module, nn.Linear)
            # The layouts of per-expert tensors are those of Linear layers.
            return module is not head and not plan.leaves_out(name)

        return chosen

    def update_weight_conversions(self, weight_conversions: Any, model: Any = None) -> Any:
        """Transformers' conversions, and beside each that merges or renames weights one for their
        codes and one for their scales, as far as the model has such."""
        names = "\n".join((self._model if model is None else model).state_dict())
        made = []
        for one in weight_conversions:
            made.append(one)
            if not isinstance(one, WeightConverter):
                continue
            sources, targets = one._original_source_patterns, one._original_target_patterns
            if not all(source.endswith(".weight") for source in sources):
                continue
            code_end, scale_end, *number_end = self.plan.ends
            steps: dict[str, tuple[list[Any], list[Any]]] = {code_end: ([], [])}
            # float8_e4m3fn scales, of NVFP4, are merged as they are.
            steps[scale_end] = ([] if number_end else [Scales(self.plan.has_bytes)], [])
            if self.plan.of_tensor:
                steps[scale_end] = [Numbers(self.number)], []
            steps |= {
                end: ([Numbers(self.number)], [OneAMatrix(len(sources))]) for end in number_end
            }
            for end, (first, last) in steps.items():
                if end and re.search(f"{targets[0]}{end}$", names, re.MULTILINE):
                    given, made_of = ([one + end for one in each] for each in (targets, sources))
                    made.append(_like(one, made_of, given, first, last))
            if inputs := self.plan.inputs:
                named = [f"{source.removesuffix('weight')}{inputs}" for source in sources]
                targets = [f"{target}_{inputs}" for target in targets]
                if re.search(f"{targets[0]}$", names, re.MULTILINE):
                    made.append(_like(one, named, targets, [Numbers(self.number)], []))
        return made

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module, masters in self._masters:
            take(name, module, masters, self.plan.of(name))
        plans = {module: self.plan.of(name) for name, module, _ in self._masters}
        # A scale a tensor comes with the codes.
        ends = {m: ("", None) if plan.of_tensor else plan.ends for m, plan in plans.items()}
        claim(model, ends.items(), self._fields)
        self._masters.clear()
        self._model = None
        if any(formats.get(plan.fmt).tensor_scaled and plan.inputs for plan in plans.values()):
            _say_once(
                "this checkpoint has inputs quantized to NVFP4; te_mx leaves them as they are, "
                "which loses less. te_mx.freeze_weights(model, drop_master=True, "
                "activations='nvfp4') quantizes them"
            )
        if alone := {module for module, plan in plans.items() if plan.weight_only}:
            how: dict[str, Any] = {"activations": "bf16", "filter_fn": lambda m, _: m in alone}
            freeze_weights(model, drop_master=True, **how)
        return model

    def restate(self, model: Any, fields: dict[str, Any]) -> None:
        """Stand for another quantization_config of the model that was loaded."""
        found = plan_of(fields)
        assert isinstance(found, Plan)  # of what te_mx writes
        self.quantization_config, self.plan, self._fields = TeMxConfig(**fields), found, fields
        model.quantization_method = fields["quant_method"]

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        unfreeze_weights(model, dequantize=True)
        return model if dtype is None else model.to(dtype)


def _names_in(files: Any) -> set[str]:
    """The names of all tensors in these safetensors files."""
    names: set[str] = set()
    for path in files:
        if str(path).endswith(".safetensors"):
            with safe_open(path, "pt") as file:
                names.update(file.keys())
    return names


def _shapes_in(files: Any, end: str) -> Iterator[tuple[int, ...]]:
    """The shapes of tensors in these safetensors files whose names have this ending."""
    for path in files:
        if str(path).endswith(".safetensors"):
            with safe_open(path, "pt") as file:
                for name in set(file.keys()):
                    if name.endswith(end):
                        yield tuple(file.get_slice(name).get_shape())


def _like(
    converter: Any, sources: list[str], targets: list[str], first: list[Any], last: list[Any]
) -> Any:
    """A converter like this one, of tensors with other names, with these steps before and after."""
    copy = WeightConverter(sources, targets, [*first, *converter.operations, *last])
    for name in ("force_cpu", "scope_prefix", "base_model_prefix"):
        if hasattr(converter, name):
            setattr(copy, name, getattr(converter, name))
    return copy


def convert_scales_too(model: Any, fields: dict[str, Any]) -> None:
    """Have ``save_pretrained`` split and rename the scales of stacked experts as it does their
    weights. `fields`: the model's quantization_config."""
    known = getattr(model, "_weight_conversions", None)
    if known is None:  # the model was not loaded: what save_pretrained would take
        found = get_model_conversion_mapping(model, add_legacy=False)
        known = [one for one in found if not isinstance(one, PrefixChange)]
    quantizer = TeMxQuantizer(TeMxConfig(**fields))
    model._weight_conversions = quantizer.update_weight_conversions(known, model)


def register() -> None:
    """Have from_pretrained give te_mx layers for the checkpoints listed above, until `unregister`.
    A second call changes nothing."""
    for method in METHODS:
        if method in _before:
            continue
        config, quantizer = _CONFIGS.get(method), _QUANTIZERS.get(method)
        _before[method] = config, quantizer
        _CONFIGS[method] = _config_class(method, config)
        _QUANTIZERS[method] = _quantizer_of(quantizer)


def unregister() -> None:
    """Undo `register`; models that were loaded stay as they are."""
    for method, pair in _before.items():
        for mapping, before in zip((_CONFIGS, _QUANTIZERS), pair, strict=True):
            if before is None:
                mapping.pop(method, None)
            else:
                mapping[method] = before
    _before.clear()
    _said.clear()


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        warnings.warn(line, ConversionWarning, stacklevel=4)


def _config_class(method: str, before: Any) -> Any:
    """What stands in the registry of configs: ours where te_mx takes it, or Transformers' own."""

    class Chosen:
        @classmethod
        def from_dict(cls, fields: "dict[str, Any]", **kwargs: Any) -> Any:
            found = plan_of(fields)
            if isinstance(found, Plan):
                return TeMxConfig(**fields)
            if before is None:
                raise ValueError(
                    f"te_mx reads no {method} checkpoint with such a quantization_config ({found}),"
                    f" and Transformers has no {method}: {fields}"
                )
            _say_once(
                f"te_mx leaves this {method!r} checkpoint to Transformers, whose layers it gets: "
                f"{found}"
            )
            return before.from_dict(fields, **kwargs)

    return Chosen


def _quantizer_of(before: Any) -> Callable[..., Any]:
    def make(config: Any, **kwargs: Any) -> Any:
        return (TeMxQuantizer if isinstance(config, TeMxConfig) else before)(config, **kwargs)

    return make
