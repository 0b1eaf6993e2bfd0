"""What the golden digests are taken of: every op, layout, epilogue, recipe and module, through the
public API, on fixed inputs.

A case is a name and a function of a device that returns tensors. Names stay; how a case calls te_mx
may follow the API.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from data import KINDS, matrix, vector
from torch import Tensor

import te_mx
from te_mx.recipe import Format, MXFP8BlockScaling

Case = Callable[[torch.device], list[Tensor | None]]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
R = MXFP8BlockScaling


def codes(q: te_mx.MXTensor) -> list[Tensor | None]:
    parts = q.rowwise_data, q.rowwise_scale, q.columnwise_data, q.columnwise_scale
    return [None if part is None else part.view(torch.uint8) for part in parts]


# ----------------------------------------------------------------------------------------- quantize
def quantize_cases() -> Iterator[tuple[str, Case]]:
    shapes = ((1, 1), (3, 33), (64, 64), (50, 97), (129, 257))
    options = itertools.product(shapes, (F32, BF16, F16), ("e4m3", "e5m2"), ("rceil", "floor"))
    for (rows, cols), dtype, fmt, rule in options:

        def run(device, rows=rows, cols=cols, dtype=dtype, fmt=fmt, rule=rule):
            made: list[Tensor | None] = []
            for kind in KINDS:
                x = matrix("q", rows, cols, kind).to(device, dtype)
                for turned in (False, True):
                    q = te_mx.quantize(
                        x, fmt=fmt, columnwise=True, columnwise_transposed=turned, scale_rule=rule
                    )
                    made += codes(q)
                made += [q.dequantize(BF16), q.dequantize(F32, "columnwise")]
            return made

        yield f"quantize {rows}x{cols} {str(dtype)[6:]} {fmt} {rule}", run


# --------------------------------------------------------------------------------------------- gemm
SIZES = ((7, 40, 96), (65, 130, 161), (200, 96, 320))  # n, m, k: few rows of B, tails, whole blocks


def operands(device, layout, n, m, k, fmts, kind="plain"):
    a, b = matrix("a", m, k, kind).to(device, BF16), matrix("b", n, k, kind).to(device, BF16)
    a = a.t().contiguous() if layout in ("NN", "NT") else a
    b = b.t().contiguous() if layout == "NT" else b
    q = [te_mx.quantize(x, fmt=fmt, columnwise=True) for x, fmt in zip((a, b), fmts, strict=True)]
    return q


def epilogues(device, n: int, m: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    bias, side = vector("bias", m).to(device, dtype), matrix("side", n, m).to(device, dtype)
    return {
        "none": {},
        "bias": {"bias": bias},
        "gelu tanh": {"bias": bias, "gelu": "tanh"},
        "gelu erf": {"gelu": "erf"},
        "dgelu tanh": {"grad": True, "gelu": "tanh", "gelu_in": side, "bias": True},
        "dgelu erf": {"grad": True, "gelu": "erf", "gelu_in": side, "bias": bias},
        "operand sums": {"grad": True, "bias": True},
        "accumulate": {"accumulate": True, "out": side.clone(), "out_dtype": dtype},
    }


def gemm_cases() -> Iterator[tuple[str, Case]]:
    pairs = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")]
    for (n, m, k), layout, fmts in itertools.product(SIZES, ("TN", "NN", "NT"), pairs):

        def run(device, n=n, m=m, k=k, layout=layout, fmts=fmts):
            made: list[Tensor | None] = []
            for kind in ("plain", "outliers", "powers", "tiny", "broken"):
                a, b = operands(device, layout, n, m, k, fmts, kind)
                made += te_mx.gemm(a, b, layout, out_dtype=F32, split_k=False)
            return made

        yield f"gemm {n}x{m}x{k} {layout} {'x'.join(fmts)}", run
    for (n, m, k), dtype in itertools.product(SIZES, (BF16, F16, F32)):
        for name in epilogues(torch.device("cpu"), 1, 1, F32):

            def run(device, n=n, m=m, k=k, dtype=dtype, name=name):
                a, b = operands(device, "TN", n, m, k, ("e4m3", "e4m3"))
                more = {"out_dtype": dtype, **epilogues(device, n, m, dtype)[name]}
                return list(te_mx.gemm(a, b, "TN", split_k=False, **more))

            yield f"gemm {n}x{m}x{k} {str(dtype)[6:]} {name}", run


# ------------------------------------------------------------------------------------------ modules
K, N = 96, 80
RECIPES = {
    "default": R(),
    "floor": R(scale_rule="floor"),
    "hybrid": R(fp8_format=Format.HYBRID),
    "high precision": R(backward_override="high_precision"),
    "dequantized": R(backward_override="dequantized"),
    "wgrad hp": R(wgrad_with_hp=True),
    "one copy": R(one_copy_weights=True),
    "spread 3": R(alignment_spread=3),
}
# Where backward multiplies in torch, bits are those of its library and of no interest here.
NOT_OURS = {"high precision": (), "dequantized": (), "wgrad hp": ("x", "bias", "layer_norm")}


def filled(module: torch.nn.Module, device, dtype) -> torch.nn.Module:
    """The module with parameters of fixed numbers."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            value = matrix(name, p.numel(), 1).view(p.shape) * 0.1
            p.copy_(value + 1 if name == "layer_norm_weight" else value)
    return module.to(device, dtype)


