"""Tokens on their way to experts and back: T tokens of k slots each are R = T * k pairs, and the
experts see the pairs in the order of their experts, one row each.

Everything is a function of the experts' numbers as a tensor: nothing waits for a device, and shapes
depend on T, k and the number of experts alone."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Route(NamedTuple):
    """Where the pairs go: `order` [R] is the pair of each row, `place` [R] the row of each pair,
    `offs` [E] where the rows of each expert end. Rows behind the last end are of no expert."""

    order: Tensor
    place: Tensor
    offs: Tensor
    top_k: int

    def inside(self) -> Tensor:
        """Whether a row is some expert's, bool [R, 1]."""
        row = torch.arange(self.order.shape[0], device=self.order.device)
        return (row < self.offs[-1]).unsqueeze(1)


def route(index_TK: Tensor, experts: int) -> Route:
    """The route of int expert numbers [T, k]; those outside of 0 .. experts - 1 are no expert's.

    The sort is stable, so the rows of an expert are in the order of their tokens."""
    numbers = index_TK.reshape(-1)
    outside = (numbers < 0) | (numbers >= experts)
    sorted_R, order = torch.sort(torch.where(outside, experts, numbers), stable=True)
    every = torch.arange(experts, device=numbers.device, dtype=sorted_R.dtype)
    offs = torch.searchsorted(sorted_R, every, right=True)
    position = torch.arange(order.shape[0], device=order.device)
    place = torch.empty_like(order).scatter(0, order, position)
    return Route(order, place, offs, index_TK.shape[-1])


def rows_of(x_TH: Tensor, order: Tensor, top_k: int) -> Tensor:
    """The token of every row, [R, H]."""
    return x_TH.index_select(0, order // top_k)


def sum_of_rows(g_RH: Tensor, place: Tensor, top_k: int) -> Tensor:
    """The sum of the rows of every token, [T, H]."""
    return g_RH.index_select(0, place).unflatten(0, (-1, top_k)).sum(1)


class _TakeRows(torch.autograd.Function):
    """x [T, H] -> rows [R, H]. Every pair has one row, so backward is a look-up and a sum over the
    slots of a token: no atomic additions, the same bits every time."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return rows_of(x_TH, order, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return sum_of_rows(grads[0], place, ctx.top_k), None, None, None


class _PutBack(torch.autograd.Function):
    """rows [R, H] -> pairs [R, H], and back by a look-up too."""

    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y_RH.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None, None


def take_rows(x_TH: Tensor, to: Route) -> Tensor:
    """The token of every row, [R, H]; differentiable."""
    return _TakeRows.apply(x_TH, to.order, to.place, to.top_k)


def put_back(y_RH: Tensor, to: Route, scores_TK: Tensor) -> Tensor:
    """What every token gets of its experts: sum over k of scores[t, k] * y[row of (t, k)], [T, H];
    differentiable. Products and sums have the wider dtype of the two."""
    pairs_TKH = _PutBack.apply(y_RH, to.order, to.place).unflatten(0, (-1, to.top_k))
    return (pairs_TKH * scores_TK.unsqueeze(-1)).sum(1)
