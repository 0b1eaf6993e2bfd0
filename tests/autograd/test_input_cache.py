"""Layers that are known to read one tensor quantize it once: the bits of layers that read copies,
and never those of a tensor that changed since."""

from __future__ import annotations

import copy
import threading

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
from torch import Tensor, nn

import te_mx
from te_mx.autograd import input_cache
from te_mx.context.region import Region
from te_mx.recipe import DeepSeekV3, Float8BlockScaling, Format, MXFP8BlockScaling

RECIPES = {
    "default": MXFP8BlockScaling(),
    "hybrid, floor": MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_rule="floor"),
    "kept_columns": MXFP8BlockScaling(keep_weight_columns=True),
    "high_precision": MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized": MXFP8BlockScaling(backward_override="dequantized"),
    "wgrad_with_hp": MXFP8BlockScaling(wgrad_with_hp=True),
    "one_copy": MXFP8BlockScaling(one_copy_weights=True),
    "float8_block": Float8BlockScaling(),
    "deepseek_v3": DeepSeekV3(),
    "mxfp4": te_mx.recipe.BlockScaling("mxfp4", "mxfp4", "mxfp8_e5m2"),
    "mxfp4_all": te_mx.recipe.MXFP4BlockScaling(g="mxfp4", stochastic_rounding=False),
}


@pytest.fixture
def reads(monkeypatch, by_steps):
    return noted_reads(monkeypatch)


def entries() -> list[input_cache.Entry]:
    return input_cache._here.entries


# ------------------------------------------------------------------------------------------ values
@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # of mxfp4
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(ROWS, IN), (2, 20, IN), (IN,)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_read_and_the_bits_of_copies(reads, recipe, shape, dtype):
    layers, x = qkv(dtype), torch.randn(shape, dtype=dtype)
    want = step(layers, x, separate, RECIPES[recipe])
    count = len(reads)
    assert count >= 3 and count % 3 == 0
    reads.clear()
    got = step(layers, x, together, RECIPES[recipe])
    assert len(reads) == count // 3
    if dtype != torch.float32:
        # Five roundings of copies' gradients and sums, three of sums in the GEMMs: half an ulp.
        alone = [step([layer], x, together, RECIPES[recipe])[1] for layer in layers]
        bound = 8 * 2.0**-9 * sum(dx.abs().float() for dx in alone)
        mine, theirs = got.pop(len(layers)), want.pop(len(layers))
        assert ((mine.float() - theirs.float()).abs() <= bound).all()
    assert_same(got, want)


def test_no_layer_waits_for_the_others_backward():
    """What is shared is not freed with the first graph that held it."""
    layers, x = qkv(), torch.randn(ROWS, IN, requires_grad=True)
    with te_mx.autocast():
        outputs, copies = together(layers, x), separate(layers, x)
    for y, alone, layer in zip(outputs, copies, layers, strict=True):
        leaves = [x, *layer.parameters()]
        got = torch.autograd.grad(y.sum(), leaves)
        assert_same(got, torch.autograd.grad(alone.sum(), leaves))


# -------------------------------------------------------------------------------- what is not stale
def by_method(x: Tensor) -> None:
    x.add_(1)


def of_a_view(x: Tensor) -> None:
    x.view(-1)[3:9].mul_(7)


def of_the_base(x: Tensor) -> None:
    x._base.zero_()


def of_a_detached_alias(x: Tensor) -> None:
    x.detach().neg_()


def by_index(x: Tensor) -> None:
    x[0, 0] = 100.0


def by_out(x: Tensor) -> None:
    torch.add(x, 1, out=x)


def by_foreach(x: Tensor) -> None:
    torch._foreach_mul_([x], 3.0)


def other_memory(x: Tensor) -> None:
    x.set_(torch.randn_like(x))


def by_an_optimizer(x: Tensor) -> None:
    x.grad = torch.randn_like(x)
    torch.optim.SGD([x], 0.5).step()
    x.grad = None


