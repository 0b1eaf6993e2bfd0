"""softmax(q k^T) v with what Transformer Engine puts around it: scaled_dot_product_attention of
torch where that has it, the formula written out where it has not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Scores(NamedTuple):
    """What becomes of the scores ``s = q k^T`` of one call:
    ``softmax(cap(scale * s) + bias, where seen)``, then dropout.

    causal: query i sees keys up to i. seen: bool, broadcastable to [b, heads, queries, keys], or
    None for all. bias: likewise, of a float dtype. softcap: ``cap(x) = softcap * tanh(x /
    softcap)``, none where it is 0. sink: one more score for each head [heads], which takes its
    share of the softmax and adds nothing.
    """

    scale: float
    causal: bool = False
    seen: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    softcap: float = 0.0
    sink: Tensor | None = None
    bias_inside_cap: bool = False


def attend(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
    """q [b, heads, queries, d], k [b, groups, keys, d], v [b, groups, keys, e] -> [b, heads,
    queries, e]; a query that sees no key gets zeros."""
    how, blind = _with_something_to_see(how)
    if how.softcap or how.sink is not None:
        out, _ = written_out(q, k, v, how)
    else:
        out = _torchs(q, k, v, how)
    return out if blind is None else out.masked_fill(blind, 0.0)


def attend_with_max(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, Tensor]:
    """As `attend`, and the largest score that is seen of each head [heads], in the dtype of the
    output; -inf where there is none."""
    how, blind = _with_something_to_see(how)
    out, s = written_out(q, k, v, how)
    s = s.detach() if blind is None else s.detach().masked_fill(blind, float("-inf"))
    largest = s.amax((0, 2, 3)) if s.numel() else s.new_full(s.shape[1:2], float("-inf"))
    return (out if blind is None else out.masked_fill(blind, 0.0)), largest.to(out.dtype)


def _with_something_to_see(how: Scores) -> tuple[Scores, Tensor | None]:
    """The softmax of no scores at all is NaN in some kernels: rows without any key see all of
    them, and the second result says where their outputs are to be 0."""
    if how.seen is None:
        return how, None
    blind = ~how.seen.any(-1, keepdim=True)
    return how._replace(seen=how.seen | blind), blind


def _torchs(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
    mask = how.seen
    if how.bias is not None:
        seen = mask
        if how.causal:
            ones = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            seen = ones.tril() if seen is None else seen & ones.tril()
        mask = how.bias if seen is None else how.bias.masked_fill(~seen, float("-inf"))
        mask = mask.to(q.dtype)
    grouped = k.shape[1] != q.shape[1]
    if grouped and mask is not None:  # kernels that take a mask want as many heads
        k, v, grouped = _spread(k, q), _spread(v, q), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=how.dropout, is_causal=how.causal and mask is None,
        scale=how.scale, enable_gqa=grouped,
    )  # fmt: skip


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Each group once for every head that reads it."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def written_out(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, Tensor]:
    """The formula in fp32, with all scores in memory, and these."""
    k, v = _spread(k, q), _spread(v, q)
    s = q.float() @ k.float().transpose(-1, -2) * how.scale
    if how.bias is not None and how.bias_inside_cap:
        s = s + how.bias.float()
    if how.softcap:
        s = how.softcap * torch.tanh(s / how.softcap)
    if how.bias is not None and not how.bias_inside_cap:
        s = s + how.bias.float()
    if how.causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, float("-inf"))
    if how.seen is not None:
        s = s.masked_fill(~how.seen, float("-inf"))
    if how.sink is not None:
        extra = how.sink.float().view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
        p = torch.cat((s, extra), -1).softmax(-1)[..., :-1]
    else:
        p = s.softmax(-1)
    p = F.dropout(p, how.dropout) if how.dropout else p
    return (p @ v.float()).to(v.dtype), s
