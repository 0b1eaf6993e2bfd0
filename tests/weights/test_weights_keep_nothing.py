"""By default a layer keeps nothing of its weights from forward to backward but the parameters
themselves; keep_weight_columns keeps dgrad's operands, for the same bits."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import as_on_hopper
import pytest
import torch
import torch.distributed.fsdp
from norm_modules import filled
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parameter import is_lazy

import te_mx
from te_mx import _ops as ops
from te_mx._ops import grouped_quantize
from te_mx.dispatch import run
from te_mx.recipe import DeepSeekV3, Float8BlockScaling, Format, MXFP8BlockScaling

AGAIN, KEPT = (
    MXFP8BlockScaling(fp8_format=Format.HYBRID, keep_weight_columns=keep) for keep in (False, True)
)
M, K, N = 64, 160, 96  # no two products of them, and so no two kinds of tensors, have one size
SPLITS = [32, 0, 32]
FAMILY: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te_mx.Linear(K, N),
    "LayerNormLinear": lambda: filled(te_mx.LayerNormLinear(K, N)),
    "LayerNormMLP": lambda: filled(te_mx.LayerNormMLP(K, N)),
    "swiglu": lambda: filled(te_mx.LayerNormMLP(K, N, activation="swiglu")),
    "GroupedLinear": lambda: te_mx.GroupedLinear(3, K, N),
    "stacked": lambda: te_mx.GroupedLinear(3, K, N, single_grouped_weight=True),
}
families = pytest.mark.parametrize("kind", FAMILY)


@pytest.fixture(params=["CPU", "Hopper"])
def device(request, kind, threads) -> Iterator[str]:
    """Operands as they lie on either."""
    threads(1)
    grouped = kind in ("GroupedLinear", "stacked")
    hopper = as_on_hopper.hopper_with_groups if grouped else as_on_hopper.hopper
    with hopper() if request.param == "Hopper" else contextlib.nullcontext():
        yield request.param


def call(module: nn.Module, x: Tensor, **more) -> Tensor:
    grouped = isinstance(module, te_mx.GroupedLinear)
    return module(x, SPLITS, **more) if grouped else module(x, **more)


def weights(module: nn.Module) -> list[Tensor]:
    return [p for name, p in module.named_parameters() if p.dim() > 1 and "bias" not in name]


def step(module: nn.Module, x: Tensor, recipe: MXFP8BlockScaling, **more) -> list[Tensor]:
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = call(module, leaf, **more)
    y.backward(torch.arange(y.numel()).view(y.shape).sin())
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


class Saved(NamedTuple):
    """Bytes of every storage that is saved for backward, by its address: of parameters, and of all
    else. `y` keeps them there."""

    parameters: dict[int, int]
    others: dict[int, int]
    y: Tensor


def saved_by(module: nn.Module, recipe: MXFP8BlockScaling) -> Saved:
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}
    parameters, others = {}, {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        address = storage.data_ptr()
        (parameters if address in known else others)[address] = storage.nbytes()
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks, te_mx.autocast(recipe=recipe):
        y = call(module, torch.randn(M, K, requires_grad=True))
    return Saved(parameters, others, y)


def column_bytes(weight: Tensor, device: str) -> int:
    """Of dgrad's operands of a weight [N, K] or [G, N, K]."""
    spec = "mxfp8_e4m3@cols" if device == "CPU" else "mxfp8_e4m3@sm90:8"
    stack = weight.detach().reshape(-1, *weight.shape[-2:])
    made = [ops.quantize_2d(one, col=spec).col for one in stack]
    return sum(part.untyped_storage().nbytes() for one in made for part in one[:2])


