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
"nvfp4"               no files: NVFP4Config quantizes what it loads; saved as "modelopt"
====================  ============================================================================

Layers of NVFP4 leave inputs as they are, whatever the checkpoint says of them, which loses less: a
ConversionWarning says so once. te_mx.freeze_weights(model, drop_master=True, activations="nvfp4")
quantizes them. A scale of inputs is kept for save_pretrained.

What goes to Transformers is said once, with the reason, by a ConversionWarning.

How: placeholders with the names and shapes of the files stand in the modules while Transformers
loads (renames, merges per-expert tensors, reads shards); then the modules take what has come.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from te_mx import formats
from te_mx.api.convert import convert_model
from te_mx.api.freeze import freeze_weights, unfreeze_weights
from te_mx.api.quantization_config import quantization_config as say_what_it_holds
from te_mx.conversion.decisions import protected_in
from te_mx.integrations.checkpoints import METHODS, Plan, plan_of
from te_mx.integrations.checkpoints.tensors import put_placeholders, refuse_casts, take
from te_mx.integrations.hf_conversions import with_codes
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
        _keep_beside(model, files)
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
        """Transformers' conversions, and beside them those of codes and scales."""
        model = self._model if model is None else model
        return with_codes(weight_conversions, model, self.plan, self.number)

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


class OnTheFly(TeMxQuantizer):
    """Quantizes the values that are loaded, where Transformers' NVFP4Config asks for that."""

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        HfQuantizer.__init__(self, quantization_config, **kwargs)
        if self.pre_quantized:
            raise ValueError(
                "NVFP4Config is for values; no files hold codes of quant_method 'nvfp4'"
            )

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """As of a model that is not quantized."""
        return HfQuantizer.get_new_dtype(self, converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: Any, model: Any = None) -> Any:
        """Those of values."""
        return weight_conversions

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        pass

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config: Any = self.quantization_config
        kept = self.get_modules_to_not_convert(
            model, config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        convert_model(model, filter_fn=lambda _, name: should_convert_module(name, kept))
        freeze_weights(model, drop_master=True, fmt="nvfp4", activations="bf16")
        say_what_it_holds(model, "modelopt")
        return model


_ON_THE_FLY = {"nvfp4": OnTheFly}
# Beside codes in files: scales of a cache, which are kept for them, and what changes values.
_OF_CACHES = ("k_scale", "v_scale", "q_scale")
_CHANGES = {
    "weight_g_idx": "an order of columns (actorder)", "pre_quant_scale": "a factor of inputs (AWQ)",
    "weight_zero_point": "zero points",
}  # fmt: skip


def _keep_beside(model: Any, files: Any) -> None:
    """Give modules buffers for the scales of caches in files, so that they are saved again. Raises
    ValueError for what te_mx does not multiply with."""
    for file in _opened(files):
        for name in file.keys():  # noqa: SIM118
            head, _, last = name.rpartition(".")
            # Zero points of symmetric codes are zeros.
            if last in _CHANGES and file.get_tensor(name).float().any():
                raise ValueError(
                    f"{name}: te_mx does not read codes with {_CHANGES[last]}; export the "
                    "checkpoint without, or dequantize it with the tool that wrote it"
                )
            try:
                module = model.get_submodule(head) if last in _OF_CACHES else None
            except AttributeError:
                continue  # Transformers says that it leaves the tensor out
            if module is not None and not hasattr(module, last):
                given = file.get_tensor(name)
                module.register_buffer(last, torch.empty_like(given, device="meta"))


def _opened(files: Any) -> Iterator[Any]:
    """Those of the files that are of safetensors, one after the other."""
    for path in files:
        if str(path).endswith(".safetensors"):
            with safe_open(path, "pt") as file:
                yield file


def _names_in(files: Any) -> set[str]:
    """The names of all tensors in these safetensors files."""
    return {name for file in _opened(files) for name in file.keys()}  # noqa: SIM118


def _shapes_in(files: Any, end: str) -> Iterator[tuple[int, ...]]:
    """The shapes of tensors in these safetensors files whose names have this ending."""
    for file in _opened(files):
        for name in set(file.keys()):
            if name.endswith(end):
                yield tuple(file.get_slice(name).get_shape())


def register() -> None:
    """Have from_pretrained give te_mx layers for the checkpoints listed above, until `unregister`.
    A second call changes nothing."""
    for method, chosen in _ON_THE_FLY.items():
        if method in _QUANTIZERS and method not in _before:
            _before[method] = _CONFIGS[method], _QUANTIZERS[method]
            _QUANTIZERS[method] = chosen
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
