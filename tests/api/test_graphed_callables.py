"""te_mx.make_graphed_callables without a GPU: torch's function is replaced by one that does the
same to gradients and to what Python decides. tests/gpu/test_graphed_callables.py captures."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import te_mx
from te_mx.context.region import active_region, entered_again
from te_mx.recipe import Format, MXFP8BlockScaling

FLOOR = MXFP8BlockScaling(scale_rule="floor", fp8_format=Format.HYBRID)
SIZE = 32


def fake_graphs(callables, sample_args, num_warmup_iters=3, allow_unused_input=False, pool=None):
    """As torch's: warm-up on gradients of no meaning; replays in the region of the capture, results
    and gradients in memory of the graph, no Python in the backward pass but the copies."""
    made = []
    for function, args in zip(callables, sample_args, strict=True):
        params = tuple(function.parameters()) if isinstance(function, nn.Module) else ()
        run = function.forward if isinstance(function, nn.Module) else function
        surface = [t for t in (*args, *params) if t.requires_grad]
        grads = []
        for _ in range(num_warmup_iters):
            y = run(*args)
            noise = torch.full_like(y, torch.nan)
            grads = torch.autograd.grad(y, surface, noise, allow_unused=allow_unused_input)
        static = [None if g is None else torch.empty_like(g) for g in grads]
        replay = functools.partial(_replay, run, active_region(), args, params, static)
        if isinstance(function, nn.Module):
            training = function.training

            def forward(*given, module=function, run=run, replay=replay, training=training):
                return replay(*given) if module.training == training else run(*given)

            function.forward = forward
            made.append(function)
        else:
            made.append(replay)
    return tuple(made)


def _replay(run, region, sampled, params, static, *args):
    taken = [t.requires_grad for t in (*sampled, *params)]

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.leaves = [a.detach().requires_grad_(on) for a, on in zip(args, taken, strict=False)]
            with torch.enable_grad(), entered_again(region):
                ctx.y = run(*ctx.leaves)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, grad):
            marks = [getattr(p, "grad_added_to_main_grad", None) for p in params]
            surface = [t for t in (*ctx.leaves, *params) if t.requires_grad]
            grads = torch.autograd.grad(ctx.y, surface, grad, allow_unused=True)
            for p, mark in zip(params, marks, strict=True):
                if mark is not None:
                    p.grad_added_to_main_grad = mark
            for buffer, new in zip(static, grads, strict=True):
                if buffer is not None:
                    buffer.copy_(new)
            given = iter(None if b is None else b.detach() for b in static)
            return tuple(next(given) if on else None for on in taken)

    return Graphed.apply(*args, *params)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fake_graphs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def block(**how) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(te_mx.LayerNormMLP(SIZE, SIZE, **how), te_mx.Linear(SIZE, SIZE, **how))


def fused(mark: bool = False) -> nn.Module:
    model = block(fuse_wgrad_accumulation=True)
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.dim() == 2:
            parameter.main_grad = torch.full_like(parameter, 0.5)
            if mark:
                parameter.grad_added_to_main_grad = False
    return model


def sample() -> tuple[Tensor]:
    return (torch.randn(8, SIZE, requires_grad=True),)


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, SIZE) for _ in range(2)]


def gradients(model: nn.Module) -> list[Tensor]:
    held = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in model.parameters()]
    return [grad.clone() for grad in held]


def run(model: nn.Module, **first) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of two micro-batches."""
    results = []
    for i, x in enumerate(batches()):
        y = model(x, **(first if i == 0 else {}))
        results.append(y.detach().clone())
        y.square().sum().backward()
    return results, gradients(model)


def same(got, want) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(got, want, strict=True)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("make", [block, fused])
@pytest.mark.parametrize("how", ["region", "bound", "recipe", "high precision"])
def test_two_micro_batches_as_eager(make, how):
    eager, model = make(), make()
    region = te_mx.autocast(enabled=how != "high precision", recipe=FLOOR)
    with region:
        want = run(eager)
    if how == "bound":
        te_mx.convert_model(model, recipe=FLOOR)
        te_mx.make_graphed_callables(model, sample())
        got = run(model)
    elif how == "recipe":
        assert te_mx.make_graphed_callables(model, sample(), recipe=FLOOR) is model
        got = run(model)
    else:
        with region:
            te_mx.make_graphed_callables(model, sample())
            got = run(model)
    assert same(got, want)


