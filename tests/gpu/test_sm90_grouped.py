"""The grouped kernels of Hopper: bytes of the quantizer against single calls, products against
single calls bit for bit, and grouped layers in everything that torch can put around them.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import sm90_calls as calls
import torch
from sm90_calls import DTYPES, FORMATS, RULES, address, native, stream
from torch import Tensor

import te_mx
from te_mx._ops import grouped_quantize
from te_mx.backends.sm90.layouts import groups as grouped_layout
from te_mx.backends.sm90.layouts.tiles import PackedOperand, packed_shapes
from te_mx.dispatch.groups import device_bounds
from te_mx.recipe import Format, MXFP8BlockScaling

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from grouped_cases import equal, loop_of, parameters, run_loop

PAIRS = [("e4m3", "e4m3"), ("e4m3", "e5m2")]  # forward, backward
# (rows of every group, rows behind, in features, out features)
SPLITS = [
    ([128, 256], 0, 256, 256),
    ([40, 0, 3, 90], 0, 320, 264),
    ([0, 0, 133, 0], 7, 129, 100),
    ([1000, 17, 0, 513, 64], 100, 1024, 513),
    ([0, 0], 50, 64, 64),
    ([300] * 33 + [0] * 40 + [5], 0, 96, 80),
    ([129, 63, 191, 193], 1, 48, 8),
]
KINDS = ["normal", "channels", "mixed", "nan", "spread", "rows", "huge"]


class Problem:
    """Tokens in groups, with the bounds that a kernel must find for itself."""

    def __init__(self, splits: list[int], behind: int, capacity: int = 0, long: bool = False):
        counts = torch.tensor(splits)
        if capacity:
            ends, self.rows = torch.arange(len(splits)) * capacity + counts, capacity * len(splits)
        else:
            ends, self.rows = counts.cumsum(0), sum(splits) + behind
        self.offs = ends.to("cuda", torch.int64 if long else torch.int32)
        self.capacity = capacity
        starts, ends = device_bounds(ends, capacity, self.rows)
        self.bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))

    @property
    def groups(self):
        """The native record."""
        return calls.groups_record(self.offs, self.rows, self.capacity)


def poisoned(shapes) -> PackedOperand:
    return PackedOperand(
        torch.full(shapes[0], 0xA5, dtype=torch.uint8, device="cuda"),
        torch.full(shapes[1], 0x5A5A5A5A, dtype=torch.int32, device="cuda"),
    )


def quantize(x: Tensor, problem: Problem, fmt: str, rule: str = "rceil", spread: int = 8):
    """(rows, columns, column sums)."""
    (rows, cols), groups = x.shape, len(problem.offs)
    row = poisoned(grouped_layout.shapes_rows(rows, cols, groups))
    col = poisoned(grouped_layout.shapes_k(rows, cols, groups))
    sums = torch.full((groups, cols), math.nan, device="cuda")
    partial = torch.full((grouped_layout.group_tiles(rows, groups), cols), math.nan, device="cuda")
    args = native().GroupedQuantizeArgs(
        x=calls.matrix(x), groups=problem.groups, element=FORMATS[fmt], rule=RULES[rule],
        row=calls.out_record(row, "sm90_rows"), col=calls.out_record(col, "sm90_k"), spread=spread,
        col_sum=address(sums), col_sum_ws=address(partial), stream=stream(),
    )  # fmt: skip
    assert native().quantize_grouped(args) == 0
    return row, col, sums


def quantize_weights(weights: list[Tensor], fmt: str):
    n, k = weights[0].shape
    row, col = (
        poisoned(tuple((len(weights), *shape) for shape in packed_shapes(*sizes)))
        for sizes in ((n, k), (k, n))
    )
    args = native().QuantizeArgs(
        x=calls.matrix(weights[0]).copy(data=0), element=FORMATS[fmt], spread=8, stream=stream(),
        row=calls.out_record(row, "packed"), col=calls.out_record(col, "packed"),
    )  # fmt: skip
    assert native().quantize_stacked(args, list(map(address, weights))) == 0
    return row, col


def gemm(name: str, lhs, rhs, sizes, formats, problem: Problem, out, bias=None, accumulate=False,
         config=-1):  # fmt: skip
    args = gemm_args(name, lhs, rhs, sizes, formats, problem, out, config)
    args.accumulate = accumulate
    if bias is not None:
        args.bias, args.bias_dtype = address(bias), DTYPES[bias.dtype]
    assert native().gemm_grouped(args) == 0
    return out


def gemm_args(name: str, lhs, rhs, sizes, formats, problem: Problem, out, config=-1):
    """The native record of "gemm_rows" or "gemm_k"."""
    m, n, k = sizes
    along_k = {"gemm_rows": False, "gemm_k": True}[name]
    orders = ("sm90_k", "sm90_k") if along_k else ("sm90_rows", "sm90")
    return native().GroupedGemmArgs(
        lhs=calls.side(lhs, m, k, formats[0], orders[0]),
        rhs=calls.side(rhs, n, k, formats[1], orders[1]),
        out=address(out), out_dtype=DTYPES[out.dtype], ldo=out.shape[-1], along_k=along_k,
        groups=problem.groups, kernel=config, stream=stream(),
    )  # fmt: skip


def nans(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SPLITS, ids=str)
@pytest.mark.parametrize("capacity", [False, True])
def test_quantizer_gives_the_bytes_of_each_group_alone(case, kind, capacity):
    splits, behind, k, _ = case
    long = kind in KINDS[::2]
    problem = Problem(splits, behind, max(*splits, 1) + behind if capacity else 0, long)
    dtype = list(DTYPES)[KINDS.index(kind) % 3]
    rule = "floor" if kind == "channels" else "rceil"
    x = calls.data(problem.rows, k, kind, dtype)
    row, col, sums = quantize(x, problem, "e4m3", rule, 3 if kind == "rows" else 8)
    for i, (start, end) in enumerate(problem.bounds):
        if start == end:
            assert bool((sums[i] == 0).all())
            continue
        spread = 3 if kind == "rows" else 8
        want = calls.quantize(x[start:end], "e4m3", rule, spread=spread, col_sum=torch.float32)
        first, tiles = grouped_layout.first_tile(start, i), -(-(end - start) // 128)
        equal(row.codes[start:end, :k], want[0].codes[:, :k])
        assert torch.equal(row.scales[:, first : first + tiles], want[0].scales[:, :tiles])
        own = col.codes[:, first * 128 : (first + tiles) * 128]
        equal(own[:, : end - start], want[1].codes[:, : end - start])
        padding = own[:, end - start :]
        assert bool(((padding == 0) | (padding == 0x7F)).all())
        assert bool(x.isfinite().all()) <= bool((padding == 0).all())
        assert torch.equal(col.scales[first : first + tiles], want[1].scales)
        equal(sums[i], want[2])


@pytest.mark.parametrize("config", [-1, 0, 1])
@pytest.mark.parametrize("case", list(enumerate(SPLITS)), ids=str)
@pytest.mark.parametrize("capacity", [False, True])
def test_products_have_the_bits_of_single_ones(case, capacity, config):
    number, (splits, behind, k, n) = case
    problem = Problem(splits, behind, max(*splits, 1) + behind if capacity else 0, number % 2 == 0)
    kind, (fwd, bwd) = KINDS[number % len(KINDS)], PAIRS[number % 2]
    dtype = list(DTYPES)[number % 3]
    x = calls.data(problem.rows, k, kind, torch.bfloat16)
    grad = calls.data(problem.rows, n, kind, torch.bfloat16, seed=1)
    weights = [calls.data(n, k, "normal", torch.bfloat16, seed=2 + i) for i in range(len(splits))]
    bias = torch.randn(len(splits), n, device="cuda", dtype=torch.bfloat16)
    (x_row, x_col, _), (g_row, g_col, _) = quantize(x, problem, fwd), quantize(grad, problem, bwd)
    w_row, w_col = quantize_weights(weights, fwd)
    more = {"problem": problem, "config": config}
    rows, both = problem.rows, (bwd, fwd)
    y = gemm("gemm_rows", x_row, w_row, (rows, n, k), (fwd, fwd), bias=bias,
             out=nans(rows, n, dtype=dtype), **more)  # fmt: skip
    dx = gemm("gemm_rows", g_row, w_col, (rows, k, n), both, out=nans(rows, k, dtype=dtype), **more)
    dw = gemm("gemm_k", g_col, x_col, (n, k, 0), both,
              out=nans(len(splits), n, k, dtype=dtype), **more)  # fmt: skip
    old = torch.randn(len(splits), n, k, device="cuda").to(dtype)
    added = gemm("gemm_k", g_col, x_col, (n, k, 0), both, out=old.clone(), accumulate=True, **more)
    inside = torch.zeros(rows, dtype=torch.bool, device="cuda")
    for i, (start, end) in enumerate(problem.bounds):
        inside[start:end] = True
        if start == end:
            assert bool((dw[i] == 0).all())
            equal(added[i], old[i])
            continue
        count = end - start
        (xr, xc, _), (gr, gc, _) = (calls.quantize(v[start:end], f)
                                    for v, f in ((x, fwd), (grad, bwd)))  # fmt: skip
        wr, wc, _ = calls.quantize(weights[i], fwd)
        one = {"out_dtype": dtype}
        equal(y[start:end], calls.gemm(xr, wr, (count, n, k), (fwd, fwd), bias=bias[i], **one))
        equal(dx[start:end], calls.gemm(gr, wc, (count, k, n), both, **one))
        equal(dw[i], calls.gemm(gc, xc, (n, k, count), both, **one))
        equal(added[i], calls.gemm(gc, xc, (n, k, count), both, out=old[i].clone(),
                                   accumulate=True, **one))  # fmt: skip
    for made in (y, dx):
        assert bool((made[~inside] == 0).all())


def test_columns_of_weights_alone_are_those_beside_rows():
    for number, (n, k) in enumerate(((48, 64), (130, 70), (1, 200))):
        weights = [calls.data(n, k, KINDS[number], torch.bfloat16, seed=i) for i in range(5)]
        spec = "mxfp8_e4m3@sm90:8"
        _, beside = grouped_quantize.quantize_weights(weights, spec, spec, rule="rceil")
        alone = grouped_quantize.weight_columns(weights, spec, rule="rceil")
        assert alone[2:] == beside[2:]
        equal(alone.codes, beside.codes)
        assert torch.equal(alone.scales, beside.scales)


def test_ends_that_the_host_uploads():
    for count in (1, 512, 1300):
        ends = torch.randint(0, 1 << 30, (count,)).sort().values
        out = torch.full((count + 1,), -1, dtype=torch.int32, device="cuda")
        assert native().upload_ends(ends.tolist(), address(out), stream()) == 0
        assert torch.equal(out[:-1].cpu(), ends.int()) and int(out[-1]) == -1


@pytest.mark.parametrize("ends", [[4, 2, 99], [-5, 700, 300], [1 << 40, 0, 0]])
def test_ends_out_of_range_are_cut_off(ends):
    problem = Problem([40, 30, 20], 10, long=True)
    problem.offs.copy_(torch.tensor(ends))
    x = torch.randn(100, 64, device="cuda")
    row, *_ = quantize(x, problem, "e4m3")
    weights, _ = quantize_weights([torch.randn(48, 64, device="cuda") for _ in range(3)], "e4m3")
    guard = nans(300, 48, dtype=torch.bfloat16)
    gemm("gemm_rows", row, weights, (100, 48, 64), ("e4m3", "e4m3"), problem, guard[100:200])
    assert bool(guard[:100].isnan().all()) and bool(guard[200:].isnan().all())
    assert bool(guard[100:200].isfinite().all())


# ----------------------------------------------------------------------------------------- layers
RECIPES = {
    "adaptive": MXFP8BlockScaling(),
    "hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "exact": MXFP8BlockScaling(precision="exact"),
}


def layer(groups=4, k=320, n=264, **more) -> te_mx.GroupedLinear:
    torch.manual_seed(1)
    return te_mx.GroupedLinear(groups, k, n, device="cuda", dtype=torch.bfloat16, **more)


def step(fn, module, x, grad, splits) -> list[Tensor]:
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te_mx.autocast():
        y = fn(x, splits)
    y.backward(grad)
    return [y.detach(), x.grad, parameters(module, "weight.grad"), parameters(module, "bias.grad")]


def inputs(rows, k=320, n=264, seed=0) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    make = {"generator": g, "device": "cuda", "dtype": torch.bfloat16}
    return torch.randn(rows, k, **make), torch.randn(rows, n, **make)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("splits", [[40, 0, 3, 90], [0, 0, 300, 0], [129, 63, 191, 193]], ids=str)
def test_a_layer_is_a_loop_of_linear(splits, stacked, recipe):
    ours = layer(single_grouped_weight=stacked)
    loop = [one.cuda() for one in loop_of(ours)]
    x, grad = inputs(sum(splits) + 9)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    with te_mx.autocast(recipe=RECIPES[recipe]):
        y, want = ours(mine, splits), run_loop(loop, theirs, splits)
    y.backward(grad)
    want.backward(grad)
    # NOTE: precision "exact" is cuBLAS, whose order of sums follows how the operands lie.
    near = torch.testing.assert_close if recipe == "exact" else equal
    near(y, want)
    near(mine.grad, theirs.grad)
    for kind in ("weight", "bias"):
        wanted = torch.stack([getattr(one, kind).grad for one in loop])
        near(parameters(ours, f"{kind}.grad"), wanted)
    assert (te_mx.audit(ours)["(root)"].wgrad == "sm90_adaptive") == (recipe != "exact")


def test_splits_on_the_device_are_never_waited_for():
    ours = layer()
    x, grad = inputs(200)
    splits = [40, 0, 3, 90]
    want = step(ours, ours, x, grad, splits)
    m_splits = torch.tensor(splits, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(ours, ours, x, grad, m_splits)
        listed = step(ours, ours, x, grad, splits)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for mine, also, theirs in zip(got, listed, want, strict=True):
        equal(mine, theirs)
        equal(also, theirs)


@pytest.mark.parametrize("listed", [False, True])
def test_a_graph_is_replayed_with_other_splits(listed):
    ours = layer()
    x, grad = inputs(200)
    first = [50, 50, 50, 50]
    m_splits = first if listed else torch.tensor(first, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(ours, ours, x, grad, m_splits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(ours, ours, x, grad, m_splits)
    for seed, splits in enumerate(([10, 0, 70, 1], [0, 200, 0, 0], [0, 0, 0, 0], [64, 1, 1, 128])):
        new_x, new_grad = inputs(200, seed=seed)
        x.copy_(new_x), grad.copy_(new_grad)
        if not listed:
            m_splits.copy_(torch.tensor(splits))
        graph.replay()
        got = [t.clone() for t in made]
        want = step(ours, ours, new_x, new_grad, first if listed else splits)
        for mine, theirs in zip(got, want, strict=True):
            equal(mine, theirs)


def test_more_rows_than_there_are_poison_nothing():
    ours = layer()
    x, grad = inputs(100)
    got = step(ours, ours, x, grad, torch.tensor([50, 40, 80, 9], device="cuda"))
    for mine, theirs in zip(got, step(ours, ours, x, grad, [50, 40, 10, 0]), strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_of_a_stacked_weight(dtype):
    ours = layer(single_grouped_weight=True, fuse_wgrad_accumulation=True)
    plain = layer(single_grouped_weight=True)
    x, grad = inputs(143)
    splits = [40, 0, 3, 90]
    ours.weight.main_grad = torch.ones(4, 264, 320, dtype=dtype, device="cuda")
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    with te_mx.autocast():
        y, want = ours(mine, splits), plain(theirs, splits)
    y.backward(grad)
    want.backward(grad)
    equal(mine.grad, theirs.grad)
    assert bool((ours.weight.main_grad[1] == 1).all())
    torch.testing.assert_close(
        ours.weight.main_grad.float() - 1, plain.weight.grad.float(), rtol=2e-2, atol=0.1
    )


def test_kept_weights_and_inference():
    ours = layer()
    x, _ = inputs(143)
    splits = torch.tensor([40, 0, 3, 90], device="cuda")
    with te_mx.autocast(), torch.no_grad():
        want = ours(x, splits)
        for first in (True, False, False):
            equal(ours(x, splits, is_first_microbatch=first), want)
        te_mx.freeze_weights(ours)
        equal(ours(x, splits), want)
    with torch.no_grad(), te_mx.autocast():
        offs = splits.cumsum(0)
        stack = torch.stack([w.detach() for w in ours.weights()])
        biases = torch.stack([b.detach() for b in ours.biases()])
        equal(te_mx.grouped_linear(x, stack, offs=offs, bias=biases), want)
        masked = te_mx.grouped_linear(
            x[:100].view(4, 25, 320), stack, masked_m=torch.tensor([25, 0, 3, 7], device="cuda")
        )
        assert bool((masked[1] == 0).all()) and bool((masked[2, 3:] == 0).all())
        alone = te_mx.grouped_linear(x[50:53], stack[2:3], offs=torch.tensor([3], device="cuda"))
        equal(masked[2, :3], alone)


def test_products_are_near_those_of_fp64():
    ours = layer(k=1024, n=512)
    x, grad = inputs(700, 1024, 512)
    splits = [300, 0, 1, 390]
    y, dx, dw, _ = step(ours, ours, x, grad, torch.tensor(splits, device="cuda"))
    ends = torch.tensor(splits).cumsum(0).tolist()
    weights, biases = parameters(ours, "weight").double(), parameters(ours, "bias").double()
    for i, (end, count) in enumerate(zip(ends, splits, strict=True)):
        rows = slice(end - count, end)
        for got, want in (
            (y[rows] - biases[i], x[rows].double() @ weights[i].t()),
            (dx[rows], grad[rows].double() @ weights[i]),
            (dw[i], grad[rows].double().t() @ x[rows].double()),
        ):
            assert float((got.double() - want).norm()) <= 0.05 * float(want.norm())
