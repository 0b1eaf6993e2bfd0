"""fake_sm90.py with the calls of routed rows: on addresses of CPU memory, in plain torch."""

from __future__ import annotations

import fake_sm90_grouped
import torch
from fake_sm90 import OK, at

from te_mx import formats
from te_mx.backends.base import FLOAT_DTYPES, FORMATS
from te_mx.dispatch.kernels import kernels
from te_mx.dispatch.moe import Align, Routing

_I32 = torch.int32
_MX = {0: "mxfp8_e4m3", 1: "mxfp8_e5m2", FORMATS["e2m1"]: "mxfp4"}
_DTYPES = {number: dtype for dtype, number in FLOAT_DTYPES.items()}


def __getattr__(name: str):
    return getattr(fake_sm90_grouped, name)


def _values(codes: int, scales: int, rows: int, k: int, element: int) -> torch.Tensor:
    fmt = formats.get(_MX[element])
    shapes = fmt.codes_shape(rows, k), fmt.scales_shape(rows, k)
    parts = at(codes, shapes[0]), at(scales, shapes[1])
    return fmt.dequantize(*parts, k=k, dtype=torch.float64)


def moe_gemm(a) -> int:
    lhs = _values(a.lhs_codes, a.lhs_scales, a.lhs_rows, a.lhs_k, a.lhs_element)
    w = _values(a.rhs_codes, a.rhs_scales, a.experts * a.rhs_rows, a.rhs_k, a.rhs_element)
    w = w.view(a.experts, a.rhs_rows, a.rhs_k)
    ids = None if a.sorted_token_ids == 0 else at(a.sorted_token_ids, (a.positions,), _I32)
    count = at(a.num_tokens_post_padded, (1,), _I32) if a.num_tokens_post_padded else None
    routing = Routing(
        ids, at(a.expert_ids, (a.blocks,), _I32), count, a.block_m, a.a_div,
    )  # fmt: skip
    out = at(a.out, (a.routed, a.rhs_rows), _DTYPES[a.out_dtype])
    for row, expert in enumerate(routing.experts(a.routed, a.experts).tolist()):
        if expert < 0:
            continue
        sums = w[expert] @ lhs[row // a.a_div]
        if a.bias:
            sums += at(a.bias, (a.experts, a.rhs_rows), _DTYPES[a.bias_dtype])[expert].double()
        if a.weights:
            sums *= at(a.weights, (a.routed,), torch.float32)[row].double()
        out[row] = sums.to(out.dtype)
    return OK


def moe_align(a) -> int:
    ids = at(a.topk_ids, (a.routed,), _I32)
    if a.ends:
        return _sorted(a, ids)
    local = None if a.expert_map == 0 else at(a.expert_map, (a.experts,), _I32)
    made = kernels("moe_align")[-1].run(Align(ids, a.block_m, a.experts, local))
    places = a.sorted_token_ids, a.expert_ids, a.num_tokens_post_padded
    for place, size, list_ in zip(places, (a.positions, a.blocks, 1), made, strict=True):
        at(place, (size,), _I32).copy_(list_)
    return OK


def _sorted(a, ids: torch.Tensor) -> int:
    """Where the slots of every expert lie when they are sorted; the rest is poisoned."""
    if a.mapped:
        known = (ids >= 0) & (ids < a.mapped)
        local = at(a.expert_map, (a.mapped,), _I32)
        ids = torch.where(known, local[ids.clamp(0, a.mapped - 1).long()], -1)
    order = torch.cat([(ids == e).nonzero().flatten() for e in range(a.experts)])
    counts = torch.stack([(ids == e).sum() for e in range(a.experts)])
    at(a.ends, (a.experts,), _I32).copy_(counts.cumsum(0))
    at(a.rows, (a.positions,), _I32).fill_(1 << 30)[: len(order)] = (order // a.top_k).int()
    at(a.slot_positions, (a.routed,), _I32).fill_(-1)[order] = torch.arange(len(order)).int()
    return OK


def moe_combine(a) -> int:
    positions = torch.arange(a.tokens * a.top_k).view(a.tokens, a.top_k)
    if a.slot_positions:
        positions = at(a.slot_positions, (a.tokens, a.top_k), _I32)
    if a.slot_experts:
        ids = at(a.slot_experts, (a.tokens, a.top_k), _I32)
        positions = torch.where((ids >= 0) & (ids < a.experts), positions, -1)
    weights = torch.ones(a.tokens, a.top_k)
    if a.weights:
        weights = at(a.weights, (a.tokens, a.top_k), torch.float32)
    values = at(a.values, (a.tokens * a.top_k, a.n), torch.float32)
    out = torch.zeros(a.tokens, a.n)
    for j in range(a.top_k):
        own = positions[:, j]
        there = (own >= 0).unsqueeze(1)
        out += torch.where(there, values[own.clamp(0).long()] * weights[:, j, None], 0.0)
    at(a.out, (a.tokens, a.n), _DTYPES[a.out_dtype]).copy_(out)
    return OK
