"""The GEMM kernels of Hopper: on FP8 tensor cores with aligned scales, and on the exact values in
bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.native import FP4, native_operand, words_of
from te_mx.backends.sm90 import (
    binding,
    binding_exact,
    binding_prepared,
    split_k,
    ways,
)
from te_mx.backends.sm90.envelope import why_not, why_not_second
from te_mx.backends.sm90.layouts.tiles import FP4_SPREAD
from te_mx.dispatch import run
from te_mx.dispatch.calls import Product, Ran
from te_mx.dispatch.kernels import Kernel, PreparedGemm, Wants
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand
from te_mx.runtime import workspace

ADAPTIVE, EXACT = "sm90_adaptive", "sm90_exact"
_MOST_CALLS = 4096


class Scratches:
    """Workspaces of one call, given back when it is enqueued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: list[tuple[Tensor | None, int]] = []

    def __call__(self, nbytes: int) -> Tensor | None:
        self.held.append((workspace.acquire(self.device, nbytes), nbytes))
        return self.held[-1][0]

    def release(self) -> None:
        for buffer, nbytes in self.held:
            workspace.release(buffer, nbytes)


class Scratched(Kernel):
    """A GEMM that takes its workspaces as it goes, and gives them back when it is enqueued."""

    op = "gemm"

    def run(self, p: Product) -> Ran | None:
        scratch = Scratches(p.out.device)
        made = self.multiply(p, scratch)
        scratch.release()
        if made is not None and not p.out.is_inference():
            torch.autograd.graph.increment_version(p.out)
        return made

    def multiply(self, p: Product, scratch: Scratches) -> Ran | None:
        raise NotImplementedError


def is_plain_fp4(spec: str) -> bool:
    """Whether an operand lies in codes of 4 bits, two a byte along k."""
    fmt, layout = spec_of(spec)
    return fmt.untransformed.name in FP4 and layout.name == "rows"


