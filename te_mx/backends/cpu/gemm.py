"""GEMMs of the CPU: panel kernels pack both operands, stream kernels read rhs as it lies."""

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import BIAS_GRADS, FLOAT_DTYPES, pointer, set_epilogue
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.binding import why_not, why_not_level
from te_mx.backends.native import MX, NVFP4, fields_of, set_tensor_scale, words_of
from te_mx.dispatch.calls import Product, Ran
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import INVARIANT, STREAM_ROWS, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand
from te_mx.runtime import workspace
from te_mx.runtime.cpu_memory import CPU, in_huge_pages


def run(native: Any, args: Any) -> str | None:
    """Run a product, whose record has no workspace yet: the name of the kernel that ran, None for
    what native code does not take."""
    nbytes = native.workspace_bytes(args)
    scratch = workspace.acquire(CPU, nbytes)
    args.workspace, args.workspace_bytes = pointer(scratch), nbytes
    status, ran = native.gemm(args)
    workspace.release(scratch, nbytes)
    if status and not binding.supported(status):
        return None
    return binding.KERNELS[ran]


class Products:
    """Products of operands of one size by one kernel, whose native record is made once."""

    __slots__ = ("lhs", "native", "record", "rhs")

    def __init__(self, kernel: str, p: Problem) -> None:
        number = binding.KERNEL_IDS[kernel]
        self.native = binding.native()
        # Which packed forms these are.
        self.lhs = number, binding.ROLES["b"], p.m, p.k
        self.rhs = number, binding.ROLES["a"], p.n, p.k
        self.record = self.native.GemmArgs(
            lhs_rows=p.m, lhs_k=p.k, rhs_rows=p.n, rhs_k=p.k, out_dtype=FLOAT_DTYPES[p.dtype],
            ldo=p.n, kernel=number, invariant=p.precision == INVARIANT,
            **fields_of(p.lhs, "lhs"), **fields_of(p.rhs, "rhs"),
        )  # fmt: skip

    def __call__(self, p: Product) -> Ran | None:
        args, bias_grad, _alive = self.filled(p)
        ran = run(self.native, args)
        return None if ran is None else Ran(ran, bias_grad)

    def filled(self, p: Product) -> tuple[Any, Tensor | None, object]:
        """The record of a call without a workspace, its bias gradient, what must live as long."""
        lhs, rhs, epilogue, out, aux, _ = p
        kind = epilogue.bias_grad
        args = self.record.copy(
            lhs_codes=lhs.codes.data_ptr(), lhs_scales=lhs.scales.data_ptr(),
            rhs_codes=rhs.codes.data_ptr(), rhs_scales=rhs.scales.data_ptr(), out=out.data_ptr(),
            accumulate=epilogue.accumulate, threads=torch.get_num_threads(),
        )  # fmt: skip
        set_tensor_scale(args, "lhs_", lhs)
        set_tensor_scale(args, "rhs_", rhs)
        if lhs.packed is not None:
            args.lhs_packed = binding.packed_at(lhs.packed, self.lhs)
        if rhs.packed is not None:
            args.rhs_packed = binding.packed_at(rhs.packed, self.rhs)
        alive = set_epilogue(args, epilogue, aux)
        bias_grad = None
        if kind is not None:
            size = out.shape[0] if kind == "operand" else out.shape[1]
            bias_grad = torch.empty(size, dtype=torch.float32, device=CPU)
            args.bias_grad_kind, args.bias_grad = BIAS_GRADS[kind], bias_grad.data_ptr()
        return args, bias_grad, alive


class Panel(Kernel):
    """Packs both operands: any shape, both layouts."""

    op, invariant = "gemm", True

    def __init__(self, name: str, level: str, rank: int) -> None:
        self.name, self.level, self.rank = name, level, rank

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True, nvfp4=True)
        return reason or why_not_level(self.name, self.level, problem)

    def sums(self, problem: Problem) -> str:
        # Of fp32 scales the order depends on those of all rows; rows of too wide a range take those
        # of their block along (docs/numerics.md).
        names = [spec_of(one).format.untransformed.name for one in (problem.lhs, problem.rhs)]
        return self.name if all(one in MX + NVFP4 for one in names) else super().sums(problem)

    def note(self, problem: Problem) -> str:
        return (
            f"32-row blocks with a row whose scales span more than 2^{binding.WIDE_SPREAD} run on "
            "wide_f64"
        )

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        role = "a" if side == "rhs" else "b"
        operand = operand.checked(side)
        word = words_of(operand.spec)[0]
        nbytes = binding.packed_bytes(self.name, role, operand.rows, operand.k, word)
        if nbytes == 0:
            return operand
        packed = in_huge_pages(nbytes)
        if not binding.pack(operand, self.name, role, packed):
            raise RuntimeError(f"te_mx internal error: {self.name} does not pack {operand.spec}")
        return operand._replace(packed=packed)

    def prepares(self, m: int, n: int, k: int) -> bool:
        return not binding.stream_pays(f"{self.level}_stream", m, n, k)

    def make_plan(self, problem: Problem) -> Products:
        return Products(self.name, problem)


class Stream(Panel):
    """For few rows of lhs and a k that is long enough; it reads rows of rhs, turned first where the
    codes lie by k. They sum in another order than panel kernels, which take any number of rows."""

    invariant = False

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
    "amx": "amx_bf16", "avx512_bf16": "avx512_bf16", "avx512": "avx512_f32", "avx2": "avx2_f32",
    "portable": "portable_f32",
}  # fmt: skip
for _rank, (_level, _name) in enumerate(PANELS.items()):
    register(Stream(f"{_level}_stream", _level, 2 * _rank))
    register(Panel(_name, _level, 2 * _rank + 1))
