"""Run what a newcomer runs, in a folder and an environment that have torch and te_mx alone: the
examples of README.md, and training steps of layers of 8 MiB."""

import importlib.metadata
import re
import sys
from pathlib import Path

import torch

import te_mx
from te_mx.commands.main import main

NOT_THERE = {"numpy", "matplotlib", "tqdm", "pytest", "transformers"}
MOST = 0.99  # of the first step's loss, in the second


def examples(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} has no example any more"
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def train(width: int = 1024, hidden: int = 2048) -> None:
    """Weights, activations and gradients of 8 MiB, in every format that has native code."""
    assert 4 * width * hidden == 8 << 20
    for recipe in ("mxfp8", "float8_block", "mxfp4", "mxfp4_all"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            te_mx.Linear(width, hidden), torch.nn.GELU(), te_mx.Linear(hidden, width)
        )
        optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(width, width)
        losses = []
        for _ in range(2):
            with te_mx.autocast(recipe=recipe):
                loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[1] < MOST * losses[0], (recipe, losses)
        print(f"{recipe}: {losses[0]:.4f}, {losses[1]:.4f}")


if __name__ == "__main__":
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    assert not installed & NOT_THERE, installed & NOT_THERE
    examples(Path("README.md"))
    train()
    sys.exit(main(["doctor"]))
