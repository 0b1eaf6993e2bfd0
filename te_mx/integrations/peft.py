"""LoRA and DoRA of peft on te_mx modules.

    config = te_mx.integrations.peft.register(LoraConfig(target_modules=[...]))
    model = peft.get_peft_model(model, config)

peft takes a te_mx.Linear for the nn.Linear that it is, also without this, and puts LoRA on one that
holds codes alone. Registering adds what peft does not know: DoRA on codes, te_mx.LayerNormLinear
and te_mx.GroupedLinear, Conv1D on codes, `target_parameters` of experts on codes, frozen copies
that follow a merge, and refusals that name the layer.

For LoRA y = base(x) + scaling * B(A(dropout(x))), with A [r, in] and B [out, r] in high precision
(peft makes them; under torch.autocast they run in its dtype). x is what the weight multiplies: the
normalized input of a LayerNormLinear, so that adapters merge into its weight; of a GroupedLinear
each group has its own A and B. DoRA as in peft, with the values of the codes in the place of the
weight, decoded for the time of a norm.

Imports peft, so nothing of te_mx imports it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import layer as lora
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

from te_mx._ops import dequantize_2d
from te_mx.fusion.experts import ExpertsModule
from te_mx.fusion.transposed_linear import TransposedLinear
from te_mx.integrations.peft_experts import adapted_experts
from te_mx.integrations.peft_grouped import LoraGroupedLinear
from te_mx.integrations.peft_refusals import check_base, check_config, forget, refuse_merge
from te_mx.nn import GroupedLinear, LayerNormLinear, Linear
from te_mx.runtime.arguments import shown


def register(config: LoraConfig) -> LoraConfig:
    """Have a LoraConfig put te_mx's adapters on te_mx modules; other modules get peft's.

    Args:
        config: changed in place. peft does not save what is registered: `PeftModel.from_pretrained`
            needs it again, as ``config=register(LoraConfig.from_pretrained(folder))``.

    Returns:
        The config.

    Raises:
        TypeError: it is no LoraConfig.
    """
    if not isinstance(config, LoraConfig):
        raise TypeError(f"config must be a peft.LoraConfig, got {shown(config)}")
    config._register_custom_module(
        {
            LayerNormLinear: LoraLayerNormLinear,
            GroupedLinear: LoraGroupedLinear,
            Linear: LoraLinear,
            TransposedLinear: LoraLinear,
            ExpertsModule: adapted_experts,
        }
    )
    return config


class _DoraOnCodes(DoraLinearVariant):
    """DoRA on a layer without a master, with W the values of its codes and D = scaling * B A:

        y = W x + bias + (r - 1) W x' + r D x',  r = m / |W + D|

    with |.| the norms of rows, through which nothing trains (arXiv 2402.09353, section 4.3), and x'
    = dropout(x), as in peft. W is decoded for the time of a norm.
    """

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        made = DoraLinearLayer(fan_in_fan_out=module.fan_in_fan_out)
        made.weight = nn.Parameter(_row_norms(module, adapter_name))
        module.lora_magnitude_vector[adapter_name] = made

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        base, dropout = module.get_base_layer(), module.lora_dropout[active_adapter]
        product = result if base.bias is None else result - base.bias
        if module.training and not isinstance(dropout, nn.Identity):
            x = dropout(x)
            product = nn.functional.linear(x, _values(base).to(x.dtype))
        magnitude = module.lora_magnitude_vector[active_adapter].weight
        ratio = magnitude / _row_norms(module, active_adapter)
        scaling = module.scaling[active_adapter]
        return result + (ratio - 1) * product + ratio * scaling * b(a(x))


def _values(base: Any) -> Tensor:
    """[out, in]: what the codes of a layer stand for."""
    return dequantize_2d(base._dropped_operand("weight"), base._frozen.dtypes["weight"])


@torch.no_grad()
def _row_norms(module: Any, name: str) -> Tensor:
    """[out]: the norms of the rows of W + D."""
    a, b = module.lora_A[name].weight, module.lora_B[name].weight
    whole = _values(module.get_base_layer()).to(a.dtype) + module.scaling[name] * (b @ a)
    return torch.linalg.vector_norm(whole, dim=1)


class LoraLinear(lora.Linear):
    """Adapters of a te_mx.Linear or a converted Conv1D."""

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, **kwargs: Any) -> None:
        check_base(base_layer)
        transposed = isinstance(base_layer, TransposedLinear)
        if config.fan_in_fan_out != transposed:
            config = copy.copy(config)
            config.fan_in_fan_out = transposed
        kwargs |= {"is_target_conv_1d_layer": transposed}
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        if isinstance(module, TransposedLinear):
            return module._sizes()
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        if self.get_base_layer()._is_dropped():
            return {(): None, ("use_dora",): _DoraOnCodes}
        return super().lora_variants

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        check_config(self, kwargs["config"])
        super().update_layer(adapter_name, r, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        refuse_merge(self, "merge")
        super().merge(safe_merge, adapter_names)
        forget(self)

    def unmerge(self) -> None:
        refuse_merge(self, "unmerge")
        super().unmerge()
        forget(self)


class LoraLayerNormLinear(LoraLinear):
    """Adapters of a te_mx.LayerNormLinear, on the normalized input."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._check_forward_args(x, *args, **kwargs)
        if kwargs.pop("adapter_names", None) is not None:
            raise NotImplementedError(
                f"{self.get_base_layer()._label()}: adapter_names, which gives each sample its own "
                "adapter, is not supported; call the model once for each adapter"
            )
        base: Any = self.get_base_layer()
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return self.base_layer(x, *args, **kwargs)
        result, z = base._with_normalized(x)
        dtype, inp = result.dtype, z
        for name in filter(self.lora_A.__contains__, self.active_adapters):
            a, b, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
            inp = self._cast_input_dtype(inp, a.weight.dtype)
            if name in self.lora_variant:
                result = self.lora_variant[name].forward(self, name, inp, result)
            else:
                result = result + b(a(dropout(inp))) * self.scaling[name]
        result = result.to(dtype)
        return (result, z) if base.return_layernorm_output else result
