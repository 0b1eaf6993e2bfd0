"""What te_mx keeps beside modules and parameters goes with them."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import te_mx
from te_mx.autograd import grad_target
from te_mx.runtime import kernel_log


def run(layer: torch.nn.Module, **arguments) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    with te_mx.autocast():
        y = layer(x, **arguments)
    y.sum().backward()


def test_records_of_kernels():
    gc.collect()
    before = len(kernel_log.LAST_RUN)
    for _ in range(20):
        run(te_mx.Linear(16, 16))
        run(te_mx.LayerNormMLP(16, 32))
        run(te_mx.GroupedLinear(2, 16, 16), m_splits=[1, 3])
        run(copy.deepcopy(te_mx.Linear(16, 16)))
    gc.collect()
    assert len(kernel_log.LAST_RUN) <= before


def test_records_of_backward_passes_that_outlive_their_module():
    held = te_mx.Linear(16, 16)
    run(held)
    living = len(kernel_log._living)
    x = torch.randn(4, 16, requires_grad=True)
    for _ in range(100):
        with te_mx.autocast():
            y = te_mx.Linear(16, 16)(x)
        gc.collect(0)
        y.sum().backward()
    assert (
        len(kernel_log.LAST_RUN)
        <= 2 * kernel_log.TAGS * (living + kernel_log.TAGS) + 3 * kernel_log.TAGS
    )
    assert te_mx.audit(held)["(root)"].wgrad not in ("never ran", "high precision")


def fused(rows: int) -> te_mx.Linear:
    layer = te_mx.Linear(16, rows, bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    layer.weight.grad_added_to_main_grad = False
    run(layer)
    return layer


def test_stand_ins_of_weight_gradients():
    gc.collect()
    before = len(grad_target._stand_ins), len(grad_target._kept_by)
    layers = [fused(rows) for rows in (8, 8, 24)]
    addresses = [layer.weight.grad.data_ptr() for layer in layers]
    assert addresses[0] == addresses[1] != addresses[2]  # weights of one kind share theirs
    assert len(grad_target._stand_ins) == before[0] + 2
    del layers[0]
    layers[0].weight.grad = None
    gc.collect()
    run(layers[0])
    assert layers[0].weight.grad.data_ptr() == addresses[1]
    layers.clear()
    gc.collect()
    assert (len(grad_target._stand_ins), len(grad_target._kept_by)) == before


@pytest.mark.parametrize("what", ["plain", "bound", "fused"])
def test_converting_and_reverting_keeps_nothing(what):
    """A layer that is te_mx's no more has no finalizer of te_mx, however often it was."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    how = {"bound": {"recipe": te_mx.get_default_recipe()}, "fused": {"fuse": True}}.get(what, {})
    x, living, registered = torch.randn(8, 64), len(kernel_log._living), []
    for _ in range(4):
        te_mx.convert_model(model, **how)
        with te_mx.autocast():
            model(x).sum().backward()
        te_mx.revert_model(model)
        gc.collect()
        registered.append(len(weakref.finalize._registry))
    assert len(kernel_log._living) <= living and len(set(registered[1:])) == 1
