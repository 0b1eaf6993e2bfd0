"""Layers that read one tensor, in what torch puts around them: recomputation, torch.compile, and
Hopper's way of one call for a layer (on fake_sm90.py)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import as_on_hopper
import pytest
import torch
from input_cache_cases import (
    IN,
    ROWS,
    assert_same,
    noted_reads,
    opened,
    qkv,
    separate,
    step,
    together,
)
from norm_modules import filled
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.autograd import input_cache, linear
from te_mx.backends.sm90 import binding
from te_mx.recipe import Format, MXFP8BlockScaling
from te_mx.runtime import streams

HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)


@pytest.fixture
def reads(monkeypatch, by_steps):
    return noted_reads(monkeypatch)


# ----------------------------------------------------------------------------------- recomputation
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reads, reentrant, outside):
    """Whether the recomputation runs where a region is open or not."""
    layers, x = qkv(), torch.randn(ROWS, IN)

    def block(h: Tensor) -> Tensor:
        return torch.cat(together(layers, h), -1).relu()

    def recomputed(h: Tensor) -> Tensor:
        return checkpoint(block, h, use_reentrant=reentrant)

    def run(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        for layer in layers:
            layer.zero_grad()
        with te_mx.autocast(recipe=HYBRID):
            loss = forward(leaf * 1).square().sum()
            if not outside:
                loss.backward()
        if outside:
            loss.backward()
        return [loss.detach(), leaf.grad, *(p.grad for layer in layers for p in layer.parameters())]

    want = run(lambda h: torch.cat(separate(layers, h), -1).relu())
    reads.clear()
    assert_same(run(recomputed), want)
    assert len(reads) == 2  # forward, and again
    assert input_cache._here.entries == []


# ----------------------------------------------------------------------------------- torch.compile
class Graphs:
    """A backend that runs what inductor would compile, and keeps it: the joint graph is cut by
    inductor's partitioner, which eliminates common subexpressions first."""

    def __init__(self) -> None:
        self.forward: torch.fx.GraphModule | None = None
        self.backward: torch.fx.GraphModule | None = None
        self.backend = aot_autograd(
            fw_compiler=self._compiler("forward"), bw_compiler=self._compiler("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )  # fmt: skip

    def _compiler(self, name: str) -> Callable:
        def keep(graph: torch.fx.GraphModule, inputs: object) -> Callable:
            setattr(self, name, graph)
            return make_boxed_func(graph.forward)

        return keep

    def quantized(self, name: str) -> Counter[str]:
        """Shapes that te_mx.quantize reads in a graph."""
        found = [
            node.args[0].meta["val"].shape
            for node in getattr(self, name).graph.nodes
            if node.target is torch.ops.te_mx.quantize.default
        ]
        return Counter(str(tuple(shape)) for shape in found)


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


WEIGHTS = {f"({n}, {IN})": 1 for n in (48, 17, 33)}


def test_compiled_siblings_quantize_once(compiled):
    layers, x = qkv(), torch.randn(ROWS, IN)

    def run(modules: list[nn.Module], h: Tensor) -> list[Tensor]:
        return together(modules, h)

    fast = torch.compile(run, fullgraph=True, backend=compiled.backend)
    assert_same(step(layers, x, fast, HYBRID), step(layers, x, separate, HYBRID))
    assert compiled.quantized("forward") == {f"({ROWS}, {IN})": 1, **WEIGHTS}
    gradients = {f"({ROWS}, {n})": 1 for n in (48, 17, 33)}
    assert compiled.quantized("backward") == {**gradients, **WEIGHTS}  # w columns, again


def test_compiled_code_that_changes_the_input(compiled):
    layers, x = qkv(), torch.randn(ROWS, IN)

    def run(modules: list[nn.Module], h: Tensor) -> list[Tensor]:
        first = modules[0](h)
        h.mul_(2)
        return [first, modules[1](h), modules[2](h)]

    fast = torch.compile(run, fullgraph=True, backend=compiled.backend)
    assert_same(step(layers, x, fast), step(layers, x, run))
    assert compiled.quantized("forward") == {f"({ROWS}, {IN})": 2, **WEIGHTS}


def test_compiled_and_eager_layers_of_one_input(compiled):
    """Compiled code neither takes nor leaves what eager layers remember."""
    (q, k, v), x = qkv(), torch.randn(ROWS, IN)
    fast = torch.compile(k, fullgraph=True, backend=compiled.backend)
    with te_mx.autocast():
        want = separate([q, k, v], x)
        got = [q(opened(x))]
        entry = input_cache.entry_of(x)
        got += [fast(x), fast(x)]
        assert entry is not None and input_cache.entry_of(x) is entry
        got += [v(x), k(x)]
        x.add_(1)
        got += [fast(x), v(x)]
    assert_same(got[:5], [want[i] for i in (0, 1, 1, 2, 1)])
    with te_mx.autocast():
        assert_same(got[5:], separate([k, v], x))


# ----------------------------------------------------------------------------- streams and watchers
def test_streams_and_captures_do_not_see_each_others(monkeypatch, reads):
    layers, x, place = [qkv()[0] for _ in range(2)], torch.randn(ROWS, IN), (1, 0)
    monkeypatch.setattr(input_cache, "_place", lambda _: place)
    places = (1, 0), (2, 0), (1, 7), (1, 8), None
    with te_mx.autocast():
        for first in places:
            for second in places:
                reads.clear()
                place = first
                layers[0](opened(x))
                place = second
                layers[1](x)
                assert len(reads) == (1 if first == second and first else 2), (first, second)


def test_the_number_of_a_capture(monkeypatch):
    device, captured = torch.device("cuda", 0), False
    monkeypatch.setattr(streams, "capturing", lambda _: captured)
    monkeypatch.setattr(streams, "current", lambda _: 77)
    monkeypatch.setattr(streams, "capture_number", None)
    assert streams.capture(device) == 0
    captured = True
    assert streams.capture(device) is None  # one that nobody can name
    monkeypatch.setattr(streams, "capture_number", {77: 5}.get)
    assert streams.capture(device) == 5

    class Cuda:
        is_cuda, device = True, torch.device("cuda", 0)

    assert input_cache._place(Cuda()) == (77, 5)
    monkeypatch.setattr(streams, "capture_number", None)
    assert input_cache._place(Cuda()) is None
    assert input_cache._place(torch.empty(0)) == (0, 0)


def test_watchers_see_every_read(reads):
    """Profilers, dispatch modes and transforms are shown what a layer does, and leave nothing."""
    layer, x = qkv()[0], torch.randn(ROWS, IN)

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with te_mx.autocast():
        want = layer(opened(x))
        for count, mode in enumerate((Mode(), torch.overrides.BaseTorchFunctionMode()), 2):
            with mode:
                assert torch.equal(layer(x), want)
            assert len(reads) == count
        with torch.inference_mode():
            other = torch.randn(ROWS, IN)
            layer(opened(other)), layer(other)
        assert len(reads) == 5 and input_cache.entry_of(other) is None
        traced = torch.fx.experimental.proxy_tensor.make_fx(layer)(x)
        assert torch.equal(traced(2 * x), layer(2 * x))


# ------------------------------------------------------------------------------------------ Hopper
def many() -> dict[str, nn.Module]:
    """Layers that read an input of IN columns in one native call, step by step, or fused."""
    torch.manual_seed(3)
    return {
        "Linear": te_mx.Linear(IN, 33),
        "again": te_mx.Linear(IN, 48, bias=False),
        "saves": te_mx.Linear(IN, 17, save_original_input=True),
        "frozen": te_mx.Linear(IN, 17).requires_grad_(False),
        "norm": filled(te_mx.LayerNormLinear(IN, 33)),
        "mlp": filled(te_mx.LayerNormMLP(IN, 48, normalization=None)),
    }


@pytest.fixture
def hopper(threads):
    threads(1)  # many small operators
    with as_on_hopper.hopper() as patch:
        yield patch


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("first", ["Linear", "saves", "frozen", "norm", "mlp"])
def test_one_call_and_steps_read_what_the_other_made(hopper, first, keep):
    modules, recipe = many(), MXFP8BlockScaling(keep_weight_columns=keep)
    names = [first, *(name for name in modules if name != first), first]
    layers, x = [modules[name] for name in names], torch.randn(2, 20, IN)
    want, got = (step(layers, x, call, recipe) for call in (separate, together))
    # One sum of fp32 gradients, in another order where layers of other families are between.
    sums = [made.pop(len(layers)) for made in (got, want)]
    alone = [step([layer], x, together, recipe)[1].abs() for layer in layers]
    assert ((sums[0] - sums[1]).abs() <= len(layers) * 2.0**-23 * sum(alone)).all()
    assert_same(got, want)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_how_often_hopper_quantizes(hopper, order):
    """A call that is given its input quantizes the weight alone. The layer that saves its input
    asks for the rows alone, which is what it leaves for others."""
    layers = [*qkv()[:2], te_mx.Linear(IN, 33, save_original_input=True)]
    given, native = [], binding.native()
    forward = native.linear_forward

    def noted(args):
        given.append(args.x_given)
        return forward(args)

    hopper.setattr(native, "linear_forward", noted)
    calls = noted_reads(hopper)
    x = torch.randn(ROWS, IN, requires_grad=True)
    with te_mx.autocast():
        opened(x)
        names = {type(layers[i](x).grad_fn).__name__ for i in order}
    assert names == {"OneCallLinearBackward"} and calls == []
    assert given == ([False, False, True] if order[0] == 2 else [False, True, True])


@pytest.mark.parametrize("keep", [False, True])
def test_saved_once_on_hopper(hopper, keep):
    layers, x = qkv(), torch.randn(ROWS, IN, requires_grad=True)
    with te_mx.autocast(recipe=MXFP8BlockScaling(keep_weight_columns=keep)):
        outs = together(layers, x)  # torch 2.11 frees what is saved with them
        nodes = [y.grad_fn for y in outs]
        entry = input_cache.entry_of(x)
    assert {type(node).__name__ for node in nodes} == {"OneCallLinearBackward"}
    assert len({node.saved_tensors[0].data_ptr() for node in nodes}) == 1
    assert nodes[0].saved_tensors[0].data_ptr() == entry.held.x_col[0].data_ptr()
    assert entry.held._fields == ("x_row", "x_col")  # columns of a weight belong to one layer


@pytest.mark.parametrize("by_steps", [True, False])
def test_hooks_of_shared_saved_tensors_on_hopper(hopper, by_steps):
    """What a step made (codes and scales apart), or a call (one buffer), comes back elsewhere."""
    layers, x = [*qkv(), te_mx.Linear(IN, 20)], torch.randn(ROWS, IN)
    want = step(layers, x, separate)

    def run(modules: list[nn.Module], h: Tensor) -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            if by_steps:
                patch.setattr(linear, "plan_of", lambda *_: None)
            first = modules[0](opened(h))
        return [first, *(layer(h) for layer in modules[1:])]

    for back in (lambda t: t.clone(), lambda t: torch.stack([t, t], -1)[..., 0]):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, back):
            assert_same(step(layers, x, run), want)
