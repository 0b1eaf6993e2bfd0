"""What kernels say of their sums (Kernel.sums): who says the same gives a row the same bits, be it
another kernel, another configuration or other rows beside it. Tables rely on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from kernel_calls import FLOATS, FORMATS, OF_TOKENS, SIZES, matrix, operand
from test_contract_kernels import allowed, every_device

from te_mx.dispatch.calls import Epilogue, Mode, Product
from te_mx.dispatch.kernels import Kernel, kernels
from te_mx.dispatch.linear import FrozenCall
from te_mx.dispatch.problem import Problem, place_of
from te_mx.layouts.operand import Operand

LONG = st.sampled_from([512, 1056])  # of k, which kernels may cut


def ways(problem: Problem) -> list[Kernel]:
    """All kernels that take a problem, in each configuration."""
    able = [one for one in kernels(problem.op) if one.accepts(problem) is None]
    return [
        kernel.configured(how) if how else kernel
        for kernel in able
        for how in ("", *kernel.configurations(problem))
    ]


def rows_of(lhs: Operand, rows: slice) -> Operand:
    """A part of an operand that lies by rows, in memory of its own."""
    codes, scales = lhs.codes[rows].clone(), lhs.scales[rows].clone()
    return lhs._replace(codes=codes, scales=scales, rows=len(codes))


def gemm(kernel: Kernel, problem: Problem, x: Tensor, lhs: Operand, rhs: Operand) -> Tensor | None:
    out = torch.full((lhs.rows, rhs.rows), torch.nan, dtype=problem.dtype, device=x.device)
    mode = Mode(problem.precision, split_k=problem.split_k)
    return (
        None
        if kernel.make_plan(problem)(Product(lhs, rhs, Epilogue(), out, None, mode)) is None
        else out
    )


def linear_frozen(
    kernel: Any, problem: Problem, x: Tensor, lhs: Operand, rhs: Operand
) -> Tensor | None:
    form = kernel.form(rhs)
    if form is None:
        return None
    return kernel.make_plan(problem)(FrozenCall(x, form, None, problem.dtype))[0]


@allowed
@every_device
@pytest.mark.parametrize("run", [gemm, linear_frozen])
@settings(max_examples=40)
@given(data=st.data())
def test_who_says_the_same_of_its_sums_gives_the_same_bits(run, device, isa, data):
    on = torch.device(device)
    m, n, k = data.draw(SIZES), data.draw(SIZES), data.draw(SIZES | LONG)
    x, fmt = matrix(data, m, k, on).contiguous(), data.draw(OF_TOKENS)
    lhs = operand(data, x, fmt, "rows")
    rhs = operand(data, matrix(data, n, k, on), data.draw(FORMATS), "rows")
    first = data.draw(st.integers(0, m - 1))
    part = slice(first, data.draw(st.integers(first + 1, m)))
    precision = data.draw(st.sampled_from(["adaptive", "exact"]))
    specs = lhs.spec, rhs.spec
    if run is linear_frozen:
        specs = tuple(f"{spec.partition('@')[0]}@any" for spec in specs)
    dtype = x.dtype if run is linear_frozen else data.draw(FLOATS)
    whole = Problem(
        run.__name__, place_of(on), *specs, m, n, k, precision=precision, dtype=dtype,
        rule=lhs.format.scaling.rules[0], split_k=run is gemm and data.draw(st.booleans()),
    )  # fmt: skip
    known: dict[str, Tensor] = {}
    for problem, rows in ((whole, slice(0, m)), (whole._replace(m=part.stop - first), part)):
        beside = x[rows].clone(), rows_of(lhs, rows)
        for kernel in ways(problem):
            word, got = kernel.sums(problem), run(kernel, problem, *beside, rhs)
            if got is None:  # of weights whose numbers it does not take
                assert run is linear_frozen
                continue
            full = known.setdefault(word, got) if rows.stop - rows.start == m else known.get(word)
            if full is not None:
                want = full if len(full) == len(got) else full[rows]
                assert torch.equal(got.nan_to_num(), want.nan_to_num()), (kernel.name, word)


def test_no_kernel_promises_the_bits_of_another_by_accident():
    """What a kernel says that says nothing is its own, of every configuration and number of
    rows."""

    class Other(Kernel):
        op, name = "gemm", "other"

    one = Problem("gemm", place_of(torch.device("cpu")), "mxfp8_e4m3@any", "mxfp8_e4m3@any", 4)
    fast, more = Other().configured("fast"), one._replace(m=5)
    assert len({Other().sums(one), fast.sums(one), Other().sums(more)}) == 3
