"""Weights that stand still on Hopper: one copy, which the GEMM and the kernels for few rows read
where it lies. MXFP8 in tiles that give their bytes back (layouts/frozen.py), blockwise FP8 with its
scales in the order of steps (layouts/factors.py), MXFP4 by rows."""

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.reference.quantize import ReferenceRest
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.blockwise import FORMATS as BLOCKWISE
from te_mx.backends.sm90.envelope import why_not, why_not_second
from te_mx.backends.sm90.layouts import SM90_FACTORS, SM90_FROZEN, frozen
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats import get
from te_mx.layouts import ROWS
from te_mx.layouts.base import Parts
from te_mx.layouts.operand import Operand, Stack

ROOM = 1 << 10  # for a code to lie aside in so many at first; more are counted and packed again


class Frozen(ReferenceRest):
    """MXFP8 in E4M3, of which a byte in 10,000 lies aside."""

    name = layout = SM90_FROZEN.name
    rank = 0

    def accepts(self, problem: Problem) -> str | None:
        if not problem.lhs.startswith(f"{frozen.FORMAT}@"):
            return f"keeps {frozen.FORMAT}, not {problem.lhs}"
        if problem.n % 16:
            return f"keeps rows of whole 16 bytes, not of {problem.n}"
        return why_not(problem)

    def rest(self, row: Operand | Stack) -> Operand | Stack:
        codes, scales = row.codes.contiguous(), row.scales.contiguous()
        made = binding.empty_like(row, f"{frozen.FORMAT}@{SM90_FROZEN.name}")
        room = codes.numel() // ROOM + frozen.MOST_ASIDE
        while True:
            lists = [self._pack(*one, room) for one in _each((codes, scales), made)]
            most = max(max(counts) for _, counts in lists)
            if most <= room:
                break
            room = most
        return made._replace(packed=_aside(lists, codes, scales))

    @staticmethod
    def _pack(
        codes: Tensor, scales: Tensor, tiles: Tensor, words: Tensor, room: int
    ) -> tuple[Tensor, list[int]]:
        native = binding.native()
        aside = torch.empty((2, room), dtype=torch.int64, device=codes.device)
        counts = torch.zeros(2, dtype=torch.int64, device=codes.device)
        places = [part.data_ptr() for part in (codes, scales, tiles, words)]
        index = codes.device.index
        status = native.pack_frozen(
            places, *codes.shape, aside.data_ptr(), room, counts.data_ptr(), index or 0,
            binding.stream(index),
        )  # fmt: skip
        binding.expect(status, f"a weight {tuple(codes.shape)}")
        return aside, counts.tolist()

    def plain(self, held: Operand | Stack) -> Parts:
        native = binding.native()
        held = held.checked("the weight")
        groups = held.codes.shape[:-2]
        codes, scales = (
            torch.empty((*groups, *shape), dtype=torch.uint8, device=held.codes.device)
            for shape in ROWS.shapes(get(frozen.FORMAT), held.rows, held.k)
        )
        index = codes.device.index
        for one in _each((codes, scales), held):
            places = [part.data_ptr() for part in one]
            stream = binding.stream(index)
            status = native.unpack_frozen(places, held.rows, held.k, 0, 0, 0, index or 0, stream)
            binding.expect(status, f"a frozen weight {held.rows, held.k}")
        if held.packed is not None:
            frozen.put_back(held.packed, codes, scales)
        return codes, scales


class Factors(ReferenceRest):
    """Blockwise FP8, whose codes stay as they are."""

    name = layout = SM90_FACTORS.name
    rank = 0

    def accepts(self, problem: Problem) -> str | None:
        if problem.n % 16:
            return f"keeps rows of whole 16 bytes, not of {problem.n}"
        return why_not(problem, formats=BLOCKWISE) or why_not_second(problem.lhs)

    def rest(self, row: Operand | Stack) -> Operand | Stack:
        codes, scales = SM90_FACTORS.pack(row.format, row.codes, row.scales, row.k)
        return row._replace(codes=codes, scales=scales, spec=f"{row.format.name}@{self.layout}")


def _each(plain: Parts, held: Any) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Plain codes and scales, tiles and words of a weight, or of each group's."""
    parts = *plain, held.codes, held.scales
    return [parts] if held.codes.dim() == 2 else list(zip(*parts, strict=True))


def _aside(lists: list[tuple[Tensor, list[int]]], codes: Tensor, scales: Tensor) -> Tensor:
    """What was listed of a weight, or of each group's, in order, as one."""
    found: list[Tensor] = []
    for part, held in enumerate((codes, scales)):
        size = held.numel() // len(lists) << 8
        each = [one[part, : counts[part]] + i * size for i, (one, counts) in enumerate(lists)]
        found.append(torch.cat(each).sort()[0])
    return frozen.filled(found, codes, scales)


register(Frozen())
register(Factors())
