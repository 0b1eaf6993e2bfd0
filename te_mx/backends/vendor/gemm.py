"""GEMMs by torch.nn.functional.scaled_mm (aten/src/ATen/native/cuda/ScaledBlas.cpp) and
scaled_grouped_mm (GroupedBlas.cpp beside it)."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import base
from te_mx.backends.native import BLOCKWISE
from te_mx.backends.reference import gemm
from te_mx.dispatch.calls import Epilogue, GroupedK, GroupedRows, Product, Ran
from te_mx.dispatch.groups import BLOCK, device_bounds, inside_groups, scale_rows
from te_mx.dispatch.kernels import Kernel, PreferredLayouts, kernels
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats import Format
from te_mx.layouts import spec_of
from te_mx.layouts.base import Layout, Parts, Shape
from te_mx.layouts.operand import Operand, Stack

# ----------------------------------------------------------------------------------------- layouts
# What torch.nn.functional.scaled_mm asks of scales, in plain torch.
_TALL, _WIDE = 128, 4  # scales of a tile: 128 rows, 4 blocks
_ROUND = 32


class Swizzled(Layout):
    """Codes by rows, scales [rows rounded up to 128, blocks rounded up to 4] as SWIZZLE_32_4_4.

    Tiles of 128 rows and 4 blocks lie behind each other, those of the same rows first; in a tile
    the scale of row r and block b is byte (r % 32) * 16 + r // 32 * 4 + b. What pads is 0. cuBLAS,
    "1D Block Scaling Factors Layout"."""

    name = "torch_swizzled"
    refused = "formats but MX ones and NVFP4 with blocks of one row"

    def takes(self, fmt: Format) -> bool:
        return fmt.scaling.scale != "fp32" and fmt.scaling.block[0] == 1

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        padded = -(-rows // _TALL) * _TALL, -(-fmt.blocks(k) // _WIDE) * _WIDE
        return fmt.codes_shape(rows, k), padded

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        return codes, _swizzled(scales)

    def unpack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        tall, wide = scales.shape
        tiles = scales.reshape(tall // _TALL, wide // _WIDE, _ROUND, _TALL // _ROUND, _WIDE)
        plain = tiles.permute(0, 3, 2, 1, 4).reshape(tall, wide)
        return codes, plain[: len(codes), : fmt.blocks(k)].contiguous()


def _swizzled(scales: Tensor) -> Tensor:
    rows, blocks = scales.shape
    pad = torch.nn.functional.pad(scales, (0, -blocks % _WIDE, 0, -rows % _TALL))
    tiles = pad.view(-(-rows // _TALL), _TALL // _ROUND, _ROUND, -(-blocks // _WIDE), _WIDE)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(pad.shape)


def of_rows(scales: Tensor) -> Tensor:
    """fp32 scales [rows, blocks] of blocks of 1 x 128, columns behind each other."""
    return scales.t().contiguous().t()


def of_squares(scales: Tensor) -> Tensor:
    """fp32 scales [rows, blocks along k] of blocks of 128 x 128 as [blocks along k rounded up to 4,
    rows], columns behind each other."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4)).t()


def of_stack(scales: Tensor) -> Tensor:
    """Scales [groups, rows, blocks] of weights, swizzled, those of a group [rows rounded up to 128
    * blocks rounded up to 4] behind each other."""
    groups, rows, _ = scales.shape
    tall = torch.nn.functional.pad(scales, (0, 0, 0, -rows % _TALL)).flatten(0, 1)
    return _swizzled(tall).view(groups, -1)


