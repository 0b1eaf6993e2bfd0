"""The GEMM kernels of the CPU: panel kernels pack both operands, stream kernels read the codes of
rhs as they lie."""

from __future__ import annotations

import torch

from te_mx.backends.base import pointer
from te_mx.backends.cpu import binding, binding_prepared
from te_mx.backends.cpu.envelope import MX, why_not, why_not_level
from te_mx.backends.native import native_operand
from te_mx.dispatch.calls import Product, Ran
from te_mx.dispatch.kernels import Kernel, PreparedGemm
from te_mx.dispatch.problem import STREAM_ROWS, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand
from te_mx.runtime import workspace
from te_mx.runtime.cpu_memory import CPU, in_huge_pages


class Panel(Kernel):
    """Packs both operands: any shape, both layouts."""

    op = "gemm"

    def __init__(self, name: str, level: str, rank: int) -> None:
        self.name, self.level, self.rank = name, level, rank

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem, blockwise=True) or why_not_level(self.name, self.level, problem)

    def sums(self, problem: Problem) -> str:
        # Of fp32 scales the order depends on those of all rows; rows of too wide a range take those
        # of their block along (docs/numerics.md).
        mx = all(spec_of(one).format.untransformed.name in MX for one in (problem.lhs, problem.rhs))
        return self.name if mx else super().sums(problem)

    def note(self, problem: Problem) -> str:
        return (
            f"32-row blocks with a row whose scales span more than 2^{binding.WIDE_SPREAD} run on "
            "wide_f64"
        )

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        role = "a" if side == "rhs" else "b"
        plain = native_operand(operand.checked(side))
        nbytes = binding.packed_bytes(self.name, role, operand.rows, operand.k, plain.fmt)
        if nbytes == 0:
            return operand
        packed = in_huge_pages(nbytes)
        if not binding.pack(plain, self.name, role, packed):
            raise RuntimeError(f"te_mx internal error: {self.name} does not pack {operand.spec}")
        return operand._replace(packed=packed)

    def prepares(self, m: int, n: int, k: int) -> bool:
        return not binding.stream_pays(f"{self.level}_stream", m, n, k)

    def prepared(self, problem: Problem) -> PreparedGemm | None:
        return binding_prepared.PreparedGemm(self.name, problem).run

    def run(self, p: Product) -> Ran | None:
        call = binding.GemmCall(
            self.name, native_operand(p.rhs), native_operand(p.lhs), p.epilogue, p.out, p.aux
        )
        args, native = call.args, binding.native()
        nbytes = native.workspace_bytes(args)  # type: ignore[union-attr]
        scratch = workspace.acquire(CPU, nbytes)
        args.workspace, args.workspace_bytes = pointer(scratch), nbytes
        status, ran = native.gemm(args)  # type: ignore[union-attr]
        workspace.release(scratch, nbytes)
        if status and not binding.supported(status):
            return None
        if not p.out.is_inference():  # native code wrote behind autograd's back
            torch.autograd.graph.increment_version(p.out)
        return Ran(binding.KERNELS[ran], call.bias_grad)


class Stream(Panel):
    """For few rows of lhs and a k that is long enough; it reads rows of rhs, turned first where the
    codes lie by k."""

    def accepts(self, problem: Problem) -> str | None:
        return super().accepts(problem) or why_not_stream(self.name, problem)

    def sized(self, problem: Problem) -> bool:
        return problem.place.device == "cpu" and problem.m <= STREAM_ROWS

    def prepares(self, m: int, n: int, k: int) -> bool:
        return False


def why_not_stream(name: str, problem: Problem) -> str | None:
    """Why a stream kernel leaves a problem to the panel kernel of its level."""
    m, n, k = problem.m, problem.n, problem.k
    if m > STREAM_ROWS:
        return f"takes at most {STREAM_ROWS} rows of B, this has {m}"
    if not binding.stream_pays(name, m, n, k):
        return f"takes {m} rows of B with a longer k, this has k {k}"
    return None


# NOTE: a stream kernel stands before the panel kernel of its level: for few rows and a long k the
# codes (1.03 bytes an element) are the cheapest thing to read, cheaper than a packed weight.
PANELS = {
    "amx": "amx_bf16",
    "avx512_bf16": "avx512_bf16",
    "avx512": "avx512_f32",
    "avx2": "avx2_f32",
    "portable": "portable_f32",
}
for _rank, (_level, _name) in enumerate(PANELS.items()):
    register(Stream(f"{_level}_stream", _level, 2 * _rank))
    register(Panel(_name, _level, 2 * _rank + 1))
