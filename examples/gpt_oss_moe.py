#!/usr/bin/env python
"""The mixture of experts of gpt-oss, run from its 4-bit weights.

    python examples/gpt_oss_moe.py                              # random experts of a small block
    python examples/gpt_oss_moe.py --activations mxfp8          # inputs quantized as well
    python examples/gpt_oss_moe.py --file model-00000-of-00002.safetensors --layer 3

`GptOssMoE` is a block to copy. It loads the tensors of a published checkpoint as they are
(``experts.gate_up_proj_blocks`` [E, 2 H, D/32, 16], ``experts.gate_up_proj_scales`` [E, 2 H, D/32],
.., rows of gate and up interleaved) and keeps them so: 17 bytes for 32 elements. Shape letters: T
tokens, D model width, H width inside of an expert, E experts, A experts a token, R = T * A.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_mx
from te_mx.formats import mxfp4_checkpoints

LIMIT, ALPHA = 7.0, 1.702
NEEDED = {"router.weight", "router.bias"} | {
    f"experts.{name}_proj_{part}"
    for name in ("gate_up", "down") for part in ("blocks", "scales", "bias")
}  # fmt: skip


class GptOssMoE(nn.Module):
    """Router, gate and up, clamped SwiGLU, down, weighted sum. [.., D] -> [.., D]."""

    def __init__(self, width: int, hidden: int, experts: int, active: int):
        super().__init__()
        self.experts, self.active = experts, active
        self.router = nn.Linear(width, experts)
        # Both hold codes once they are loaded, so nothing has to be allocated for parameters.
        options = {"single_grouped_weight": True, "device": "meta"}
        self.gate_up = te_mx.GroupedLinear(experts, width, 2 * hidden, **options)
        self.down = te_mx.GroupedLinear(experts, hidden, width, **options)

    def load_checkpoint(self, tensors: dict[str, Tensor], activations: str) -> None:
        """Take the tensors of one layer, named as behind ``model.layers.0.mlp.``. activations:
        "bf16" leaves inputs as they are, "mxfp8" and "mxfp4" quantize them."""
        names = {"experts.gate_up_proj_": "gate_up.", "experts.down_proj_": "down."}
        ends = {"blocks": "weight_blocks", "scales": "weight_scales"}
        state = {}
        for name, value in tensors.items():
            layer = next((theirs for theirs in names if name.startswith(theirs)), "")
            end = name.removeprefix(layer)
            state[names[layer] + ends.get(end, end) if layer else name] = value
        self.load_state_dict(state, assign=True)
        te_mx.freeze_weights(self, activations=activations)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        score_TA, expert_TA = self.router(x_TD).topk(self.active)
        score_TA = score_TA.softmax(-1)
        # Sorted by expert: the rows of one expert follow each other, as many as chose it.
        order_R = expert_TA.flatten().argsort(stable=True)
        splits_E = F.one_hot(expert_TA.flatten(), self.experts).sum(0)
        h_RH = swiglu(self.gate_up(x_TD.index_select(0, order_R // self.active), splits_E))
        y_RD = self.down(h_RH, splits_E)
        y_TAD = y_RD.index_select(0, order_R.argsort()).unflatten(0, (-1, self.active))
        return (y_TAD * score_TA.unsqueeze(-1)).sum(1).to(x.dtype).view(x.shape)


def swiglu(h: Tensor) -> Tensor:
    """[.., 2 H] with gate and up in turns -> [.., H]: gate * sigmoid(ALPHA gate) * (up + 1)."""
    gate, up = h[..., ::2].clamp(max=LIMIT), h[..., 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def random_checkpoint(width: int, hidden: int, experts: int) -> dict[str, Tensor]:
    """Tensors of the names, shapes and dtypes of a published layer."""
    made = {"router.weight": torch.randn(experts, width), "router.bias": torch.randn(experts)}
    for name, rows, k in (("gate_up_proj", 2 * hidden, width), ("down_proj", width, hidden)):
        q = te_mx.quantize(torch.randn(experts, rows, k) * k**-0.5, fmt="mxfp4")
        codes, scales = (
            part.unflatten(0, (experts, rows)) for part in (q.rowwise_data, q.rowwise_scale)
        )
        blocks, own = mxfp4_checkpoints.to_gpt_oss(codes, scales, k)
        made |= {f"experts.{name}_blocks": blocks, f"experts.{name}_scales": own}
        made[f"experts.{name}_bias"] = torch.randn(experts, rows) * 0.1
    return {k: v.bfloat16() if v.is_floating_point() else v for k, v in made.items()}


def read_layer(file: Path, layer: int) -> dict[str, Tensor]:
    """The tensors of one layer of a file of safetensors."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise SystemExit("error: --file needs safetensors: pip install safetensors") from None

    prefix = f"model.layers.{layer}.mlp."
    try:
        with safe_open(file, "pt") as held:
            names = [name for name in held.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors = {name.removeprefix(prefix): held.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise SystemExit(f"error: --file {file} cannot be read as safetensors: {error}") from None
    if not tensors:
        raise SystemExit(f"error: {file} has no tensors {prefix}..; this layer is in another file")
    missing = NEEDED - tensors.keys()
    if missing:
        raise SystemExit(
            f"error: {file} has no {prefix}{', '.join(sorted(missing))}: it does not hold this "
            "layer in gpt-oss's own 4-bit form"
        )
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--file", type=Path, help="a file of gpt-oss's safetensors")
    parser.add_argument("--layer", type=int, default=0, help="of --file (default: 0)")
    parser.add_argument(
        "--activations", default="bf16", choices=["bf16", "mxfp8", "mxfp4"],
        help="what inputs of the experts are quantized to (default: bf16, as they are)",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64, help="in a batch (default: 64)")
    args = parser.parse_args()
    tensors = read_layer(args.file, args.layer) if args.file else random_checkpoint(512, 512, 8)
    experts, rows = tensors["experts.gate_up_proj_bias"].shape
    width = tensors["experts.down_proj_bias"].shape[1]
    block = GptOssMoE(width, rows // 2, experts, active=4)
    block.load_checkpoint(tensors, args.activations)
    held = sum(t.nbytes for t in block.state_dict().values())
    elements = experts * (rows * width + width * rows // 2)
    print(f"{experts} experts, {elements / 1e6:.1f} M elements, {held / elements:.3f} bytes each")
    x = torch.randn(args.tokens, width, dtype=torch.bfloat16)
    with torch.no_grad():
        block(x)
        start = time.perf_counter()
        y = block(x)
    took = time.perf_counter() - start
    print(f"{args.tokens} tokens in {took:.3f} s, standard deviation {y.float().std():.3f}")
    print(te_mx.audit(block))
    print("next: routing lists of serving engines, by te_mx.moe (docs/moe.md)")


if __name__ == "__main__":
    main()
