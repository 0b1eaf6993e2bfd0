"""Whether Triton's kernels run at a place, and what all of them need to know."""

import importlib
import importlib.util
import os
from functools import lru_cache
from typing import Any

import torch

from te_mx.backends.base import forced
from te_mx.backends.native import BLOCKWISE, unknown
from te_mx.dispatch.problem import MOST, Problem
from te_mx.formats import Format
from te_mx.formats.element import Element
from te_mx.layouts import spec_of

NAME, RANK = "triton", 500
MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4")
NVFP4 = ("nvfp4", "nvfp4_16x16", "nvfp4_rows")
MXFP6 = ("mxfp6_e2m3", "mxfp6_e3m2")  # but for products
_PRODUCTS = "gemm", "gemm_rows", "gemm_k", "moe_gemm"
_MOST_ROWS = 1 << 20  # in tiles of 32, beside groups' own, of which CUDA launches 65,535
LAYOUTS = ("rows", "cols")
# Interpreted kernels run on CPU tensors, for tests.
INTERPRETED = "TRITON_INTERPRET"


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why there is no Triton; None where it can be imported."""
    found = importlib.util.find_spec("triton") is not None
    return None if found else "needs Triton, which is not installed: pip install triton"


def is_interpreted() -> bool:
    """Whether Triton interprets kernels, so that they run on CPU tensors."""
    return os.environ.get(INTERPRETED, "0") not in ("", "0")


def why_not(problem: Problem, *layouts: str) -> str | None:
    """Why no kernel of this backend runs the problem, in plain layouts and these; None when one
    may."""
    device = problem.place.device
    if device != ("cpu" if is_interpreted() else "cuda"):
        return f"runs on GPUs, the operands are on {device}"
    reads, random = problem.op == "dequantize", problem.op in ("quantize", "quantize_grouped")
    formats = MX + BLOCKWISE + (NVFP4 if reads or random or problem.op in _PRODUCTS else ())
    formats += MXFP6 if reads or problem.op == "quantize" else ()
    if random:
        problem = problem._replace(rule="rceil")  # all rules of each
    reason = _why_not_gpu(problem) or missing()
    reason = reason or unknown(problem, LAYOUTS + layouts, formats, random)
    if reason is None and problem.empty:
        reason = "takes matrices that are not empty"
    if reason is None:
        new = reads and spec_of(problem.lhs).format.untransformed.name in MXFP6
        reason = why_not_run(problem) if new else None
    if reason is None and max(problem.m, problem.n, problem.k) > MOST:
        reason = f"counts sizes up to {MOST}"
    if reason is None and problem.op not in _PRODUCTS and problem.m > _MOST_ROWS:
        reason = f"a launch takes up to {_MOST_ROWS} rows"
    return reason


def _why_not_gpu(problem: Problem) -> str | None:
    """Why Triton has no code for a GPU of NVIDIA."""
    if problem.place.device != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(max(problem.place.index, 0))
    return None if major >= 8 else f"needs compute capability 8.0, the GPU has {major}.{minor}"


def why_not_run(problem: Problem) -> str | None:
    """Why what has not been run on Hopper does not run there, unless somebody asks for Triton."""
    if problem.place.device != "cuda" or forced == NAME or not torch.cuda.is_available():
        return None
    if torch.version.hip or torch.cuda.get_device_capability(max(problem.place.index, 0))[0] != 9:
        return None
    return f"has not been run on Hopper; TE_MX_BACKEND={NAME} asks for it"


def kernels(module: str) -> Any:
    """A module of te_mx.backends.triton.kernels, imported at the first call."""
    return importlib.import_module(f"te_mx.backends.triton.kernels.{module}")


def dtype_of(dtype: torch.dtype) -> Any:
    """A dtype of torch as Triton's."""
    return getattr(kernels("encode").tl, str(dtype).removeprefix("torch."))


def element_of(element: Element) -> dict[str, int]:
    """What `encode` asks of an element."""
    return {
        "BITS": element.bits, "MANTISSA_BITS": element.mantissa_bits,
        "MAX_BITS": element.max_bits, "MIN_BITS": element.min_bits,
        "NAN_CODE": element.nan_code or 0,
    }  # fmt: skip


def decoded(lhs: Format, rhs: Format, device: torch.device) -> str:
    """As which dtype a product multiplies values that the kernel makes, where a GPU has no such FP8
    or Triton no block scales of E4M3; its interpreter cannot multiply bf16, nor small FP8 numbers
    exactly. "" for none."""
    blocks = {lhs.block, rhs.block}
    if is_interpreted():
        return "fp32" if blocks & {16, 128} else ""
    fnuz = "fnuz" in lhs.element.name + rhs.element.name
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName
        sixteens = 16 in blocks and not ("gfx125" in arch and blocks == {16})
        return "bf16" if sixteens or (128 in blocks and ("gfx94" in arch) != fnuz) else ""
    capability = torch.cuda.get_device_capability(device)
    known = capability >= (10, 0) if blocks == {16} else len(blocks) == 1 and not fnuz
    return "" if known and capability >= (8, 9) else "bf16"


def casts(element: Element, device: torch.device) -> bool:
    """Whether a GPU rounds to an element of FP8 itself, saturating."""
    if is_interpreted() or torch.version.hip is not None or element.name not in ("e4m3", "e5m2"):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def takes_ptx(device: torch.device) -> int:
    """The major of a GPU of NVIDIA, whose instructions kernels may have in them; 0 for others."""
    if is_interpreted() or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def lanes(device: torch.device) -> int:
    """Threads of a warp."""
    if is_interpreted() or torch.version.hip is None:
        return 32
    return int(torch.cuda.get_device_properties(device).warp_size)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
