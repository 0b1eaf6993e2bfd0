"""A mixture of experts in place of the MLP: every token goes to the best two of eight.

`MoE` is a drop-in block: copy it. Its experts are te_mx.GroupedLinear layers, which are plain
high-precision layers outside of te_mx.autocast, so both runs of the example train the same model.
Shape letters: R tokens, D model width, E experts, A experts a token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_mx
from gpt.model import GPTConfig


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    experts: int = 8
    active: int = 2  # experts a token
    hidden: int = 1024  # width inside of an expert
    balance: float = 0.01  # weight of the loss that keeps experts equally busy

    def make_mlp(self) -> nn.Module:
        return MoE(self.width, self.hidden, self.experts, self.active, self.balance)


class MoE(nn.Module):
    """Router, two grouped linear layers, weighted sum. [..., D] -> [..., D]."""

    def __init__(self, width: int, hidden: int, experts: int, active: int, balance: float = 0.01):
        super().__init__()
        self.experts, self.active, self.balance = experts, active, balance
        self.router = nn.Linear(width, experts, bias=False)  # stays in high precision
        options = {"bias": False, "single_grouped_weight": True, "init_method": _init}
        self.up = te_mx.GroupedLinear(experts, width, hidden, **options)
        self.down = te_mx.GroupedLinear(experts, hidden, width, **options)

    def forward(self, x: Tensor) -> Tensor:
        x_RD = x.reshape(-1, x.shape[-1])
        p_RE = self.router(x_RD).float().softmax(-1)
        p_RA, expert_RA = p_RE.topk(self.active)
        # Sorted by expert: the rows of one expert follow each other, as many as it was chosen.
        order = expert_RA.flatten().argsort(stable=True)
        back = order.argsort()
        splits = F.one_hot(expert_RA.flatten(), self.experts).sum(0)
        copies = x_RD.unsqueeze(1).expand(-1, self.active, -1).reshape(len(order), -1)
        rows = copies.index_select(0, order)
        rows = self.down(F.gelu(self.up(rows, splits), approximate="tanh"), splits)
        rows_RAD = rows.index_select(0, back).view(-1, self.active, x.shape[-1])
        p_RA = p_RA / p_RA.sum(-1, keepdim=True)
        out_RD = (rows_RAD * p_RA.unsqueeze(-1).to(rows.dtype)).sum(1)
        # E times the dot product of how often and how likely experts are chosen: 1 when balanced.
        share_E = splits / splits.sum()
        loss = self.balance * self.experts * (share_E * p_RE.mean(0)).sum()
        return _WithLoss.apply(out_RD, loss).view(x.shape)


class _WithLoss(torch.autograd.Function):
    """x, and in the backward pass also the gradient of a loss that nobody adds up."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.ones = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.ones


def _init(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.02)
