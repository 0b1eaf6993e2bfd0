"""What stands beside te_mx's products where a row keeps its bits beside any others: a product in
the dtype of its weights, for routers and heads, and sums in an order of their own.
docs/invariance.md."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_mx.runtime.arguments import check_dense

# Rows that a library multiplies at a time: always so many, so it always runs the same kernel.
# Few, for they are computed for one row too, and no more than a block of any kernel has.
ROWS, ROWS_OF_GPUS = 16, 64
KEYS = 64  # that are added up as a tree, before one such sum is added to the next


class InvariantLinear(nn.Linear):
    """nn.Linear whose rows have the same bits beside any others: for routers and output heads,
    beside te_mx layers at precision "invariant".

    ``y = x @ weight.T + bias`` in the dtype of the weight, by torch, 64 rows at a time on GPUs and
    16 on CPUs, with zeros behind the last ones. So one row costs as much as 16 or 64, and many rows
    read the weight once for each of these. Arguments and errors are those of nn.Linear.
    """

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
    """Sums over the last dimension, 64 numbers and then the next ones: zeros behind the last do not
    change them."""
    parts = tree_sum(F.pad(x, (0, -x.shape[-1] % KEYS)).unflatten(-1, (-1, KEYS)))
    total = parts[..., 0]
    for i in range(1, parts.shape[-1]):
        total = total + parts[..., i]
    return total
