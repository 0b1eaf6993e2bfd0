"""K in parts on Hopper: against fp64 of the packed operands and against K in one piece, epilogues,
bits from run to run, graphs, streams, and who cuts.
"""

from __future__ import annotations

import math

import pytest
import sm90_calls as calls
import torch
from test_sm90_gemm import CUT, FORMATS, OUTPUTS, PAIRS, assert_epilogues, largest_products

import te_mx
from te_mx.backends.sm90.layouts import tiles as layout
from te_mx.recipe import MXFP8BlockScaling
from te_mx.runtime import workspace

# Whole blocks, tails everywhere, M and N below a block, odd N, more blocks than multiprocessors.
SHAPES = ((256, 256, 1024), (300, 200, 1333), (64, 520, 1000), (5, 7, 680), (1300, 1500, 1536))
PARTS = (2, 5, 3, 6, 7)
CUT_HERE = (256, 384, 8192)  # m, n, k of a problem that te_mx.gemm cuts


@pytest.fixture(autouse=True)
def fresh_cache():
    workspace.reset("cuda")
    yield
    workspace.reset("cuda")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_in_parts(shape, pair):
    m, n, k = shape
    index = SHAPES.index(shape) + PAIRS.index(pair)
    formats, dtype = FORMATS[index // 2 % 2], OUTPUTS[index % 2]
    parts = min(PARTS[index % 5], -(-k // 128))
    a, b = calls.data(m, k, pair[0], torch.float32, 1), calls.data(n, k, pair[1], torch.float32, 2)
    pa, pb = calls.operand(a, formats[0]), calls.operand(b, formats[1])
    va, vb = layout.packed_values(pa, k, formats[0]), layout.packed_values(pb, k, formats[1])
    got = calls.gemm(pa, pb, shape, formats, dtype, parts=parts)
    want = va @ vb.t()
    magnitude = va.abs() @ vb.abs().t()
    bound = CUT * largest_products(va, vb) + 0.51 * calls.ulp(want, dtype) + 2.0**-120
    bound += (k / 128 + 2 + parts) * 2.0**-24 * magnitude
    fits = want.abs() < torch.finfo(dtype).max
    assert ((got.double() - want).abs() <= bound)[fits].all()
    assert torch.equal(got.isnan(), want.isnan()) or not fits.all()

    # What the tensor cores lose is the same in every step: only fp32 sums of steps differ.
    sums = calls.gemm(pa, pb, shape, formats, torch.float32, parts=parts)
    whole = calls.gemm(pa, pb, shape, formats, torch.float32, config=2)
    near = 2 * (k / 32 + parts) * 2.0**-24 * (1 + CUT) * magnitude + 2.0**-120
    finite = whole.isfinite() & sums.isfinite()
    assert ((sums.double() - whole.double()).abs() <= near)[finite].all()
    assert torch.equal(whole.isnan(), sums.isnan()) or not fits.all()
    assert torch.equal(got, sums.to(dtype)) or not fits.all()


def test_every_number_of_parts():
    m, n, k = shape = (130, 136, 2000)
    pa, pb = (calls.operand(calls.data(r, k, "mixed", torch.float32, r), "e4m3") for r in (m, n))
    va, vb = (layout.packed_values(p, k, "e4m3") for p in (pa, pb))
    whole = calls.gemm(pa, pb, shape, out_dtype=torch.float32)
    near = 2 * (k / 32 + 16) * 2.0**-24 * (1 + CUT) * (va.abs() @ vb.abs().t())
    for parts in range(2, 17):
        got = calls.gemm(pa, pb, shape, out_dtype=torch.float32, parts=parts)
        assert ((got.double() - whole.double()).abs() <= near).all(), parts
        for _ in range(3):
            again = calls.gemm(pa, pb, shape, out_dtype=torch.float32, parts=parts)
            assert torch.equal(got, again), parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(300, 264, 512), (129, 75, 640), (512, 512, 1536), (3, 1, 1500)], ids=str
)
@pytest.mark.parametrize("parts", [2, 4, 11])
def test_epilogues_in_parts(parts, shape, dtype):
    assert_epilogues(shape, dtype, True, parts=min(parts, -(-shape[2] // 128)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("before", "behind"), [(0, 40), (1, 39), (4, 4), (3, 2)])
def test_rows_of_the_output_may_lie_apart(before, behind, dtype):
    m, n, k = shape = (300, 264, 768)
    pa, pb = (calls.operand(calls.data(r, k, "gaussian", torch.float32), "e4m3") for r in (m, n))
    want = calls.gemm(pa, pb, shape, out_dtype=dtype, parts=3)
    wide = torch.full((m, before + n + behind), 7.0, dtype=dtype, device="cuda")
    calls.gemm(pa, pb, shape, out=wide[:, before : before + n], parts=3)
    assert torch.equal(wide[:, before : before + n], want)
    assert (wide[:, :before] == 7.0).all() and (wide[:, before + n :] == 7.0).all()


def test_native_code_refuses_what_does_not_fit():
    shape = (64, 64, 256)
    pa, pb = (calls.operand(calls.data(64, 256, "gaussian", torch.float32), "e4m3") for _ in "ab")
    for how in ({"parts": 3}, {"parts": 2, "config": 0}):
        with pytest.raises(AssertionError):
            calls.gemm(pa, pb, shape, **how)


# ------------------------------------------------------------------------------------- te_mx.gemm
def values(*sizes, seed=0):
    """Numbers whose fp32 sums have other bits in another order. Normal ones need not: what the
    tensor cores keep of 128 of K has so few bits that sums of it are mostly exact.
    """
    return calls.data(*sizes, "lognormal", torch.float32, seed)


def tensors(seed=0, shape=CUT_HERE):
    m, n, k = shape
    return [te_mx.quantize(values(r, k, seed=seed + i), columnwise=True)
            for i, r in enumerate((m, n))]  # fmt: skip


def test_gemm_cuts_as_explain_says():
    A, B = tensors()
    said = te_mx.explain(A, B)
    assert said.parts > 1 and f"{said.parts} parts" in str(said)
    assert te_mx.explain(A, B, split_k=False).parts == 1
    assert te_mx.explain(A, B, precision="exact").parts == 1
    m, n, k = CUT_HERE
    packed = [calls.pack(t.rowwise_data.view(torch.uint8), t.rowwise_scale.view(torch.uint8), t.fmt)
              for t in (B, A)]  # fmt: skip
    for parts, split in ((said.parts, True), (1, False)):
        want = calls.gemm(*packed, (n, m, k), out_dtype=torch.float32, parts=parts)
        for _ in range(3):  # packed in the call, then kept
            got = te_mx.gemm(A, B, out_dtype=torch.float32, split_k=split).out
            assert torch.equal(got, want)
    assert not torch.equal(want, te_mx.gemm(A, B, out_dtype=torch.float32).out)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", [(64, 128, 1024), (128, 64, 2048), (130, 136, 1536)], ids=str)
def test_every_call_has_the_same_bits(shape, split):
    """Packed in the call, then kept, then by a record that is made once; whatever the layouts."""
    A, B = tensors(1, shape)
    m, n, k = shape
    parts = te_mx.explain(A, B, split_k=split).parts
    packed = [calls.pack(t.rowwise_data.view(torch.uint8), t.rowwise_scale.view(torch.uint8), t.fmt)
              for t in (B, A)]  # fmt: skip
    want = calls.gemm(*packed, (n, m, k), out_dtype=torch.float32, parts=parts)
    a, b = values(m, k, seed=1), values(n, k, seed=2)
    At, Bt = (te_mx.quantize(x.t(), rowwise=False, columnwise=True) for x in (a, b))
    for _ in range(4):
        for pair, layout_ in (((A, B), "TN"), ((At, B), "NN"), ((At, Bt), "NT")):
            got = te_mx.gemm(*pair, layout_, out_dtype=torch.float32, split_k=split).out
            assert torch.equal(got, want), layout_


def test_layouts_give_the_same_bits():
    m, n, k = CUT_HERE
    a, b = values(m, k), values(n, k, seed=1)
    A, B = te_mx.quantize(a), te_mx.quantize(b)
    At, Bt = (te_mx.quantize(x.t(), rowwise=False, columnwise=True) for x in (a, b))
    want = te_mx.gemm(A, B, out_dtype=torch.float32).out
    assert torch.equal(te_mx.gemm(At, B, "NN", out_dtype=torch.float32).out, want)
    assert torch.equal(te_mx.gemm(At, Bt, "NT", out_dtype=torch.float32).out, want)


def test_the_workspace_is_kept_to():
    A, B = tensors()
    bias = torch.randn(CUT_HERE[0], device="cuda")
    want = te_mx.gemm(A, B, bias=bias, gelu="tanh")
    with workspace.guarded():
        for _ in range(3):
            got = te_mx.gemm(A, B, bias=bias, gelu="tanh")
            assert torch.equal(got.out, want.out) and torch.equal(got.aux, want.aux)
            te_mx.gemm(A, B, grad=True, gelu_in=want.aux, bias=True)


def test_growth_under_running_kernels():
    small, large = tensors(1, (128, 128, 4096)), tensors(2, (512, 512, 16384))
    want = [te_mx.gemm(*pair).out for pair in (small, large, small)]
    torch.cuda.synchronize()
    workspace.reset("cuda")
    for _ in range(20):
        torch.cuda._sleep(1_000_000)
        got = [te_mx.gemm(*pair).out for pair in (small, large, small)]
        workspace.reset("cuda")
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_a_graph_and_streams_give_the_same_bits():
    pairs = [tensors(seed) for seed in range(2)]
    want = [te_mx.gemm(*pair).out for pair in pairs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    got = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(te_mx.gemm(*pairs[i]).out)
    before = workspace.stats()["cuda:0"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = [te_mx.gemm(*pair).out for pair in pairs]
    assert workspace.stats()["cuda:0"] == before
    for reset in (False, True, False):
        if reset:
            workspace.reset("cuda")
            torch.cuda.empty_cache()
            torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")
        for out in inside:
            out.fill_(math.nan)
        graph.replay()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(inside, want, strict=True))
    torch.cuda.synchronize()
    for mine, theirs in zip(got, want, strict=True):
        assert all(torch.equal(out, theirs) for out in mine)


# ---------------------------------------------------------------------------------------- modules
def step(layer, x, grad, split, **recipe):
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with te_mx.autocast(recipe=MXFP8BlockScaling(split_k=split, **recipe)):
        y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad


def test_a_layer_cuts_where_its_recipe_asks():
    tokens, k, n = 8192, 512, 256  # wgrad has few tiles and a long K
    layer = te_mx.Linear(k, n, bias=False, device="cuda")
    x, grad = values(tokens, k), values(tokens, n, seed=1)
    W, X, G = (te_mx.quantize(t.detach(), columnwise=True) for t in (layer.weight, x, grad))
    problems = (W, X, "TN"), (W, G, "NN"), (X, G, "NT")
    made = []
    for split in (False, True):
        made.append(step(layer, x, grad, split))
        for mine, problem in zip(made[-1], problems, strict=True):
            want = te_mx.gemm(*problem, out_dtype=torch.float32, split_k=split).out
            assert torch.equal(mine, want)
    for whole, cut, problem in zip(*made, problems, strict=True):
        assert torch.equal(whole, cut) == (te_mx.explain(*problem).parts == 1)
    assert te_mx.explain(*problems[2]).parts > 1


def test_a_frozen_weight_serves_both_ways():
    m, n, k = CUT_HERE
    layer = te_mx.Linear(k, m, bias=False, device="cuda")
    te_mx.freeze_weights(layer)
    x = values(n, k)
    W, X = te_mx.quantize(layer.weight.detach()), te_mx.quantize(x)
    for split in (False, True):
        with torch.no_grad(), te_mx.autocast(recipe=MXFP8BlockScaling(split_k=split)):
            got = layer(x)
        want = te_mx.gemm(W, X, out_dtype=torch.float32, split_k=split).out
        assert torch.equal(got, want)


def test_groups_are_never_cut():
    m, n, k = CUT_HERE
    layer = te_mx.GroupedLinear(2, k, m, bias=False, device="cuda")
    x = values(2 * n, k)
    got = []
    for split in (False, True):
        with torch.no_grad(), te_mx.autocast(recipe=MXFP8BlockScaling(split_k=split)):
            got.append(layer(x, [n, n]))
    assert torch.equal(*got)
