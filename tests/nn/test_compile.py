"""torch.compile(fullgraph=True): no graph break, no stale recipe, the bits of eager."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import te_mx
from te_mx.recipe import Format, MXFP8BlockScaling

HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)
FLOOR = MXFP8BlockScaling(scale_rule="floor")
OFF = contextlib.nullcontext
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def clean_dynamo():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


class Counter:
    """A backend that counts compilations and runs eagerly."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return te_mx.convert_model(
        nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 40, bias=False))
    ).model


def step(model, fn, x, context):
    """Output and every gradient of one forward and backward."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with context():
        y = fn(x)
    weights = torch.arange(y.numel(), dtype=torch.float32).view(y.shape)
    (y.float() * weights).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def assert_same(got, expected):
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_region_outside_the_compiled_function(backend):
    model = mlp()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    regions = [
        te_mx.autocast,
        lambda: te_mx.autocast(recipe=te_mx.recipe.DeepSeekV3()),
        lambda: te_mx.autocast(recipe=HYBRID),
        te_mx.autocast,
    ]
    if backend == "inductor":  # has its own bits outside te_mx; what it is given changes with ops
        regions = [lambda: te_mx.autocast(recipe=te_mx.recipe.MXFP4BlockScaling()), te_mx.autocast]
    else:
        regions += [OFF, lambda: torch.autocast("cpu", torch.bfloat16), te_mx.autocast, OFF]
    x = torch.randn(9, 48)
    for region in regions:
        assert_same(step(model, compiled, x, region), step(model, model, x, region))


def test_region_inside_the_compiled_function():
    model = mlp()

    def forward(x):
        with te_mx.autocast():
            y = model(x)
            with te_mx.autocast(recipe=MXFP8BlockScaling(fp8_format=Format.HYBRID)):
                y = y + model(x)
            with te_mx.fp8_autocast(True, FLOOR):
                y = y + model(x)
            with torch.autocast("cpu", torch.bfloat16):
                y = y + model(x)
        return y

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 48)
    expected = step(model, forward, x, OFF)
    for region in (OFF, lambda: te_mx.autocast(recipe=HYBRID), OFF):
        got = step(model, compiled, x, region)
        assert_same(got[:1], expected[:1])
        for a, b in zip(got[1:], expected[1:], strict=True):
            torch.testing.assert_close(a, b)  # sums of four gradients, in another order
    assert te_mx.context.region.current_recipe() is None


def test_regions_inside_override_the_one_outside():
    model = mlp()

    def forward(x):
        with te_mx.autocast(enabled=False):
            off = model(x)
        return off, model(x)

    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    x = torch.randn(9, 48)
    for region in (OFF, te_mx.autocast, lambda: te_mx.autocast(recipe=FLOOR), OFF):
        with region():
            assert_same(compiled(x), forward(x))


def test_decorated_functions():
    model = mlp()
    decorated = te_mx.autocast(recipe=FLOOR)(model.forward)
    compiled = torch.compile(decorated, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 48)
    assert_same(step(model, compiled, x, OFF), step(model, decorated, x, OFF))


def test_exceptions_leave_the_region():
    model = mlp()

    def forward(x):
        try:
            with te_mx.autocast():
                y = model(x)
                raise ValueError("inside")
        except ValueError:
            return y, model(x)

    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    x = torch.randn(9, 48)
    assert_same(compiled(x), forward(x))


def test_recompiles_only_when_the_recipe_changes():
    model, counter = mlp(), Counter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = torch.randn(9, 48)
    counts = []
    for context in (OFF(), te_mx.autocast(), te_mx.autocast(recipe=MXFP8BlockScaling()), OFF(),
                    te_mx.autocast(recipe=FLOOR), te_mx.autocast(), OFF()):  # fmt: skip
        with context:
            compiled(x)
        counts.append(counter.count)
    assert counts == [1, 2, 2, 2, 3, 3, 3]


def test_layers_of_one_shape_share_their_compilation():
    counter = Counter()
    layers = [te_mx.Linear(48, 48, name=f"layer{i}") for i in range(3)]
    compiled = torch.compile(lambda layer, x: layer(x), fullgraph=True, backend=counter)
    x = torch.randn(4, 48)
    with te_mx.autocast():
        for layer in layers:
            layer(x)  # eager calls give each layer a number of its own, which must not matter
            assert torch.equal(compiled(layer, x), layer(x))
    assert counter.count == 1


def test_dynamic_shapes():
    model, counter = mlp(), Counter()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    with te_mx.autocast():
        for rows in (5, 9, 33, 64):
            x = torch.randn(rows, 48)
            assert torch.equal(compiled(x), model(x))
    assert counter.count == 1


@pytest.mark.parametrize("shape", [(3, 7, 48), (48,), (2, 1, 3, 48)])
def test_leading_dimensions(shape):
    model = mlp()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(shape)
    assert_same(step(model, compiled, x, te_mx.autocast), step(model, model, x, te_mx.autocast))


def test_without_grad_and_with_frozen_parameters():
    model = mlp()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 48)
    with te_mx.autocast():
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
        with torch.inference_mode():
            assert torch.equal(compiled(x), model(x))
        model[0].weight.requires_grad_(False)
        compiled(x).sum().backward()
        assert model[0].weight.grad is None and model[0].bias.grad is not None


@pytest.mark.parametrize("drop_master", [False, True])
def test_frozen_weights(drop_master):
    model, x = mlp(), torch.randn(9, 48)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), te_mx.autocast():
        expected = model(x)
        assert torch.equal(compiled(x), expected)
        te_mx.freeze_weights(model, drop_master=drop_master)
        assert torch.equal(compiled(x), expected)
        te_mx.unfreeze_weights(model, dequantize=True)
        model[0].weight.mul_(2)
        assert torch.equal(compiled(x), model(x))


def test_microbatches_change_nothing_in_compiled_code():
    model, x = te_mx.Linear(48, 40), torch.randn(9, 48)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), te_mx.autocast():
        for first in (True, False, None):
            assert torch.equal(compiled(x, is_first_microbatch=first), model(x))


def test_a_whole_training_step_with_checkpointing():
    model = mlp()

    def forward(x):
        with te_mx.autocast():
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 48)
    assert_same(step(model, compiled, x, OFF), step(model, model, x, te_mx.autocast))


def test_graph_breaks_inside_a_region_keep_the_results():
    model = te_mx.Linear(48, 48)

    def forward(x):
        y = model(x)
        with te_mx.autocast(recipe=FLOOR):
            y = y + model(x)
            torch._dynamo.graph_break()
            y = y + model(x)
        return y + model(x)

    compiled = torch.compile(forward, backend="eager")
    x = torch.randn(9, 48)
    for region in (OFF, te_mx.autocast, OFF):
        with region():
            assert torch.equal(compiled(x), forward(x))
    assert te_mx.context.region.current_recipe() is None
