"""LoRA and DoRA on te_mx.GroupedLinear: every group has its own A and B, stacked.

    LoRA    y[rows of g] = x W_g^T + bias_g + x' D_g^T           D_g = scaling * B_g A_g
    DoRA    y[rows of g] = x W_g^T + bias_g + (r_g - 1) x' W_g^T + r_g x' D_g^T

with x' = dropout(x), r_g = m_g / |W_g + D_g|, and |.| the norms of rows, through which nothing
trains. A [G, r, in] and B [G, out, r] are the weights of lora_A and lora_B in a state_dict, m
[G, out] that of lora_magnitude_vector.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from te_mx._ops import dequantize_2d
from te_mx.autograd.grouped import Groups, grouped_plain
from te_mx.autograd.saved import flatten
from te_mx.integrations.peft_refusals import check_base, check_config, forget, refuse_merge
from te_mx.nn.grouped_linear import groups_of


class StackedFactor(nn.Module):
    """One low-rank factor of all groups: weight [G, out, in]."""

    def __init__(self, groups: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """x [R, in] -> [R, out]; rows of no group are 0."""
        return grouped_plain(x, groups, self.weight, ())


class Magnitudes(nn.Module):
    """DoRA's of all groups: weight [G, out]."""

    def __init__(self, values_GN: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values_GN)


class _Dora(LoraVariant):
    """Says that an adapter is DoRA; LoraGroupedLinear computes it."""


