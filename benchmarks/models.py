"""Language models of Transformers as training steps to time: in bf16, and converted."""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import te_mx
from benchmarks.timing import Call
from examples.llama import models

WARM_UP = 3  # the first step compiles, the second allocates what the optimizer keeps
GIB = 1 << 30
CAUSAL = "causal_sdpa"  # an attention without masks
Region = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Workload:
    """A model and what one step trains it on."""

    shape: str  # of examples/llama/models.py
    changes: dict[str, Any] = field(default_factory=dict)
    batch: int = 8
    context: int = 2048
    compiled: bool = False
    attention: str = "sdpa"

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    def config(self) -> Any:
        return models.config_of(self.shape, **self.changes)

    def build(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """Random weights, the same ones every time."""
        config = self.config()
        torch.manual_seed(0)
        experts = "grouped_mm" if config.model_type in ("mixtral", "qwen3_moe") else None
        if self.attention == CAUSAL:
            _register_causal()
        with device:
            return models.build(config, dtype=dtype, attention=self.attention, experts=experts)


def _register_causal() -> None:
    """Transformers' sdpa under a name for which it makes no masks. Under torch.compile it would
    make one of `sdpa`, since it cannot look whether position_ids are those of packed sequences,
    and with a mask attention takes three times as long as with is_causal. (Models of te_mx make
    none under `sdpa` either: te_mx/fusion/masks.py.)"""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)


def to_te_mx(model: nn.Module, *, fuse: bool = True, recipe: str | None = None) -> Region:
    """Convert all but what makes logits, and say which region to train in."""
    te_mx.convert_model(model, fuse=fuse)
    return partial(te_mx.autocast, recipe=recipe)


def to_torchao(model: nn.Module) -> Region:
    """torchao's FP8 training with one scale a tensor. ImportError where it is not installed."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=models.stays)
    return contextlib.nullcontext


def stays_bf16(model: nn.Module) -> Region:
    return contextlib.nullcontext


CONVERSIONS: dict[str, Callable[[nn.Module], Region]] = {
    "bf16": stays_bf16,
    "te_mx": to_te_mx,
    "torchao float8": to_torchao,
    **{f"te_mx {name}": partial(to_te_mx, recipe=name) for name in te_mx.recipe.NAMED},
}


def tokens_of(work: Workload, device: torch.device, seed: int = 0) -> Tensor:
    """Random tokens [batch, context]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (work.batch, work.context)
    return torch.randint(work.config().vocab_size, shape, generator=generator).to(device)


def training_step(model: nn.Module, region: Region, batches: list[Tensor]) -> Call:
    """Forward, backward and a fused AdamW; returns the loss, on the device."""
    kinds: dict[type, list[Tensor]] = {}  # fused kernels take DTensors, or others
    for parameter in model.parameters():
        kinds.setdefault(type(parameter), []).append(parameter)
    groups = [{"params": parameters} for parameters in kinds.values()]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def step(i: int) -> Tensor:
        tokens = batches[i % len(batches)]
        with region():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@dataclass(frozen=True)
class Candidate:
    """A step that has run, the loss it began with, and the most memory it takes.

    `peak` is in bytes, without what other models on the device hold; None on a CPU.
    """

    step: Call
    first_loss: float
    peak: int | None


def candidate(work: Workload, kind: str, device: torch.device) -> Candidate:
    """Build, convert and warm up the model of `work` as `kind` of CONVERSIONS."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        _use_cublas(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    model = work.build(device)
    region = CONVERSIONS[kind](model)
    ready = torch.compile(model) if work.compiled else model
    batches = [tokens_of(work, device, seed) for seed in range(2)]
    step = training_step(ready, region, batches)
    first_loss, *_ = [float(step(i)) for i in range(WARM_UP)]
    if not on_gpu:
        return Candidate(step, first_loss, None)
    torch.cuda.reset_peak_memory_stats(device)
    step(0)
    torch.cuda.synchronize(device)
    return Candidate(step, first_loss, torch.cuda.max_memory_allocated(device) - before)


def _use_cublas(device: torch.device) -> None:
    """Its workspaces, of this thread and of the one that runs backward, belong to no model."""
    x = torch.ones(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    (x @ x).sum().backward()


def clean_up() -> None:
    """After the last reference to a model: give its memory and its compiled code back."""
    torch.compiler.reset()
    te_mx.workspace.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def kept_for_backward(model: nn.Module, region: Region, tokens: Tensor) -> int:
    """Bytes that a forward pass keeps: each storage once, without parameters."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    # The tensors, not their sizes: a freed address could come back as another tensor's.
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            kept[address] = tensor.detach()
        return tensor.detach()  # as it is, an output would hold its own graph

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), region():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    del loss
    return sum(t.untyped_storage().nbytes() for t in kept.values())
