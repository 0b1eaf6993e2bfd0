"""Cross entropy over a vocabulary that may be cut between processes, of
``transformer_engine.pytorch.cross_entropy``."""

from typing import Any

import torch
from torch import Tensor

from te_mx.dispatch.groups import readable
from te_mx.runtime.arguments import check_flag, check_number, is_dense, shown

__all__ = ["parallel_cross_entropy"]


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
) -> Tensor:
    """``-log softmax(inp)[target]`` of each token, in fp32; 0 where the target is ignored.

    Args:
        inp: logits [b, s, vocabulary] or [s, b, vocabulary]; with a process group this process's
            share of the vocabulary, equal shares in the order of ranks.
        target: int64, one for each token, of the whole vocabulary.
        label_smoothing: 0 to 1: so much of the target's probability goes to all words alike.
        reduce_loss: return the mean over tokens that are not ignored.
        dist_process_group: of those that share the vocabulary; None: this process has all of it.
        ignore_idx: the target of tokens that do not count.
        is_cg_capturable: of no effect: the host never waits.
        overwrite_input: allows inp to be overwritten, which te_mx has no use for.

    Returns:
        The losses, fp32, of the first two dimensions of inp, or their mean. On a device, where the
        host does not look at targets, the loss of one outside of the vocabulary is NaN.

    Raises:
        TypeError, ValueError: an argument of a wrong type, value or shape, by name; on the CPU a
            target outside of the vocabulary.
    """
    owner = "parallel_cross_entropy"
    if not isinstance(inp, Tensor) or not is_dense(inp) or not inp.is_floating_point():
        raise TypeError(f"{owner}: inp must be a dense tensor of floats, got {shown(inp)}")
    if inp.dim() != 3 or not inp.shape[-1]:
        raise ValueError(f"{owner}: inp must be [b, s, vocabulary], got {shown(inp)}")
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        raise TypeError(f"{owner}: target must be a tensor of int64, got {shown(target)}")
    if target.numel() * inp.shape[-1] != inp.numel() or target.device != inp.device:
        raise ValueError(
            f"{owner}: target must have one word for each of the {tuple(inp.shape[:2])} tokens, on "
            f"{inp.device}, got {shown(target)}"
        )
    smoothing = check_number(f"{owner}: label_smoothing", label_smoothing)
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{owner}: label_smoothing must be 0 to 1, got {smoothing}")
    check_flag(f"{owner}: reduce_loss", reduce_loss)
    check_flag(f"{owner}: is_cg_capturable", is_cg_capturable)
    check_flag(f"{owner}: overwrite_input", overwrite_input)
    if type(ignore_idx) is not int:
        raise TypeError(f"{owner}: ignore_idx must be an int, got {shown(ignore_idx)}")
    if abs(ignore_idx) >= 1 << 62:
        raise ValueError(f"{owner}: ignore_idx must be an int of 64 bits, got {shown(ignore_idx)}")
    group, total = dist_process_group, inp.shape[-1]
    if group is not None:
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(
                f"{owner}: dist_process_group must be a ProcessGroup or None, got {shown(group)}"
            )
        total *= group.size()
        group = group if group.size() > 1 else None
    words = target.reshape(-1)
    counted = words != ignore_idx
    if readable(words):
        outside = words[counted & ((words < 0) | (words >= total))]
        if len(outside):
            got = int(outside[0])
            raise ValueError(f"{owner}: target must be 0 to {total - 1}, or ignore_idx, got {got}")
    losses = _CrossEntropy.apply(inp.flatten(0, 1), words, counted, smoothing, group)
    if reduce_loss:
        return losses.sum() / counted.sum()
    return losses.view(inp.shape[:2])


class _CrossEntropy(torch.autograd.Function):
    """With x the logits of a token, t its target, V words and smoothing e:
    ``loss = log sum exp(x) - (1 - e) x[t] - e / V sum(x)``,
    ``dx = softmax(x) - (1 - e) [word == t] - e / V``."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, words: Tensor, counted: Tensor, smoothing: float, group: Any
    ) -> Tensor:
        x = inp.float()
        share = x.shape[-1]
        first, total = 0, share
        if group is not None:
            first, total = group.rank() * share, group.size() * share
        largest = x.amax(-1)
        _reduced(largest, "MAX", group)
        normal = (x - largest.unsqueeze(1)).exp().sum(-1)
        here = (words >= first) & (words < first + share)
        local = torch.where(here, words - first, 0).unsqueeze(1)
        picked = torch.where(here, x.gather(1, local).squeeze(1), 0.0)
        sums = torch.stack((normal, picked, x.sum(-1), here.to(x.dtype)))
        _reduced(sums, "SUM", group)
        normal, picked, total_x, found = sums
        log_sum = largest + normal.log()
        loss = log_sum - (1.0 - smoothing) * picked
        if smoothing:
            loss = loss - smoothing / total * total_x
        ctx.save_for_backward(inp, log_sum, local, here, counted)
        ctx.smoothing, ctx.total = smoothing, total
        return torch.where(counted, torch.where(found > 0, loss, torch.nan), 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        inp, log_sum, local, here, counted = ctx.saved_tensors
        dx = (inp.float() - log_sum.unsqueeze(1)).exp()
        if ctx.smoothing:
            dx -= ctx.smoothing / ctx.total
        dx.scatter_add_(1, local, -(1.0 - ctx.smoothing) * here.to(dx.dtype).unsqueeze(1))
        dx *= torch.where(counted, grad, 0.0).unsqueeze(1)
        return dx.to(inp.dtype), None, None, None, None


def _reduced(x: Tensor, op: str, group: Any) -> None:
    if group is not None:
        torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, op), group)
