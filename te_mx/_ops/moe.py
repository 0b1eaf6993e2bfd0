"""te_mx::moe_gemm: the product of routed rows with the weights of their experts, into rows of out.

    out[r] = (lhs[r // a_div] @ rhs_e^T + bias_e) * weights[r]

dispatch/moe.py says how rows are routed. Ids that are out of range belong to nobody; nothing past
num_tokens_post_padded counts, and no host waits for a device. te_mx::moe_align: slots sorted by
expert and cut into blocks."""

from typing import Any

import torch
from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.library import define, is_direct
from te_mx.dispatch import run
from te_mx.dispatch.calls import Mode
from te_mx.dispatch.kernels import Kernel, derive, derived
from te_mx.dispatch.moe import (
    Align,
    Experts,
    ExpertsKernel,
    RoutedGemm,
    Routing,
    capacity,
    size_class,
)
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import find, pick_problem
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.tables import MOST_ROWS
from te_mx.layouts.operand import Operand, Stack
from te_mx.runtime.kernel_log import LAST_RUN, note_read, note_written


def moe_gemm(p: RoutedGemm, tag: int = -1) -> None:
    """Write the rows of p.out that are routed; `tag`: as of gemm_rows."""
    lhs, rhs, routing, bias, weights, out, mode, _ = p
    sides = lhs.scales, rhs.codes, rhs.scales, rhs.packed
    if is_direct(lhs.codes, *sides, *routing[:3], bias, weights, out):
        _run(p, tag)
        return
    checks.writable(out)
    MOE_GEMM(
        *lhs[:5], rhs.codes, rhs.scales, rhs.packed, rhs.spec, rhs.groups, rhs.rows, *routing, bias,
        weights, out, tag, mode.precision, mode.spread, lhs.tensor_scale, rhs.tensor_scale,
    )  # fmt: skip


def check_routed(p: RoutedGemm) -> None:
    """Raise ValueError for what does not fit together."""
    lhs, rhs, routing, bias, weights, out = p[:6]
    device, routed = lhs.codes.device, out.shape[0]
    names = "the weights", "sorted_token_ids", "expert_ids", "num_tokens_post_padded", "bias"
    beside = rhs.codes, *routing[:3], bias
    checks.one_device(device, (*names, "the routing weights"), (*beside, weights))
    checks.tokens("the tokens", lhs.spec, "rows")
    checks.transformed_alike(lhs.spec, rhs.spec)
    if lhs.k != rhs.k:
        raise ValueError(f"te_mx: tokens and weights must have the same k, got {lhs.k} and {rhs.k}")
    if min(routing[3:]) < 1 or routed > lhs.rows * routing.a_div:
        raise ValueError(
            f"te_mx: {lhs.rows} tokens make at most {lhs.rows} * a_div routed rows, got {routed} "
            f"rows of out with block_m, a_div and top_k {routing[3:]}"
        )
    for name, ids in zip(names[1:4], routing[:3], strict=True):
        if ids is not None and (ids.dtype != torch.int32 or ids.dim() != 1):
            raise ValueError(f"te_mx: {name} must be a vector of int32, got {ids.dtype}")
    count = routing.num_tokens_post_padded
    if count is not None and len(count) != 1:
        raise ValueError(f"te_mx: num_tokens_post_padded must be [1], got {len(count)}")
    if bias is not None and bias.shape != (rhs.groups, rhs.rows):
        raise ValueError(f"te_mx: bias must be [{rhs.groups}, {rhs.rows}], got {bias.shape}")
    if weights is not None and (weights.dtype != torch.float32 or weights.shape != (routed,)):
        raise ValueError(f"te_mx: routing weights must be float32 [{routed}], got {weights.shape}")
    checks.float_dtype(out.dtype)
    checks.grouped_out(out, (routed, rhs.rows), device)