# ------------------------------------------------------------------------------------ what is kept
@families
def test_what_is_saved(kind, device):
    module = FAMILY[kind]()
    own = {w.untyped_storage().data_ptr() for w in weights(module)}
    again, kept = saved_by(module, AGAIN), saved_by(module, KEPT)
    assert own <= set(again.parameters) and own.isdisjoint(kept.parameters)
    columns = sum(column_bytes(w, device) for w in weights(module))
    more = sum(kept.others.values()) - sum(again.others.values())
    assert columns <= more <= 1.01 * columns + 512  # one buffer for both, aligned
    assert max(w.numel() for w in weights(module)) not in again.others.values()


def test_a_linear_layer_saves_a_byte_for_an_element_of_its_input():
    module = te_mx.Linear(K, N)
    assert sum(saved_by(module, AGAIN).others.values()) == M * K * 33 // 32
    assert sum(saved_by(module, KEPT).others.values()) == (M + N) * K * 33 // 32


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), Float8BlockScaling(), DeepSeekV3()])
@families
def test_by_default_nothing_of_weights_but_parameters(kind, device, recipe):
    module = FAMILY[kind]()
    own = {w.untyped_storage().data_ptr() for w in weights(module)}
    kept = dataclasses.replace(recipe, keep_weight_columns=True)
    plain, more = saved_by(module, recipe), saved_by(module, kept)
    assert own <= set(plain.parameters) and own.isdisjoint(more.parameters)
    least = sum(w.numel() for w in weights(module))  # a byte for each
    assert sum(more.others.values()) - sum(plain.others.values()) >= least


@families
def test_the_same_bits(kind, device):
    module, x = FAMILY[kind](), torch.randn(M, K)
    same(step(module, x, AGAIN), step(module, x, KEPT))


@pytest.mark.parametrize("recipe", [AGAIN, KEPT], ids=["default", "kept"])
@pytest.mark.parametrize("how", ["microbatch", "frozen"])
@families
def test_weights_that_stand_still_have_both_copies(kind, how, recipe, monkeypatch):
    module, x = FAMILY[kind](), torch.randn(M, K)
    want = step(module, x, recipe)[:2]
    if how == "frozen":
        te_mx.freeze_weights(module, recipe=recipe)
        more = {}
        with te_mx.autocast(recipe=recipe):
            call(module, x.clone().requires_grad_())  # the first call that needs columns makes them
    else:
        same(step(module, x, recipe, is_first_microbatch=True)[:2], want)
        more = {"is_first_microbatch": False}
        assert all(kept.col is not None for kept in module._source.kept.values())
    seen, quantize = [], run.quantize
    monkeypatch.setattr(run, "quantize", lambda what: seen.append(what.x.shape) or quantize(what))
    monkeypatch.setattr(grouped_quantize, "_quantized_weights", None)  # nobody calls it
    with te_mx.autocast(recipe=recipe):
        leaf = x.clone().requires_grad_()
        y = call(module, leaf, **more)
    y.backward(torch.arange(y.numel()).view(y.shape).sin())
    same([y.detach(), leaf.grad], want)
    shapes = {tuple(w.shape[-2:]) for w in weights(module)}
    assert shapes.isdisjoint(map(tuple, seen))


