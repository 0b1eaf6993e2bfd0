"""LoRA of peft's ``target_parameters`` on experts of which only codes are left.

    y[rows of e] = x W_e^T + bias_e + scaling * (x A_e^T) B_e^T

with W_e the values of the codes. A is the weight [r E, in] of lora_A and B that [out, r E] of
lora_B, in the order of peft's own ParamWrapper: adapters that peft trained on the weights load
here, and the other way round. peft's adds the product of A and B to the weights; here x meets them
one after the other, in high precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from te_mx.autograd.grouped import Groups, grouped_plain
from te_mx.integrations.peft_refusals import check_config, refuse_merge


class ParamWrapper(lora.ParamWrapper):
    """Adapters of one weight of an experts module. peft knows such wrappers by this name."""

    def get_param(self) -> Tensor:
        """The weight as peft sees it: its shape, dtype and device."""
        return self.get_base_layer()._outline(self.parameter_name)

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
    wrapper = ParamWrapper if base._is_dropped() else lora.ParamWrapper
    return wrapper(target, adapter_name, parameter_name, config, **kwargs)
