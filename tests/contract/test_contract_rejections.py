"""Calls that no kernel may see: each is refused by name while nothing runs, for formats of each
kind of scale and code. What is only unusual, as codes at odd addresses, gives the usual result.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import te_mx
from te_mx import formats
from te_mx.dispatch import run

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
FORMATS = ["mxfp8_e4m3", "mxfp4", "mxfp6_e2m3", "fp8_e4m3_1x128"]
each = pytest.mark.parametrize("fmt", FORMATS)
M, N, K, G = 24, 20, 160, 3
U8, F32, BF16 = torch.uint8, torch.float32, torch.bfloat16


def quantized(fmt, *shape, **how):
    torch.manual_seed(len(shape))
    return te_mx.quantize(torch.randn(*shape), fmt=fmt, **how)


def parts(fmt, *shape):
    """Codes and scales of rows, as ops hold them."""
    q = quantized(fmt, *shape)
    known = formats.get(fmt)
    return q.rowwise_data.view(U8), q.rowwise_scale.view(known.scaling.storage)


@pytest.fixture
def nothing_runs(monkeypatch):
    """Makes the operands first: from `nothing_runs()` on any kernel is a failure."""

    def forbid():
        def launched(*args, **kwargs):
            raise AssertionError("a kernel ran")

        for name in ("run", "gemm", "quantize", "dequantize", "convert"):
            monkeypatch.setattr(run, name, launched)

    return forbid


def refused(call, says, error=(ValueError, TypeError)):
    with pytest.raises(error) as caught:
        call()
    assert re.search(says, str(caught.value)), str(caught.value)


# ----------------------------------------------------------------------------------------- operands
@each
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c, s: (c.t().contiguous(), s), r"rowwise_data must have shape"),  # k first
        (lambda c, s: (torch.zeros(M, 2 * c.shape[1], dtype=U8), s), "rowwise_data must have sh"),
        (lambda c, s: (c[:, :-1], s), "rowwise_data must have shape"),
        (lambda c, s: (c.view(torch.int8), s), "rowwise_data must be uint8"),
        (lambda c, s: (c.int(), s), "rowwise_data must be uint8"),
        (lambda c, s: (c, s[:, :-1]), "rowwise_scale must have shape"),
        (lambda c, s: (c, s.t().contiguous()), "rowwise_scale must have shape"),
        (lambda c, s: (c, torch.cat([s, s[:, :1]], 1)), "rowwise_scale must have shape"),
        (lambda c, s: (c, s.double()), "rowwise_scale must be"),
        (lambda c, s: (c, s.to("meta")), "move them to one device"),
        (lambda c, s: (c, None), "without rowwise_scale"),
    ],
)
def test_parts_of_an_operand(fmt, change, says, nothing_runs):
    codes, scales = change(*parts(fmt, M, K))
    nothing_runs()
    refused(lambda: te_mx.MXTensor((M, K), fmt, rowwise_data=codes, rowwise_scale=scales), says)


def test_codes_of_one_format_under_the_name_of_another(nothing_runs):
    """Four bits are no eight, nor six: bytes are counted."""
    held = {fmt: parts(fmt, M, K) for fmt in FORMATS}
    nothing_runs()
    for fmt, (codes, scales) in held.items():
        for other in FORMATS:
            if other != fmt:
                refused(
                    lambda o=other, c=codes, s=scales: te_mx.MXTensor(
                        (M, K), o, rowwise_data=c, rowwise_scale=s
                    ),
                    "rowwise_(data|scale) must",
                )


# -------------------------------------------------------------------------------------------- gemm
@each
def test_gemm(fmt, nothing_runs):
    a, b = quantized(fmt, M, K), quantized(fmt, N, K)
    short, across = quantized(fmt, N, K - 1), quantized(fmt, N, K, rowwise=False, columnwise=True)
    out, turned, wide = torch.zeros(N, M), torch.zeros(M, N).t(), torch.zeros(N, M + 1)
    nothing_runs()
    refused(lambda: te_mx.gemm(a, short), "TN needs the same k in A .* and B")
    refused(lambda: te_mx.gemm(a, across), "reads the rowwise copy of B")  # the other majorness
    refused(lambda: te_mx.gemm(a, b, "NN"), "reads the columnwise copy of A")
    refused(lambda: te_mx.gemm(a, b, "NT"), "reads the columnwise copy of A")
    refused(lambda: te_mx.gemm(a, b, out=turned), "out must be contiguous")
    refused(lambda: te_mx.gemm(a, b, out=wide[:, 1:]), "out must be contiguous")
    refused(lambda: te_mx.gemm(a, b, out=out[1:]), r"out must have shape \(20, 24\)")
    refused(lambda: te_mx.gemm(a, b, out=out.double()), "out must be float32, bfloat16 or float16")
    refused(lambda: te_mx.gemm(a, b, out_dtype=torch.int32), "out_dtype must be float32")
    refused(lambda: te_mx.gemm(a, b, out_dtype=torch.float8_e4m3fn), "out_dtype must be float32")
    refused(lambda: te_mx.gemm(a, b, bias=torch.ones(N)), r"bias must have shape \(24,\)")
    refused(lambda: te_mx.gemm(a, b, accumulate=True), "accumulate")
    assert not out.any() and not wide.any()


@each
@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("part", ["codes", "scales"])
def test_out_in_the_memory_of_an_operand(fmt, side, part, nothing_runs):
    """Codes that start, and scales that end, where out lies."""
    rows, other = (M, quantized(fmt, N, K)) if side == "A" else (N, quantized(fmt, M, K))
    codes, scales = parts(fmt, rows, K)
    held = torch.zeros(N * M * 4 + codes.nbytes + scales.nbytes, dtype=U8)
    at = N * M * 4 - 4
    if part == "codes":
        codes = held[at : at + codes.nbytes].view(codes.shape)
    else:
        scales = held[at : at + scales.nbytes].view(scales.dtype).view(scales.shape)
    q = te_mx.MXTensor((rows, K), fmt, rowwise_data=codes, rowwise_scale=scales)
    out = held[: N * M * 4].view(F32).view(N, M)
    pair = (q, other) if side == "A" else (other, q)
    nothing_runs()
    refused(lambda: te_mx.gemm(*pair, out=out), f"out and the {part} of {side} share memory")
    refused(lambda: te_mx.gemm(*pair, out=out, bias=out[3]), "share memory")
    assert not held.any()


# ------------------------------------------------------------------------------------------ grouped
def weights(fmt):
    return quantized(fmt, G, N, K)


ENDS = torch.tensor([8, 8, M])
OFFSETS = [
    ([8, 8, M + 1], "at most the 24 rows there are"),
    ([-1, 8, M], "offs must be end offsets that rise from 0"),
    ([16, 8, M], "group 1 would be rows 16 to 8"),
    ([0, 0, 2**40], "at most the 24 rows there are"),
    ([0, 0, -(2**63)], "offs must be end offsets that rise"),
]


@each
def test_grouped_gemm(fmt, nothing_runs):
    x, w = quantized(fmt, M, K), weights(fmt)
    masked = quantized(fmt, G, 8, K)
    short, across = (
        quantized(fmt, G, N, K - 32),
        quantized(fmt, G, N, K, rowwise=False, columnwise=True),
    )
    nothing_runs()
    call = te_mx.grouped_gemm
    refused(lambda: call(x, short, offs=ENDS), r"inp must be \[R, 128\]")
    refused(lambda: call(x, across, offs=ENDS), "weight has no rowwise copy")
    refused(lambda: call(x, x, offs=ENDS), r"weight must be \[G, N, K\]")
    refused(lambda: call(masked, w, offs=ENDS), r"inp must be \[R, 160\]")
    refused(lambda: call(x, w, masked_m=ENDS), r"inp must be \[3, M_max, 160\]")
    refused(lambda: call(x, w, offs=ENDS[:2]), r"offs must have shape \(3,\)")
    refused(lambda: call(x, w, offs=ENDS.short()), "offs must be an int32 or int64 tensor")
    refused(lambda: call(x, w, offs=ENDS.to("meta")), "move offs there or to the CPU")
    refused(lambda: call(x, w, offs=ENDS, bias=torch.ones(N)), r"bias must be \[3, 20\]")
    refused(lambda: call(x, w, offs=ENDS, out_dtype=torch.float64), "out_dtype must be float32")
    refused(lambda: call(x, w, offs=ENDS, alignment=0), "alignment must be 1 or more")
    refused(lambda: call(masked, w, masked_m=ENDS, alignment=8), "leave it away with masked_m")
    for ends, says in OFFSETS:
        for alignment in (1, 4):
            offs = torch.tensor(ends)
            refused(lambda o=offs, a=alignment: call(x, w, offs=o, alignment=a), says)
    refused(lambda: call(masked, w, masked_m=torch.tensor([0, 9, 8])), "must be 0 to M_max = 8")
    refused(lambda: call(masked, w, masked_m=torch.tensor([0, -1, 8])), "must be 0 to M_max = 8")
    refused(lambda: call(x, w, index=torch.full((M,), G)), "below the 3 groups")


@each
def test_grouped_functions_that_quantize(fmt, nothing_runs):
    x, g, w = torch.ones(M, K), torch.ones(M, N), weights(fmt)
    held = torch.zeros(G * N * K)
    out = held.view(G, N, K)
    nothing_runs()
    for ends, says in OFFSETS:
        offs = torch.tensor(ends)
        refused(lambda o=offs: te_mx.grouped_linear(x, w, offs=o), says)
        refused(lambda o=offs: te_mx.grouped_wgrad(g, x, o, alignment=4), says)
    refused(lambda: te_mx.grouped_linear(x[:, :-1], w, offs=ENDS), r"inp must be \[R, 160\]")
    refused(lambda: te_mx.grouped_linear(x.double(), w, offs=ENDS), "float32, bfloat16 or float16")
    refused(
        lambda: te_mx.grouped_linear(x.requires_grad_(), w, offs=ENDS),
        "gradients do not flow where weights are MXTensors", RuntimeError,
    )  # fmt: skip
    x = x.detach()
    refused(lambda: te_mx.grouped_wgrad(g, x, ENDS, out=out.mT), "out must be contiguous")
    refused(lambda: te_mx.grouped_wgrad(g, x, ENDS, out=out.double()), "float32, bfloat16 or fl")
    shared = held[: M * K].view(M, K)
    refused(lambda: te_mx.grouped_wgrad(g, shared, ENDS, out=out), "out and inp share memory")
    assert not held.any()


def lists():
    return te_mx.moe.align_block_size(torch.tensor([[0, 1], [2, 0], [1, 2]]), 4, G)


@each
def test_routed_products(fmt, nothing_runs):
    """What is written shares no memory with what is read, and stays as it is after an error."""
    size = formats.get(fmt).codes_shape(G * N, K)
    held, lists_ = torch.zeros(1 << 16, dtype=U8), lists()
    codes = held[: size[0] * size[1]].view(size)
    w = te_mx.MXTensor(
        (G, N, K), fmt, rowwise_data=codes, rowwise_scale=quantized(fmt, G, N, K).rowwise_scale
    )
    x, other = quantized("mxfp8_e4m3", 3, K), weights(fmt)
    call = te_mx.moe.grouped_gemm
    how = {"top_k": 2, "block_m": 4, "zero_unrouted": True}
    wrong = quantized("mxfp4+rht32:0x3", 3, K)
    nothing_runs()
    out = held[: 6 * N * 4].view(F32).view(6, N)
    refused(lambda: call(x, w, *lists_, out=out, **how), "out and the codes of w share memory")
    out = x.rowwise_data.view(U8).view(-1)[: 6 * N * 2].view(BF16).view(6, N)
    refused(lambda: call(x, other, *lists_, out=out, **how), "out and the codes of a share memory")
    room = torch.full((6, N), 5.0)
    for at, name in ((1, "expert_ids"), (2, "num_tokens_post_padded")):
        given = list(lists_)
        given[at] = room.view(torch.int32).view(-1)[: len(lists_[at])].copy_(lists_[at])
        refused(lambda g=given: call(x, other, *g, out=room, **how), f"out and {name} share")
    room.fill_(5.0)
    refused(lambda: call(wrong, other, *lists_, out=room, **how), "same Hadamard transform")
    assert bool((room == 5).all())
    refused(lambda: call(x, torch.ones(G, N, K), *lists_, **how), r"moe.grouped_gemm: w must be")


@each
def test_what_grouped_gemm_writes(fmt, nothing_runs):
    held, w = torch.zeros(M * K, dtype=U8), weights(fmt)
    x = te_mx.MXTensor(
        (M, K), "mxfp8_e4m3", rowwise_data=held.view(M, K),
        rowwise_scale=quantized("mxfp8_e4m3", M, K).rowwise_scale,
    )  # fmt: skip
    nothing_runs()
    for out, more, says in (
        (None, {"accumulate": True}, "pass the tensor as out="),
        (torch.zeros(M, N + 1), {}, "out must be contiguous"),
        (torch.zeros(N, M).t(), {}, "out must be contiguous"),
        (torch.zeros(M, N), {"out_dtype": torch.float16}, "out is torch.float32 but out_dtype"),
        (torch.zeros(M, N).double(), {}, "out must be float32, bfloat16 or float16"),
        (held[: M * N * 2].view(BF16).view(M, N), {}, "out and the codes of inp share memory"),
    ):
        refused(lambda o=out, m=more: te_mx.grouped_gemm(x, w, offs=ENDS, out=o, **m), says)


@each
def test_memory_at_addresses_between_elements(fmt, nothing_runs):
    a, b, w = quantized(fmt, M, K), quantized(fmt, N, K), weights(fmt)
    bias, biases, out = torch.ones(M), torch.ones(G, N), torch.zeros(N, M)
    x, lists_, ids = quantized("mxfp8_e4m3", 3, K), lists(), ENDS.int()
    how = {"top_k": 2, "block_m": 4}
    nothing_runs()
    says = "must start at a multiple of its 4 bytes an element, got an address of"
    for by in (1, 2):
        refused(lambda by=by: te_mx.gemm(a, b, bias=displaced(bias, by)), f"bias {says} {by}")
        refused(lambda by=by: te_mx.gemm(a, b, out=displaced(out, by)), f"out {says}")
        refused(lambda by=by: te_mx.grouped_gemm(b, w, offs=displaced(ids, by)), f"offs {says}")
        refused(
            lambda by=by: te_mx.grouped_gemm(b, w, offs=ids, bias=displaced(biases, by)),
            f"bias {says}",
        )
        moved = displaced(lists_[0].int(), by)
        refused(
            lambda m=moved: te_mx.moe.grouped_gemm(x, w, m, *lists_[1:], **how),
            f"sorted_token_ids {says}",
        )


# ------------------------------------------------------------------------------ unusual, and legal
def displaced(tensor, by):
    """The same values `by` bytes behind an address that every kernel likes."""
    room = np.zeros(tensor.nbytes + 64 + by, np.uint8)
    at = -room.ctypes.data % 64 + by
    held = room[at : at + tensor.nbytes].view(f"u{tensor.element_size()}")  # torch.view refuses it
    return torch.from_numpy(held).view(tensor.dtype).view(tensor.shape).copy_(tensor)


@each
@pytest.mark.parametrize("by", [1, 3, 4, 8])
def test_memory_at_odd_addresses(fmt, by):
    rows = {}
    for name, size in (("A", M), ("B", N)):
        codes, scales = parts(fmt, size, K)
        to = by if scales.element_size() == 1 else 4
        rows[name] = te_mx.MXTensor(
            (size, K), fmt, rowwise_data=displaced(codes, by), rowwise_scale=displaced(scales, to)
        )
    bias = torch.randn(M)
    expected = te_mx.gemm(quantized(fmt, M, K), quantized(fmt, N, K), bias=bias, out_dtype=F32).out
    out = displaced(torch.zeros(N, M), 4)
    te_mx.gemm(rows["A"], rows["B"], bias=displaced(bias, 4), out=out)
    assert torch.equal(out, expected)
    half = displaced(torch.zeros(N, M, dtype=BF16), 2)
    te_mx.gemm(rows["A"], rows["B"], bias=bias, out=half)
    assert torch.equal(half, expected.bfloat16())
    y = te_mx.grouped_gemm(rows["B"], [rows["A"]] * 2, offs=torch.tensor([7, N]), out_dtype=F32)
    plain = te_mx.grouped_gemm(
        quantized(fmt, N, K), [quantized(fmt, M, K)] * 2, offs=torch.tensor([7, N]), out_dtype=F32
    )
    assert torch.equal(y, plain)
