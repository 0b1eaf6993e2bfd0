"""precision="invariant" on Hopper: rows keep their bits at any number of rows; tiles have the bytes
of the specification; errors are within the bound of docs/invariance.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import te_mx
from te_mx import _ops as ops
from te_mx.autograd.linear_recipe import roles
from te_mx.backends.sm90.layouts import tiles
from te_mx.recipe import Float8BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import rollout

RECIPES = {
    "mxfp8": MXFP8BlockScaling(precision="invariant"),
    "mxfp4": MXFP4BlockScaling(precision="invariant"),
    "fp8": Float8BlockScaling(precision="invariant"),
    "fp8 fp32": Float8BlockScaling(precision="invariant", use_f32_scales=True),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def tokens(rows: int, k: int) -> Tensor:
    """Rows that differ: outlier channels, rows of other sizes, zeros, a range no tile aligns."""
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    x[:, ::41] *= 60
    x[1::7] *= 2.0**9
    x[2::11, : k // 2] *= 2.0**-14
    x[3::13] = 0
    x[4::17, 1] = torch.nan
    return x


def same(part: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(part, whole, rtol=0, atol=0, equal_nan=True)


FEW, EVERY = (1, 2, 17, 64, 65, 129, 192, 257, 300), (*range(1, 301), 512, 777, 4096)


@recipes
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(300, 200, 320), (16384, 1024, 1024), (777, 2304, 512)]
)
def test_rows_keep_their_bits(recipe, rows, n, k):
    layer, x = te_mx.Linear(k, n, params_dtype=torch.bfloat16, device="cuda"), tokens(rows, k)
    layer.weight.data[:, ::37] *= 100  # tiles of which one that stands still would lose much
    counts = EVERY if rows > 4096 else FEW
    with te_mx.autocast(recipe=recipe):
        whole = layer(x)
        for drop in (None, False, True):
            if drop is not None:
                te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe)
            with torch.no_grad():
                for m in counts:
                    same(layer(x[-m:].contiguous()), whole[-m:])
        for m in (1, 33, 300) if rows > 4096 else ():
            graph, part = torch.cuda.CUDAGraph(), x[-m:].contiguous()
            with torch.no_grad(), torch.cuda.graph(graph):
                y = layer(part)
            y.zero_()
            graph.replay()
            same(y, whole[-m:])
        if rows > 4096:
            torch._dynamo.reset()  # forward has eight entries at most, two of each recipe here
            compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
            for m in (1, 33, 300, 4096):
                with torch.no_grad():
                    same(compiled(x[-m:].contiguous()), whole[-m:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["mxfp8", "fp8", "fp8 fp32"])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        *[(64, 200, 320), (17, 136, 1040), (300, 40, 2000), (64, 64, 24576), (64, 17800, 320)],
        *[(64, 200, 8320), (64, 2304, 8320), (64, 2304, 640), (64, 6144, 640)],
    ],
)
def test_few_rows_of_frozen_weights_are_those_of_many(fmt, rows, n, k, dtype):
    """Of a weight with tiles of all classes; CTAs that make x and rows that are made before; a k so
    long that there is room for few stages, and of many rounds in a cluster; an n with which a CTA
    has all of k, and others for each way to cut it."""
    layer = te_mx.Linear(k, n, params_dtype=torch.bfloat16, device="cuda")
    w = layer.weight.data
    w[::3] *= 2.0**-12  # rows that differ, and in the first tile blocks of a row
    w[:, 5:9] *= 2.0**12
    w[n // 2 :, k // 2 : k // 2 + 40] *= 2.0**80  # a tile of class 3
    x, recipe = tokens(max(rows, 65), k).to(dtype), RECIPES[fmt]
    x[2::5] *= 2.0**60  # with factors whose products are no normal numbers
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        whole = layer(x)
        te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
        if fmt == "mxfp8":
            classes = set(layer.weight_scale[..., 128].flatten().tolist())
            assert classes >= ({2, 3} if k > 320 else {1, 3})
        same(layer(x), whole)
        assert te_mx.audit(layer)["(root)"].fprop != "sm90_rows"
        for m in {1, 2, 4, 5, 9, 16, 31, 33, 50, min(rows, 64)}:
            same(layer(x[-m:].contiguous()), whole[-m:])
            assert (te_mx.audit(layer)["(root)"].fprop == "sm90_rows") == (m <= 64)


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8"])
@pytest.mark.parametrize("k", [320, 168])
def test_rows_of_groups_are_those_of_layers(fmt, k):
    experts, n = 4, 136
    layers = [
        te_mx.Linear(k, n, params_dtype=torch.bfloat16, device="cuda") for _ in range(experts)
    ]
    grouped = te_mx.GroupedLinear(experts, k, n, params_dtype=torch.bfloat16, device="cuda")
    recipe = RECIPES[fmt]
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        for i, one in enumerate(layers):
            one.weight[i::3, ::37] *= 100
            getattr(grouped, f"weight{i}").copy_(one.weight)
            getattr(grouped, f"bias{i}").copy_(one.bias)
        for frozen in (False, True):
            if frozen:
                te_mx.freeze_weights(grouped, drop_master=True, recipe=recipe)
            for splits in ([1, 0, 17, 9], [130, 3, 0, 150], [777, 1, 512, 33]):
                x = tokens(sum(splits), k)
                whole = [one(part) for one, part in zip(layers, x.split(splits), strict=True)]
                for given in (splits, torch.tensor(splits, device="cuda")):
                    same(grouped(x, given), torch.cat(whole))
                few = frozen and len(x) < 32 and k % 16 == 0
                assert (te_mx.audit(grouped)["(root)"].fprop == "sm90_rows") == few


@pytest.mark.parametrize("tokens_", [3, 70, 500])
def test_routed_rows_are_those_of_layers(tokens_):
    experts, n, k, top_k, recipe = 4, 144, 160, 2, RECIPES["mxfp8"]
    made = {"params_dtype": torch.bfloat16, "device": "cuda", "bias": False}
    first = [te_mx.Linear(k, 2 * n, **made) for _ in range(experts)]
    second = [te_mx.Linear(n, k, **made) for _ in range(experts)]
    x = tokens(tokens_, k)
    x[3::13], x[4::17] = 1, 2  # NaN of an expert's row is NaN in the sum
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens_)]).cuda()
    weights = torch.rand(tokens_, top_k, device="cuda")
    w13, w2 = ([te_mx.quantize(one.weight.detach()) for one in part] for part in (first, second))
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        y = te_mx.moe.fused_experts(x, w13, w2, weights, ids.int())
        for i in (0, 1, tokens_ - 1):
            part = [one[i : i + 1] for one in (x, weights, ids.int())]
            same(te_mx.moe.fused_experts(part[0], w13, w2, *part[1:]), y[i : i + 1])
        flat = ids.flatten().int()
        routing = None, flat, torch.tensor([len(flat)], dtype=torch.int32, device="cuda")
        h = te_mx.moe.grouped_gemm(x, w13, *routing, top_k=top_k, block_m=1)
        for r in range(0, len(flat), 1 + len(flat) // 30):
            same(h[r], first[int(flat[r])](x)[r // top_k])


def test_a_rollout_has_the_probabilities_of_its_trainer(capsys):
    """All that a Llama and a mixture have, in CUDA graphs: examples/rollout.py."""
    given = "--device cuda --ways invariant --width 256 --layers 2 --batches 1,7,32,128 --tokens 5"
    assert rollout.main(given.split()) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    counts = [("1", "5"), ("7", "35"), ("32", "160"), ("128", "640")] * 2
    assert [line.split()[2:8] for line in lines] == [
        [batch, "0", "0", same_, "of", same_] for batch, same_ in counts
    ]


@pytest.mark.parametrize("activation", ["gelu", "gelu_erf", "swiglu", "geglu", "silu", "srelu"])
def test_few_rows_of_frozen_blocks_are_those_of_many(activation):
    block = te_mx.LayerNormMLP(
        128, 192, activation=activation, params_dtype=torch.bfloat16, device="cuda"
    )
    x, recipe = tokens(140, 128), MXFP8BlockScaling(precision="invariant")
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        whole = block(x)
        te_mx.freeze_weights(block, drop_master=True, recipe=recipe)
        same(block(x), whole)
        for m in (1, 9, 33):
            same(block(x[-m:].contiguous()), whole[-m:])
            inside = activation not in ("silu", "srelu")  # those of h in bf16
            ran = "sm90_rows" if inside else "sm90_invariant"
            assert {row.fprop for row in te_mx.audit(block)} == {ran}


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4"])
@pytest.mark.parametrize(("rows", "k"), [(300, 320), (128, 96), (40, 1000)])
def test_tiles_have_the_bytes_of_the_specification(fmt, rows, k):
    row = ops.quantize_2d(tokens(rows, k), f"{fmt}@rows").row
    assert row is not None
    made = ops.convert_2d(row, f"{fmt}@sm90:{tiles.BY_ROWS}")
    codes = row.format.unpack(row.codes, k)
    spec = tiles.pack(codes, row.scales, fmt, tiles.BY_ROWS)
    same(made.scales, spec.scales)
    assert torch.equal(made.codes[:, :k], spec.codes[:, :k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "k"), [(300, 320), (129, 97), (40, 1000)])
def test_rows_that_are_aligned_by_themselves_come_of_the_read_that_quantizes(rows, k, dtype):
    x, row, col = tokens(rows, k).to(dtype), "mxfp8_e4m3@sm90:9", "mxfp8_e4m3@sm90:8"
    plain = ops.quantize_2d(x, "mxfp8_e4m3@rows").row
    made = ops.quantize_2d(x, row, col)
    assert plain is not None and roles(x.device, RECIPES["mxfp8"].settings).x.row == row
    expected = ops.convert_2d(plain, row), ops.quantize_2d(x, col=col).col
    for one, other in zip(made[:2], expected, strict=True):
        assert torch.equal(one.codes[:, : one.k], other.codes[:, : one.k])
        same(one.scales, other.scales)
    alone = ops.quantize_2d(x, row).row
    assert torch.equal(alone.codes, made.row.codes) and torch.equal(alone.scales, made.row.scales)


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4"])
@pytest.mark.parametrize(("rows", "k"), [(300, 320), (129, 97), (40, 1000)])
def test_plain_rows_and_packed_columns_come_of_one_read(fmt, rows, k):
    x, (row, col) = tokens(rows, k), (f"{fmt}@rows", f"{fmt}@sm90:8")
    made = ops.quantize_2d(x, row, col, col_sum=True)
    alone = ops.quantize_2d(x, row).row, ops.quantize_2d(x, col=col).col
    for one, other in zip(made[:2], alone, strict=True):
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
    same(made.col_sum, ops.quantize_2d(x, row, col_sum=True).col_sum)


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4"])
def test_errors_are_within_the_bound(fmt):
    m, n, k = 130, 136, 640
    x, w = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    x[:, ::41] *= 60
    w[::9] *= 2.0**10
    a, b = (te_mx.quantize(one, fmt) for one in (w, x))
    d = te_mx.gemm(a, b, precision="invariant", out_dtype=torch.float32).out.double()
    left, right = b.dequantize(torch.float64), a.dequantize(torch.float64)
    step = 2.0**-14

    def moved(values: Tensor) -> Tensor:
        return values.abs().unflatten(1, (-1, 128)).amax(2).repeat_interleave(128, 1) * step

    # Of a weight the largest of its tile counts, where it is at most 2^9 above the row's own.
    tile = right.abs().unflatten(1, (-1, 128)).amax(2).repeat_interleave(128, 1) * step * 2**9
    bound = moved(left) @ right.abs().t() + (left.abs() + moved(left)) @ tile.t()
    bound += 2.0**-13 * (left.abs() @ right.abs().t())
    assert bool(((d - left @ right.t()).abs() <= bound).all())
