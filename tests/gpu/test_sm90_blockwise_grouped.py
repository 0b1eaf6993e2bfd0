"""Groups of blockwise FP8 on Hopper: quantizers and products have the bits of each group alone, and
layers those of a loop, at the sizes of torchao's tests too."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import sm90_calls as calls
import torch
from test_sm90_grouped import KINDS, PAIRS, SPLITS, Problem

import te_mx
from te_mx import _ops as ops
from te_mx._ops import grouped_quantize
from te_mx._ops.grouped_gemm import gemm_k, gemm_rows
from te_mx._ops.grouped_quantize import Groups, quantize_grouped
from te_mx.backends.sm90.layouts import groups as sm90_groups
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Stack
from te_mx.recipe import DeepSeekV3, Float8BlockScaling, Format

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from grouped_cases import equal, loop_of, parameters, run_loop

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Columns as factors, and aligned with two spreads: by rules.
COLUMNS = {"sm90_factors_k": ("fp32", "pow2:0.001"), "sm90_k:8": ("pow2",), "sm90_k:3": ("pow2",)}
every_case = pytest.mark.parametrize("case", list(enumerate(SPLITS)), ids=str)


def problem_of(case, capacity: bool) -> Problem:
    number, (splits, behind, _, _) = case
    return Problem(splits, behind, max(*splits, 1) + behind if capacity else 0, number % 2 == 0)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """As bits; a NaN is a NaN."""
    if got.dtype == torch.float32:
        assert torch.equal(got.isnan(), want.isnan())
        got, want = (t.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf) for t in (got, want))
        got, want = got.view(torch.int32), want.view(torch.int32)
    assert torch.equal(got, want)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("capacity", [False, True])
@every_case
def test_quantizer_gives_the_bytes_of_each_group_alone(case, capacity, columns):
    number, (_, _, k, _) = case
    problem, kind = problem_of(case, capacity), KINDS[number % len(KINDS)]
    groups = Groups(problem.offs, problem.capacity)
    for i, rule in enumerate(COLUMNS[columns]):
        fmt = f"fp8_{('e4m3', 'e5m2')[(number + i) % 2]}_1x128"
        x = calls.data(problem.rows, k, kind, DTYPES[(number + i) % 3])
        row, col = f"{fmt}@sm90_factors_rows", f"{fmt}@{columns}"
        q = quantize_grouped(x, groups, row, col, rule=rule, col_sum=True)
        alone = [f"{fmt}@{spec_of(spec).layout.alone}" for spec in (row, col)]
        for g, (start, end) in enumerate(problem.bounds):
            if start == end:
                assert bool((q.col_sum[g] == 0).all())
                continue
            one = ops.quantize_2d(x[start:end], *alone, rule=rule, col_sum=True)
            first, tiles = sm90_groups.first_tile(start, g), -(-(end - start) // 128)
            assert torch.equal(q.row.codes[start:end], one.row.codes)
            same(q.row.scales[:, first : first + tiles], one.row.scales[:, :tiles])
            own = q.col.codes[:, first * 128 : (first + tiles) * 128]
            assert torch.equal(own[:, : end - start], one.col.codes)
            padding = own[:, end - start :]
            assert bool(((padding == 0) | (padding == 0x7F)).all())
            assert bool(x.isfinite().all()) <= bool((padding == 0).all())
            same(q.col.scales[first : first + tiles], one.col.scales)
            same(q.col_sum[g], one.col_sum)
        # One direction alone has the same bytes where anybody reads them.
        for side, specs in (("row", (row, "")), ("col", ("", col))):
            single = getattr(quantize_grouped(x, groups, *specs, rule=rule), side)
            both = getattr(q, side)
            for start, end in problem.bounds:
                part = slice(start, end) if side == "row" else slice(0)
                assert torch.equal(single.codes[part], both.codes[part])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("block", "row", "col", "rule"),
    [
        ("128x128", "sm90_factors", "sm90_factors", "fp32"),
        ("128x128", "rows", "cols", "pow2"),
        ("128x128", "sm90_factors", "", "pow2"),
        ("128x128", "", "sm90_factors", "pow2"),
        ("1x128", "sm90_factors", "sm90_factors", "fp32:0.01"),
        ("1x128", "sm90_factors", "sm90:8", "pow2"),
        ("1x128", "rows", "cols", "fp32"),
        ("1x128", "", "sm90:8", "pow2"),
    ],
)
def test_weights_of_groups_have_the_bytes_of_each_alone(block, row, col, rule):
    for number, (n, k) in enumerate(((48, 64), (130, 72), (1, 200), (384, 520))):
        dtype, fmt = DTYPES[number % 3], f"fp8_e4m3_{block}"
        stack = torch.stack([calls.data(n, k, KINDS[number], dtype, seed=i) for i in range(5)])
        specs = [f"{fmt}@{layout}" if layout else "" for layout in (row, col)]
        for weights in (stack, list(stack.unbind(0))):
            made = ops_of_weights(weights, specs, rule)
            for i, weight in enumerate(stack):
                one = ops.quantize_2d(weight, *specs, rule=rule)
                for got, want in zip(made, one[:2], strict=True):
                    assert (got is None) == (want is None)
                    if got is not None:
                        assert torch.equal(got.codes[i], want.codes)
                        same(got.scales[i], want.scales)


def ops_of_weights(weights, specs: list[str], rule: str) -> tuple[Stack | None, Stack | None]:
    row, col = specs
    if row:
        return grouped_quantize.quantize_weights(weights, row, col, rule=rule)
    return None, grouped_quantize.weight_columns(weights, col, rule=rule)


def nans(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device="cuda")


def alone_of(x: torch.Tensor, spec: str, rule: str) -> Operand:
    return ops.quantize_2d(x, spec, rule=rule).row


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("block", ["128x128", "1x128"])
@pytest.mark.parametrize("capacity", [False, True])
@every_case
def test_products_of_rows_have_the_bits_of_single_ones(case, capacity, block):
    number, (splits, _, k, n) = case
    problem, (right, left) = problem_of(case, capacity), PAIRS[number % 2]
    rule, dtype = ("fp32", "pow2")[number % 2], DTYPES[number % 3]
    x = calls.data(problem.rows, k, KINDS[number % len(KINDS)], torch.bfloat16)
    stack = torch.stack(
        [calls.data(n, k, "normal", torch.bfloat16, seed=2 + i) for i in range(len(splits))]
    )
    bias = torch.randn(len(splits), n, device="cuda", dtype=torch.bfloat16)
    groups = Groups(problem.offs, problem.capacity)
    lhs, rhs = f"fp8_{left}_1x128", f"fp8_{right}_{block}"
    tokens = quantize_grouped(x, groups, f"{lhs}@sm90_factors_rows", rule=rule).row
    inside = torch.zeros(problem.rows, dtype=torch.bool, device="cuda")
    for layout in ("sm90_factors", "rows", "cols"):
        spec = f"{rhs}@{layout}"
        if layout == "cols":
            turned = stack.transpose(1, 2).contiguous()
            weights = grouped_quantize.weight_columns(turned, spec, rule=rule)
        else:
            weights, _ = grouped_quantize.quantize_weights(stack, spec, rule=rule)
        made = gemm_rows(tokens, weights, groups, bias=bias, out_dtype=dtype)
        for i, (start, end) in enumerate(problem.bounds):
            inside[start:end] = True
            if start == end:
                continue
            sides = alone_of(x[start:end], f"{lhs}@sm90_factors", rule), weights.group(i)
            want = ops.gemm_2d(*sides, ops.Epilogue(bias=bias[i]), out_dtype=dtype).out
            equal(made[start:end], want)
        assert bool((made[~inside] == 0).all())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("columns", list(COLUMNS)[:2])
@pytest.mark.parametrize("capacity", [False, True])
@every_case
def test_products_of_k_have_the_bits_of_single_ones(case, capacity, columns):
    number, (splits, _, k, n) = case
    problem, (right, left) = problem_of(case, capacity), PAIRS[number % 2]
    rule, dtype = COLUMNS[columns][0], DTYPES[number % 3]
    kind = KINDS[number % len(KINDS)]
    x = calls.data(problem.rows, k, kind, torch.bfloat16)
    grad = calls.data(problem.rows, n, kind, torch.bfloat16, seed=1)
    groups = Groups(problem.offs, problem.capacity)
    g_col, x_col = (
        quantize_grouped(t, groups, col=f"fp8_{element}_1x128@{columns}", rule=rule).col
        for t, element in ((grad, left), (x, right))
    )
    old = torch.randn(len(splits), n, k, device="cuda").to(dtype)
    made = gemm_k(g_col, x_col, groups, out=nans(len(splits), n, k, dtype=dtype), out_dtype=dtype)
    added = gemm_k(g_col, x_col, groups, out=old.clone(), out_dtype=dtype, accumulate=True)
    alone = spec_of(g_col.spec).layout.alone
    for i, (start, end) in enumerate(problem.bounds):
        if start == end:
            assert bool((made[i] == 0).all())
            equal(added[i], old[i])
            continue
        sides = [
            ops.quantize_2d(t[start:end], col=f"fp8_{element}_1x128@{alone}", rule=rule).col
            for t, element in ((grad, left), (x, right))
        ]
        equal(made[i], ops.gemm_2d(*sides, ops.Epilogue(), out_dtype=dtype).out)
        again = old[i].clone()
        ops.gemm_2d(*sides, ops.Epilogue(accumulate=True), out=again, out_dtype=dtype)
        equal(added[i], again)


# ----------------------------------------------------------------------------------------- layers
RECIPES = {
    "pow2": Float8BlockScaling(),
    "fp32": DeepSeekV3(),
    "hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "weights 1x128": Float8BlockScaling(w_block_scaling_dim=1),
    "one copy": Float8BlockScaling(one_copy_weights=True, amax_epsilon=1e-12),
}


def layer(groups, k, n, **more) -> te_mx.GroupedLinear:
    torch.manual_seed(1)
    return te_mx.GroupedLinear(groups, k, n, device="cuda", dtype=torch.bfloat16, **more)


def inputs(rows, k, n, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    make = {"generator": g, "device": "cuda", "dtype": torch.bfloat16}
    return torch.randn(rows, k, **make), torch.randn(rows, n, **make)


def assert_loop(ours, x, grad, splits, recipe) -> None:
    loop = [one.cuda() for one in loop_of(ours)]
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    with te_mx.autocast(recipe=recipe):
        y, want = ours(mine, splits), run_loop(loop, theirs, splits)
    y.backward(grad)
    want.backward(grad)
    equal(y, want)
    equal(mine.grad, theirs.grad)
    equal(parameters(ours, "weight.grad"), torch.stack([one.weight.grad for one in loop]))
    assert te_mx.audit(ours)["(root)"][2:5] == ("sm90_blockwise",) * 3


@pytest.mark.filterwarnings("error::te_mx.FallbackWarning")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("splits", [[40, 0, 3, 90], [0, 0, 300, 0], [129, 63, 191, 193]], ids=str)
def test_a_layer_is_a_loop_of_linear(splits, stacked, name):
    ours = layer(4, 320, 264, single_grouped_weight=stacked)
    assert_loop(ours, *inputs(sum(splits) + 9, 320, 264), splits, RECIPES[name])


# torchao's sizes: experts, rows, in and out features.
@pytest.mark.filterwarnings("error::te_mx.FallbackWarning")
@pytest.mark.parametrize("name", ["pow2", "fp32"])
@pytest.mark.parametrize(
    ("experts", "m", "k", "n"),
    [
        (8, 2048, 1024, 8192),
        (8, 16640, 5120, 1024),
        (16, 16640, 1024, 1024),
        (16, 4096, 8192, 2048),
        (16, 2048, 2048, 8192),
    ],
)
def test_a_layer_is_a_loop_at_the_sizes_of_torchao(experts, m, k, n, name):
    g = torch.Generator().manual_seed(m + k)
    cuts = torch.randint(0, m + 1, (experts - 1,), generator=g).sort().values.tolist()
    splits = [b - a for a, b in zip([0, *cuts], [*cuts, m], strict=True)]
    ours = layer(experts, k, n, bias=False)
    assert_loop(ours, *inputs(m, k, n), splits, RECIPES[name])


@pytest.mark.filterwarnings("error::te_mx.FallbackWarning")
@pytest.mark.parametrize("name", ["pow2", "fp32"])
def test_splits_on_the_device_are_never_waited_for(name):
    ours, splits = layer(4, 320, 264), [40, 0, 3, 90]
    x, grad = inputs(200, 320, 264)

    def step(given):
        leaf = x.clone().requires_grad_()
        ours.zero_grad()
        with te_mx.autocast(recipe=RECIPES[name]):
            y = ours(leaf, given)
        y.backward(grad)
        parts = parameters(ours, "weight.grad"), parameters(ours, "bias.grad")
        return y.detach(), leaf.grad, *(part.clone() for part in parts)

    want = step(splits)
    m_splits = torch.tensor(splits, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = step(m_splits), step(splits)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for got in made:
        for mine, theirs in zip(got, want, strict=True):
            equal(mine, theirs)


@pytest.mark.parametrize("name", ["pow2", "fp32"])
def test_main_grad_of_a_stacked_weight(name):
    ours = layer(4, 320, 264, single_grouped_weight=True, fuse_wgrad_accumulation=True, bias=False)
    plain = layer(4, 320, 264, single_grouped_weight=True, bias=False)
    x, grad = inputs(143, 320, 264)
    ours.weight.main_grad = torch.zeros(4, 264, 320, device="cuda")
    with te_mx.autocast(recipe=RECIPES[name]):
        for _ in range(2):
            ours(x, [40, 0, 3, 90]).backward(grad[:143])
        plain(x, [40, 0, 3, 90]).backward(grad[:143])
    assert torch.equal((ours.weight.main_grad / 2).bfloat16(), plain.weight.grad)


@pytest.mark.filterwarnings("error::te_mx.FallbackWarning")
def test_masked_groups_and_kept_weights():
    ours, recipe = layer(4, 320, 264), RECIPES["pow2"]
    x, _ = inputs(143, 320, 264)
    splits = torch.tensor([40, 0, 3, 90], device="cuda")
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        want = ours(x, splits)
        stack = torch.stack([w.detach() for w in ours.weights()])
        for first in (True, False, False):
            equal(ours(x, splits, is_first_microbatch=first), want)
        te_mx.freeze_weights(ours, recipe=recipe)
        equal(ours(x, splits), want)
        masked = te_mx.grouped_linear(
            x[:100].view(4, 25, 320), stack, masked_m=torch.tensor([25, 0, 3, 7], device="cuda")
        )
        assert bool((masked[1] == 0).all()) and bool((masked[2, 3:] == 0).all())
        alone = te_mx.grouped_linear(x[50:53], stack[2:3], offs=torch.tensor([3], device="cuda"))
        equal(masked[2, :3], alone)