class LoraGroupedLinear(nn.Module, LoraLayer):
    """Adapters of a te_mx.GroupedLinear."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What peft's class has, by adapter or not, and nn.Module's annotations would hide."""

    def __init__(
        self, base_layer: Any, adapter_name: str, config: Any, r: int = 0, lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        check_base(base_layer)
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self._ratios: dict[str, Tensor] = {}  # r of merged adapters
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """What peft may ask for."""
        return {(): None, ("use_dora",): _Dora}

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any
    ) -> None:
        """Make the factors of a new adapter.

        Raises:
            ValueError: r is not 1 or more, or the config asks for more than LoRA and DoRA.
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
        variant = self.resolve_lora_variant(config=config)  # refuses all others
        p = config.lora_dropout
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.lora_dropout[adapter_name] = nn.Dropout(p) if p > 0 else nn.Identity()
        groups = base.num_gemms
        self.lora_A[adapter_name] = StackedFactor(groups, self.in_features, r)
        self.lora_B[adapter_name] = StackedFactor(groups, r, self.out_features)
        self.lora_bias[adapter_name], self.use_dora[adapter_name] = False, config.use_dora
        self.use_rslora[adapter_name] = config.use_rslora
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self._initialize(adapter_name, config.init_lora_weights)
        sample = base._codes("weight")[0] if base._is_dropped() else base._sample("weight")
        dtype = sample.dtype if sample.is_floating_point() else torch.float32
        for factor in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            factor.to(sample.device, dtype)
        if variant is not None:
            self.lora_variant[adapter_name] = variant
            norms = self._norms(adapter_name)
            self.lora_magnitude_vector[adapter_name] = Magnitudes(norms)
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
        groups = groups_of(m_splits, base.num_gemms, x_RK.shape[0], x.device, base._label)
        for name in filter(self.lora_A.__contains__, self.active_adapters):
            a, b = self.lora_A[name], self.lora_B[name]
            inp = self.lora_dropout[name](self._cast_input_dtype(x_RK, a.weight.dtype))
            low_RN = b(a(inp, groups), groups) * self.scaling[name]
            if name in self.lora_variant:
                low_RN = self._with_magnitude(name, inp, flatten(result), low_RN, groups)
            result = result + low_RN.view(result.shape)
        return result.to(dtype)

    def _with_magnitude(
        self, name: str, inp: Tensor, result_RN: Tensor, low_RN: Tensor, groups: Groups
    ) -> Tensor:
        """What a DoRA adapter adds, [R, N]: 0 on rows of no group."""
        base: Any = self.get_base_layer()
        offs = groups.offs.to(inp.device)
        row = torch.arange(inp.shape[0], device=inp.device)
        group = torch.searchsorted(offs, row, right=True).clamp(max=len(offs) - 1)
        if self.training and not isinstance(self.lora_dropout[name], nn.Identity):
            product = grouped_plain(inp, groups, self._values().to(inp.dtype), ())
        else:
            product = result_RN
            if base.use_bias:
                product = product - torch.stack(base.biases())[group]
            product = torch.where((row < offs[-1]).unsqueeze(1), product, 0)
        ratio_GN = self.lora_magnitude_vector[name].weight / self._norms(name)
        ratio = ratio_GN[group]
        return (ratio - 1) * product + ratio * low_RN

    def _values(self) -> Tensor:
        """[G, out, in]: the weights, or what their codes stand for."""
        base: Any = self.get_base_layer()
        if not base._is_dropped():
            return torch.stack([weight.detach() for weight in base.weights()])
        stack, dtype = base._dropped_operand("weight"), base._frozen.dtypes["weight"]
        return torch.stack([dequantize_2d(stack.group(i), dtype) for i in range(stack.groups)])

    @torch.no_grad()
    def _norms(self, name: str) -> Tensor:
        """[G, out]: the norms of the rows of W + D."""
        delta = self.get_delta_weight(name)
        return torch.linalg.vector_norm(self._values().to(delta.dtype) + delta, dim=-1)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What the adapter adds to the weights, [G, out, in]."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        return (b.float() @ a.float()).to(b.dtype) * self.scaling[adapter]

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weights.

        Raises:
            RuntimeError: only codes of the weights are left.
            ValueError: under safe_merge, an adapter is not finite; nothing is merged.
        """
        refuse_merge(self, "merge")
        wanted = check_adapters_to_merge(self, adapter_names)
        names = [name for name in wanted if name in self.lora_A]
        whole = self._unmerged()
        ratios = {name: self._ratio(name, whole) for name in names}
        for name in names if safe_merge else ():
            if not (self.get_delta_weight(name).isfinite().all() and ratios[name].isfinite().all()):
                raise ValueError(
                    f"{self.get_base_layer()._label()}: adapter {name!r} is not finite, so nothing "
                    "was merged; it seems to be broken"
                )
        self._ratios |= ratios
        self.merged_adapters += names
        self._write(whole)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take all merged adapters out of the weights again.

        Raises:
            RuntimeError: only codes of the weights are left.
        """
        refuse_merge(self, "unmerge")
        whole = self._unmerged()
        self.merged_adapters.clear()
        self._ratios.clear()
        self._write(whole)

    def _ratio(self, name: str, whole_GNK: Tensor) -> Tensor:
        """r of an adapter, [G, out, 1]; ones for LoRA."""
        if name not in self.lora_variant:
            return whole_GNK.new_ones(*whole_GNK.shape[:2], 1)
        norms = torch.linalg.vector_norm(whole_GNK + self.get_delta_weight(name), dim=-1)
        return (self.lora_magnitude_vector[name].weight / norms).unsqueeze(-1)

    def _sums(self) -> tuple[Any, Any]:
        """S and T, so that weights with all merged adapters are S * W + T."""
        names = [name for name in self.merged_adapters if name in self.lora_A]
        scale = 1 + sum(self._ratios[name] - 1 for name in names)
        return scale, sum(self._ratios[name] * self.get_delta_weight(name) for name in names)

    def _unmerged(self) -> Tensor:
        """W of all groups in fp32, [G, out, in]."""
        scale, added = self._sums()
        return (self._values().float() - added) / scale

    def _write(self, whole_GNK: Tensor) -> None:
        base: Any = self.get_base_layer()
        scale, added = self._sums()
        for weight, value in zip(base.weights(), whole_GNK * scale + added, strict=True):
            weight.copy_(value)
        forget(self)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Conversion to other shapes of LoRA works on matrices, which stacks are not."""
        return False

    def __repr__(self) -> str:
        return "lora." + super().__repr__()
