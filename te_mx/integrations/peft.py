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

Imports peft, so nothing of te_mx imports it."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from peft.tuners.lora import layer as lora
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from te_mx.autograd.grouped import Groups, grouped_plain
from te_mx.autograd.saved import flatten
from te_mx.fusion.experts import ExpertsModule
from te_mx.fusion.transposed_linear import TransposedLinear
from te_mx.nn import GroupedLinear, LayerNormLinear, Linear
from te_mx.nn.base import MXModule
from te_mx.nn.grouped_linear import groups_of
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
    = dropout(x), as in peft. W is decoded for the time of a norm."""

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
    """[out, in], or [G, out, in]: the weights of a layer, or what their codes stand for."""
    return base._source.values(base, "weight")


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
        if self.get_base_layer()._parameters.get("weight", self) is None:  # only codes of it
            return {(): None, ("use_dora",): _DoraOnCodes}
        return super().lora_variants

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        check_config(self, kwargs["config"])
        super().update_layer(adapter_name, r, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        refuse_merge(self, "merge")
        super().merge(safe_merge, adapter_names)
        self.get_base_layer()._forget_copies()

    def unmerge(self) -> None:
        refuse_merge(self, "unmerge")
        super().unmerge()
        self.get_base_layer()._forget_copies()


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


# ----------------------------------------------------------------------------------- grouped layers
# Of te_mx.GroupedLinear every group has its own A and B, stacked.
#
#     LoRA    y[rows of g] = x W_g^T + bias_g + x' D_g^T           D_g = scaling * B_g A_g
#     DoRA    y[rows of g] = x W_g^T + bias_g + (r_g - 1) x' W_g^T + r_g x' D_g^T
#
# with x' = dropout(x), r_g = m_g / |W_g + D_g|, and |.| the norms of rows, through which nothing
# trains. A [G, r, in] and B [G, out, r] are the weights of lora_A and lora_B in a state_dict, m
# [G, out] that of lora_magnitude_vector.
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
        sample = base._source.read(base, "weight")[0]
        dtype = sample.dtype if sample.is_floating_point() else torch.float32
        for factor in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            factor.to(sample.device, dtype)
        if variant is not None:
            self.lora_variant[adapter_name] = variant
            self.lora_magnitude_vector[adapter_name] = Magnitudes(self._norms(adapter_name))
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
            product = grouped_plain(inp, groups, _values(base).to(inp.dtype), ())
        else:
            product = result_RN
            if base.use_bias:
                product = product - torch.stack(base.biases())[group]
            product = torch.where((row < offs[-1]).unsqueeze(1), product, 0)
        ratio = (self.lora_magnitude_vector[name].weight / self._norms(name))[group]
        return (ratio - 1) * product + ratio * low_RN

    @torch.no_grad()
    def _norms(self, name: str) -> Tensor:
        """[G, out]: the norms of the rows of W + D."""
        delta = self.get_delta_weight(name)
        whole = _values(self.get_base_layer()).to(delta.dtype) + delta
        return torch.linalg.vector_norm(whole, dim=-1)

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
        return (_values(self.get_base_layer()).float() - added) / scale

    def _write(self, whole_GNK: Tensor) -> None:
        base: Any = self.get_base_layer()
        scale, added = self._sums()
        for weight, value in zip(base.weights(), whole_GNK * scale + added, strict=True):
            weight.copy_(value)
        base._forget_copies()

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Conversion to other shapes of LoRA works on matrices, which stacks are not."""
        return False

    def __repr__(self) -> str:
        return "lora." + super().__repr__()