def test_main_grads_survive_the_capture_and_are_marked_by_replays():
    model = fused(mark=True)
    with te_mx.autocast():
        te_mx.make_graphed_callables(model, sample())
        weights = [p for p in model.parameters() if hasattr(p, "main_grad")]
        assert len(weights) == 3
        assert all(p.main_grad.eq(0.5).all() and not p.grad_added_to_main_grad for p in weights)
        model(batches()[0]).sum().backward()
    assert all(p.grad_added_to_main_grad for p in weights)


def test_the_first_micro_batch_of_a_step():
    model, zeroed = fused(), fused()
    for parameter in zeroed.parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    with te_mx.autocast():
        want = run(zeroed)
        te_mx.make_graphed_callables(model, sample())
        assert same(run(model, is_first_microbatch=True), want)
        with pytest.raises(TypeError, match="is_first_microbatch must be a bool"):
            model(batches()[0], is_first_microbatch=1)


def test_several_and_functions():
    first, second = te_mx.Linear(SIZE, SIZE), te_mx.Linear(SIZE, SIZE)
    x = batches()[0]
    with te_mx.autocast():
        want = second(first(x)).relu()
        parts = te_mx.make_graphed_callables((first, second, torch.relu), (sample(),) * 3)
        assert parts[0] is first and parts[1] is second
        assert torch.equal(parts[2](parts[1](parts[0](x))), want)
    with pytest.raises(RuntimeError, match=r"was captured with Settings.* with no te_mx.autocast"):
        parts[2](x)


def test_another_region_is_refused():
    model, x = block(), batches()[0]
    with te_mx.autocast(recipe=FLOOR):
        te_mx.make_graphed_callables(model, sample())
    said = "LayerNormMLP|Sequential was captured with Settings.*and this call would run with"
    for region in (te_mx.autocast(), te_mx.autocast(enabled=False)):
        with region, pytest.raises(RuntimeError, match=said):
            model(x)
    with pytest.raises(RuntimeError, match="would run with te_mx off, but a CUDA graph replays"):
        model(x)
    te_mx.convert_model(model, recipe=FLOOR)  # which means the same
    model(x)
    te_mx.convert_model(model, recipe=te_mx.get_default_recipe())
    with pytest.raises(RuntimeError, match=said):
        model(x)
    with te_mx.autocast(recipe=FLOOR):
        model(x)
    model.eval()  # without its graph, so whatever the region
    with te_mx.autocast(enabled=False):
        model(x)


def test_memory_that_moved_is_refused():
    model, x = fused(), batches()[0]
    with te_mx.autocast():
        te_mx.make_graphed_callables(model, sample())
        weight = model[1].weight
        kept = weight.main_grad
        weight.main_grad = torch.zeros_like(weight)
        with pytest.raises(RuntimeError, match=r"main_grad or .* was replaced since"):
            model(x)
        weight.main_grad = kept
        weight.overwrite_main_grad = True
        with pytest.raises(RuntimeError, match=r"overwrite_main_grad of .* was replaced since"):
            model(x)
        weight.overwrite_main_grad = False
        model(x)
        weight.data = weight.data.clone()
        with pytest.raises(RuntimeError, match=r"a parameter \(32, 32\) of Sequential was moved"):
            model(x)


class Graph:
    """What must not be destroyed during a capture; in a cycle with itself."""

    def __init__(self):
        self.me = self


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_during_a_capture(monkeypatch, enabled):
    graphs = [weakref.ref(Graph())]

    def capture(*args):
        assert not gc.isenabled() and graphs[0]() is None
        raise RuntimeError("as a capture that fails")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="as a capture"):
            te_mx.make_graphed_callables(te_mx.Linear(SIZE, SIZE), sample())
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_what_cannot_be_graphed(monkeypatch):
    delayed = te_mx.Linear(SIZE, SIZE, delay_wgrad_compute=True)
    with pytest.raises(ValueError, match="delay_wgrad_compute=True"):
        te_mx.make_graphed_callables(delayed, sample())
    model = te_mx.Linear(SIZE, SIZE)
    with pytest.raises(TypeError, match="tensors only, got 3; bind"):
        te_mx.make_graphed_callables(model, (*sample(), 3))
    with pytest.raises(TypeError, match="a tuple of 2 tuples"):
        te_mx.make_graphed_callables((model, model), sample())
    with pytest.raises(TypeError, match="callables must be"):
        te_mx.make_graphed_callables("model", sample())
    with pytest.raises(ValueError, match="recipe must be"):
        te_mx.make_graphed_callables(model, sample(), recipe="floor")
    with te_mx.autocast():
        te_mx.make_graphed_callables(model, sample())
    with pytest.raises(ValueError, match="graphed before"):
        te_mx.make_graphed_callables(model, sample())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        te_mx.make_graphed_callables(te_mx.Linear(SIZE, SIZE), sample())
