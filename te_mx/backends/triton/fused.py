"""The fused steps in Triton: quantizers whose tiles are those of a normalization or an activation,
after one read of x for the sums of a normalization."""

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import why_not_dtype
from te_mx.backends.reference.fused import inverse
from te_mx.backends.triton import binding
from te_mx.backends.triton.binding import NAME, RANK, cdiv
from te_mx.backends.triton.quantize import launch, rows_of, why_not
from te_mx.dispatch import run
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.fused import ActParts, ActStep, NormParts, NormStep, Target
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts.operand import Quantized

_F32 = torch.float32
_SUM_ROWS = 4  # of x, a program
_SUMS, _SHARES = (16, 256), 16  # rows and columns that are added at once, in so many shares of rows


class _Fused(Kernel):
    name, rank = NAME, RANK

    def __init__(self, op: str, planner: type | None = None) -> None:
        self.op, self.planner = op, planner

    def accepts(self, problem: Problem) -> str | None:
        values = problem._replace(lhs="", rhs="", rule="rceil")
        return binding.why_not(values) or why_not_dtype(problem)


class _Ends:
    """In what the steps of a problem end: the operands of its specs where a quantizer makes these,
    else values that `dispatch.run` quantizes."""

    def __init__(self, p: Problem) -> None:
        # Of float16, which one rule does not take.
        self.known = why_not(p._replace(op="quantize", dtype=torch.float16)) is None

    def ended(
        self, shape: tuple[int, int], dtype: torch.dtype, keep: bool, target: Target,
        step: dict[str, Any],
    ) -> tuple[Tensor | None, Quantized]:  # fmt: skip
        """Values, if they are kept, and the same quantized, of a step by its words."""
        row, col, rule, col_sum, seed = target
        x, out = step["x"], None
        if keep or col_sum or not self.known:
            out = torch.empty(shape, dtype=dtype, device=x.device)
        asked = Quantize(x, row, col, rule, seed=seed)
        if not self.known:
            asked = Quantize(x, "", "", rule)
        if out is not None or target.codes:
            made = Quantized(*launch(asked, shape, dtype, step | {"out": out}))
        else:
            made = Quantized()
        if not self.known and out is not None:
            made = run.quantized(out, target)
        elif col_sum and out is not None:
            made = made._replace(col_sum=out.sum(0, dtype=_F32))
        return out if keep else None, made


class Norms(_Ends):
    """Normalizations of matrices of one size."""

    def __call__(self, s: NormStep) -> NormParts:
        x, (rows, cols), layer = rows_of(s.x), s.x.shape, s.norm.kind == "LayerNorm"
        mean = torch.empty(rows, dtype=_F32, device=x.device) if layer else None
        rstd = torch.empty(rows, dtype=_F32, device=x.device)
        binding.kernels("steps").norm_sums[(cdiv(rows, _SUM_ROWS),)](
            x, mean, rstd, rows, cols, x.stride(0), inverse(cols), s.norm.eps, R=_SUM_ROWS,
            enable_fp_fusion=False,
        )  # fmt: skip
        step = {
            "x": x, "stride": x.stride(0), "STEP": "norm", "mean": mean, "rstd": rstd,
            "weight": s.weight.contiguous(),
            "bias": None if s.bias is None else s.bias.contiguous(),
        }  # fmt: skip
        return NormParts(mean, rstd, *self.ended((rows, cols), s.dtype, s.keep, s.target, step))


class TritonNormBackward(_Fused):
    def run(
        self, dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dz, x, (rows, cols) = rows_of(dz), rows_of(x), x.shape
        dx = torch.empty((rows, cols), dtype=dtype, device=x.device)
        (height, width), share = _SUMS, cdiv(rows, _SHARES)
        shares = cdiv(rows, share)
        sums = torch.empty((2, shares, cols), dtype=_F32, device=x.device)
        mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
        kernels, ends = binding.kernels("steps"), (rows, cols, dz.stride(0), x.stride(0))
        kernels.norm_backward[(rows,)](
            dz, x, weight.contiguous(), mean, rstd, dx, *ends, inverse(cols), R=1,
            enable_fp_fusion=False,
        )  # fmt: skip
        kernels.norm_weights[cdiv(cols, width), shares](
            dz, x, mean, rstd, *sums, *ends, share, R=height, C=width, enable_fp_fusion=False
        )
        return dx, *sums.sum(1)


def activation(s: ActStep) -> tuple[tuple[int, int], dict[str, Any]]:
    """The shape of what an activation or its gradient makes, and what kernels ask of it."""
    h, act = rows_of(s.h), s.act
    rows, width = h.shape
    return (rows, width // 2 if act.gated and s.grad is None else width), {
        "x": h, "stride": h.stride(0), "STEP": "act" if s.grad is None else "dact",
        "grad": None if s.grad is None else s.grad.detach().resolve_neg().contiguous(),
        "ACT": act.base, "GATED": act.gated, "LIMIT": act.limit, "ALPHA": act.alpha,
        "OFFSET": act.offset,
    }  # fmt: skip


class Activations(_Ends):
    """Activations of matrices of one size, and their gradients."""

    def __call__(self, s: ActStep) -> ActParts:
        shape, step = activation(s)
        return ActParts(*self.ended(shape, s.dtype, s.keep, s.target, step))


register(_Fused("norm_quantize", Norms))
register(TritonNormBackward("norm_backward"))
register(_Fused("act_quantize", Activations))