CHANGES = [
    by_method, of_a_view, of_the_base, of_a_detached_alias, by_index, by_out, by_foreach,
    other_memory, by_an_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_is_quantized_again(reads, change, grad):
    layers = qkv()
    x = torch.randn(ROWS * IN).view(ROWS, IN)
    with te_mx.autocast(), torch.set_grad_enabled(grad):
        before = together(layers, x)
        assert len(reads) == 1
        with torch.no_grad():
            change(x)
        after = [layer(x) for layer in layers]
        assert len(reads) == 4
        assert_same(after, separate(layers, x))
    assert not torch.equal(after[0], before[0])


def test_nothing_is_cached_for_readers_that_nobody_knows(reads):
    layers, x = qkv(), torch.randn(ROWS, IN)
    with te_mx.autocast():
        got = [layer(x) for layer in layers]
        assert len(reads) == 3 and entries() == []
        assert_same(got, together(layers, x))
        assert len(reads) == 4


@pytest.mark.parametrize("grad", [True, False])
def test_a_view_that_is_all_of_an_input(reads, grad):
    """As another rank's layers get one of a DTensor. Its siblings' gradients are its own."""
    layers = qkv()
    whole = torch.randn(ROWS + 1, IN)
    for x in (torch.randn(ROWS, IN).requires_grad_(grad) * 1, whole[1:], whole[1:].view(ROWS, IN)):
        with te_mx.autocast(), torch.set_grad_enabled(grad):
            reads.clear()
            made = [layers[0](opened(x)), *(layer(x.view_as(x)) for layer in layers[1:])]
            assert len(reads) == 1
            assert_same(made, separate(layers, x))
            with torch.no_grad():
                x.mul_(2)
            assert_same([layer(x[:]) for layer in layers], separate(layers, x))
    want, got = [
        step(layers, whole, lambda ls, h, f=f: [ls[0](opened(h)), ls[1](f(h)), ls[2](f(h))])
        for f in (torch.clone, lambda h: h.view_as(h))
    ]
    torch.testing.assert_close(got.pop(3), want.pop(3))
    assert_same(got, want)


def test_views_of_parts_and_in_another_order(reads):
    square, layer = torch.randn(IN, IN), te_mx.Linear(IN, 8)
    other = copy.deepcopy(layer)
    views = (square, square.t(), square[:-1], square.flip(0), torch.imag(torch.complex(
        square, square).conj()))  # fmt: skip
    with te_mx.autocast():
        for view in views:
            layer(opened(square))
            assert torch.equal(other(view), layer(view.clone()))


# -------------------------------------------------------------------------- what is asked for again
def test_inputs_in_turn(reads):
    """The two that were opened last are cached."""
    layers = [*qkv(), *qkv()]
    inputs = dict(zip("abc", torch.randn(3, ROWS, IN).unbind(0), strict=True))
    with te_mx.autocast():
        want = {name: separate(layers, x) for name, x in inputs.items()}
        input_cache.forget()
        reads.clear()
        turns = ["0a+", "0b+", "1a", "2a", "1b", "0c+", "2b", "3a", "1c"]
        for (layer, name, *opens), count in zip(turns, (1, 2, 2, 2, 2, 3, 3, 4, 4), strict=True):
            x = opened(inputs[name]) if opens else inputs[name]
            assert torch.equal(layers[int(layer)](x), want[name][int(layer)])
            assert len(reads) == count and len(entries()) <= 2


def test_what_a_layer_asks_for_decides(reads):
    layer, other, third = (qkv()[0] for _ in range(3))
    frozen, original = (
        qkv()[0].requires_grad_(False),
        te_mx.Linear(IN, 48, save_original_input=True),
    )
    leaf = torch.randn(ROWS, IN, requires_grad=True)

    def without_grad(x):
        with torch.no_grad():
            return third(x)

    def nor_this(x):
        with torch.no_grad():
            return other(x)

    def by_floor(x):
        # Inside the region, as a layer with a recipe of its own.
        recipe = MXFP8BlockScaling(scale_rule="floor")
        with te_mx.context.region.entered_again(Region(recipe.settings, recipe, None)):
            return third(x)

    with te_mx.autocast():
        for calls, made in (
            ((without_grad, layer, nor_this), ["row", "both"]),
            ((layer, without_grad, frozen, original), ["both"]),
            ((frozen, original, layer, other), ["row", "both"]),
            ((layer, by_floor, other), ["both", "both", "both"]),
            ((layer, other, layer), ["both"]),
        ):
            opened(leaf)
            reads.clear()
            got = [call(leaf) for call in calls]
            assert reads == made
            assert_same(got, [call(leaf.detach().clone()) for call in calls])


@pytest.mark.parametrize("kind", ["microbatch", "frozen", "without master"])
def test_weights_that_stand_still_share_inputs_too(reads, kind):
    layers, x = qkv(), torch.randn(ROWS, IN)
    if kind != "microbatch":
        te_mx.freeze_weights(nn.ModuleList(layers), drop_master=kind == "without master")
    more = {"is_first_microbatch": True} if kind == "microbatch" else {}
    context = torch.no_grad() if kind == "without master" else torch.enable_grad()
    with te_mx.autocast(), context:
        opened(x)
        got = [layer(x, **more) for layer in layers]
        assert len(reads) == 1
        assert_same(got, [layer(x.clone(), **more) for layer in layers])


# -------------------------------------------------------------------------------------- where it is
def test_threads_do_not_see_each_others():
    layer, x = qkv()[0], torch.randn(ROWS, IN)
    seen = []

    def elsewhere():
        seen.append(input_cache.entry_of(x))
        with te_mx.autocast():
            seen.append(layer(opened(x)))
            seen.append(input_cache.entry_of(x))

    with te_mx.autocast():
        want, mine = layer(opened(x)), input_cache.entry_of(x)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert mine is not None and input_cache.entry_of(x) is mine
    assert seen[0] is None and torch.equal(seen[1], want) and seen[2] not in (None, mine)
