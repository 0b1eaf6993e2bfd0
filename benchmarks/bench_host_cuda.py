"""Host time of a small forward and backward, in each of the modes that trainers use: until the
calls return, not the GPU. Each right behind the plain modules in bf16 that stand beside it, on
four cores that stay the same: threads that move between many take twice as long, te_mx's and
torch's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import te_mx
from benchmarks.gpu import GpuContext
from benchmarks.row import Row, Target
from benchmarks.timing import Call, beside, interleaved

SIZE, QUICK = 1024, 64
CORES = 4  # for the thread that calls, that of autograd, and what they wake
# Of a te_mx.Linear against nn.Linear: recipe of the region, what the module is given, what the call
# is given.
MAIN_GRAD: dict[str, Any] = {"fuse_wgrad_accumulation": True}
RECIPES = "float8_block", "deepseek_v3", "mxfp4", "mxfp4_all", "nvfp4"
MODES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "autocast()": (None, {}, {}),
    "recipe given": ("mxfp8", {}, {}),
    "micro-batch": (None, {}, {"is_first_microbatch": False}),
    "main_grad": (None, MAIN_GRAD, {}),
    "delayed": (None, {"delay_wgrad_compute": True}, {}),
    **{recipe: (recipe, {}, {}) for recipe in RECIPES},
    **{f"{recipe}, main_grad": (recipe, MAIN_GRAD, {}) for recipe in RECIPES},
}
TARGETS = {"autocast()": 1.7, "recipe given": 1.7, "micro-batch": 1.5, "main_grad": 1.8}
TARGETS |= {"delayed": 1.8, "LayerNormLinear": 1.2, "LayerNormMLP": 1.2}


@contextmanager
def _few_cores() -> Iterator[None]:
    """All threads of the process on CORES of its cores, where there is Linux."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        yield
        return
    before = os.sched_getaffinity(0)

    def put(cores: Iterable[int]) -> None:
        for task in tasks.iterdir():
            os.sched_setaffinity(int(task.name), cores)

    put(sorted(before)[:CORES])
    try:
        yield
    finally:
        put(before)


def _step(module: nn.Module, x: Tensor, g: Tensor, region: Any, given: dict[str, Any]) -> Call:
    later = getattr(module, "backward_dw", None)
    delayed = getattr(module, "delay_wgrad_compute", False)

    def step(i: int) -> None:
        with region():
            y = module(x, **given)
        y.backward(g)
        if delayed:
            later()

    return step


def modes(context: GpuContext) -> Iterator[Row]:
    """A linear layer, a normalized one and an MLP, each against plain modules."""
    size = QUICK if context.quick else SIZE
    made: dict[str, Any] = {"device": context.device, "dtype": torch.bfloat16}
    x = context.randn(size, size, seed=1).requires_grad_()
    g = context.randn(size, size, seed=2)
    norm, linear = nn.LayerNorm(size, **made), nn.Linear(size, size, bias=False, **made)
    fc1, fc2 = nn.Linear(size, size, **made), nn.Linear(size, size, **made)
    calls: dict[str, Call] = {
        "nn.Linear": _step(linear, x, g, nullcontext, {}),
        "LayerNorm + nn.Linear": _step(nn.Sequential(norm, linear), x, g, nullcontext, {}),
        "LayerNorm + MLP": _step(
            nn.Sequential(norm, fc1, nn.GELU("tanh"), fc2), x, g, nullcontext, {}
        ),
    }
    peers = dict.fromkeys(MODES, "nn.Linear")
    for name, (recipe, module, given) in MODES.items():
        layer = te_mx.Linear(size, size, bias=False, **made, **module)
        layer.weight.main_grad = torch.zeros(size, size, device=context.device)

        def region(recipe: Any = recipe) -> Any:
            return te_mx.autocast(recipe=recipe)

        if given:
            with region():
                layer(x, is_first_microbatch=True)
        calls[name] = _step(layer, x, g, region, given)
    plain, added = (te_mx.LayerNormLinear(size, size, False, **made, **f) for f in ({}, MAIN_GRAD))
    added.weight.main_grad = torch.zeros(size, size, device=context.device)
    for name, kind, at in (
        ("LayerNormLinear", plain, 1), ("LayerNormLinear, main_grad", added, 1),
        ("LayerNormMLP", te_mx.LayerNormMLP(size, size, **made), 2),
    ):  # fmt: skip
        calls[name] = _step(kind, x, g, te_mx.autocast, {})
        peers[name] = list(calls)[at]
    with _few_cores():
        times = interleaved(calls, context.effort, 20, context.host_clock, peers)
    for name, peer in peers.items():
        target, its = TARGETS.get(name, 2.0), beside(peer, name)
        yield Row(
            f"host {name}", f"{size} {size} {size}", "", times.seconds(name) * 1e6, "", None, peer,
            times.ratio(name, its), Target(target, round(target - 0.1, 2), lower_is_better=True),
            f"{times.seconds(its) * 1e6:.0f} us",
        )  # fmt: skip
