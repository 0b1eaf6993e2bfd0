"""examples/gpt_oss_moe.py: the block against plain torch on the values of its codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import gpt_oss_moe  # noqa: E402  (the examples are no package)

WIDTH, HIDDEN, EXPERTS, ACTIVE = 96, 64, 5, 2
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, rows, k] in fp64, nibble by nibble."""
    codes = torch.stack([blocks & 0xF, blocks >> 4], -1).flatten(-2).long()
    values = E2M1.double()[codes & 7] * torch.where(codes > 7, -1, 1)
    return (values * torch.exp2(scales.double() - 127).unsqueeze(-1)).flatten(-2)


def reference(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Token by token and expert by expert, in fp64."""
    held = {k: v.double() for k, v in tensors.items() if v.is_floating_point()}
    weights = {
        name: decoded(*(tensors[f"experts.{name}_{end}"] for end in ("blocks", "scales")))
        for name in ("gate_up_proj", "down_proj")
    }
    scores, chosen = F.linear(
        x, tensors["router.weight"], tensors["router.bias"]
    ).double().topk(ACTIVE)  # fmt: skip
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, token in enumerate(x.double()):
        for p, e in zip(scores[t].softmax(-1), chosen[t].tolist(), strict=True):
            h = weights["gate_up_proj"][e] @ token + held["experts.gate_up_proj_bias"][e]
            gate, up = h[::2].clamp(max=7), h[1::2].clamp(-7, 7)
            a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            out[t] += p * (weights["down_proj"][e] @ a + held["experts.down_proj_bias"][e])
    return out


def block(tensors: dict[str, torch.Tensor], activations: str) -> gpt_oss_moe.GptOssMoE:
    made = gpt_oss_moe.GptOssMoE(WIDTH, HIDDEN, EXPERTS, ACTIVE)
    made.load_checkpoint(tensors, activations)
    return made


@pytest.mark.parametrize(
    ("activations", "dtype", "most"),
    [
        ("bf16", torch.float32, 1e-5),
        ("bf16", torch.bfloat16, 1e-2),
        ("mxfp8", torch.float32, 0.05),
        ("mxfp4", torch.float32, 0.25),
    ],
)
def test_the_block(activations, dtype, most):
    torch.manual_seed(0)
    tensors = gpt_oss_moe.random_checkpoint(WIDTH, HIDDEN, EXPERTS)
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}
    made, x = block(tensors, activations), torch.randn(3, 20, WIDTH, dtype=dtype)
    with torch.no_grad():
        y = made(x)
        exact = reference(tensors, x.flatten(0, 1)).view(x.shape)
    error = (y.double() - exact).norm() / exact.norm()
    assert y.dtype == dtype and error < most and (activations == "bf16" or error > most / 20)


def test_what_it_holds():
    tensors = gpt_oss_moe.random_checkpoint(WIDTH, HIDDEN, EXPERTS)
    state = block(tensors, "bf16").state_dict()
    assert sum(t.nbytes for t in state.values()) == sum(t.nbytes for t in tensors.values())
    blocks = tensors["experts.gate_up_proj_blocks"]
    assert torch.equal(state["gate_up.weight"], blocks.flatten(-2))


def test_a_file_of_safetensors(tmp_path):
    torch_of = pytest.importorskip("safetensors.torch")
    tensors = gpt_oss_moe.random_checkpoint(128, 64, 4)
    named = {f"model.layers.3.mlp.{k}": v for k, v in tensors.items()} | {"other": torch.ones(1)}
    torch_of.save_file(named, tmp_path / "model.safetensors")
    found = gpt_oss_moe.read_layer(tmp_path / "model.safetensors", 3)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[k], tensors[k]) for k in tensors)
    with pytest.raises(SystemExit, match=r"has no tensors model.layers.4.mlp"):
        gpt_oss_moe.read_layer(tmp_path / "model.safetensors", 4)

    torch_of.save_file({"model.layers.3.mlp.router.weight": torch.ones(2, 2)}, tmp_path / "other")
    (tmp_path / "broken").write_text("no safetensors")
    for name, why in (
        ("other", r"error: .*other has no model.layers.3.mlp.experts.down_proj_bias"),
        ("broken", r"error: --file .*broken cannot be read as safetensors"),
        ("absent", r"error: --file .*absent cannot be read as safetensors"),
    ):
        with pytest.raises(SystemExit, match=why) as said:
            gpt_oss_moe.read_layer(tmp_path / name, 3)
        assert "\n" not in str(said.value)


def test_the_script(run_script, capsys):
    assert run_script("gpt_oss_moe.py", "--activations", "mxfp8", "--tokens", "5") == 0
    said = capsys.readouterr().out
    assert "8 experts, 6.3 M elements, 0.5" in said and "mxfp4" in said
    assert said.splitlines()[-1].startswith("next: ")