def _run(p: RoutedGemm, tag: int) -> None:
    check_routed(p)
    lhs, rhs = p.lhs.checked("the tokens"), p.rhs.checked("the weights")
    routing = p.routing._replace(
        expert_ids=p.routing.expert_ids.contiguous(),
        sorted_token_ids=None if p.routing[0] is None else p.routing[0].contiguous(),
    )
    if p.out.numel() == 0:
        return
    problem = Problem(
        "moe_gemm", place_of(p.out.device), lhs.spec, rhs.spec, -(-len(p.out) // routing.top_k),
        rhs.rows, rhs.k, rhs.groups, p.mode.precision, "", p.out.dtype, p.mode.spread,
        top_k=routing.top_k,
    )  # fmt: skip
    call = p._replace(lhs=lhs, rhs=rhs, routing=routing)
    kernel = _kernel(problem)
    ran = kernel.run(call) if kernel.name != run.REFERENCE else None
    if ran is None:
        ran = run.fall_back(kernel, problem, call)
    note_written(p.out)
    if tag >= 0:
        LAST_RUN[tag] = ran


def _kernel(problem: Problem) -> Kernel:
    """The kernel of a problem: envelopes look at the class of its tokens' number, tables at it."""
    if problem.place.device == "cuda" and problem.place.index < 0:
        return pick_problem(problem)
    by_tokens = tables.has_rows(problem) and problem.m <= MOST_ROWS
    known = derived()
    key = problem if by_tokens else problem._replace(m=size_class(problem.m))
    if key not in known:
        derive(key, pick_problem(key))
    kernel: Kernel = known[key]
    return kernel


def prepared_experts(weights: Stack, mode: Mode) -> Stack:
    """Weights that stand still in the form that the kernel of few rows reads, and the one of many
    rows without work; as they are where there is nothing to gain."""
    problem = Problem(
        "moe_gemm", place_of(weights.codes.device), "mxfp8_e4m3@rows", weights.spec, 1,
        weights.rows, weights.k, weights.groups, mode.precision, spread=mode.spread, top_k=1,
    )  # fmt: skip
    return pick_problem(problem).prepare_stack(weights.checked("the weights"), problem)


def summed_slots(
    y: Tensor, top_k: int, dtype: torch.dtype, experts: tuple[Tensor, int] | None = None
) -> Tensor:
    """Sums of fp32 y [tokens * top_k, n] over the slots of each token, in their order, rounded.
    experts: that of each slot, int32 [tokens * top_k], of so many; slots of others add nothing."""
    if is_direct(y):
        problem = Problem("moe_combine", place_of(y.device), dtype=dtype)
        known = derived()
        kernel = known[problem] if problem in known else derive(problem, find(problem))
        made: Tensor | None = (
            None if kernel is None else kernel.run(y, top_k, dtype, experts=experts)
        )
        if made is not None:
            return made
    if experts is not None:
        ids, count = experts
        y = torch.where(((ids >= 0) & (ids < count)).unsqueeze(1), y, 0.0)
    return y.view(-1, top_k, y.shape[1]).sum(1).to(dtype)


def experts_in_one(p: Experts) -> Tensor | None:
    """A whole mixture by a kernel for many rows an expert; None where there is none, or somebody
    watches, and products go by steps."""
    parts = p.first.codes, p.second.codes, p.ids, p.weights, p.expert_map, *p.biases
    if not is_direct(p.x, *parts):
        return None
    (tokens, top_k), total = p.ids.shape, p.first.groups
    total = total if p.expert_map is None else len(p.expert_map)
    kernel, lhs = None, p.format and f"{p.format}@rows"
    for weight in (p.first, p.second):
        problem = Problem(
            "experts", place_of(p.x.device), lhs, weight.spec, size_class(tokens), weight.rows,
            weight.k, total, p.mode.precision, "", p.x.dtype, p.mode.spread, p.rule, top_k=top_k,
        )  # fmt: skip
        known = derived()
        kernel = known[problem] if problem in known else derive(problem, find(problem))
        if kernel is None:
            return None
    assert isinstance(kernel, ExpertsKernel)
    first, second = p.first.checked("w13"), p.second.checked("w2")
    return kernel.run(p._replace(first=first, second=second, weights=p.weights.contiguous()))


def _call(args: tuple[Any, ...]) -> RoutedGemm:
    codes, scales, spec, rows, k, w_codes, w_scales, packed, w_spec, count, n = args[:11]
    bias, weights, out, _, precision, spread = args[17:23]
    whole, w_whole = (*args[23:], None, None)[:2]
    return RoutedGemm(
        Operand(codes, scales, spec, rows, k, None, whole),
        Stack(w_codes, w_scales, w_spec, count, n, k, packed, w_whole),
        Routing(*args[11:17]), bias, weights, out, Mode(precision, spread),
    )  # fmt: skip


def _moe(*args: Any) -> None:
    note_read(args[5])
    _run(_call(args), args[20])


def _moe_fake(*args: Any) -> None:
    check_routed(_call(args))


MOE_GEMM = define(
    "moe_gemm(Tensor lhs_codes, Tensor lhs_scales, str lhs_spec, SymInt lhs_rows, SymInt k, "
    "Tensor rhs_codes, Tensor rhs_scales, Tensor? rhs_packed, str rhs_spec, SymInt experts, "
    "SymInt rhs_rows, Tensor? sorted_token_ids, Tensor expert_ids, Tensor? num_tokens_post_padded, "
    "int block_m, int a_div, int top_k, Tensor? bias, Tensor? weights, Tensor(a!) out, int tag, "
    "str precision, int spread, Tensor? lhs_tensor_scale=None, Tensor? rhs_tensor_scale=None) "
    "-> ()",
    _moe,
    _moe_fake,
    lambda args: (*args[19], args[4]),
)


# ---------------------------------------------------------------------------------- lists of blocks
_I32 = torch.int32
Aligned = tuple[Tensor, Tensor, Tensor]


def moe_align(p: Align) -> Aligned:
    """(sorted_token_ids, expert_ids, num_tokens_post_padded), int32."""
    return _run_align(*p) if is_direct(p.topk_ids, p.expert_map) else MOE_ALIGN(*p)


def _check_align(topk_ids: Tensor, block_m: int, experts: int, expert_map: Tensor | None) -> None:
    checks.one_device(topk_ids.device, ("expert_map",), (expert_map,))
    for name, ids in (("topk_ids", topk_ids), ("expert_map", expert_map)):
        if ids is not None and (ids.dtype != _I32 or ids.dim() != 1):
            raise ValueError(f"te_mx: {name} must be a vector of int32, got {ids.dtype}")
    if block_m < 1 or experts < 1 or (expert_map is not None and len(expert_map) != experts):
        raise ValueError(
            f"te_mx: blocks need a size and experts a number, of expert_map too, got {block_m} and "
            f"{experts}"
        )


def _run_align(topk_ids: Tensor, block_m: int, experts: int, expert_map: Tensor | None) -> Aligned:
    _check_align(topk_ids, block_m, experts, expert_map)
    ids = topk_ids.contiguous()
    local = None if expert_map is None else expert_map.contiguous()
    problem = Problem("moe_align", place_of(ids.device), m=len(ids), n=experts, k=block_m)
    return run.run(problem, Align(ids, block_m, experts, local))


def _align_fake(topk_ids: Tensor, block_m: int, experts: int, expert_map: Tensor | None) -> Aligned:
    _check_align(topk_ids, block_m, experts, expert_map)
    size = capacity(topk_ids.shape[0], block_m, experts)
    made = (topk_ids.new_empty(n, dtype=_I32) for n in (size, -(-size // block_m), 1))
    return tuple(made)  # type: ignore[return-value]


MOE_ALIGN = define(
    "moe_align(Tensor topk_ids, int block_m, int experts, Tensor? expert_map) -> "
    "(Tensor, Tensor, Tensor)",
    _run_align,
    _align_fake,
)
