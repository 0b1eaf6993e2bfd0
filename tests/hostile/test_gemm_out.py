"""out= of te_mx.gemm and te_mx.grouped_wgrad: what it may not share, and what autograd knows."""

from __future__ import annotations

import pytest
import torch

import te_mx

N, M, K = 96, 64, 64
F32 = torch.float32


@pytest.fixture
def sides():
    return te_mx.quantize(torch.randn(M, K), columnwise=True), te_mx.quantize(torch.randn(N, K))


def memory(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def refuses(match: str, error=ValueError):
    return pytest.raises(error, match=match)


def unchanged(out, call, match, error=ValueError):
    """The call is refused and has written nothing."""
    before = out.detach().clone()
    with refuses(match, error):
        call()
    assert torch.equal(out.detach(), before)


@pytest.mark.parametrize("row", [0, 3, N - 1])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_row_as_the_bias(sides, row, compiled):
    out = torch.randn(N, M)

    def call(out):
        return te_mx.gemm(*sides, bias=out[row], out=out).out

    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="eager")
    unchanged(out, lambda: call(out), "out and bias share memory; pass another out")


def test_functionalized_code_copies_instead(sides):
    """As it does for every op of torch that writes over what it reads."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda out: te_mx.gemm(*sides, bias=out[0], out=out).out, fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    out = torch.randn(N, M)
    expected = te_mx.gemm(*sides, bias=out[0].clone(), out_dtype=F32).out
    assert torch.equal(compiled(out), expected) and torch.equal(out, expected)


def test_a_strided_bias_inside(sides):
    held = torch.randn(N, 2 * M)
    out = held.view(2 * N, M)[:N]
    bias = held[:, 0][:M]
    unchanged(out, lambda: te_mx.gemm(*sides, bias=bias, out=out), "out and bias share memory")


@pytest.mark.parametrize("shift", [0, 1, -1, N * M - 1])
def test_gelu_in(sides, shift):
    held = torch.randn(3 * N * M)
    at = N * M
    out, gelu_in = held[at : 2 * at].view(N, M), held[at + shift :][:at].view(N, M)
    unchanged(
        out, lambda: te_mx.gemm(*sides, grad=True, gelu_in=gelu_in, out=out),
        "out and gelu_in share memory",
    )  # fmt: skip


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("part", ["codes", "scales"])
def test_the_operands(sides, side, part):
    held = memory(N * M * 4 + 64)
    rows = M if side == "A" else N
    data, scale = torch.zeros(rows, K, dtype=torch.uint8), torch.zeros(rows, 2, dtype=torch.uint8)
    if part == "codes":
        data = held[-data.numel() :].view(data.shape)
    else:
        scale = held[64 - 1 :][: scale.numel()].view(scale.shape)
    q = te_mx.MXTensor((rows, K), "e4m3", rowwise_data=data, rowwise_scale=scale)
    out = held[: N * M * 4].view(F32).view(N, M)
    a, b = (q, sides[1]) if side == "A" else (sides[0], q)
    call = lambda: te_mx.gemm(a, b, out=out)  # noqa: E731
    unchanged(out, call, f"out and the {part} of {side} share memory")


def test_neighbours_share_nothing(sides):
    held = torch.randn(M + N * M + N * M)
    bias, out, gelu_in = held[:M], held[M:][: N * M].view(N, M), held[M + N * M :].view(N, M)
    expected = te_mx.gemm(*sides, bias=bias.clone(), out_dtype=F32).out
    assert torch.equal(te_mx.gemm(*sides, bias=bias, out=out).out, expected)
    expected = te_mx.gemm(*sides, grad=True, gelu_in=gelu_in.clone(), out_dtype=F32).out
    assert torch.equal(te_mx.gemm(*sides, grad=True, gelu_in=gelu_in, out=out).out, expected)


def test_meta_tensors_share_nothing():
    a, b = (te_mx.quantize(torch.empty(r, K, device="meta")) for r in (M, N))
    out, gelu_in = (torch.empty(N, M, device="meta") for _ in range(2))
    assert te_mx.gemm(a, b, grad=True, gelu_in=gelu_in, out=out).out is out


@pytest.mark.parametrize("leaf", [True, False])
def test_what_requires_grad(sides, leaf):
    out = torch.zeros(N, M, requires_grad=True)
    out = out if leaf else out * 1
    unchanged(out, lambda: te_mx.gemm(*sides, out=out), "pass out.detach", RuntimeError)
    with torch.no_grad():
        te_mx.gemm(*sides, out=out)
    assert out.abs().max() > 0


def test_autograd_notices_what_was_written(sides):
    x = torch.zeros(N, M, requires_grad=True)
    z = x * 1
    loss = (z * z).sum()
    te_mx.gemm(*sides, out=z.detach())
    with refuses("modified by an inplace operation", RuntimeError):
        loss.backward()


def test_expanded_and_negative_outputs(sides):
    with refuses("out must be contiguous"):
        te_mx.gemm(*sides, out=torch.empty(1, M).expand(N, M))
    out = torch._neg_view(torch.zeros(N, M))
    unchanged(out, lambda: te_mx.gemm(*sides, out=out), "out is a negative view")


@pytest.mark.parametrize("part", ["real", "imag"])
def test_negative_views_of_what_is_read(sides, part):
    """The imaginary part of a conjugate is one."""
    made = torch.randn(N, M, dtype=torch.complex64).conj()
    view = getattr(made, part)
    plain = view.resolve_neg().clone()
    for grad in (False, True):
        # As bias of the forward, as gelu_in of the backward.
        arguments = ({"bias": view[0]}, {"bias": plain[0]}) if not grad else (
            {"gelu_in": view, "grad": True}, {"gelu_in": plain, "grad": True})  # fmt: skip
        got, expected = (te_mx.gemm(*sides, **each, out_dtype=F32).out for each in arguments)
        assert torch.equal(got, expected)
    got, expected = te_mx.quantize(view, columnwise=True), te_mx.quantize(plain, columnwise=True)
    assert got.equal(expected)
    codes = te_mx.quantize(plain)
    with refuses("negative view, whose bytes are not its codes"):
        te_mx.MXTensor(
            (N, M), "e4m3", rowwise_data=torch._neg_view(codes.rowwise_data),
            rowwise_scale=codes.rowwise_scale,
        )  # fmt: skip


# ------------------------------------------------------------------------------------ grouped_wgrad
def wgrad(**changed):
    arguments = {"grad": torch.randn(40, 24), "inp": torch.randn(40, 32)}
    return te_mx.grouped_wgrad(**{**arguments, **changed}, offs=torch.tensor([10, 40]))


def test_grouped_wgrad_out():
    out = torch.zeros(2, 24, 32)
    with refuses("out is torch.float32 but out_dtype is torch.float16; leave out_dtype away"):
        wgrad(out=out, out_dtype=torch.float16)
    held = torch.randn(2 * 24 * 32)
    with refuses("out and grad share memory"):
        wgrad(out=held.view(2, 24, 32), grad=held[: 40 * 24].view(40, 24))
    with refuses("out and inp share memory"):
        wgrad(out=held.view(2, 24, 32), inp=held[-40 * 32 :].view(40, 32))
    with refuses("out is a negative view"):
        wgrad(out=torch._neg_view(out))
    with refuses(r"out must be contiguous \(2, 24, 32\)"):
        wgrad(out=torch.empty(1, 24, 32).expand(2, 24, 32))
    with refuses("out requires grad", RuntimeError):
        wgrad(out=out.clone().requires_grad_())
    assert not out.any()
    with torch.no_grad():
        assert wgrad(out=out.requires_grad_(), out_dtype=F32).abs().max() > 0
    assert not wgrad(inp=torch.randn(40, 32, requires_grad=True)).requires_grad
