"""convert_model(model, recipe=...): a model that runs in MXFP8 without a region."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.context import region as context
from te_mx.nn import converted
from te_mx.recipe import BlockScaling, Float8BlockScaling, Format, MXFP8BlockScaling

FLOOR = MXFP8BlockScaling(scale_rule="floor", fp8_format=Format.HYBRID)
MXFP4 = BlockScaling(x="mxfp4", w="mxfp4", g="mxfp8_e5m2")
SIZE = 64

# MXFP4 has no native kernels yet.
pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))


def native() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        te_mx.LayerNormLinear(SIZE, SIZE), te_mx.LayerNormMLP(SIZE, 2 * SIZE),
        te_mx.Linear(SIZE, SIZE),
    )  # fmt: skip


def bound(recipe=FLOOR, make=plain, **how) -> nn.Module:
    model = make()
    te_mx.convert_model(model, recipe=recipe, **how)
    return model


def results(model: nn.Module, x: Tensor, region=None, run=None) -> list[Tensor]:
    """Output and gradients of a step whose backward is outside of the region."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    with region or nullcontext():
        y = run(model, x) if run else model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, SIZE)


@pytest.fixture
def wanted(x) -> list[Tensor]:
    return results(bound(None), x, te_mx.autocast(recipe=FLOOR))


@pytest.mark.parametrize(
    "recipe", [FLOOR, MXFP4, Float8BlockScaling(), te_mx.get_default_recipe()], ids=str
)
@pytest.mark.parametrize("make", [plain, native])
def test_outside_of_regions_it_is_the_recipe_inside_the_region_is(make, recipe, x):
    model = bound(recipe, make)
    region_alone = bound(None, make)
    want = results(region_alone, x, te_mx.autocast(recipe=recipe))
    assert same(results(model, x), want)
    off = te_mx.autocast(enabled=False)
    assert same(results(model, x, off), results(region_alone, x))
    hybrid = MXFP8BlockScaling(fp8_format=Format.HYBRID)
    with te_mx.autocast(recipe=recipe):  # the innermost region counts
        inner = results(model, x, te_mx.autocast(recipe=hybrid))
    assert same(inner, results(region_alone, x, te_mx.autocast(recipe=hybrid)))
    assert same(results(model, x), want)


def test_every_family_and_the_report():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.native = native()
            self.experts = te_mx.GroupedLinear(2, SIZE, SIZE)
            self.plain = plain()

    model = Model()
    dry = te_mx.convert_model(model, recipe=FLOOR, dry_run=True)
    assert dry.count("would bind") == 4 and dry.count("would convert") == 2
    assert model.experts._bound is None and type(model.plain[0]) is nn.Linear
    report = te_mx.convert_model(model, recipe=FLOOR)
    rows = {layer.name: (layer.status, layer.shape) for layer in report}
    assert rows == {
        "native.0": ("bound", "64 -> 64"), "native.1": ("bound", "64 -> 128 -> 64"),
        "native.2": ("bound", "64 -> 64"), "experts": ("bound", "64 -> 64"),
        "plain.0": ("converted", "64 -> 64"), "plain.2": ("converted", "64 -> 64"),
    }  # fmt: skip
    assert report.recipe == FLOOR and repr(FLOOR) in str(report)
    x, splits = torch.randn(8, SIZE), [3, 5]
    got = model.experts(x, splits)
    with te_mx.autocast(recipe=FLOOR):
        assert torch.equal(got, model.experts(x, splits))


def test_bound_again_left_alone_and_removed(x, wanted):
    model = bound(te_mx.get_default_recipe(), native)
    te_mx.convert_model(model)  # None leaves what is bound
    assert model[0]._bound == te_mx.get_default_recipe().settings
    te_mx.convert_model(model, recipe=FLOOR, filter_fn=lambda module, name: name != "1")
    assert [m._bound for m in model] == [
        FLOOR.settings, te_mx.get_default_recipe().settings, FLOOR.settings
    ]  # fmt: skip
    te_mx.revert_model(model)
    assert [getattr(m, "_bound", None) for m in model] == [None] * 3  # also of those that stay
    model = bound(fuse=True)
    assert model[0]._bound == FLOOR.settings  # what was fused
    te_mx.revert_model(model)
    assert all("_bound" not in m.__dict__ for m in model)
    te_mx.convert_model(model)
    assert same(results(model, x), results(plain(), x))


@pytest.mark.parametrize("recipe", ["floor", 3, MXFP8BlockScaling, {"recipe": FLOOR}], ids=repr)
def test_what_is_no_recipe_changes_nothing(recipe):
    model = plain()
    with pytest.raises((TypeError, ValueError), match="recipe must be one of"):
        te_mx.convert_model(model, recipe=recipe)
    assert type(model[0]) is nn.Linear
    model = bound()
    with pytest.raises((TypeError, ValueError), match="recipe must be one of"):
        te_mx.convert_model(model, recipe=recipe)
    assert model[0]._bound == FLOOR.settings