class Twice(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


class Viewed(nn.Module):
    """A view; of something computed if `twice`."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice

    def forward(self, w: Tensor) -> Tensor:
        return (w * 2 if self.twice else w).view(w.shape)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear", "stacked"])
@pytest.mark.parametrize(
    ("made", "computed"), [(Twice(), True), (Viewed(True), True), (Viewed(False), False)]
)
def test_computed_weights_keep_columns_and_views_of_parameters_nothing(kind, made, computed):
    """What is computed is larger than its columns, and lives for nothing else."""
    module = FAMILY[kind]()
    plain = saved_by(module, AGAIN)
    columns = sum(column_bytes(w, "CPU") for w in weights(module))
    for name, parameter in list(module.named_parameters()):
        if parameter.dim() > 1 and "bias" not in name:
            nn.utils.parametrize.register_parametrization(module, name, made)
    more = sum(saved_by(module, AGAIN).others.values()) - sum(plain.others.values())
    assert more == (columns if computed else 0)


@families
def test_a_weight_that_changed_before_backward(kind):
    """An error of autograd, as for nn.Linear; columns that were kept are those of forward."""
    module, x = FAMILY[kind](), torch.randn(M, K)
    want = step(module, x, KEPT)[1]
    for recipe in (AGAIN, KEPT):
        leaf = x.clone().requires_grad_()
        with te_mx.autocast(recipe=recipe):
            y = call(module, leaf)
        with torch.no_grad():
            for weight in weights(module):
                weight.mul_(-1)
        grad = torch.arange(y.numel()).view(y.shape).sin()
        if recipe is KEPT:
            y.backward(grad)
            assert torch.equal(leaf.grad, want)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward(grad)
        with torch.no_grad():
            for weight in weights(module):
                weight.mul_(-1)


# ---------------------------------------------------------------------- weights that go and return
def held(sizes: set[int]) -> list[Tensor]:
    """Tensors of so many elements whose memory is there; none of those that compiling left behind,
    whose sizes may be symbols."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and not is_lazy(o)]
    found = [t for t in found if not isinstance(t, FakeTensor) and type(t.numel()) is int]
    return [t for t in found if t.numel() in sizes and t.untyped_storage().nbytes()]


@families
def test_memory_of_a_weight_that_is_given_back_between_the_passes(kind, device):
    """As FSDP2 does with unsharded parameters: nothing of their size stays."""
    module, x = FAMILY[kind](), torch.randn(M, K)
    want = step(module, x, AGAIN)
    module.zero_grad()
    leaf, masters = x.clone().requires_grad_(), [w.detach().clone() for w in weights(module)]
    sizes = {w.numel() for w in weights(module)} | {N * K}
    before = {id(t) for t in held(sizes)} - {id(w) for w in weights(module)}
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with te_mx.autocast(recipe=AGAIN), hooks:
        y = call(module, leaf)
    for weight in weights(module):
        weight.untyped_storage().resize_(0)
    assert [t for t in held(sizes) if id(t) not in before] == []
    assert not any(t.numel() in sizes and t.untyped_storage().nbytes() for t in saved)
    for weight, master in zip(weights(module), masters, strict=True):
        weight.untyped_storage().resize_(master.nbytes)
        with torch.autograd._unsafe_preserve_version_counter(weight), torch.no_grad():
            weight.copy_(master)
    y.backward(torch.arange(y.numel()).view(y.shape).sin())
    same([y.detach(), leaf.grad, *(p.grad for p in module.parameters())], want)


@pytest.fixture
def mesh(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@families
def test_fsdp2_frees_what_backward_gathers_again(kind, mesh):
    """Of each layer between its forward and its backward, with what is saved of it."""
    plain, x = nn.Sequential(*(_Called(FAMILY[kind]()) for _ in range(2))), torch.randn(M, K)
    if kind in ("Linear", "LayerNormLinear", "GroupedLinear", "stacked"):
        plain.insert(1, nn.Linear(N, K))
    sharded = copy.deepcopy(plain)
    want = step(plain, x, AGAIN)
    for layer in (*sharded, sharded):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    leaf, saved = x.clone().requires_grad_(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with te_mx.autocast(recipe=AGAIN), hooks:
        y = sharded(leaf)
    sizes = {w.numel() for w in weights(plain)} | {N * K}
    of_weights = [t for t in saved if t.numel() in sizes]
    assert len(of_weights) >= 2
    assert not any(t.untyped_storage().nbytes() for t in of_weights)
    y.backward(torch.arange(y.numel()).view(y.shape).sin())
    grads = [p.grad.full_tensor() for p in sharded.parameters()]
    same([y.detach(), leaf.grad, *grads], want)


class _Called(nn.Module):
    """A layer of the family in a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return call(self.layer, x)
