"""What stands beside te_mx's products where a row keeps its bits beside any others: a product in
the dtype of its weights, for routers and heads, and sums in an order of their own.
docs/invariance.md."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_mx.runtime.arguments import check_dense

# Rows that a library multiplies at a time: always so many, so it always runs the same kernel.
# Few, for they are computed for one row too, and no more than a block of any kernel has.
ROWS, ROWS_OF_GPUS = 16, 64
KEYS = 64  # that are added up as a tree, before one such sum is added to the next
# On GPUs torch multiplies always so many blocks of 64 x 64 x 64 at a time, by the same kernel.
BLOCK, BLOCKS = 64, 512
_MOST_PRODUCTS = 1 << 24  # that lie in memory at once on CPUs


class InvariantLinear(nn.Linear):
    """nn.Linear whose rows have the same bits beside any others: for routers and output heads,
    beside te_mx layers at precision "invariant".

    ``y = x @ weight.T + bias`` in the dtype of the weight, by torch, 64 rows at a time on GPUs and
    16 on CPUs, with zeros behind the last ones. So one row costs as much as 16 or 64, and many rows
    read the weight once for each of these. Arguments and errors are those of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """input [.., in_features], dense -> [.., out_features]."""
        check_dense("input", input)
        flat, rows = input.reshape(-1, input.shape[-1]), ROWS if input.is_cpu else ROWS_OF_GPUS
        parts = F.pad(flat, (0, 0, 0, -len(flat) % rows)).split(rows)
        made = torch.cat([F.linear(part, self.weight, self.bias) for part in parts])
        return made[: len(flat)].reshape(*input.shape[:-1], self.out_features)


def tree_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension: its halves are added up until one number is left. An order that
    the size alone decides, on any device."""
    while (size := x.shape[-1]) > 1:
        half = (size + 1) // 2
        low, high = x[..., : size - half], x[..., half:]
        x = low + high if size % 2 == 0 else torch.cat([low + high, x[..., half - 1 : half]], -1)
    return x.squeeze(-1)


def sum_of_keys(x: Tensor) -> Tensor:
    """Sums over the last dimension, 64 numbers, then the next: zeros at the end change nothing."""
    parts = tree_sum(F.pad(x, (0, -x.shape[-1] % KEYS)).unflatten(-1, (-1, KEYS)))
    total = parts[..., 0]
    for i in range(1, parts.shape[-1]):
        total = total + parts[..., i]
    return total


class _Product(torch.autograd.Function):
    """a [.., m, k] @ b [.., k, n], of which k alone decides the order of sums: 64 and then the next
    ones, so that zeros behind the last do not change them. Gradients are torch's products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _in_order(a, b) if a.is_cpu else in_blocks(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad @ b.mT, a.mT @ grad


def product(a: Tensor, b: Tensor) -> Tensor:
    made: Tensor = _Product.apply(a, b)
    return made


def _in_order(a: Tensor, b: Tensor) -> Tensor:
    """Some rows of a at a time: sums in the order of sum_of_keys."""
    turned = b.transpose(-1, -2).unsqueeze(-3)
    each = max(1, _MOST_PRODUCTS // max(1, turned.numel()))
    parts = [sum_of_keys(rows.unsqueeze(-2) * turned) for rows in a.split(each, -2)]
    return torch.cat(parts, -2)


def in_blocks(a: Tensor, b: Tensor) -> Tensor:
    """Block by block, padded by zeros to whole ones."""
    m, n = a.shape[-2], b.shape[-1]
    left, right = _blocks(a.flatten(0, -3)), _blocks(b.flatten(0, -3).mT)  # [N, I or J, P, 64, 64]
    count, i, parts = left.shape[:3]
    j = right.shape[1]
    left, right = left.flatten(0, 1), right.flatten(0, 1).mT
    at = torch.arange(count * i * j, device=a.device)
    made = []
    for some in F.pad(at, (0, -len(at) % BLOCKS)).split(BLOCKS):
        of_left, of_right = some // j, some // (i * j) * j + some % j
        total = torch.bmm(left[of_left, 0], right[of_right, 0])
        for part in range(1, parts):
            total = total + torch.bmm(left[of_left, part], right[of_right, part])
        made.append(total)
    whole = torch.cat(made)[: len(at)].view(count, i, j, BLOCK, BLOCK).transpose(2, 3)
    return whole.reshape(count, i * BLOCK, j * BLOCK)[:, :m, :n].reshape(*a.shape[:-2], m, n)


def _blocks(x: Tensor) -> Tensor:
    """x [N, rows, k] in blocks [N, rows / 64, k / 64, 64, 64]."""
    padded = F.pad(x, (0, -x.shape[2] % BLOCK, 0, -x.shape[1] % BLOCK))
    return padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).transpose(2, 3)
