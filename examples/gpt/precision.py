"""Everything that MXFP8 changes in a training script: convert, autocast, ask what ran."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

import te_mx

RECIPES = (
    "mxfp8", "mxfp8-hybrid", "mxfp8-floor", "mxfp8-exact", "float8_block", "deepseek_v3",
    "mxfp4", "mxfp4_all",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def usual_dtype(device: str) -> str:
    """bf16; fp32 on a CPU where torch has no bf16 products but a loop over single numbers."""
    slow = device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "fp32" if slow else "bf16"


def recipe(name: str) -> "te_mx.recipe.Recipe":
    """mxfp8: E4M3 throughout. -hybrid: E5M2 gradients. -floor: the OCP scale rule. -exact: products
    of the exact values on Hopper GPUs, in bf16. float8_block: one scale for 1 x 128 inputs and
    gradients, and 128 x 128 weights. deepseek_v3: the same with scales that are no powers of two.
    mxfp4: forward in MXFP4, backward in MXFP8. mxfp4_all: all three GEMMs in MXFP4, gradients with
    stochastic rounding and a random Hadamard transform.
    """
    if name == "float8_block":
        return te_mx.recipe.Float8BlockScaling()
    if name == "deepseek_v3":
        return te_mx.recipe.DeepSeekV3()
    if name in ("mxfp4", "mxfp4_all"):
        return te_mx.recipe.MXFP4BlockScaling(g="mxfp8_e4m3" if name == "mxfp4" else "mxfp4")
    fmt = te_mx.recipe.Format.HYBRID if name == "mxfp8-hybrid" else te_mx.recipe.Format.E4M3
    rule = "floor" if name == "mxfp8-floor" else "rceil"
    precision = "exact" if name == "mxfp8-exact" else "adaptive"
    return te_mx.recipe.MXFP8BlockScaling(fp8_format=fmt, scale_rule=rule, precision=precision)


def convert(model: nn.Module) -> None:
    """Every nn.Linear but the head and routers: both make logits and stay in high precision.

    fuse: the MLP runs as one step with GELU inside of its GEMMs, and normalizations quantize for
    the layers behind them. Parameters keep their names.
    """
    te_mx.convert_model(
        model, fuse=True,
        filter_fn=lambda module, name: name.split(".")[-1] not in ("head", "router"),
    )  # fmt: skip


def kernels(model: nn.Module) -> dict[str, int]:
    """Which kernels ran, each with its number of linear layers, e.g. {"amx_bf16": 12}."""
    ran: Counter[str] = Counter()
    for layer in te_mx.audit(model):
        if not layer.fprop:  # a fused block or normalization, whose layers have rows of their own
            continue
        gemms = {"fprop": layer.fprop, "dgrad": layer.dgrad, "wgrad": layer.wgrad}
        alike = len(set(gemms.values())) == 1
        ran[layer.fprop if alike else ", ".join(f"{k} {v}" for k, v in gemms.items())] += 1
    return dict(ran)


@contextlib.contextmanager
def forward_precision(device: str, dtype: str, recipe_name: str | None) -> Iterator[None]:
    """fp32 parameters, `dtype` activations by torch.autocast; with a recipe, MXFP8 linears."""
    with contextlib.ExitStack() as stack:
        if dtype != "fp32":
            stack.enter_context(torch.autocast(device.split(":")[0], DTYPES[dtype]))
        if recipe_name is not None:
            stack.enter_context(te_mx.autocast(recipe=recipe(recipe_name)))
        yield
