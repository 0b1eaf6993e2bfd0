"""How many Python functions of te_mx a small forward and backward costs on Hopper: what the host
does is what small layers wait for. Without a GPU: fake_sm90.py stands in for the native
module, whose calls do nothing here."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import as_on_hopper
import pytest
import torch

import te_mx

ROOT = str(Path(te_mx.__file__).parent)
BF16, SIZE = torch.bfloat16, 128


@pytest.fixture(autouse=True)
def hopper(threads):
    threads(1)  # many small operators
    with as_on_hopper.hopper(as_on_hopper.Idle()):
        yield


def counted(step: Callable[[], None]) -> Counter[str]:
    """The calls of functions of te_mx, in all threads."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found[f"{frame.f_code.co_filename[len(ROOT) :]} {frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return found


def linear(kind: Any = te_mx.Linear, **fields: Any) -> Any:
    layer = kind(SIZE, SIZE, bias=False, dtype=BF16, **fields)
    layer.weight.main_grad = torch.zeros(SIZE, SIZE)
    return layer


layer_norm_linear = partial(linear, te_mx.LayerNormLinear)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], Any, bool | None, int]] = {
    "Linear": (linear, None, None, 35),
    "recipe by name": (linear, "mxfp8", None, 35),
    "recipe object": (linear, te_mx.recipe.Float8BlockScaling(), None, 36),
    "micro-batch": (linear, None, False, 39),
    "mxfp4": (linear, "mxfp4", None, 39),
    "mxfp4_all": (linear, "mxfp4_all", None, 42),
    "main_grad": (lambda: linear(fuse_wgrad_accumulation=True), None, None, 46),
    "delayed": (lambda: linear(delay_wgrad_compute=True), None, None, 51),
    "mxfp4, main_grad": (lambda: linear(fuse_wgrad_accumulation=True), "mxfp4", None, 56),
    "LayerNormLinear": (layer_norm_linear, None, None, 46),
    "LayerNormLinear, main_grad": (
        lambda: layer_norm_linear(fuse_wgrad_accumulation=True), None, None, 68,
    ),
    "LayerNormMLP": (lambda: te_mx.LayerNormMLP(SIZE, SIZE, dtype=BF16), None, None, 51),
}  # fmt: skip


def refuse(one: torch.Tensor, other: Any) -> None:
    raise AssertionError("a tensor was compared, by `in` or == of a tuple that holds it")


@pytest.mark.parametrize("name", CASES)
def test_calls_of_a_forward_and_backward(name, monkeypatch):
    make, recipe, first, most = CASES[name]
    layer = make()
    x, g = torch.randn(SIZE, SIZE, dtype=BF16, requires_grad=True), torch.randn(SIZE, SIZE).to(BF16)

    def step(first: bool | None = first) -> None:
        with te_mx.autocast(recipe=recipe):
            y = layer(x) if first is None else layer(x, is_first_microbatch=first)
        y.backward(g)
        if layer.delay_wgrad_compute:
            layer.backward_dw()

    if first is not None:
        step(True)
    for _ in range(2):  # what is looked up once
        step()
    monkeypatch.setattr(torch.Tensor, "__eq__", refuse)  # takes as long as a hundred such calls
    found = counted(step)
    assert found.total() <= most, found.most_common()


def test_the_forward_of_a_linear_asks_nothing_of_its_weight():
    """The source of the weight knows its state (te_mx/weights/source.py)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(te_mx.Linear.forward)))
    kinds = Counter(type(node) for node in ast.walk(tree))
    assert kinds[ast.If] <= 4 and kinds[ast.Return] <= 2
