"""Groups of rows on the decode kernel of Hopper, each with a weight of its own: the bits of a call
for every group, zeros for rows of none; frozen te_mx.GroupedLinear."""

from __future__ import annotations

import pytest
import torch
from decode_calls import (
    BF16,
    F32,
    bits,
    decode,
    kernel_of,
    packed,
    recipe_of,
    rule_of,
    spread,
    stack_of,
)

import te_mx
from te_mx.runtime.kernel_log import LAST_RUN

pytestmark = pytest.mark.usefixtures("poisoned")

CASES = [  # format, rows, ends of groups; rows of a block are 8, 16, 32 and 64
    ("mxfp8_e4m3", 20, [3, 3, 12, 15, 20]),
    ("mxfp8_e4m3", 64, [0] * 17 + [1, 9, 9, 30] + [33] * 20 + [60]),
    ("fp8_e4m3_128x128", 33, [20, 33]),
    ("mxfp8_e4m3", 60, [35, 35, 58]),
    ("mxfp8_e4m3", 7, [1] * 40 + [2] * 29 + [7]),
    ("mxfp8_e4m3", 64, [61]),
    ("mxfp8_e4m3", 50, [40, 45, 47]),
    ("fp8_e4m3_1x128", 150, [100, 150]),
    ("mxfp8_e4m3", 9, [0, 0, 0]),
]


def weights(n, k, w_fmt, count, lies="rows"):
    """Some different ones, again and again, and the stack of all."""
    some = [packed(spread(n, k, 4, 100 + i), w_fmt, lies)[0] for i in range(min(count, 4))]
    each = [some[i % len(some)] for i in range(count)]
    return each, stack_of(each)


def loop(each, w_fmt, x, out, ends, bias, **how):
    at = 0
    for i, end in enumerate(ends):
        if end > at:
            one = each[i]
            decode(one, w_fmt, x[at:end], out[at:end], x.shape[1], bias=bias[i], **how)
            at = end
    out[at:] = 0
    return out


@pytest.mark.parametrize(("exact", "lies"), [(False, "rows"), (False, "packed"), (True, "rows")])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_groups_have_the_bits_of_a_call_each(case, exact, lies):
    w_fmt, m, ends = CASES[case]
    n, k = [(80, 300), (64, 700), (130, 256)][case % 3]
    each, stack = weights(n, k, w_fmt, len(ends), lies)
    x, bias = spread(m, k, 4, 2).to(BF16), torch.randn(len(ends), n, device="cuda")
    there = torch.tensor(ends, dtype=(torch.int32, torch.int64)[case % 2], device="cuda")
    how = {"exact": exact, "rule": rule_of(w_fmt, case % 2), "act": (None, 3)[case % 2]}
    how["split"] = case % 2
    out_dtype = (F32, BF16)[case // 2 % 2]
    out = torch.empty(m, n, dtype=out_dtype, device="cuda")
    decode(stack, w_fmt, x, out, k, ends=there, bias=bias, **how)
    expected = loop(each, w_fmt, x, torch.empty_like(out), ends, bias, **how)
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("split", range(16))
def test_every_split(split):
    n, k, ends = 200, 1300, [2, 2, 20, 21, 33]
    each, stack = weights(n, k, "mxfp8_e4m3", len(ends))
    x, bias = spread(35, k, 4, 2).to(BF16), torch.zeros(len(ends), n, device="cuda")
    out = torch.empty(35, n, device="cuda")
    decode(stack, "mxfp8_e4m3", x, out, k, ends=torch.tensor(ends, device="cuda"), split=split)
    expected = loop(each, "mxfp8_e4m3", x, torch.empty_like(out), ends, bias, split=split)
    assert torch.equal(bits(out), bits(expected))


def test_ends_that_are_none_are_cut_off():
    """Ends that fall or lie outside are taken for the nearest that may be."""
    n, k = 48, 128
    each, stack = weights(n, k, "mxfp8_e4m3", 4)
    x, bias = spread(20, k, 4, 2).to(BF16), torch.zeros(4, n, device="cuda")
    for given, meant in (([5, 3, 30, 1], [5, 5, 20, 20]), ([-4, 6, -1, 8], [0, 6, 6, 8])):
        out = torch.empty(20, n, device="cuda")
        ends = torch.tensor(given, dtype=torch.int32, device="cuda")
        decode(stack, "mxfp8_e4m3", x, out, k, ends=ends, split=0)
        expected = loop(each, "mxfp8_e4m3", x, torch.empty_like(out), meant, bias, split=0)
        assert torch.equal(bits(out), bits(expected))


def level(seed, rows, k):
    """Rows whose blocks have one scale: aligning them, as one weight in tiles has it, is exact."""
    x = spread(rows, k, 4, seed).clamp_(-4, 4)
    x[:, ::32] = 4
    return x.to(BF16)


def level_groups(groups, rows, k):
    return torch.stack([level(10 + i, rows, k) for i in range(groups)]) * 2**-6


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("w_fmt", ["mxfp8_e4m3", "mxfp4", "fp8_e4m3_128x128"])
def test_frozen_groups_in_a_cuda_graph(w_fmt, drop):
    recipe = recipe_of(w_fmt)
    n, k = 400, 512
    layer = te_mx.GroupedLinear(4, k, n, dtype=BF16, device="cuda")
    linears = [te_mx.Linear(k, n, dtype=BF16, device="cuda") for _ in range(4)]
    for i, (linear, plain) in enumerate(zip(linears, level_groups(4, n, k), strict=True)):
        linear.weight.data.copy_(plain), layer.weights()[i].data.copy_(plain)
        linear.bias.data.copy_(layer.biases()[i])
        te_mx.freeze_weights(linear, recipe=recipe)
    te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe)
    x, splits = level(2, 20, k), torch.tensor([3, 0, 9, 5], device="cuda")

    def forward():
        with torch.no_grad(), te_mx.autocast(recipe=recipe):
            return layer(x, splits)

    def expected():
        out, at = torch.zeros(20, n, dtype=BF16, device="cuda"), 0
        with torch.no_grad(), te_mx.autocast(recipe=recipe):
            for linear, rows in zip(linears, splits.tolist(), strict=True):
                if rows:
                    out[at : at + rows] = linear(x[at : at + rows])
                at += rows
        return out

    # K may be cut in other places than for one weight alone: a rounding of bf16 apart.
    torch.testing.assert_close(forward(), expected(), rtol=2**-7, atol=1e-3)
    assert LAST_RUN[layer._tag] == kernel_of(w_fmt)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for seed, given in ((3, [0, 20, 0, 0]), (4, [1, 1, 0, 2])):
        x.copy_(level(seed, 20, k))
        splits.copy_(torch.tensor(given))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, forward())
        torch.testing.assert_close(out, expected(), rtol=2**-7, atol=1e-3)
