"""LoRA on a model of Transformers whose linear layers hold codes alone, in the loop of
gpt/train.py.

The base is a folder's model, or a small one that learnt the text before. It is adapted to the same
text in capitals.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from gpt import data, precision, report
from torch import nn

import te_mx
from llama import models, recipes, train

MODES = ("bf16", "mxfp8", "mxfp4")  # what the base weights are
COLORS = dict(zip(MODES, ("#2f6fb0", "#d9622b", "#3f8f5b"), strict=True))


@dataclass(frozen=True)
class LoraSettings(train.LlamaSettings):
    """`mode` is one of MODES; `base` the checkpoint of train_llama.py's loop that has the weights,
    "" where `preset` is a folder with some."""

    base: str = ""
    rank: int = 16
    dora: bool = False
    activations: str = "bf16"  # or "mxfp8": inputs of layers of codes are quantized too


def in_capitals(text: data.Text) -> data.Text:
    """The same text with the letters a to z as A to Z."""

    def raised(t: torch.Tensor) -> torch.Tensor:
        return torch.where((t >= ord("a")) & (t <= ord("z")), t - 32, t)

    return data.Text(raised(text.train), raised(text.val), text.files)


class LoraTrainer(train.LlamaTrainer):
    """Adapters on every linear layer but the head are all that trains and all that is saved."""

    settings: LoraSettings
    bytes: dict[str, int]

    def make_model(self) -> nn.Module:
        peft, register = peft_and_register()
        s = self.settings
        with torch.device(s.device):
            model = models.build(
                s.config(), dtype=s.parameter_dtype, attention=s.attention,
                weights=None if s.base else s.preset,
            )  # fmt: skip
        if s.base:
            model.load_state_dict(torch.load(s.base, weights_only=True)["model"])
        self.plan = recipes.plan_of(s.recipe, model.config.num_hidden_layers)
        layers = [m for n, m in model.named_modules() if is_layer(m, n)]
        if s.mode != "bf16":
            te_mx.convert_model(model)
            te_mx.freeze_weights(
                model, drop_master=True, fmt="mxfp4" if s.mode == "mxfp4" else None,
                activations=s.activations,
            )  # fmt: skip
        self.bytes = {
            "layers": sum(map(weight_bytes, layers)),
            "layers in bf16": sum(2 * m.in_features * m.out_features for m in layers),
            "all": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        }
        config = peft.LoraConfig(
            r=s.rank, lora_alpha=2 * s.rank, target_modules="all-linear", use_dora=s.dora
        )
        self.forward = adapted = peft.get_peft_model(model, register(config))
        return adapted

    def kernels(self) -> dict[str, int]:
        return {} if self.settings.mode == "bf16" else precision.kernels(self.model)

    def model_state(self) -> dict:
        return peft_and_register()[0].get_peft_model_state_dict(self.model)

    def load_model_state(self, state: dict) -> None:
        found = peft_and_register()[0].set_peft_model_state_dict(self.model, state)
        if found.unexpected_keys:
            raise ValueError(f"no adapters of this model: {found.unexpected_keys[:3]}")

    @property
    def title(self) -> str:
        return f"LoRA on a {type(self.model.get_base_model()).__name__}: bytes in capitals"


def peft_and_register() -> tuple:
    """The package, imported here because it takes seconds, and te_mx's mapping for it."""
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise RuntimeError("adapters are of peft, which is missing: pip install peft") from error
    from te_mx.integrations.peft import register

    return peft, register


def is_layer(module: nn.Module, name: str) -> bool:
    """Whether a module is one of those that te_mx converts."""
    return isinstance(module, nn.Linear) and models.stays(module, name)


def weight_bytes(layer: nn.Module) -> int:
    """Of the weight, or of its codes and scales."""
    held = [t for n, t in layer.named_parameters() if n == "weight"] + list(layer.buffers())
    return sum(t.nbytes for t in held)


def table(runs: dict[str, dict]) -> str:
    """One row for each base."""
    lines = ["base    bytes of its layers         first loss  validation loss  tokens/s"]
    for mode, run in runs.items():
        size = run["base_bytes"]
        share = size["layers"] / size["layers in bf16"]
        lines.append(
            f"{mode:<6} {size['layers']:>12,} ({share:.2f}x bf16) {run['losses'][0]:>12.4f} "
            f"{run['val_loss']:>16.4f} {run['tokens_per_second']:>9,.0f}"
        )
    return "\n".join(lines)


def plot(runs: dict[str, dict], path: Path) -> None:
    """Training loss of every base, and validation losses as circles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for mode, run in runs.items():
        color = COLORS[mode]
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], color=color, label=mode)
        at, losses = zip(*run["val"], (run["steps"], run["val_loss"]), strict=True)
        axes.plot(at, losses, color=color, linestyle="none", marker="o", markerfacecolor="white")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a byte)")
    axes.set_title(next(iter(runs.values()))["model"], loc="left", fontsize=11)
    axes.legend(frameon=False, title="base weights")
    axes.grid(axis="y", color=report.BAND, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
