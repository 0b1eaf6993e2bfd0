"""What follows from a choice is made once for a problem, and forgotten in one place."""

from __future__ import annotations

import pytest
import torch

import te_mx
from te_mx import _ops as ops
from te_mx.backends.cpu import binding as cpu
from te_mx.dispatch import kernels, registry
from te_mx.dispatch.problem import Problem, place_of

pytestmark = pytest.mark.skipif(cpu.missing_reason() is not None, reason="no native module")
CPU = torch.device("cpu")
ROWS = "mxfp8_e4m3@rows"


@pytest.fixture
def made(monkeypatch):
    """(op, m, n, k) of every plan that a kernel makes."""
    found = []
    for op in kernels.ops():
        for kernel in kernels.kernels(op):
            make = kernel.make_plan

            def noted(problem, op=op, make=make):
                found.append((op, problem.m, problem.n, problem.k))
                return make(problem)

            monkeypatch.setattr(kernel, "make_plan", noted)
    registry.forget()
    yield found
    registry.forget()


def test_a_problem_is_planned_once_whoever_asks(made):
    x, w = torch.randn(20, 64), torch.randn(24, 64)
    for _ in range(3):
        row, weight = (ops.quantize_2d(t, ROWS).row for t in (x, w))
        ops.gemm_2d(row, weight, out_dtype=torch.float32)
        ops.gemm_2d(row, weight, ops.Epilogue(gelu="erf"), out_dtype=torch.float32)
        ops.dequantize_2d(row, torch.float32)
    quantized = [("quantize", 20, 64, 1), ("quantize", 24, 64, 1)]
    assert made == [*quantized, ("gemm", 20, 24, 64), ("dequantize", 20, 64, 1)]


def test_few_rows_of_a_frozen_weight_are_planned_once(made):
    layer, x = te_mx.Linear(64, 24, bias=False), torch.randn(2, 64)
    te_mx.freeze_weights(layer)
    want = layer(x)
    made.clear()
    assert torch.equal(layer(x), want) and made == []


@pytest.mark.parametrize("change", ["forget", "level", "table"])
def test_plans_are_forgotten_with_the_choices(made, change):
    problem = Problem("quantize", place_of(CPU), ROWS, "", 20, 64)
    kernel, plan = registry.planned("quantize", CPU, ROWS, "", (20, 64, 1))
    again = kernel.plan(problem)
    assert registry.planned("quantize", CPU, ROWS, "", (20, 64, 1))[1] is plan
    assert kernel.plan(problem) is again
    if change == "forget":
        registry.forget()
    elif change == "level":
        cpu.set_isa(cpu.ISA_LEVELS[cpu.isa()])
    else:
        te_mx.use_tuned_table(None)
    assert registry.planned("quantize", CPU, ROWS, "", (20, 64, 1))[1] is not plan
    assert kernel.plan(problem) is not again


def test_plans_of_sizes_that_never_come_again_do_not_pile_up(made):
    for m in range(1, kernels._MOST_DERIVED + 10):
        registry.planned("quantize", CPU, ROWS, "", (m, 64, 1))
    assert len(kernels.derived()) <= kernels._MOST_DERIVED + 1