def of_groups(scales: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Scales [rows, blocks] of tokens, swizzled, the rows of every group rounded up to 128: [rows
    // 128 * 128 + groups * 128, blocks rounded up to 4], for every split."""
    rows, blocks = scales.shape
    tall = scale_rows(rows, len(ends), _TALL) * _TALL
    padded = (ends - starts + _TALL - 1) // _TALL * _TALL
    group, inside = inside_groups(starts, ends, rows)
    first = (padded.cumsum(0) - padded - starts)[group]
    room = scales.new_zeros(tall + 1, blocks)
    room[torch.where(inside, first + torch.arange(rows, device=ends.device), tall)] = scales
    return _swizzled(room[:-1])


def of_k(scales: Tensor, blocks: Tensor, ends: Tensor) -> Tensor:
    """Scales [blocks, rows] along k, by the block of each in a copy where groups of k start at
    tiles and end at `ends` (a number behind it: of none), swizzled, the tiles of a group behind
    each other: [rows rounded up to 128, blocks of the copy]."""
    placed = scales.new_zeros(len(blocks) + 1, scales.shape[1])
    placed[:-1] = torch.nn.functional.pad(scales, (0, 0, 0, 1))[blocks]
    tiles = _swizzled(placed[:-1].t()).view(-1, len(blocks) // _WIDE, _TALL * _WIDE)
    stop = ends // (_WIDE * BLOCK)
    tile = torch.arange(tiles.shape[1], device=ends.device)
    group = torch.searchsorted(stop, tile, right=True)
    start = torch.nn.functional.pad(stop, (1, 0))
    inside = group < len(stop)
    first = torch.where(inside, start[group], tile)
    across = torch.where(inside, torch.nn.functional.pad(stop, (0, 1))[group] - first, 1)
    down = torch.arange(len(tiles), device=ends.device)[:, None]
    made = torch.empty_like(tiles).flatten(0, 1)
    made[len(tiles) * first + down * across + tile - first] = tiles
    return made.view(-1, len(blocks))


SWIZZLED = Swizzled()


# The first major of GPUs that multiply a format by cuBLAS, and the one behind the last; torch
# takes E4M3 alone, in blocks of any kind.
_GPUS = dict.fromkeys(("mxfp8_e4m3", "nvfp4"), (10, 13))
_GPUS |= {name: (9, 10) for name in BLOCKWISE if name.startswith("fp8_e4m3_")}
# On AMD, by format, the ROCm from which torch takes only scales that hipBLASLt shuffled.
AMD, _AMD = "gfx950", {"mxfp8_e4m3": (7, 14), "mxfp4": (7, 13)}
_GROUPED = ("mxfp8_e4m3", "mxfp4", "nvfp4")
_MULTIPLE, _TILE = 16, 128


@lru_cache(maxsize=64)
def capability(index: int) -> int | str | None:
    """The major of a CUDA GPU, or AMD; None where torch has no scaled_mm for it."""
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return None
    if not (torch.cuda.is_available() and 0 <= index < torch.cuda.device_count()):
        return None
    if torch.version.hip is None:
        return torch.cuda.get_device_capability(index)[0]
    return AMD if AMD in torch.cuda.get_device_properties(index).gcnArchName else None


@lru_cache(maxsize=64)
def groups(index: int) -> bool:
    """Whether torch multiplies groups with block scales on a GPU: B200, built with MSLK."""
    if torch.version.hip is not None or capability(index) is None:
        return False
    built = any(one in torch.__config__.show() for one in ("USE_MSLK", "USE_FBGEMM_GENAI"))
    return built and torch.cuda.get_device_capability(index) == (10, 0)


def behind(kernel: Kernel, problem: Problem) -> Any:
    """The plan of the kernel that comes next, for what no problem says; None for the reference."""
    names = [one.name for one in kernels(kernel.op)]
    rest = kernels(kernel.op)[names.index(kernel.name) + 1 :]
    found = next(one for one in rest if one.declines(problem) is None)
    return None if found is rest[-1] else found.plan(problem)


def why_not_rows(problem: Problem, *layouts: str) -> str | None:
    """Why torch does not multiply two operands as they lie, here: by rows, or in these layouts."""
    if problem.place.device != "cuda" or base.forced == "triton":
        return "runs on CUDA, where TE_MX_BACKEND does not say triton"
    specs = spec_of(problem.lhs), spec_of(problem.rhs)
    known = layouts or ("rows", "any", SWIZZLED.name)
    if any(one.layout.name not in known for one in specs):
        return f"takes operands that lie by {' and '.join(layouts) or 'rows (TN)'}"
    return "takes matrices that are not empty" if problem.empty else None


class _OfTorch(Kernel):
    """A product that torch computes; calls that it does not take run on the kernel behind."""

    rank = 400
    layouts = PreferredLayouts("rows", "grouped_cols")

    def takes(self, call: Any) -> bool:
        """Whether torch computes all that a call asks for."""
        raise NotImplementedError

    def sized(self, problem: Problem) -> bool:
        return True

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return self.layouts

    def make_plan(self, problem: Problem) -> Any:
        rest = behind(self, problem)

        def plan(p: Any) -> Any:
            if self.takes(p):
                return self.run(p)
            return None if rest is None else rest(p)

        return plan


class ScaledMM(_OfTorch):
    """cuBLAS, through torch: products of rows, with the epilogue in plain torch behind them."""

    op, name = "gemm", "torch_scaled_mm"
    layouts = PreferredLayouts("rows", "rows")

    def accepts(self, problem: Problem) -> str | None:
        reason, (m, n, k) = why_not_rows(problem), (problem.m, problem.n, problem.k)
        if reason is not None:
            return reason
        lhs, rhs = spec_of(problem.lhs).format, spec_of(problem.rhs).format
        names, kind = (lhs.name, rhs.name), capability(problem.place.index)
        if kind == AMD:
            return self._accepts_amd(problem, names)
        majors = {_GPUS.get(name) for name in names}
        if None in majors or len(majors) > 1 or lhs.block != rhs.block:
            both = " and ".join(names)
            return f"multiplies E4M3 in MX or blocks of 128, and NVFP4, by themselves, not {both}"
        if lhs.scaling.block[0] > 1 and rhs.scaling.block[0] > 1:
            return "takes blocks of 128 x 128 on one side"
        if n % _MULTIPLE or k % _MULTIPLE:
            return f"takes n and k that divide by {_MULTIPLE}"
        if names[0] in BLOCKWISE and (m % 4 or k % 128):
            return "takes blockwise FP8 with m that divides by 4 and k by 128"
        if names[0] == "nvfp4" and k % 32:
            return "takes NVFP4 with k that divides by 32"
        first, end = _GPUS[names[0]]
        if not isinstance(kind, int) or not first <= kind < end:
            return f"torch multiplies {names[0]} on GPUs of other kinds (or has no scaled_mm)"
        return None

    def _accepts_amd(self, problem: Problem, names: tuple[str, str]) -> str | None:
        if names[0] != names[1] or names[0] not in _AMD:
            return f"multiplies {' and '.join(_AMD)} by themselves, not {' and '.join(names)}"
        since = _AMD[names[0]]
        if tuple(map(int, str(torch.version.hip).split(".")[:2])) >= since:
            return f"torch takes {names[0]} with shuffled scales from ROCm {since[0]}.{since[1]} on"
        least = 32 if names[0] == "mxfp8_e4m3" else 64
        if problem.m % 32 or problem.n % 32 or problem.k % least:
            return f"takes m and n that divide by 32, and k by {least}"
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"writes bfloat16 and float16, not {problem.dtype}"
        return None

    def make_plan(self, problem: Problem) -> Any:
        return super().make_plan(problem) if capability(problem.place.index) == AMD else self.run

    def takes(self, call: Product) -> bool:
        return call.epilogue == Epilogue()  # which works on fp32 sums: AMD gives none

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        """With its scales swizzled, once."""
        plain = operand.format.scaling.scale == "fp32" or torch.version.hip is not None
        if plain or operand.layout is SWIZZLED:
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
    if torch.version.hip is not None:
        return scaled(side, side.scales, swizzles.NO_SWIZZLE)
    swizzled = side.scales
    if side.layout is not SWIZZLED:
        swizzled = SWIZZLED.pack(fmt, side.codes, swizzled, side.k)[1]
    return scaled(side, swizzled, swizzles.SWIZZLE_32_4_4)


def scaled(side: Operand | Stack, scales: Tensor, swizzle: Any) -> dict[str, Any]:
    """The same of codes with scales that lie as a swizzle says, and tensor scales."""
    types, fmt = torch.nn.functional.ScalingType, side.format
    scales, dtype = scales.view(fmt.scaling.torch_dtype), fmt.element.torch_dtype
    if fmt.element.bits == 4:
        dtype = torch.float4_e2m1fn_x2
    mat = side.codes.view(dtype or torch.uint8)
    if side.tensor_scale is None:
        recipe = types.BlockWise1x32
        return {"mat": mat, "scale": scales, "scale_recipe": recipe, "swizzle": swizzle}
    both: list[Tensor] = [scales, side.tensor_scale]
    return {
        "mat": mat, "scale": both, "scale_recipe": [types.BlockWise1x16, types.TensorWise],
        "swizzle": [swizzle, torch.nn.functional.SwizzleType.NO_SWIZZLE],
    }  # fmt: skip


def _grouped(a: dict[str, Any], b: dict[str, Any], ends: Tensor) -> Tensor:
    """torch's product of two sides (`scaled`), in bf16."""
    functional: Any = torch.nn.functional  # whose stub does not know it
    made: Tensor = functional.scaled_grouped_mm(
        a.pop("mat"), b.pop("mat").transpose(-2, -1),
        **{f"{key}_a": one for key, one in a.items()},
        **{f"{key}_b": one for key, one in b.items()}, offs=ends.to(torch.int32),
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return made


def _why_not_groups(problem: Problem) -> str | None:
    if problem.dtype != torch.bfloat16:
        return f"writes bfloat16, not {problem.dtype}"
    if not (problem.ends == "device" and problem.groups):
        return "is for groups whose ends the device knows; others run one by one"
    if not groups(problem.place.index):
        return "torch multiplies groups on compute capability 10.0, built with MSLK"
    return None


class ScaledGroupedMM(_OfTorch):
    """Groups of rows whose ends the device knows, through torch, in bf16."""

    op, name = "gemm_rows", "torch_scaled_grouped_mm"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not_rows(problem)
        names = [spec_of(spec).format.name for spec in (problem.lhs, problem.rhs)]
        if reason is None and (names[0] != names[1] or names[0] not in _GROUPED):
            reason = f"multiplies {', '.join(_GROUPED)} by themselves, not {' and '.join(names)}"
        if reason is None and (problem.n % _MULTIPLE or problem.k % 32):
            reason = f"takes n that divides by {_MULTIPLE} and k by 32"
        return reason or _why_not_groups(problem)

    def takes(self, call: GroupedRows) -> bool:
        return call.bias is None

    def run(self, p: GroupedRows) -> str:
        rows, count, capacity = len(p.out), p.rhs.groups, p.groups.capacity
        starts, ends = device_bounds(*p.groups, rows)
        _, inside = inside_groups(starts, ends, rows)
        if capacity:  # torch's groups follow each other; what is between them is set to 0 below
            ends = (torch.arange(1, count + 1, device=ends.device) * capacity).clamp(max=rows)
            starts = torch.nn.functional.pad(ends[:-1], (1, 0))
        swizzle = torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
        a = scaled(p.lhs, of_groups(p.lhs.scales, starts, ends), swizzle)
        b = scaled(p.rhs, of_stack(p.rhs.scales), swizzle)
        p.out.copy_(torch.where(inside[:, None], _grouped(a, b, ends), 0.0))
        return self.name


class ScaledGroupedK(_OfTorch):
    """Products of groups over their rows, through torch, in bf16: of copies that lie by rows, where
    every group starts at 128 of k."""

    op, name = "gemm_k", "torch_scaled_grouped_mm"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not_rows(problem, "grouped_cols")
        names = {spec_of(spec).format.name for spec in (problem.lhs, problem.rhs)}
        if reason is None and names != {"mxfp8_e4m3"}:
            reason = f"multiplies mxfp8_e4m3 by itself, not {' and '.join(sorted(names))}"
        if reason is None and (problem.m % _MULTIPLE or problem.n % _MULTIPLE):
            reason = f"takes m and n that divide by {_MULTIPLE}"
        return reason or _why_not_groups(problem)

    def takes(self, call: GroupedK) -> bool:
        return not call.accumulate

    def run(self, p: GroupedK) -> str:
        rows, device = p.lhs.k, p.out.device
        starts, ends = device_bounds(*p.groups, rows)
        stop = (-(-(ends - starts) // _TILE) * _TILE).cumsum(0)
        first = torch.nn.functional.pad(stop[:-1], (1, 0))
        room = scale_rows(rows, len(ends), _TILE) * _TILE
        group, inside = inside_groups(starts, ends, rows)
        row = torch.arange(rows, device=device)
        to = torch.where(inside, first[group] + row - starts[group], room)
        own = starts[group] // BLOCK + group + (row - starts[group]) // BLOCK
        none = len(p.lhs.scales)
        blocks = own.new_full((room // BLOCK + 1,), none)
        blocks[to // BLOCK] = torch.where(inside, own, none)
        swizzle, sides = torch.nn.functional.SwizzleType.SWIZZLE_32_4_4, []
        for side in (p.lhs, p.rhs):
            codes = side.codes.new_zeros(room + 1, side.rows)
            codes[to] = side.codes
            flat = side._replace(codes=codes[:-1].t().contiguous())
            sides.append(scaled(flat, of_k(side.scales, blocks[:-1], stop), swizzle))
        value = _grouped(sides[0], sides[1], stop)
        p.out.copy_(torch.where((ends > starts)[:, None, None], value, 0.0))
        return self.name


register(ScaledMM())
register(ScaledGroupedK())
register(ScaledGroupedMM())