def stored(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def moved(model: nn.Module) -> nn.Module:
    return model.to(torch.float64).to(torch.float32)


def loaded(model: nn.Module) -> nn.Module:
    other, state = bound(), model.state_dict()
    assert list(state) == list(plain().state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state, assign=True)
    return other


@pytest.mark.parametrize(
    "through",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), stored, moved, loaded],
    ids=["deepcopy", "pickle", "torch.save", "to", "state_dict"],
)
def test_it_goes_with_the_model(through, x, wanted):
    model = bound()
    model(x)
    assert same(results(through(model), x), wanted)


# ------------------------------------------------------------------------------------ recomputation
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "another thread"])
def test_checkpointing(reentrant, elsewhere, x, wanted):
    model = bound()

    def run(module, x):
        return checkpoint(module, x, use_reentrant=reentrant)

    assert same(results(model, x, run=run), wanted)
    # Neither other runs nor the region of the backward pass count.
    leaf = x.clone().requires_grad_()
    with torch.no_grad(), te_mx.autocast():
        model(x)
    y = run(model, leaf)
    with te_mx.autocast(enabled=False):
        off = run(model, leaf)
    with te_mx.autocast():
        on = run(model, leaf)
    model.zero_grad()

    def backward():
        with te_mx.autocast(recipe=MXFP4):
            y.square().sum().backward()

    if elsewhere:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    else:
        backward()
    assert same([y.detach(), leaf.grad, *(p.grad for p in model.parameters())], wanted)
    for outputs, region in ((off, te_mx.autocast(enabled=False)), (on, te_mx.autocast())):
        leaf.grad = None
        model.zero_grad()
        outputs.square().sum().backward()
        got = [outputs.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]
        assert same(got, results(bound(None), x, region))


def test_binding_alone_prepares_for_what_runs_again(x, wanted, monkeypatch):
    """As in a process in which no region was ever entered."""
    frame = torch.utils.checkpoint._CheckpointFrame
    monkeypatch.setattr(frame, "__init__", inspect.unwrap(frame.__init__))
    monkeypatch.setattr(context, "_started", False)
    model, leaf = bound(), x.clone().requires_grad_()
    y = checkpoint(model, leaf, use_reentrant=False)
    with te_mx.autocast():
        model(x)
        y.square().sum().backward()
    assert same([y.detach(), leaf.grad, *(p.grad for p in model.parameters())], wanted)


# -------------------------------------------------------------------------------------- compilation
def test_compiled_once_for_each_kind_of_region(x):
    torch._dynamo.reset()
    model, seen = bound(), []

    def backend(graph, example):
        seen.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    regions = [nullcontext(), te_mx.autocast(enabled=False), te_mx.autocast(recipe=MXFP4)]
    for _ in range(2):
        for region in regions:
            with torch.no_grad():
                with region:
                    want = model(x)
                with region:
                    assert torch.equal(compiled(x), want)
    assert len(seen) == len(regions)
    te_mx.convert_model(model, recipe=te_mx.get_default_recipe())  # noticed by a guard
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert len(seen) == len(regions) + 1

    @torch.compile(backend=backend, fullgraph=True)
    def inside(x):
        with te_mx.autocast(enabled=False):
            y = model(x)
        return y, model(x)

    with torch.no_grad():
        off, on = inside(x)
        assert torch.equal(on, model(x))
        with te_mx.autocast(enabled=False):
            assert torch.equal(off, model(x))
    torch._dynamo.reset()


def test_a_compiled_model_trains_and_is_recomputed(x, wanted):
    torch._dynamo.reset()
    model = bound()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def again(module, x):
        return checkpoint(module, x, use_reentrant=False)

    assert same(results(model, x, run=lambda m, x: compiled(x)), wanted)
    assert same(results(model, x, run=lambda m, x: again(compiled, x)), wanted)
    torch._dynamo.reset()


# ------------------------------------------------------------------------------- warnings, freezing
def test_no_warning_of_training_outside_of_autocast(monkeypatch, x):
    monkeypatch.setattr(converted, "_warned", False)
    monkeypatch.setattr(context, "_started", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound()(x).sum().backward()
        bound(make=native)  # there is nothing to convert, but something to bind to
    with pytest.warns(te_mx.ConversionWarning, match="runs with gradients outside"):
        bound(None)(x)


def test_what_replaces_layers_is_noticed_without_a_region(x):
    model = bound()
    model(x)
    model[2] = nn.Linear(SIZE, SIZE)
    with pytest.warns(te_mx.ConversionWarning, match="were replaced since, first '2'"):
        model(x)


@pytest.mark.parametrize("drop", [False, True])
def test_frozen_weights_take_the_bound_recipe(drop, x):
    model = bound(MXFP4)
    with torch.no_grad():
        want = model(x)
    te_mx.freeze_weights(model, drop_master=drop)
    assert model[0]._source.settings == MXFP4.settings
    with torch.no_grad():
        assert torch.equal(model(x), want)
    other = bound(MXFP4)
    with te_mx.autocast(recipe=FLOOR):  # what is active goes first
        te_mx.freeze_weights(other, drop_master=drop)
    assert other[0]._source.settings == FLOOR.settings
    if drop:  # codes without the metadata that names their recipe
        state = {name: value.clone() for name, value in model.state_dict().items()}
        other = bound(MXFP4)
        other.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(other(x), want)
