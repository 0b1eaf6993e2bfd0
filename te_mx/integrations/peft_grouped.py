"""LoRA on te_mx.GroupedLinear: every group has its own A and B, stacked.

    y[rows of g] = x W_g^T + bias_g + scaling * (dropout(x) A_g^T) B_g^T

A [G, r, in] and B [G, out, r] are the weights of lora_A and lora_B in a state_dict.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from te_mx.autograd.grouped_operands import Groups
from te_mx.autograd.shapes import flatten
from te_mx.integrations.peft_refusals import check_base, check_config, forget, refuse_merge
from te_mx.nn.grouped_plain import grouped_plain
from te_mx.nn.grouped_splits import groups_of


class StackedFactor(nn.Module):
    """One low-rank factor of all groups: weight [G, out, in]."""

    def __init__(self, groups: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """x [R, in] -> [R, out]; rows of no group are 0."""
        return grouped_plain(x, groups, self.weight, ())


class LoraGroupedLinear(nn.Module, LoraLayer):
    """Adapters of a te_mx.GroupedLinear."""

    # peft's, by adapter, which nn.Module's annotations would hide.
    r: dict[str, int]
    lora_alpha: dict[str, int]
    scaling: dict[str, float]
    lora_dropout: Any
    lora_A: Any
    lora_B: Any
    lora_bias: dict[str, bool]
    use_dora: dict[str, bool]
    use_rslora: dict[str, bool]
    in_features: int
    out_features: int
    merged_adapters: list[str]
    active_adapters: list[str]
    merged: bool
    disable_adapters: bool
    base_layer: Any
    get_base_layer: Any
    set_adapter: Any
    resolve_lora_variant: Any
    _cast_input_dtype: Any

    def __init__(
        self, base_layer: Any, adapter_name: str, config: Any, r: int = 0, lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        check_base(base_layer)
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any
    ) -> None:
        """Make the factors of a new adapter.

        Raises:
            ValueError: r is not 1 or more, or the config asks for more than plain LoRA.
        """
        base: Any = self.get_base_layer()
        if r < 1:
            raise ValueError(f"{base._label()}: r must be 1 or more, got {r}")
        check_config(self, config)
        if config.lora_bias or config.init_lora_weights not in (True, False, "gaussian"):
            raise ValueError(
                f"{base._label()}: adapters of groups have no lora_bias and are initialized with "
                f"True, False or 'gaussian', got lora_bias={config.lora_bias}, "
                f"init_lora_weights={config.init_lora_weights!r}"
            )
        if config.use_dora:
            raise ValueError(
                f"{base._label()}: DoRA is not supported on groups; use LoRA for these modules"
            )
        self.resolve_lora_variant(config=config)  # refuses all other variants
        p = config.lora_dropout
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.lora_dropout[adapter_name] = nn.Dropout(p) if p > 0 else nn.Identity()
        groups = base.num_gemms
        self.lora_A[adapter_name] = StackedFactor(groups, self.in_features, r)
        self.lora_B[adapter_name] = StackedFactor(groups, r, self.out_features)
        self.lora_bias[adapter_name], self.use_dora[adapter_name] = False, False
        self.use_rslora[adapter_name] = config.use_rslora
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self._initialize(adapter_name, config.init_lora_weights)
        sample = base._codes("weight")[0] if base._is_dropped() else base._sample("weight")
        dtype = sample.dtype if sample.is_floating_point() else torch.float32
        for factor in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            factor.to(sample.device, dtype)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def _initialize(self, name: str, how: bool | str) -> None:
        """As peft initializes nn.Linear adapters, each group by itself: B starts at 0."""
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        for i in range(len(a)):
            if how == "gaussian":
                nn.init.normal_(a[i], std=1 / self.r[name])
            else:
                nn.init.kaiming_uniform_(a[i], a=math.sqrt(5))
            if how is False:
                nn.init.kaiming_uniform_(b[i], a=math.sqrt(5))
        if how is not False:
            nn.init.zeros_(b)

    def forward(self, x: Tensor, m_splits: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As te_mx.GroupedLinear.forward."""
        base: Any = self.get_base_layer()
        if self.disable_adapters and self.merged:
            self.unmerge()
        result: Tensor = self.base_layer(x, m_splits, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        dtype, x_RK = result.dtype, flatten(x)
        groups = groups_of(m_splits, base.num_gemms, len(x_RK), x.device, base._label)
        for name in filter(self.lora_A.__contains__, self.active_adapters):
            a, b = self.lora_A[name], self.lora_B[name]
            inp = self.lora_dropout[name](self._cast_input_dtype(x_RK, a.weight.dtype))
            result = result + b(a(inp, groups), groups).view(result.shape) * self.scaling[name]
        return result.to(dtype)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What the adapter adds to the weights, [G, out, in]."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        return (b.float() @ a.float()).to(b.dtype) * self.scaling[adapter]

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weights.

        Raises:
            RuntimeError: only codes of the weights are left.
            ValueError: under safe_merge, a sum is not finite; that adapter is not merged.
        """
        refuse_merge(self, "merge")
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.lora_A:
                continue
            delta = self.get_delta_weight(name)
            if safe_merge and not torch.isfinite(delta).all():
                raise ValueError(
                    f"{self.get_base_layer()._label()}: adapter {name!r} is not finite, so it was "
                    "not merged; it seems to be broken"
                )
            self._add(delta)
            self.merged_adapters.append(name)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take all merged adapters out of the weights again.

        Raises:
            RuntimeError: only codes of the weights are left.
        """
        refuse_merge(self, "unmerge")
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            if name in self.lora_A:
                self._add(-self.get_delta_weight(name))

    def _add(self, delta_GNK: Tensor) -> None:
        base: Any = self.get_base_layer()
        for weight, delta in zip(base.weights(), delta_GNK, strict=True):
            weight += delta.to(weight.dtype)
        forget(self)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Conversion to other shapes of LoRA works on matrices, which stacks are not."""
        return False

    def __repr__(self) -> str:
        return "lora." + super().__repr__()
