"""The experts of a mixture, as te_mx.moe.grouped_gemm runs them, for the tuner."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import te_mx
from te_mx.commands.shapes import Shape
from te_mx.commands.timing import sets_for
from te_mx.recipe import BlockScaling

ROUTINGS = 8  # in turns: other tokens choose other experts
BLOCK = 16


class Experts:
    """Weights of experts of one size, as many as no cache holds, and routings of tokens to them;
    calls take turns with both."""

    def __init__(self, shape: Shape, recipe: BlockScaling, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self._shape = shape
        n, k, experts, _ = shape.weights
        bits = te_mx.formats.get(recipe.w).element.bits
        # Of a call that reads few of many experts, the next one reads others.
        count = sets_for(experts * n * k * bits // 8, device)
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.randn((n, k), generator=generator, device=device).bfloat16()
        one = te_mx.quantize(drawn, fmt=recipe.w, scale_rule=recipe.scale_rule)
        parts = one.rowwise_data, one.rowwise_scale
        self._weights = []
        for _ in range(count):  # every expert has the same numbers, in memory of its own
            codes, scales = (part.repeat(experts, 1) for part in parts if part is not None)
            self._weights.append(
                te_mx.MXTensor((experts, n, k), recipe.w, rowwise_data=codes, rowwise_scale=scales)
            )
        self._lists: dict[int, list[te_mx.moe.AlignedBlocks]] = {}
        calls = max(count, ROUTINGS)
        self.kept = self.plain = [partial(self._run, i) for i in range(calls)]

    def _run(self, i: int, x: Tensor) -> Tensor:
        return te_mx.moe.grouped_gemm(
            x, self._weights[i % len(self._weights)], *self._routed(len(x))[i % ROUTINGS],
            top_k=self._shape.top_k, block_m=BLOCK, recipe=self.recipe,
        )  # fmt: skip

    def _routed(self, tokens: int) -> list[te_mx.moe.AlignedBlocks]:
        """The lists of some routings of so many tokens, drawn evenly."""
        if tokens not in self._lists:
            experts, top_k = self._shape.experts, self._shape.top_k
            generator = torch.Generator(self.device).manual_seed(tokens)
            draw = torch.rand((ROUTINGS, tokens, experts), generator=generator, device=self.device)
            self._lists[tokens] = [
                te_mx.moe.align_block_size(ids, BLOCK, experts)
                for ids in draw.topk(top_k, dim=-1).indices
            ]
        return self._lists[tokens]
