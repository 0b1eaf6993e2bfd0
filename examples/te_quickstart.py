"""Transformer Engine's way from plain PyTorch to a fused layer, on te_mx: the imports are the only
lines that differ from a script for Transformer Engine.

    python examples/te_quickstart.py [--device cuda] [--steps 10]

One transformer layer, built four times: of torch's modules, of te.Linear and te.LayerNorm, of the
modules that fuse a normalization with what follows, and as one te.TransformerLayer. They have the
same weights, so they compute the same; those of te_mx run in MXFP8 too, forward and backward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import te_mx.pytorch as te
from te_mx.common.recipe import DelayedScaling, Format


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); what its parts are made of is an argument."""

    def __init__(self, hidden: int, ffn: int, heads: int, linear: Callable[..., nn.Module],
                 norm: Callable[..., nn.Module]) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = norm(hidden, eps=1e-5), norm(hidden, eps=1e-5)
        self.qkv, self.proj = linear(hidden, 3 * hidden), linear(hidden, hidden)
        self.fc1, self.fc2 = linear(hidden, ffn), linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(attend(self.qkv(self.norm_1(x)), self.heads))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm_2(x)), approximate="tanh"))


class FusedBlock(nn.Module):
    """The same of two fused modules."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = te.LayerNormLinear(hidden, 3 * hidden, eps=1e-5, bias=True)
        self.proj = te.Linear(hidden, hidden, bias=True)
        self.mlp = te.LayerNormMLP(hidden, ffn, eps=1e-5, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(attend(self.qkv(x), self.heads))
        return x + self.mlp(x)


def attend(qkv: Tensor, heads: int) -> Tensor:
    """Causal attention; qkv [s, b, 3 * hidden], of each head its query, its key and its value."""
    q, k, v = qkv.unflatten(-1, (heads, 3, -1)).permute(1, 2, 0, 4, 3).unbind(-1)
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def same_weights(plain: Block, fused: FusedBlock, layer: te.TransformerLayer) -> None:
    """Copy the weights of one block to the others, by their names."""
    state = plain.state_dict()

    def of(part: str, norm: str = "", prefix: str = "") -> dict[str, Tensor]:
        kinds = ("weight", "bias")
        named = {f"{prefix}{kind}": state[f"{part}.{kind}"] for kind in kinds}
        return named | ({f"layer_norm_{k}": state[f"{norm}.{k}"] for k in kinds} if norm else {})

    qkv = of("qkv", "norm_1")
    mlp = of("fc1", "norm_2", "fc1_") | of("fc2", "", "fc2_")
    for module, names in (
        (fused.qkv, qkv), (fused.proj, of("proj")), (fused.mlp, mlp),
        (layer.self_attention.layernorm_qkv, qkv), (layer.self_attention.proj, of("proj")),
        (layer.layernorm_mlp, mlp),
    ):  # fmt: skip
        module.load_state_dict(names)


def time_of(run: Callable[[], Tensor], device: torch.device, steps: int) -> float:
    """Milliseconds of a forward and a backward pass."""
    for step in range(steps + 1):
        if step == 1:  # the first one warms up
            started = _now(device)
        run().sum().backward()
    return (_now(device) - started) / steps * 1e3


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(arguments)
    device, hidden, ffn, heads = torch.device(args.device), args.hidden, 4 * args.hidden, args.heads
    torch.manual_seed(1234)

    plain = Block(hidden, ffn, heads, nn.Linear, nn.LayerNorm)
    basic = Block(hidden, ffn, heads, te.Linear, te.LayerNorm)
    fused = FusedBlock(hidden, ffn, heads)
    layer = te.TransformerLayer(
        hidden, ffn, heads, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0
    )
    basic.load_state_dict(plain.state_dict())
    same_weights(plain, fused, layer)
    blocks = {"torch": plain, "te.Linear": basic, "fused modules": fused, "TransformerLayer": layer}
    x = torch.randn(args.length, args.batch, hidden, device=device, dtype=torch.bfloat16)
    for block in blocks.values():
        block.to(device=device, dtype=torch.bfloat16)

    with torch.no_grad():
        expected = plain(x).float()
    # Transformer Engine's tutorial has this recipe; te_mx runs MXFP8 in its place, and says so.
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")

    found = {}
    for name, block in blocks.items():
        for mode in ("bf16", "MXFP8") if block is not plain else ("bf16",):
            with te.fp8_autocast(enabled=mode == "MXFP8", fp8_recipe=recipe):
                with torch.no_grad():
                    out = block(x).float()
                spent = time_of(lambda block=block: block(x), device, args.steps)  # type: ignore[misc]
            gap = ((out - expected).norm() / expected.norm()).item()
            found[f"{name}, {mode}"] = gap
            print(f"{name + ', ' + mode:26} {spent:8.2f} ms   differs from torch by {gap:.1e}")
    print("next: your script, with te_mx.pytorch as te (docs/transformer_engine.md)")
    return found


if __name__ == "__main__":
    main()
