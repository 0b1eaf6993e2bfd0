"""Calls of the adaptive GEMM whose native record is made once."""

from __future__ import annotations

from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, FORMATS, LAYOUTS, pointer
from te_mx.backends.sm90 import binding
from te_mx.dispatch.problem import Problem
from te_mx.layouts.operand import Operand
from te_mx.runtime import workspace


class PreparedGemm:
    """GEMMs of packed operands of one size without an epilogue: the record is made once."""

    __slots__ = ("gemm", "index", "native", "nbytes", "record")

    def __init__(
        self, problem: Problem, lhs_fmt: str, rhs_fmt: str, parts: int, tile: int = -1
    ) -> None:
        m, n, k = problem.m, problem.n, problem.k
        index, native = problem.place.index, binding.native()
        assert native is not None
        self.native, self.gemm = native, native.gemm
        self.record = native.GemmArgs(
            lhs_rows=m, lhs_k=k, lhs_element=FORMATS[lhs_fmt], lhs_layout=LAYOUTS["sm90"],
            rhs_rows=n, rhs_k=k, rhs_element=FORMATS[rhs_fmt], rhs_layout=LAYOUTS["sm90"], ldo=n,
            out_dtype=FLOAT_DTYPES[problem.dtype], parts=parts, kernel=tile,
            device=index,
        )  # fmt: skip
        self.index = index
        self.nbytes = self.record.workspace_bytes = native.workspace_bytes(self.record)

    def run(self, lhs: Operand, rhs: Operand, out: Tensor, accumulate: bool = False) -> bool:
        """Enqueue out = lhs @ rhs^T, or add that to it; whether native code took it."""
        args = self.record.copy(
            lhs_codes=lhs.codes.data_ptr(), lhs_scales=lhs.scales.data_ptr(),
            rhs_codes=rhs.codes.data_ptr(), rhs_scales=rhs.scales.data_ptr(), out=out.data_ptr(),
            stream=binding.stream(self.index), accumulate=accumulate,
        )  # fmt: skip
        nbytes = self.nbytes
        if nbytes == 0:
            return binding.supported(self.gemm(args))
        scratch = workspace.acquire(out.device, nbytes)
        args.workspace = pointer(scratch)
        done = binding.supported(self.gemm(args))
        workspace.release(scratch, nbytes)
        return done
