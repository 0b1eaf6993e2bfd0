"""GEMMs by torch.nn.functional.scaled_mm (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import base
from te_mx.backends.native import BLOCKWISE
from te_mx.backends.reference import gemm
from te_mx.backends.vendor.layouts import SWIZZLED, of_rows, of_squares
from te_mx.dispatch.calls import Epilogue, Product, Ran
from te_mx.dispatch.kernels import Kernel, Wants
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand

_MX = ("mxfp8_e4m3", "mxfp8_e5m2")
# The first major of GPUs that multiply a format by cuBLAS, and the one behind the last.
_GPUS = dict.fromkeys((*_MX, "nvfp4"), (10, 13))
# Torch 2.11 refuses blocks of E5M2 on an H200.
_GPUS |= {name: (9, 10) for name in BLOCKWISE if name.startswith("fp8_e4m3_")}
_MULTIPLE = 16


@lru_cache(maxsize=64)
def capability(index: int) -> int | None:
    """The major of a CUDA GPU; None where torch has no scaled_mm, there is none, or it is AMD's."""
    if torch.version.hip is not None or not hasattr(torch.nn.functional, "scaled_mm"):
        return None
    if not (torch.cuda.is_available() and 0 <= index < torch.cuda.device_count()):
        return None
    return torch.cuda.get_device_capability(index)[0]


class ScaledMM(Kernel):
    """cuBLAS, through torch: products of rows, with the epilogue in plain torch behind them."""

    op, name, rank = "gemm", "torch_scaled_mm", 400

    def accepts(self, problem: Problem) -> str | None:
        place, sizes = problem.place, (problem.m, problem.n, problem.k)
        if place.device != "cuda" or base.forced == "triton":
            return "runs on CUDA, where TE_MX_BACKEND does not say triton"
        lhs, rhs = spec_of(problem.lhs), spec_of(problem.rhs)
        names = lhs.format.name, rhs.format.name
        majors = {_GPUS.get(name) for name in names}
        if None in majors or len(majors) > 1 or len({one.format.block for one in (lhs, rhs)}) > 1:
            both = " and ".join(names)
            return f"multiplies MXFP8, NVFP4 and blockwise FP8 by themselves, not {both}"
        if lhs.format.scaling.block[0] > 1 and rhs.format.scaling.block[0] > 1:
            return "takes blocks of 128 x 128 on one side"
        if all(one.format.element.name == "e5m2" for one in (lhs, rhs)):
            return "does not multiply E5M2 by E5M2"
        if any(one.layout.name not in ("rows", "any", SWIZZLED.name) for one in (lhs, rhs)):
            return "takes operands that lie by rows (TN)"
        if any(size % _MULTIPLE for size in sizes[1:]) or problem.empty:
            return f"takes n and k that divide by {_MULTIPLE}"
        if names[0] in BLOCKWISE and (problem.m % 4 or problem.k % 128):
            return "takes blockwise FP8 with m that divides by 4 and k by 128"
        if names[0] == "nvfp4" and problem.k % 32:
            return "takes NVFP4 with k that divides by 32"
        major, (first, behind) = capability(place.index), _GPUS[names[0]]
        if major is None or not first <= major < behind:
            return f"torch multiplies {names[0]} on GPUs of other kinds (or has no scaled_mm)"
        return None

    def sized(self, problem: Problem) -> bool:
        return True

    def wants(self, problem: Problem) -> Wants:
        return Wants("rows", "rows")

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        """With its scales swizzled, once."""
        if operand.format.scaling.scale == "fp32" or operand.layout is SWIZZLED:
            return operand
        codes, scales = SWIZZLED.pack(operand.format, *operand[:2], operand.k)
        return operand._replace(
            codes=codes, scales=scales, spec=f"{operand.format.name}@{SWIZZLED.name}"
        )

    def run(self, p: Product) -> Ran:
        a, b = multiplied(p.lhs), multiplied(p.rhs)
        plain = p.epilogue == Epilogue()
        dtype = p.out.dtype if plain else torch.float32
        value = torch.nn.functional.scaled_mm(
            a.pop("mat"), b.pop("mat").t(), **{f"{key}_a": one for key, one in a.items()},
            **{f"{key}_b": one for key, one in b.items()}, output_dtype=dtype,
        )  # fmt: skip
        if plain:
            p.out.copy_(value)
            return Ran(self.name, None)
        sums = p.lhs.values(torch.float32).sum(1) if p.epilogue.bias_grad == "operand" else None
        return Ran(self.name, gemm.finish(value, sums, p.epilogue, p.out, p.aux))


def multiplied(side: Operand) -> dict[str, Any]:
    """What scaled_mm takes of an operand: codes of a float dtype, scales, recipes, swizzles."""
    types, swizzles = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    fmt = side.format
    if fmt.scaling.scale == "fp32":
        square = fmt.scaling.block[0] > 1
        return {
            "mat": side.codes.view(fmt.element.torch_dtype or torch.uint8),
            "scale": of_squares(side.scales) if square else of_rows(side.scales),
            "scale_recipe": types.BlockWise128x128 if square else types.BlockWise1x128,
        }  # fmt: skip
    scales = side.scales
    if side.layout is not SWIZZLED:
        scales = SWIZZLED.pack(fmt, side.codes, scales, side.k)[1]
    scales = scales.view(fmt.scaling.torch_dtype)
    if side.tensor_scale is None:
        return {
            "mat": side.codes.view(fmt.element.torch_dtype or torch.uint8), "scale": scales,
            "scale_recipe": types.BlockWise1x32, "swizzle": swizzles.SWIZZLE_32_4_4,
        }  # fmt: skip
    both: list[Tensor] = [scales, side.tensor_scale]
    return {
        "mat": side.codes.view(torch.float4_e2m1fn_x2), "scale": both,
        "scale_recipe": [types.BlockWise1x16, types.TensorWise],
        "swizzle": [swizzles.SWIZZLE_32_4_4, swizzles.NO_SWIZZLE],
    }  # fmt: skip


register(ScaledMM())
