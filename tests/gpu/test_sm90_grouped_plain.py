"""Grouped weights that stand as plain codes, and main_grads that are no one stack, on Hopper:
bytes and bits of what does the same for one weight, and of the stack.
"""

from __future__ import annotations

import math

import pytest
import sm90_calls as calls
import torch
from grouped_cases import equal, loop_of, parameters, run_loop
from sm90_calls import DTYPES, FORMATS, RULES, native, stream
from test_sm90_grouped import PAIRS, Problem, gemm, gemm_args, inputs, layer, poisoned, quantize
from torch import Tensor

import te_mx
from te_mx._ops.grouped_quantize import QuantizeWeights, quantize_weights, weight_columns
from te_mx.backends.sm90 import grouped as sm90_grouped
from te_mx.backends.sm90.decode import Decode
from te_mx.backends.sm90.layouts.tiles import packed_shapes
from te_mx.dispatch import kernels as all_kernels
from te_mx.dispatch import registry
from te_mx.recipe import Format, MXFP8BlockScaling

SIZES = [(1, 33), (8, 1), (100, 129), (264, 320), (513, 1024), (128, 70), (130, 256)]
KINDS = ["normal", "channels", "mixed", "nan", "spread", "rows", "huge", "tiny"]
SPLITS = [40, 0, 3, 90]
ONE_COPY = MXFP8BlockScaling(one_copy_weights=True)