def step(module, x, recipe: str, **kwargs) -> list[Tensor | None]:
    """Output and the gradients that te_mx computed."""
    x = x.detach().requires_grad_()
    with te_mx.autocast(recipe=RECIPES[recipe]):
        y = module(x, **kwargs)
    grad = matrix("g", y.numel(), 1).view(y.shape).to(y.device, y.dtype)
    y.backward(grad)
    # Of grouped layers all weights, then all biases.
    held = dict(module.named_parameters())
    kinds = list(dict.fromkeys(name.rstrip("0123456789") for name in held))
    names = sorted(held, key=lambda name: kinds.index(name.rstrip("0123456789")))
    made = {"x": x.grad, **{name: held[name].grad for name in names}}
    keep = NOT_OURS.get(recipe)
    return [y.detach()] + [
        value for name, value in made.items() if keep is None or name.startswith(tuple(keep))
    ]


SPLITS = [20, 0, 27, 1]
FAMILIES: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any]]] = {
    "Linear": (lambda: te_mx.Linear(K, N), {}),
    "Linear plain": (lambda: te_mx.Linear(K, N, bias=False, save_original_input=True), {}),
    "LayerNormLinear": (lambda: te_mx.LayerNormLinear(K, N), {}),
    "RMSNormLinear": (
        lambda: te_mx.LayerNormLinear(K, N, normalization="RMSNorm", zero_centered_gamma=True), {},
    ),
    "GroupedLinear": (lambda: te_mx.GroupedLinear(4, K, N), {"m_splits": SPLITS}),
    "GroupedLinear stacked": (
        lambda: te_mx.GroupedLinear(4, K, N, single_grouped_weight=True),
        {"m_splits": torch.tensor(SPLITS)},
    ),
    **{
        f"LayerNormMLP {act}": (
            partial(te_mx.LayerNormMLP, K, N, activation=act, normalization=norm), {},
        )
        for act, norm in (
            ("gelu", "LayerNorm"), ("gelu_erf", "RMSNorm"), ("relu", None), ("srelu", "LayerNorm"),
            ("silu", "LayerNorm"), ("qgelu", None), ("geglu", "RMSNorm"), ("swiglu", "RMSNorm"),
            ("glu", None), ("clamped_swiglu", "RMSNorm"),
        )
    },
}  # fmt: skip
EVERY_RECIPE = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNormMLP gelu",
                "LayerNormMLP swiglu")  # fmt: skip


