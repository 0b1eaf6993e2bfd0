"""A small byte-level GPT in plain PyTorch. It does not know te_mx: conversion happens outside.

Shape letters: B sequences, T positions, D model width, H heads, V bytes (256).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    heads: int = 6
    width: int = 384
    context: int = 256
    vocab: int = 256
    # Wide models learn steadily from a residual stream that starts larger than one step changes it.
    embedding_std: float = 0.02

    def make_mlp(self) -> nn.Module:
        return MLP(self)


class Attention(nn.Module):
    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.heads = cfg.heads
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.proj = nn.Linear(cfg.width, cfg.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.up = nn.Linear(cfg.width, 4 * cfg.width)
        self.down = nn.Linear(4 * cfg.width, cfg.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(cfg.width)
        self.attention = Attention(cfg)
        self.norm2 = nn.LayerNorm(cfg.width)
        self.mlp = cfg.make_mlp()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class GPT(nn.Module):
    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.cfg = cfg
        self.bytes = nn.Embedding(cfg.vocab, cfg.width)
        self.positions = nn.Embedding(cfg.context, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 if isinstance(module, nn.Linear) else self.cfg.embedding_std
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        # GPT-2: what adds to the residual stream starts smaller, so that depth adds no variance.
        if isinstance(module, Block):
            for linear in (module.attention.proj, module.mlp.down):
                nn.init.normal_(linear.weight, std=0.02 / (2 * self.cfg.layers) ** 0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of the byte after each position."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.bytes(tokens_BT) + self.positions(positions)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))