def plain(rows: int, cols: int, fmt: str, kind: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Four weights with their rowwise codes and scales, stacked."""
    weights = [calls.data(rows, cols, kind, seed=i) for i in range(4)]
    row, _ = quantize_weights(weights, f"mxfp8_{fmt}@rows", rule="rceil")
    return weights, row.codes, row.scales


def stack(rows: int, k: int) -> tuple[Tensor, Tensor]:
    return poisoned(tuple((4, *shape) for shape in packed_shapes(rows, k)))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_pack_gives_the_bytes_of_each_weight(size, kind, fmt):
    (rows, k), number = size, KINDS.index(kind)
    problem = Problem(SPLITS, 5, 100 * (number % 2), number % 4 < 2)
    _, codes, scales = plain(rows, k, fmt, kind)
    spread = 3 if number % 3 == 0 else 8
    for k_first in (False, True):
        if k_first:
            codes, scales = (t.transpose(1, 2).contiguous() for t in (codes, scales))
        made = stack(rows, k)
        args = native().PackArgs(
            operand=calls.side((codes, scales), rows, k, fmt, calls.plain_order(k_first)),
            out=calls.out_record(made, "packed"), groups=problem.groups, spread=spread,
            stream=stream(),
        )  # fmt: skip
        assert native().pack_stacked(args) == 0
        for i, split in enumerate(SPLITS):
            if split == 0:
                assert bool((made[0][i] == 0xA5).all() and (made[1][i] == 0x5A5A5A5A).all())
                continue
            want = calls.pack(codes[i], scales[i], fmt, spread, k_first)
            equal(made[0][i][:, :k], want.codes[:, :k])
            assert torch.equal(made[1][i], want.scales)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_have_the_bytes_of_two_steps(size, kind):
    (rows, cols), number, fmt = size, KINDS.index(kind), "e4m3"
    rule, spread = ("floor", 3) if number % 3 == 0 else ("rceil", 8)
    _, codes, scales = plain(rows, cols, fmt, kind)
    made = stack(cols, rows)
    args = native().PackArgs(
        operand=calls.side((codes, scales), rows, cols, fmt, "k_last"),
        out=calls.out_record(made, "packed"), groups_count=4, rule=RULES[rule], spread=spread,
        stream=stream(),
    )  # fmt: skip
    assert native().columns_of_stacked(args) == 0
    for i in range(4):
        values = calls.dequantize(codes[i], scales[i], fmt, torch.bfloat16)
        _, want, _ = calls.quantize(values, fmt, rule, row=None, spread=spread)
        equal(made[0][i][:, :rows], want.codes[:, :rows])
        assert torch.equal(made[1][i], want.scales)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layouts", [("rows", ""), ("rows", "cols"), ("", "cols")])
def test_plain_stacks_have_the_bytes_of_each_weight(size, dtype, layouts):
    rows, cols = size
    kind = KINDS[SIZES.index(size)]
    specs = [layout and f"mxfp8_e4m3@{layout}" for layout in layouts]
    rule = "floor" if specs[1] else "rceil"
    weights = [calls.data(rows, cols, kind, dtype, seed=i) for i in range(300)]
    loop = all_kernels.kernels("quantize_weights")[-1]
    want = loop.run(QuantizeWeights(weights, *specs, rule))
    if specs[0]:
        made = quantize_weights(weights, *specs, rule=rule)
    else:
        made = None, weight_columns(weights, specs[1], rule=rule)
    for mine, theirs in zip(made, want, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine[2:] == theirs[2:]
            equal(mine.codes, theirs.codes)
            equal(mine.scales, theirs.scales)


# ------------------------------------------------------------------------------ products in places
@pytest.mark.parametrize("config", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(264, 320), (100, 129), (513, 1024)], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_go_where_they_belong(config, dtype, sizes, accumulate):
    """In the order and with the gaps of a buffer that holds other things as well."""
    n, k = sizes
    problem, formats = Problem([140, 0, 3, 290], 7), PAIRS[config][::-1]
    x = calls.data(problem.rows, k, "normal")
    grad = calls.data(problem.rows, n, "channels", seed=1)
    (_, x_col, _), (_, g_col, _) = (
        quantize(x, problem, formats[1]),
        quantize(grad, problem, formats[0]),
    )
    sides = (g_col, x_col, (n, k, 0), formats, problem)
    buffer = torch.randn(6 * (n + 3), k, device="cuda").to(dtype)
    old = buffer.clone()
    firsts = [4 * (n + 3), 0, 2 * (n + 3) + 1, (n + 3) + 2]
    stacked = torch.stack([old[first : first + n] for first in firsts])
    gemm("gemm_k", *sides, stacked, accumulate=accumulate, config=config)
    args = gemm_args("gemm_k", *sides, buffer, config)
    args.accumulate = accumulate
    assert native().gemm_grouped(args, firsts) == 0
    for i, first in enumerate(firsts):
        equal(buffer[first : first + n], stacked[i])
        buffer[first : first + n] = old[first : first + n]
    equal(buffer, old)


def main_grads(place: str, dtype: torch.dtype, n: int = 264, k: int = 320) -> list[Tensor]:
    if place == "stack":
        return list(torch.full((4, n, k), 0.5, dtype=dtype, device="cuda"))
    if place == "reversed":
        return main_grads("stack", dtype, n, k)[::-1]
    if place == "gaps":
        return list(torch.full((4, n + 3, k), 0.5, dtype=dtype, device="cuda")[:, 1 : n + 1])
    flat = torch.full((4 * (n * k + 32),), 0.5, dtype=dtype, device="cuda")
    return [flat[i * (n * k + 32) :][: n * k].view(n, k) for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("delay", [False, True])
def test_main_grads_have_the_same_bits_wherever_they_lie(dtype, delay):
    x, grad = inputs(143)
    want = None
    for place in ("stack", "reversed", "gaps", "between rows"):
        ours = layer(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
        grads = main_grads(place, dtype)
        for weight, one in zip(ours.weights(), grads, strict=True):
            weight.main_grad = one
        assert (sm90_grouped.places_of(grads) is None) == (place == "between rows")
        for splits in (SPLITS, [3, 90, 0, 40]):
            inp = x.clone().requires_grad_()
            with te_mx.autocast():
                y = ours(inp, torch.tensor(splits, device="cuda"))
            y.backward(grad)
            if delay:
                ours.backward_dw()
        made = torch.stack(grads)
        assert te_mx.audit(ours)["(root)"].wgrad == "sm90_adaptive"
        assert want is None or torch.equal(made, want), place
        want = made
    assert want is not None and bool((want != 0.5).any(1).any(1).all())


# ------------------------------------------------------------------------------------------ layers
RECIPES = {
    "one copy": ONE_COPY,
    "hybrid": MXFP8BlockScaling(one_copy_weights=True, fp8_format=Format.HYBRID),
    "floor": MXFP8BlockScaling(one_copy_weights=True, scale_rule="floor", alignment_spread=2),
}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("first", [None, True])
def test_one_copy_is_a_loop(recipe, stacked, first):
    ours = layer(single_grouped_weight=stacked)
    with torch.no_grad():
        for weight in ours.weights():
            weight[:, ::7] *= 300
    loop = [one.cuda() for one in loop_of(ours)]
    x, grad = inputs(142)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    with te_mx.autocast(recipe=RECIPES[recipe]):
        if first:
            ours(x, SPLITS, is_first_microbatch=True)
        splits = torch.tensor(SPLITS, device="cuda")
        y = ours(mine, splits, is_first_microbatch=None if first is None else False)
        want = run_loop(loop, theirs, SPLITS)
    y.backward(grad)
    want.backward(grad)
    equal(y, want)
    equal(mine.grad, theirs.grad)
    wanted = torch.stack([one.weight.grad for one in loop])
    equal(parameters(ours, "weight.grad"), wanted)
    found = te_mx.audit(ours)["(root)"]
    assert {found.fprop, found.dgrad, found.wgrad} == {"sm90_adaptive"}


@pytest.fixture
def by_the_gemm(monkeypatch):
    """The decode kernel takes as many rows as a Linear of the loop has, not those of all groups."""
    monkeypatch.setattr(Decode, "accepts", lambda self, problem: "is left out")
    registry.forget()
    yield
    monkeypatch.undo()
    registry.forget()


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), ONE_COPY], ids=str)
def test_weights_without_masters_are_a_loop(recipe, by_the_gemm):
    ours = layer()
    loop = [one.cuda() for one in loop_of(ours)]
    for one in (ours, *loop):
        te_mx.freeze_weights(one, recipe=recipe, drop_master=True)
    x, _ = inputs(142)
    splits = torch.tensor(SPLITS, device="cuda")
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        want = run_loop(loop, x, SPLITS)
        ours(x, splits)
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got, listed = ours(x, splits), ours(x, SPLITS)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        equal(got, want)
        equal(listed, want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ours(x, splits)
        for others in ([10, 0, 70, 1], [0, 142, 0, 0], [0, 0, 0, 0]):
            splits.copy_(torch.tensor(others))
            graph.replay()
            got = y.clone()
            equal(got, run_loop(loop, x, others))


def test_one_copy_in_a_graph():
    """Forward and backward, replayed with other splits and on other weights."""
    ours = layer(fuse_wgrad_accumulation=True)
    grads = main_grads("reversed", torch.float32)
    for weight, one in zip(ours.weights(), grads, strict=True):
        weight.main_grad = one
    x, grad = inputs(142)
    splits = torch.tensor(SPLITS, device="cuda")

    def step(m_splits) -> list[Tensor]:
        inp = x.detach().requires_grad_()
        with te_mx.autocast(recipe=ONE_COPY):
            y = ours(inp, m_splits)
        y.backward(grad)
        return [y.detach(), inp.grad]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(splits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(splits)
    for others in ([10, 0, 70, 1], [0, 142, 0, 0], [64, 1, 1, 76]):
        with torch.no_grad():
            for weight in ours.weights():
                weight.mul_(-1.5)
        splits.copy_(torch.tensor(others))
        results = []
        for run in (lambda: (graph.replay(), made)[1], lambda others=others: step(others)):
            for one in grads:
                one.fill_(0.25)
            results.append([t.clone() for t in (*run(), *grads)])
        for mine, theirs in zip(*results, strict=True):
            equal(mine, theirs)


def test_what_one_copy_keeps():
    """1.03 bytes a parameter, kept for micro-batches or in place of masters."""
    ours = layer(k=1024, n=1024, bias=False)
    x, _ = inputs(142, 1024, 1024)
    with torch.no_grad():
        ours(x, SPLITS)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with te_mx.autocast(recipe=ONE_COPY):
            ours(x, SPLITS, is_first_microbatch=True)
        kept = torch.cuda.memory_allocated() - before
        assert math.isclose(kept, 4 * 1024 * 1024 * 33 / 32, rel_tol=0.01)
