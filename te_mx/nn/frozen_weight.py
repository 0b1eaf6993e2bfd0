"""The frozen state of a te_mx.Linear, and its form in a state_dict.

With the master weight kept, freezing adds a quantized and packed copy that no checkpoint sees. With
the master dropped
the codes are the weight: ``weight`` (float8_e4m3fn [out, in]) and ``weight_scale`` (uint8 [out,
ceil(in/32)], E8M0), the names and layouts of MXFP8 checkpoints of compressed-tensors and ModelOpt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from te_mx.ops import Operand
from te_mx.recipe import Settings, get_default_recipe

if TYPE_CHECKING:
    from te_mx.autograd.operands import StandingWeight
    from te_mx.nn.linear import Linear

FMT = "e4m3"  # of every weight: recipes have no other forward format


class FrozenWeight:
    """How a layer is frozen. `weight` is the quantized copy beside a kept master, made again when
    None.

    `dtype` and `trained` (requires_grad of weight and bias) are what unfreezing restores.
    """

    __slots__ = ("dropped", "dtype", "settings", "trained", "weight")

    def __init__(
        self,
        settings: Settings,
        dtype: torch.dtype,
        trained: dict[str, bool],
        dropped: bool = False,
        weight: StandingWeight | None = None,
    ) -> None:
        self.settings = settings
        self.dtype = dtype
        self.trained = trained
        self.dropped = dropped
        self.weight = weight

    def operand(self, module: Linear) -> Operand:
        """The weight of a layer without a master, for fprop."""
        codes: Tensor = module.weight_codes  # type: ignore[assignment]
        scales: Tensor = module.weight_scale  # type: ignore[assignment]
        return Operand(codes, scales, FMT, "k_last")

    def without_codes(self) -> FrozenWeight:
        """A copy without the quantized weight, which the next forward makes again."""
        return FrozenWeight(self.settings, self.dtype, dict(self.trained), self.dropped)


def mark_frozen(module: Linear, settings: Settings) -> FrozenWeight:
    """Freeze the layer with its master kept: its parameters stop training."""
    dtype = module.whole_weight().dtype
    trained = {}
    for name, value in module.named_parameters(recurse=False):
        trained[name] = value.requires_grad
        value.requires_grad_(False)
    module._frozen = FrozenWeight(settings, dtype, trained)
    return module._frozen


def drop_master(module: Linear, codes: Tensor, scales: Tensor) -> None:
    """Replace the weight of a frozen layer by codes [out, in] and scales [out, ceil(in/32)]."""
    frozen = module._frozen
    assert frozen is not None
    frozen.dropped, frozen.weight = True, None
    module.register_parameter("weight", None)
    # The state_dict has them under other names and dtypes. As uint8 they pass through .to(dtype)
    # unharmed.
    module.register_buffer("weight_codes", codes, persistent=False)
    module.register_buffer("weight_scale", scales, persistent=False)


def restore_master(module: Linear, weight: Tensor) -> None:
    """Give a layer without a master the parameter `weight` [out, in]."""
    del module.weight_codes, module.weight_scale
    module.register_parameter("weight", nn.Parameter(weight))


def save_codes(module: Linear, destination: Any, prefix: str, keep_vars: bool) -> None:
    """state_dict entries of a layer without a master."""
    codes: Tensor = module.weight_codes  # type: ignore[assignment]
    destination[prefix + "weight"] = codes.view(torch.float8_e4m3fn)
    destination[prefix + "weight_scale"] = module.weight_scale


def load_codes(
    module: Linear, state_dict: Any, prefix: str, local_metadata: Any, error_msgs: list[str]
) -> tuple[str, ...]:
    """Load a quantized weight if the state_dict has one, which makes the layer frozen without a
    master.

    Returns the keys that were dealt with here; what is wrong is appended to `error_msgs`.
    """
    weight_key, scale_key = prefix + "weight", prefix + "weight_scale"
    dropped = module._frozen is not None and module._frozen.dropped
    if scale_key not in state_dict:
        if not dropped:
            return ()
        if weight_key in state_dict:
            error_msgs.append(
                f"{weight_key} is in high precision, but the layer is frozen without its master "
                "weight; call te_mx.unfreeze_weights(model, dequantize=True) before loading"
            )
        else:
            error_msgs.append(f"{weight_key} and {scale_key} of a frozen layer are missing")
        return (weight_key,)
    codes, scales = state_dict.get(weight_key), state_dict[scale_key]
    if module._split is not None:
        error_msgs.append(
            f"{scale_key}: a quantized weight does not load into a layer with parameters_split; "
            "build it without"
        )
        return (weight_key, scale_key)
    problem = _problem(codes, scales, module.out_features, module.in_features)
    if problem:
        error_msgs.append(f"{weight_key}, {scale_key}: {problem}")
        return (weight_key, scale_key)
    held: Tensor = module.weight_codes if dropped else module.weight  # type: ignore[assignment]
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
    if not (local_metadata.get("assign_to_params_buffers", False) or held.is_meta):
        codes, scales = (t.to(held.device, copy=True) for t in (codes, scales))
    if module._frozen is None:
        mark_frozen(module, get_default_recipe().settings)
    drop_master(module, codes.detach().contiguous(), scales.detach().contiguous())
    return (weight_key, scale_key)


def _problem(codes: Tensor | None, scales: Tensor, out_features: int, in_features: int) -> str:
    """What is wrong with a quantized weight in a state_dict, or an empty string."""
    if codes is None:
        return "a weight_scale needs a weight of codes beside it"
    if codes.dtype != torch.float8_e4m3fn:
        return f"codes must be float8_e4m3fn, got {codes.dtype}"
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return f"scales must be uint8 (E8M0 bytes), got {scales.dtype}"
    expected = [(out_features, in_features), (out_features, -(-in_features // 32))]
    got = [tuple(codes.shape), tuple(scales.shape)]
    if got != expected:
        return (
            f"shapes must be {expected[0]} and {expected[1]} (one scale per 32 columns), got "
            f"{got[0]} and {got[1]}"
        )
    return ""
