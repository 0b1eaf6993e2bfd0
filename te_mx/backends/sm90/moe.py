"""Routed rows on Hopper: one launch for the lists and one a product, which only the device needs to
understand."""

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES as DTYPES
from te_mx.backends.base import pointer
from te_mx.backends.native import FORMATS, FP4, routed_record
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.envelope import why_not, why_not_second
from te_mx.backends.sm90.grouped import pack_weights
from te_mx.backends.sm90.nvfp4 import Rest
from te_mx.dispatch.calls import FLOAT_DTYPES
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.moe import Align, RoutedGemm, capacity
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Stack

LEAST_ROWS, BLOCK = 16, 32  # of weights, and of k


def in_tiles(stack: Stack, spread: int) -> Stack:
    """All of some plain weights, packed."""
    ends = torch.arange(1, stack.groups + 1, device=stack.codes.device, dtype=torch.int32)
    return pack_weights(stack, ends, 0, stack.groups, spread)


def one_copy(stack: Stack) -> Stack:
    """Some plain weights of 4 bits as those that stand still, where they can lie so."""
    made = Rest().rest(stack)
    assert isinstance(made, Stack)
    return made


class HopperMoeGemm(Kernel):
    """Weights are read as they lie, once for eight rows: fit for few rows an expert. Its sums are
    those of the contract in either precision."""

    op, name = "moe_gemm", "sm90_moe"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(rhs=""), "rows") or why_not(
            problem._replace(lhs=problem.rhs, rhs=""), "rows", "sm90"
        )
        fmt, layout = spec_of(problem.rhs)
        packed = layout.name != "rows"
        if reason is None and packed and (problem.n % LEAST_ROWS or fmt.name != "mxfp8_e4m3"):
            reason = f"takes tiles of mxfp8_e4m3, of a multiple of {LEAST_ROWS} rows"
        if reason is None and spec_of(problem.lhs).format.untransformed.name not in FORMATS:
            reason = f"takes tokens in {', '.join(FORMATS)}, not {spec_of(problem.lhs).format}"
        if reason is None and problem.dtype not in FLOAT_DTYPES:
            reason = f"writes float32, bfloat16 and float16, not {problem.dtype}"
        if reason is None and (problem.n < LEAST_ROWS or problem.k % BLOCK):
            reason = (
                f"takes weights of {LEAST_ROWS} rows or more and k in multiples of {BLOCK}, this "
                f"has {problem.n} and {problem.k}"
            )
        return reason or why_not_second(problem.rhs)

    def note(self, problem: Problem) -> str:
        return "reads weights as they lie, once for 8 routed rows of an expert"

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        """Tiles, where both kernels read them; the one copy of MXFP4."""
        if stack.format.name in FP4:
            return one_copy(stack)
        spec = f"{stack.format.name}@sm90:{problem.spread}"
        if spec == stack.spec or self.accepts(problem._replace(rhs=spec)) is not None:
            return stack
        return in_tiles(stack, problem.spread)

    def run(self, p: RoutedGemm) -> str | None:
        native = binding.native()
        ids = p.routing.sorted_token_ids
        positions = len(p.out) if ids is None else len(ids)
        args, _keep = routed_record(native, p, positions=positions, stands=p.follows)
        binding.set_execution(args, p.out.device.index)
        return self.name if binding.supported(native.moe_gemm(args)) else None


class HopperMoeCombine(Kernel):
    op, name = "moe_combine", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem)

    def run(
        self, y: Tensor, top_k: int, dtype: torch.dtype, weights: Tensor | None = None,
        positions: Tensor | None = None, experts: tuple[Tensor, int] | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Sums over the slots of each token, times weights: y[positions[r]] of slot r, or y[r],
        where there are such experts."""
        native = binding.native()
        tokens, n = len(y) // top_k, y.shape[1]
        out = torch.empty((tokens, n), dtype=dtype, device=y.device)
        ids, count = (None, 0) if experts is None else (experts[0].contiguous(), experts[1])
        args = native.MoeCombineArgs(
            values=y.data_ptr(), slot_positions=pointer(positions), weights=pointer(weights),
            slot_experts=pointer(ids), experts=count, tokens=tokens, n=n, top_k=top_k,
            out=out.data_ptr(), out_dtype=DTYPES[dtype],
        )  # fmt: skip
        binding.set_execution(args, y.device.index)
        return out if binding.supported(native.moe_combine(args)) else None


class HopperMoeAlign(Kernel):
    op, name = "moe_align", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem)

    def run(self, p: Align) -> tuple[Tensor, Tensor, Tensor] | None:
        native = binding.native()
        ids, block_m, experts, local = p
        positions = capacity(len(ids), block_m, experts)
        blocks = -(-positions // block_m)
        made = [
            torch.empty(n, dtype=torch.int32, device=ids.device) for n in (positions, blocks, 1)
        ]
        args = native.MoeAlignArgs(
            topk_ids=ids.data_ptr(), routed=len(ids), experts=experts, positions=positions,
            blocks=blocks, block_m=block_m, expert_map=pointer(local),
            sorted_token_ids=made[0].data_ptr(), expert_ids=made[1].data_ptr(),
            num_tokens_post_padded=made[2].data_ptr(),
        )  # fmt: skip
        binding.set_execution(args, ids.device.index)
        return (made[0], made[1], made[2]) if binding.supported(native.moe_align(args)) else None


register(HopperMoeGemm())
register(HopperMoeAlign())
register(HopperMoeCombine())
