"""One training run: settings in, history and a checkpoint out. Both precisions share the loop."""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from gpt import data, memory, precision
from gpt.model import GPT, GPTConfig
from gpt.moe import MoEConfig


@dataclass(frozen=True)
class Preset:
    """A size of model with the batch and the learning rate that suit it."""

    model: GPTConfig
    batch: int = 8
    lr: float = 5e-4


PRESETS = {
    "tiny": Preset(GPTConfig(layers=1, heads=2, width=64, context=32)),
    "mini": Preset(GPTConfig(layers=3, heads=4, width=256, context=128)),  # for plain torch
    "small": Preset(GPTConfig(layers=3, heads=4, width=512, context=256)),
    "medium": Preset(GPTConfig(layers=8, heads=8, width=768, context=512)),
    # 607 M parameters, 16,384 tokens a step: enough work for a large GPU.
    "large": Preset(
        GPTConfig(layers=12, heads=16, width=2048, context=1024, embedding_std=1.0), 16, 2.5e-4
    ),
    "moe-tiny": Preset(MoEConfig(layers=1, heads=2, width=64, context=32, experts=4, hidden=96)),
    "moe": Preset(MoEConfig(layers=3, heads=4, width=512, context=256)),
    # 1.6 G parameters, of which a token uses 0.5 G; 32,768 rows for 8 experts a layer and step.
    "moe-large": Preset(
        MoEConfig(layers=8, heads=16, width=2048, context=1024, embedding_std=1.0, hidden=5632),
        16,
        2.5e-4,
    ),
}
WARMUP_SHARE, FINAL_LR_SHARE, MAX_NORM = 0.1, 0.1, 1.0
BAR = "{desc} {percentage:3.0f}%|{bar:24}| {n}/{total} [{elapsed}, {remaining} left{postfix}]"
WHEN_STOPPED = -1  # of save_every
SLOW_FIRST_STEPS = 3  # left out of tokens/s: allocation and kernel set-up


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed from."""


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run. A checkpoint of other settings does not resume, but with
    more steps: the learning rate then goes on along the schedule of the longer run."""

    mode: str = "bf16"  # "mxfp8", or the dtype's name for plain nn.Linear
    preset: str = "small"
    steps: int = 120
    batch: int = 8
    lr: float = 5e-4
    seed: int = 0
    device: str = "cpu"
    dtype: str = "bf16"
    recipe: str = "mxfp8"
    eval_every: int = 40  # 0: at the end only
    eval_batches: int = 4
    final_eval_batches: int = 32
    text: str = ""  # a folder; the standard library's sources if not given

    @property
    def model(self) -> GPTConfig:
        return PRESETS[self.preset].model

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context