def module_cases() -> Iterator[tuple[str, Case]]:
    for name, (make, kwargs) in FAMILIES.items():
        recipes = list(RECIPES) if name in EVERY_RECIPE else ["default"]
        for recipe, dtype in itertools.product(recipes, (BF16, F32)):

            def run(device, make=make, kwargs=kwargs, recipe=recipe, dtype=dtype):
                module = filled(make(), device, dtype)
                return step(module, matrix("x", 50, K).to(device, dtype), recipe, **kwargs)

            yield f"{name} {recipe} {str(dtype)[6:]}", run


def state_cases() -> Iterator[tuple[str, Case]]:
    """Weights that stand still, and gradients with a place of their own."""

    def frozen(device, make, kwargs, drop):
        module = filled(make(), device, BF16)
        te_mx.freeze_weights(module, drop_master=drop)
        with torch.no_grad(), te_mx.autocast():
            y = [module(matrix("x", rows, K).to(device, BF16), **kwargs) for rows in (50, 48)]
        held = [v.view(torch.uint8) for n, v in module.state_dict().items() if v.numel() and drop
                and v.element_size() == 1]  # fmt: skip
        return [*y, *held]

    def main_grad(device, make, kwargs):
        module = filled(make(), device, BF16)
        weights = [p for name, p in module.named_parameters() if "weight" in name and p.dim() > 1]
        for p in weights:
            p.main_grad = matrix("main", p.numel(), 1).view(p.shape).clone().to(device)
        module.fuse_wgrad_accumulation = True
        made = step(module, matrix("x", 50, K).to(device, BF16), "default", **kwargs)
        return [*made[:2], *(p.main_grad for p in weights)]

    for name in ("Linear", "GroupedLinear", "GroupedLinear stacked", "LayerNormMLP swiglu"):
        make, kwargs = FAMILIES[name]
        for drop in (False, True):
            yield (
                f"{name} frozen{' dropped' * drop}",
                lambda device, a=(make, kwargs, drop): frozen(device, *a),
            )
        yield f"{name} main_grad", lambda device, a=(make, kwargs): main_grad(device, *a)


def grouped_cases() -> Iterator[tuple[str, Case]]:
    def linear(device, how):
        x, w = matrix("x", 48, K).to(device, BF16), matrix("w", 4 * N, K).view(4, N, K)
        w = w.to(device, BF16)
        given: dict[str, Tensor] = {
            "offs": torch.tensor([20, 20, 47, 48]),
            "index": torch.arange(48) * 7 % 5 - 1,
            "masked_m": torch.tensor([12, 0, 5, 7]),
        }
        x = x.view(4, 12, K) if how == "masked_m" else x
        return [te_mx.grouped_linear(x, w, **{how: given[how]})]

    def wgrad(device, dtype):
        x, g = matrix("x", 48, K).to(device, BF16), matrix("g", 48, N).to(device, BF16)
        return [te_mx.grouped_wgrad(g, x, torch.tensor([20, 20, 47, 48]), out_dtype=dtype)]

    for how in ("offs", "index", "masked_m"):
        yield f"grouped_linear {how}", lambda device, how=how: linear(device, how)
    for dtype in (BF16, F32):
        yield f"grouped_wgrad {str(dtype)[6:]}", lambda device, d=dtype: wgrad(device, d)


# What cuBLAS multiplies on Hopper: E5M2 as the right operand. The order of its sums is that of its
# version, so that tests/gpu holds these products to a bound, and no digest does.
OF_CUBLAS = "e5m2xe4m3"


def all_cases() -> dict[str, Case]:
    made = [*quantize_cases(), *gemm_cases(), *module_cases(), *state_cases(), *grouped_cases()]
    cases = dict(made)
    assert len(cases) == len(made), "two cases have one name"
    return cases
