"""What layers that read one tensor keep alive: one copy for backward, and nothing else for longer
than the tensor and the region live."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from input_cache_cases import IN, ROWS, opened, qkv, together
from torch import Tensor, nn

import te_mx
from te_mx.autograd import input_cache
from te_mx.recipe import MXFP8BlockScaling


@pytest.fixture(autouse=True)
def without_the_collector():
    """Nothing may wait for a collection of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def operands(x: Tensor) -> list[weakref.ref]:
    """Of the codes and scales that are remembered of x."""
    made = input_cache.entry_of(x).quantized()
    return [weakref.ref(t) for one in (made.row, made.col) for t in one[:2]]


def alive(references: list[weakref.ref]) -> int:
    return sum(one() is not None for one in references)


def test_until_the_region_ends():
    layer, x = qkv()[0], torch.randn(ROWS, IN)
    with te_mx.autocast():
        layer(opened(x))
        held = operands(x)
        assert alive(held) == 4
    assert alive(held) == 0
    with te_mx.autocast():
        assert input_cache.entry_of(x) is None


@pytest.mark.parametrize("leave", ["inner region", "inner region off", "error", "decorated"])
def test_however_a_region_ends(leave):
    layer, x = qkv()[0], torch.randn(ROWS, IN)
    with te_mx.autocast():
        layer(opened(x))
        held = operands(x)
        if leave == "error":
            with pytest.raises(ZeroDivisionError), te_mx.autocast():
                1 / 0  # noqa: B018
        elif leave == "decorated":
            te_mx.autocast()(lambda: None)()
        else:
            with te_mx.autocast(enabled=leave == "inner region"):
                pass
        assert alive(held) == 0


def test_until_the_input_dies():
    layer, x = qkv()[0], torch.randn(ROWS, IN)
    with te_mx.autocast():
        layer(opened(x))
        held, memory = operands(x), weakref.ref(x)
        del x
        assert memory() is None and alive(held) == 0
        assert input_cache._here.entries == []


def test_until_others_were_read():
    layer, (x, *others) = qkv()[0], torch.randn(3, ROWS, IN).unbind(0)
    with te_mx.autocast():
        layer(opened(x))
        held = operands(x)
        layer(opened(others[0]))
        assert alive(held) == 4
        layer(opened(others[1]))
        assert alive(held) == 0


def test_until_the_same_input_was_read_otherwise():
    layer, x = qkv()[0], torch.randn(ROWS, IN)
    with te_mx.autocast():
        layer(opened(x))
        held = operands(x)
        x.add_(1)
        layer(x)
        assert alive(held) == 0 and not input_cache._here.entries


def test_an_input_that_dies_in_another_thread():
    layer, box = qkv()[0], [torch.randn(ROWS, IN)]
    with te_mx.autocast():
        layer(opened(box[0]))
        held = operands(box[0])
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert alive(held) == 0 and input_cache._here.entries == []


def test_backward_keeps_the_columns_alone(by_steps):
    """Not the rows, which only fprop reads, and no input."""
    layers, x = qkv(), torch.randn(ROWS, IN)
    with te_mx.autocast():
        outputs = together(layers, x)
        row, _, col, _ = operands(x)
        memory = weakref.ref(x)
        del x
        assert memory() is None and row() is None and col() is not None
    for y in outputs:
        y.sum().backward()
    del y, outputs
    assert col() is None


@pytest.mark.parametrize("keep", [False, True])
def test_siblings_save_one_copy(keep, by_steps):
    layers, x = qkv(), torch.randn(64, IN, requires_grad=True)

    def saved_by(inputs: list[Tensor]) -> int:
        storages = {}

        def pack(t: Tensor) -> Tensor:
            storages[t.data_ptr()] = t.untyped_storage()
            return t

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        recipe = MXFP8BlockScaling(keep_weight_columns=keep)
        with te_mx.autocast(recipe=recipe), hooks:
            opened(inputs[0])
            made = [layer(h) for layer, h in zip(layers, inputs, strict=True)]
        assert len(made) == 3
        weights = {layer.weight.data_ptr() for layer in layers}
        return sum(s.nbytes() for address, s in storages.items() if address not in weights)

    one = 64 * IN * 33 // 32
    columns = sum(IN * (n + -(-n // 32)) for n in (48, 17, 33)) if keep else 0
    assert saved_by([x] * 3) == one + columns
    assert saved_by([x, x.clone(), x.clone()]) == 3 * one + columns


def test_a_model_leaves_nothing_behind():
    """Blocks whose inputs die one after the other: no more tensors than before."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(te_mx.Linear(IN, IN) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return sum(together(self.layers, x))

    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(ROWS, IN)

    def tensors() -> int:
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    counts = []
    with te_mx.autocast():
        for _ in range(4):
            model(x).sum().backward()
            model.zero_grad()
            counts.append(tensors())
    assert counts[1] == counts[2] == counts[3]