class Trainer:
    """Model, optimizer and history of one run."""

    def __init__(self, settings: Settings, text: data.Text):
        self.settings, self.text = settings, text
        torch.manual_seed(settings.seed)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.val: list[tuple[int, float]] = []  # (steps done, loss)

    def make_model(self) -> nn.Module:
        """On the device, converted where the run is one in MXFP8."""
        with torch.device(self.settings.device):
            model = GPT(self.settings.model)
        if self.settings.mode == "mxfp8":
            precision.convert(model)
        return model

    def make_optimizer(self, **how: bool) -> torch.optim.Optimizer:
        how = how or {"fused": True}
        return torch.optim.AdamW(
            self.model.parameters(), lr=self.settings.lr, betas=(0.9, 0.95), weight_decay=0.1, **how
        )

    def clip_gradients(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, context] to [batch, context, 256]."""
        s = self.settings
        with precision.forward_precision(
            s.device, s.dtype, s.recipe if s.mode == "mxfp8" else None
        ):
            return self.model(tokens)

    def kernels(self) -> dict[str, int]:
        """What ran; nothing for a run in high precision."""
        return precision.kernels(self.model) if self.settings.mode == "mxfp8" else {}

    @property
    def title(self) -> str:
        return "byte-level GPT"

    @property
    def done(self) -> int:
        return len(self.losses)

    def batch(self) -> tuple[Tensor, Tensor]:
        s = self.settings
        return data.train_batch(self.text, s.seed, self.done, s.batch, s.context)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        s = self.settings
        tokens, targets = (t.to(s.device) for t in batch)
        logits = self.logits(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def value_of(self, loss: Tensor) -> float:
        return loss.item()

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        s = self.settings
        warmup = max(1, round(WARMUP_SHARE * s.steps))
        if self.done < warmup:
            return s.lr * (self.done + 1) / warmup
        phase = (self.done - warmup) / max(1, s.steps - warmup)
        return s.lr * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * phase)) / 2)

    def step(self) -> float:
        start = time.perf_counter()
        loss = self.loss(self.batch())
        loss.backward()
        self.clip_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = self.value_of(loss)  # also waits for the device, so that the time below is whole
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(value)
        if not math.isfinite(value):
            raise RuntimeError(
                f"the {self.settings.mode} loss is {value} at step {self.done}: lower --lr?"
            )
        return value

    @torch.no_grad()
    def evaluate(self, batches: int) -> float:
        s = self.settings
        losses = [
            self.loss(batch).item()
            for batch in data.val_batches(self.text, batches, s.batch, s.context)
        ]
        return statistics.fmean(losses)

    def step_seconds(self) -> list[float]:
        """The 10th, 50th and 90th percentile; far apart when other work disturbed the run."""
        steady = sorted(self.seconds[SLOW_FIRST_STEPS:] or self.seconds)
        return [steady[round(share * (len(steady) - 1))] for share in (0.1, 0.5, 0.9)]

    def tokens_per_second(self) -> float:
        """From the median step, so that one disturbed step does not count."""
        return self.settings.tokens_per_step / self.step_seconds()[1]

    def model_state(self) -> dict:
        """What a checkpoint keeps of the model."""
        return self.model.state_dict()

    def load_model_state(self, state: dict) -> None:
        self.model.load_state_dict(state)

    def optimizer_state(self) -> dict:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict) -> None:
        self.optimizer.load_state_dict(state)

    def write(self, state: dict, path: Path) -> None:
        torch.save(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)

    def save(self, path: Path) -> None:
        """Write a checkpoint that resumes bit for bit; the old one stays until it is whole."""
        state = {
            "settings": asdict(self.settings),
            "model": self.model_state(),
            "optimizer": self.optimizer_state(),
            "rng": torch.get_rng_state(),
            "losses": self.losses,
            "seconds": self.seconds,
            "val": self.val,
        }
        if self.settings.device.startswith("cuda"):
            state["cuda_rng"] = torch.cuda.get_rng_state(self.settings.device)
        self.write(state, path)

    def load(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
            theirs, ours = state["settings"], asdict(self.settings)
            differing = [k for k in sorted(ours | theirs) if ours.get(k) != theirs.get(k)]
            if "steps" in differing and ours["steps"] > theirs["steps"]:
                differing.remove("steps")
            if not differing:
                self._restore(state)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(
                f"{path} is damaged, or no checkpoint of this example ({reason}): delete it, or "
                "start again without --resume"
            ) from error
        if differing:
            rows = ", ".join(f"{k}: {theirs.get(k)} there, {ours.get(k)} here" for k in differing)
            raise CheckpointError(
                f"{path} was written with other settings ({rows}): pass the same ones, or start "
                "again without --resume"
            )

    def _restore(self, state: dict) -> None:
        self.load_model_state(state["model"])
        self.load_optimizer_state(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self.settings.device)
        self.losses, self.seconds = state["losses"], state["seconds"]
        self.val = [tuple(row) for row in state["val"]]


def run(
    settings: Settings,
    checkpoint: Path,
    *,
    resume: bool = False,
    save_every: int = 50,
    should_stop: Callable[[int], bool] = lambda done: False,
    text: data.Text | None = None,
    make: type[Trainer] = Trainer,
    quiet: bool = False,
    then: Callable[[Trainer], dict] = lambda trainer: {},
) -> dict:
    """Train to `settings.steps`, or until `should_stop(steps done)`; returns the record of the run,
    with what `then` finds of a finished one.

    A checkpoint is written every `save_every` steps and at the end, also at an early one; never
    when `save_every` is 0, and at an early end alone when it is WHEN_STOPPED.
    """
    trainer = make(settings, text or data.load(settings.text))
    if resume and checkpoint.exists():
        trainer.load(checkpoint)
    saved_mb = memory.saved_for_backward_mb(lambda: trainer.loss(trainer.batch()), trainer.model)
    bar = tqdm(
        total=settings.steps,
        initial=trainer.done,
        desc=f"{settings.mode:>5}",
        unit="step",
        bar_format=BAR,
        mininterval=0.2 if sys.stderr.isatty() else 15,
        disable=quiet,
    )
    stopped = False
    with bar:
        while trainer.done < settings.steps and not stopped:
            loss = trainer.step()
            bar.set_postfix_str(
                f"loss {loss:.4f}, {trainer.tokens_per_second():,.0f} tokens/s", refresh=False
            )
            bar.update()
            last = trainer.done == settings.steps
            every = settings.eval_every
            if every and trainer.done % every == 0 and not last:
                trainer.val.append((trainer.done, trainer.evaluate(settings.eval_batches)))
            stopped = should_stop(trainer.done)
            if save_every > 0 and trainer.done % save_every == 0 and not last:
                trainer.save(checkpoint)
    finished = trainer.done == settings.steps
    final = trainer.evaluate(settings.final_eval_batches if finished else settings.eval_batches)
    if save_every > 0 or (save_every == WHEN_STOPPED and not finished):
        trainer.save(checkpoint)
    return {
        "settings": asdict(settings),
        "model": trainer.title,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "finished": finished,
        "steps": trainer.done,
        "losses": trainer.losses,
        "val": trainer.val,
        "val_loss": final,
        "seeds": {str(settings.seed): final},
        "tokens_per_second": trainer.tokens_per_second(),
        "step_seconds": trainer.step_seconds(),
        "train_seconds": sum(trainer.seconds),
        "memory_mb": {
            "peak": memory.peak_mb(settings.device),
            "saved_for_backward": saved_mb,
        },
        "kernels": trainer.kernels(),
        **(then(trainer) if finished else {}),
    }