class Adaptive(Scratched):
    """FP8 tensor cores; scales of tiles of 128 x 128 are aligned."""

    name, rank = ADAPTIVE, 0

    def __init__(self) -> None:
        # Calls without an epilogue whose record is made: what they are for, and themselves.
        self._calls: dict[tuple[Any, ...], binding_prepared.PreparedGemm | None] = {}

    def run(self, p: Product) -> Ran | None:
        bias, gelu, gelu_in, bias_grad, accumulate = p.epilogue
        if bias is None and gelu is None and gelu_in is None and bias_grad is None:
            call = self._call(p)
            if call is not None and call.run(p.lhs, p.rhs, p.out, accumulate):
                if not p.out.is_inference():
                    torch.autograd.graph.increment_version(p.out)
                return Ran(self.name, None)
        return super().run(p)

    def _call(self, p: Product) -> binding_prepared.PreparedGemm | None:
        """The call of a product, which is made once for its sizes."""
        lhs, rhs, out = p.lhs, p.rhs, p.out
        key = (
            lhs.spec, rhs.spec, lhs.rows, rhs.rows, lhs.k, out.dtype, out.device, p.mode.spread,
            p.mode.split_k, self.configuration,
        )  # fmt: skip
        found = self._calls.get(key)
        if found is None and key in self._calls:
            return None
        if found is None or found.native is not binding.native():
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            found = self._calls[key] = self._made(p)
        return found

    def _made(self, p: Product) -> binding_prepared.PreparedGemm | None:
        lhs, rhs = p.lhs, p.rhs
        problem = Problem(
            "gemm", place_of(p.out.device), lhs.spec, rhs.spec, lhs.rows, rhs.rows, lhs.k,
            dtype=p.out.dtype, spread=p.mode.spread, split_k=p.mode.split_k,
        )  # fmt: skip
        return self._as_they_lie(problem)

    def _as_they_lie(self, problem: Problem) -> binding_prepared.PreparedGemm | None:
        specs = problem.lhs, problem.rhs
        plain = [order for _, order in map(words_of, specs) if order != "sm90"]
        if not all(order in ("k_last", "k_first") for order in plain):
            return None
        if any(map(is_plain_fp4, specs)):  # one launch unpacks both
            return None
        side = binding_prepared.Side
        return self._prepared(problem, *(side(*words_of(spec)) for spec in specs))

    def once(self, problem: Problem) -> PreparedGemm | None:
        made = self._as_they_lie(problem)
        return None if made is None else made.run

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols", "sm90")
        if reason is None and problem.precision != "adaptive":
            reason = f"is for precision 'adaptive', this asks for {problem.precision!r}"
        return reason or why_not_second(problem.rhs)

    def wants(self, problem: Problem) -> Wants:
        layout = f"sm90:{problem.spread}"
        return Wants(layout, layout)

    def note(self, problem: Problem) -> str:
        sides = [spec_of(spec).format.untransformed.name for spec in (problem.lhs, problem.rhs)]
        fp4 = [name in FP4 for name in sides]
        said = []
        if not all(fp4):
            said.append(
                "scales of tiles of 128 x 128 are aligned where they differ by at most "
                f"2^{problem.spread}"
            )
        if any(fp4):
            said.append(
                "4-bit codes are unpacked to FP8 tiles before the main loop, where scales up to "
                f"2^{FP4_SPREAD} apart are aligned exactly"
            )
        return "; ".join((*said, "docs/numerics.md has the error"))

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        return ways.configurations(problem.k, problem.split_k)

    def parts(self, problem: Problem) -> int:
        return self._parts(problem.place.index, problem.m, problem.n, problem.k)

    def _parts(self, index: int, m: int, n: int, k: int) -> int:
        return ways.way_of(self.configuration).parts or split_k.parts(index, m, n, k)

    def sums(self, problem: Problem) -> str:
        # Not of the blocks of D. Of m: rows of a tile share exponents.
        parts = self.parts(problem) if problem.split_k else 1
        return f"aligned tiles, k in {parts}, {problem.m} rows"

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        if not operand.layout.exact:
            return operand
        return run.convert(operand, f"{operand.format.name}@{self.wants(problem).row}")

    def prepared(self, problem: Problem) -> PreparedGemm | None:
        # NOTE: of operands that were prepared, whatever the problem says of how they lay before.
        side = binding_prepared.Side
        lhs, rhs = (side(words_of(spec)[0]) for spec in (problem.lhs, problem.rhs))
        return self._prepared(problem, lhs, rhs).run

    def _prepared(
        self, problem: Problem, lhs: binding_prepared.Side, rhs: binding_prepared.Side
    ) -> binding_prepared.PreparedGemm:
        parts = self.parts(problem) if problem.split_k else 1
        tile = ways.way_of(self.configuration).tile
        return binding_prepared.PreparedGemm(problem, lhs, rhs, parts, tile)

    def multiply(self, p: Product, scratch: Scratches) -> Ran | None:
        lhs, rhs = native_operand(p.lhs), native_operand(p.rhs)
        parts, tile, e = 1, -1, p.epilogue
        if p.mode.split_k:
            parts = self._parts(p.out.device.index, p.lhs.rows, p.rhs.rows, p.lhs.k)
        if self.configuration:
            way = ways.way_of(self.configuration)
            full = e.gelu is not None or e.gelu_in is not None or e.bias_grad is not None
            tile = way.tile if way.full or not full else -1
        done, bias_grad = binding.gemm(
            rhs, lhs, e, p.out, p.aux, p.mode.spread, scratch, parts, tile
        )
        if not done:
            return None
        if p.epilogue.bias_grad == "operand":
            bias_grad = binding.operand_sums(lhs, scratch)
        return Ran(self.name, bias_grad)


class Exact(Scratched):
    """Codes times scales as bf16, cuBLAS: for precision "exact", and for what the FP8 tensor cores
    have no kernels for."""

    name, rank = EXACT, 1

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols")
        if reason is None and problem.precision != "exact" and not why_not_second(problem.rhs):
            reason = f"is for precision 'exact', this asks for {problem.precision!r}"
        return reason

    def wants(self, problem: Problem) -> Wants:
        return Wants("rows", "rows")

    def prepares(self, m: int, n: int, k: int) -> bool:
        return False

    def note(self, problem: Problem) -> str:
        why = why_not_second(problem.rhs) if problem.precision == "adaptive" else None
        return f"{ADAPTIVE} {why}" if why else ""

    def multiply(self, p: Product, scratch: Scratches) -> Ran | None:
        lhs, rhs = native_operand(p.lhs), native_operand(p.rhs)
        return Ran(self.name, binding_exact.gemm(rhs, lhs, p.epilogue, p.out, p.aux, scratch))


register(Adaptive())
register(Exact())
