"""Training of a Transformers model in the loop of gpt/train.py."""

from dataclasses import dataclass
from typing import Any

import torch
from gpt import data, precision, train
from torch import Tensor, nn

import te_mx
from llama import models, recipes


@dataclass(frozen=True)
class Preset:
    """The steps, the batch and the learning rate that suit a model."""

    steps: int = 300
    batch: int = 8
    context: int = 2048
    lr: float = 2.5e-4
    final_eval_batches: int = 32


LARGE = Preset()
PRESETS = {
    "tiny": Preset(40, 8, 32, 2e-3, 4),
    "mixtral-tiny": Preset(40, 8, 32, 2e-3, 4),
    "small": Preset(60, 8, 64, 2e-3, 8),
}


@dataclass(frozen=True)
class LlamaSettings(train.Settings):
    """`preset` is the model: a shape of models.SHAPES, a config.json or a folder."""

    layers: int | None = None  # None: as the model's config says
    sequence: int = 128
    attention: str = "auto"
    compile: bool = False
    fuse: bool = True
    fp32_params: bool = False
    parallel: str = ""  # of parallel.KINDS, in processes that torchrun started
    gather_codes: bool = True  # under FSDP2 in MXFP8
    begin: str = ""  # a checkpoint whose weights and moments the run starts from

    @property
    def context(self) -> int:
        return self.sequence

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float32 if self.fp32_params else precision.DTYPES[self.dtype]

    def config(self) -> Any:
        """Raises ValueError where the model cannot be trained on bytes like this."""
        changes = {} if self.layers is None else {"num_hidden_layers": self.layers}
        config = models.config_of(self.preset, **changes)
        if not models.has_weights(self.preset):
            config = config.get_text_config()  # of what takes images too
        if config.vocab_size < 256:
            raise ValueError(
                f"bytes need a vocabulary of 256, {self.preset} has {config.vocab_size}"
            )
        longest = getattr(config, "max_position_embeddings", self.sequence)
        if self.sequence > longest:
            raise ValueError(f"--seq is at most {longest} for {self.preset}, got {self.sequence}")
        return config


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Every 64th weight by a rounding of bf16: what follows is another run of equal right."""
    for weight in model.parameters():
        weight.view(-1)[::64] *= 1 + 2**-7


class LlamaTrainer(train.Trainer):
    """The parameters are bf16 like the activations, or fp32 under torch.autocast."""

    settings: LlamaSettings

    def __init__(self, settings: LlamaSettings, text: data.Text) -> None:
        super().__init__(settings, text)
        if settings.begin:
            state = torch.load(settings.begin, mmap=True, map_location="cpu", weights_only=True)
            self.load_model_state(state["model"])
            self.load_optimizer_state(state["optimizer"])

    def make_model(self) -> nn.Module:
        s = self.settings
        with torch.device(s.device):
            model = models.build(
                s.config(),
                dtype=s.parameter_dtype,
                attention=s.attention,
                weights=s.preset if models.has_weights(s.preset) else None,
            )
        self.plan = recipes.plan_of(s.recipe, model.config.num_hidden_layers)
        if s.recipe == recipes.AGAIN:
            nudge(model)
        if s.mode == "mxfp8":
            te_mx.convert_model(model, fuse=s.fuse)
        torch.compiler.reset()  # of another seed's model
        self.forward = torch.compile(model) if s.compile else model
        return model

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, context] to [batch, context, vocabulary]."""
        s = self.settings
        dtype = s.dtype if s.fp32_params else "fp32"  # bf16 parameters need no torch.autocast
        recipe = self.plan.now(self.done, s.steps) if s.mode == "mxfp8" else None
        with precision.forward_precision(s.device, dtype, recipe):
            return self.forward(input_ids=tokens, use_cache=False).logits

    def kernels(self) -> dict[str, int]:
        return {} if self.settings.compile else super().kernels()  # compiled code does not record

    @property
    def title(self) -> str:
        return f"{type(self.model).__name__} on bytes"
