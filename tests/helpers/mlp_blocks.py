"""MLP blocks as models have them, for the tests of convert_model(fuse=True)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import te_mx

BF16 = torch.bfloat16


class Gated(nn.Module):
    """The MLP of Llama and its kin."""

    def __init__(self, act=None, bias=False, hidden=64, inner=96, out=None):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias)
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, out or hidden, bias)
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    """fc1, activation, fc2."""

    def __init__(self, act=None, bias=True, hidden=64, inner=96):
        super().__init__()
        self.fc1 = nn.Linear(hidden, inner, bias)
        self.act = act or nn.GELU("tanh")
        self.fc2 = nn.Linear(inner, hidden, bias)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Joined(nn.Module):
    """Phi-3: gate and up are one layer, and the product the other way round."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(64, 192)
        self.down_proj = nn.Linear(96, 64)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(up * F.silu(gate))


class Named(nn.Module):
    """Names that nobody knows, and the second layer is the one that is activated."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        a, b = self.one(x), self.two(x)
        return self.three(a * F.relu(b))


def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, **kwargs).to(BF16)


def given(rows=40):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).to(BF16)


def run(block, x, recipe=None, grad=None):
    """(y, gradients of x and of the parameters by name)."""
    x = x.detach().clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = block(x)
    named = [(n, p) for n, p in block.named_parameters() if p.requires_grad]
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype) if grad is None else grad
    got = torch.autograd.grad(y, [x, *(p for _, p in named)], grad)
    return y.detach(), dict(zip(["x", *(n for n, _ in named)], got, strict=True))