# ------------------------------------------------------------------------------------------ experts
# peft's target_parameters on experts of which only codes are left:
#
#     y[rows of e] = x W_e^T + bias_e + scaling * (x A_e^T) B_e^T
#
# with W_e the values of the codes. A is the weight [r E, in] of lora_A and B that [out, r E] of
# lora_B, in the order of peft's own ParamWrapper: adapters that peft trained on the weights load
# here, and the other way round. peft's adds the product of A and B to the weights; here x meets
# them one after the other, in high precision.
class ParamWrapper(lora.ParamWrapper):
    """Adapters of one weight of an experts module. peft knows such wrappers by this name."""

    def get_param(self) -> Tensor:
        """The weight as peft sees it: its shape, dtype and device."""
        base: Any = self.get_base_layer()
        return base._outline(self.parameter_name, base._source.read(base, self.parameter_name)[0])

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any
    ) -> None:
        """Make the factors of a new adapter.

        Raises:
            ValueError: r is not 1 or more, or the config asks for more than LoRA.
        """
        check_config(self, config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        names = [name for name in active_adapters if name in self.lora_A]
        base: Any = self.get_base_layer()
        before = base._adapters
        if names:
            own = {self.parameter_name: partial(self._low_rank, names)}
            base._adapters = own if before is None else {**before, **own}
        try:
            yield
        finally:
            base._adapters = before

    def _low_rank(self, names: list[str], x_RK: Tensor, offs: Tensor) -> Tensor:
        """What the adapters add to the rows of every expert, [R, out]; 0 to rows of none."""
        total: Any = 0
        for name in names:
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            a_ErK = a.unflatten(0, (self.num_experts, -1))
            b_ENr = b.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
            x = self._cast_input_dtype(x_RK, a.dtype)
            low_Rr = grouped_plain(x, Groups(offs), a_ErK, ())
            total = total + grouped_plain(low_Rr, Groups(offs), b_ENr, ()) * self.scaling[name]
        return total

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raises RuntimeError: there is no weight to merge into."""
        refuse_merge(self, "merge")

    def unmerge(self) -> None:
        """Raises RuntimeError, as merge."""
        refuse_merge(self, "unmerge")


def adapted_experts(
    target: Any, adapter_name: str, config: Any, parameter_name: str | None = None, **kwargs: Any
) -> nn.Module:
    """What peft puts around an experts module, whose parameter it names.

    Raises:
        ValueError: target_modules names the module, which is no linear layer.
    """
    base = target
    while hasattr(base, "base_layer"):
        base = base.base_layer
    if parameter_name is None:
        keys = ", ".join(f'"{base.name or "experts"}.{key}"' for key in base._weight_keys)
        raise ValueError(
            f"{base._label()} is no linear layer for target_modules; name its weights: "
            f"target_parameters=[{keys}]"
        )
    held = base._parameters.get(parameter_name, base)
    wrapper = ParamWrapper if held is None else lora.ParamWrapper
    return wrapper(target, adapter_name, parameter_name, config, **kwargs)


# ----------------------------------------------------------------------------------------- refusals
def check_base(base: Any) -> None:
    """Raise ValueError for a module whose weight is not in one piece or whose result is not one
    tensor plus, perhaps, the normalized input."""
    while not isinstance(base, MXModule):
        base = base.base_layer
    if getattr(base, "return_bias", False):
        raise ValueError(
            f"{base._label()}: return_bias=True leaves the bias to others, while adapters add to "
            "the whole result; build the layer with return_bias=False"
        )
    if getattr(base, "_split", None) is not None:
        raise ValueError(
            f"{base._label()}: parameters_split leaves no one weight to adapt; build the layer "
            "without"
        )


def check_config(layer: Any, config: Any) -> None:
    """Raise ValueError for a variant or an initialization that reads or changes the weight of a
    module that holds codes alone."""
    base: Any = layer.get_base_layer()
    init = config.init_lora_weights
    if isinstance(init, str) and init not in ("gaussian", "eva"):
        base._source.needs_values(
            ValueError,
            f"{base._label()}: init_lora_weights={init!r} needs the weight, of which "
            "drop_master=True left codes alone; use True or 'gaussian', or freeze with "
            "drop_master=False",
        )
    for name, field in type(config).__dataclass_fields__.items():
        wanted = field.metadata.get("is_lora_variant") and getattr(config, name)
        if wanted and name != "use_dora":
            base._source.needs_values(
                ValueError,
                f"{base._label()}: {name} is not supported on a layer that holds codes alone "
                "(drop_master=True); freeze with drop_master=False",
            )


def refuse_merge(layer: Any, what: str) -> None:
    """Raise RuntimeError where there is no weight that an adapter could be added to."""
    base: Any = layer.get_base_layer()
    base._source.needs_values(
        RuntimeError,
        f"{base._label()}: cannot {what} an adapter, because only codes of its weight are left "
        "(drop_master=True). Get weights back by te_mx.unfreeze_weights(model, "
        f"dequantize=True), {what} then, and freeze again",
    )
