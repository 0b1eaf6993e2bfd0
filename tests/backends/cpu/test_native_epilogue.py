"""The native block epilogues against fp64, at every instruction-set level.

Zero operands make the accumulators 0, so that the bias feeds any value straight into the epilogue.
"""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_words import GemmCall, Operand
from torch import Tensor

from te_mx.backends.cpu import binding as cpu
from te_mx.dispatch.calls import Epilogue
from te_mx.runtime import workspace

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")

PANEL_KERNELS = ("portable_f32", "avx2_f32", "avx512_f32", "avx512_bf16", "amx_bf16", "wide_f64")
EPS = 2.0**-24
ONE = 0x38  # 1.0 in E4M3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = ("avx512_bf16", "amx_bf16")  # the kernels of blocks of 32 x 32
KERNELS = [name for name in PANEL_KERNELS if cpu.kernel_available(name)]


def run(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None = None,
    kernel: str = "portable_f32",
) -> Tensor | None:  # fmt: skip
    """One native call with guard bytes behind its workspace; returns the bias gradient."""
    call = GemmCall(kernel, a, b, epilogue, out, aux)
    nbytes = call.workspace_bytes()
    with workspace.guarded():
        scratch = workspace.acquire(torch.device("cpu"), nbytes)
        assert call.run(scratch, nbytes) in (kernel, "wide_f64")
        workspace.release(scratch, nbytes)
    return call.bias_grad


def operand(values: Tensor, fmt: str = "e4m3") -> tuple[Operand, np.ndarray]:
    """A quantized matrix and its exact values."""
    codes, scales = oracles.quantize(oracles.numpy_of(values), fmt, "rceil")
    exact = oracles.values(codes, scales, fmt)
    return Operand(torch.from_numpy(codes), torch.from_numpy(scales), fmt, "k_last"), exact


def constant(rows: int, code: int) -> Operand:
    """[rows, 1] of one code."""
    codes = torch.full((rows, 1), code, dtype=torch.uint8)
    return Operand(codes, torch.full((rows, 1), 127, dtype=torch.uint8), "e4m3", "k_last")


def all_bf16() -> Tensor:
    """Every finite bf16 value, as fp32 [65280]."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).float()
    return x[torch.isfinite(x)]


def through(bias: Tensor, out_dtype: torch.dtype, gelu: str | None = None) -> Tensor:
    """The epilogue of accumulators 0 and this bias, [1, n]."""
    out = torch.empty(1, len(bias), dtype=out_dtype)
    aux = torch.empty(1, len(bias)) if gelu else None
    run(constant(len(bias), 0), constant(1, 0), Epilogue(bias=bias, gelu=gelu), out, aux)
    return out[0]


def exact_gelu(x: np.ndarray, form: str) -> np.ndarray:
    """x Phi(x) or x / (1 + exp(-2u)) in fp64, without the cancellation of 1 + erf and 1 + tanh."""
    with np.errstate(over="ignore"):
        if form == "erf":
            return x * 0.5 * torch.special.erfc(torch.from_numpy(-x / np.sqrt(2))).numpy()
        return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_gelu_of_every_bf16(isa: str, form: str) -> None:
    x = all_bf16()
    got = through(x, torch.float32, form).double().numpy()
    x64 = x.double().numpy()
    expected = exact_gelu(x64, form)
    tail = np.where(x64 < -2, 4 * np.minimum(x64 * x64, 1e4), 0)
    allowed = (16 + tail) * EPS * np.abs(expected) + 2.0**-140
    worst = np.argmax(np.abs(got - expected) / allowed)
    assert abs(got[worst] - expected[worst]) <= allowed[worst], (x64[worst], got[worst])


@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_gelu_derivative_at_every_bf16(isa: str, form: str) -> None:
    x = all_bf16().clamp(-1e15, 1e15)  # the oracle's x^3 must stay finite
    out = torch.empty(1, len(x))
    gelu_in = x.to(torch.bfloat16).view(1, -1)
    run(constant(len(x), ONE), constant(1, ONE), Epilogue(gelu=form, gelu_in=gelu_in), out)
    x64 = gelu_in[0].double().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.where(np.abs(x64) > 40, x64 > 0, oracles.dgelu(x64, form))
    # Near its zero at -0.75 the derivative is a difference of two terms of size 1/4.
    allowed = 16 * EPS * np.maximum(np.abs(expected), 0.25)
    got = out[0].double().numpy()
    worst = np.argmax(np.abs(got - expected) / allowed)
    assert abs(got[worst] - expected[worst]) <= allowed[worst], (x64[worst], got[worst])


@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_gelu_of_nan_and_inf(isa: str, form: str) -> None:
    ends = torch.tensor([torch.nan, torch.inf, 1e30, -1e30, 0.0, -0.0])
    got = through(ends, torch.float32, form)
    expected = torch.tensor([torch.nan, torch.inf, 1e30, -0.0, 0.0, 0.0])
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[1:], expected[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_rounds_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    """Halfway cases, subnormals, overflow, NaN: the bits of torch's own conversion."""
    bits = torch.arange(0x10000, dtype=torch.int64).repeat_interleave(6) << 16
    low = torch.tensor([0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001]).repeat(0x10000)
    x = (bits + low).to(torch.int32).view(torch.float32)
    got, expected = through(x, dtype), (x + 0.0).to(dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert torch.equal(got[keep], expected[keep])


@pytest.mark.parametrize("kernel", KERNELS)
def test_scaling_rounds_once_at_every_exponent(kernel: str) -> None:
    """K = 1, all pairs of scale bytes: one product, exact in fp64, is rounded once to fp32."""
    bytes_ = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    codes_a = torch.tensor([0x3F, 0x01, 0xFE, 0x35], dtype=torch.uint8).repeat(64).view(-1, 1)
    codes_b = torch.tensor([0x3B, 0xBD, 0x03], dtype=torch.uint8).repeat(86)[:256].view(-1, 1)
    a, b = Operand(codes_a, bytes_, "e4m3", "k_last"), Operand(codes_b, bytes_, "e4m3", "k_last")
    out = torch.empty(256, 256)
    run(a, b, Epilogue(), out, kernel=kernel)
    va, vb = (oracles.values(o.codes.numpy(), o.scales.numpy(), "e4m3") for o in (a, b))
    with np.errstate(over="ignore"):
        expected = torch.from_numpy((vb @ va.T).astype(np.float32))
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(0), expected.nan_to_num(0))


def test_nan_block_reaches_its_row_only(isa: str) -> None:
    a, _ = operand(torch.randn(40, 64))
    b, _ = operand(torch.randn(35, 64))
    a.scales[3, 1] = 255
    out = torch.empty(35, 40, dtype=torch.bfloat16)
    run(a, b, Epilogue(bias=torch.ones(40)), out)
    assert out[:, 3].isnan().all()
    assert not out[:, torch.arange(40) != 3].isnan().any()


@given(
    rows=strategies.POSITIVE, cols=strategies.POSITIVE, seed=strategies.SEEDS,
    dtypes=st.tuples(*[strategies.DTYPES] * 4), gelu=st.sampled_from([None, "tanh", "erf"]),
    backward=st.booleans(), with_bias=st.booleans(), accumulate=st.booleans(),
    bias_grad=st.booleans(), kernel=st.sampled_from(KERNELS),
)  # fmt: skip
def test_all_steps_together(
    isa: str, rows: int, cols: int, seed: int, dtypes: tuple[torch.dtype, ...], gelu: str | None,
    backward: bool, with_bias: bool, accumulate: bool, bias_grad: bool, kernel: str,
) -> None:  # fmt: skip
    if not cpu.kernel_available(kernel):
        return
    torch.manual_seed(seed % 2**31)
    out_dtype, bias_dtype, aux_dtype, in_dtype = dtypes
    a, exact_a = operand(torch.randn(cols, 33))
    b, exact_b = operand(torch.randn(rows, 33))
    bias = torch.randn(cols).to(bias_dtype) if with_bias else None
    gelu_in = torch.randn(rows, cols).to(in_dtype) if gelu and backward else None
    aux = torch.empty(rows, cols, dtype=aux_dtype) if gelu and not backward else None
    out = torch.randn(rows, cols).to(out_dtype)
    before = out.double().numpy()
    kind = "result" if bias_grad else None
    grad = run(a, b, Epilogue(bias, gelu, gelu_in, kind, accumulate), out, aux, kernel)

    v = exact_b @ exact_a.T
    bound = oracles.gemm_bound(exact_a, exact_b)
    if bias is not None:
        v = v + bias.double().numpy()
        bound = bound + EPS * np.abs(v)
    if aux is not None:
        assert_close(aux, v, bound)
    if gelu_in is not None:
        factor = oracles.dgelu(gelu_in.double().numpy(), gelu)
        bound = bound * np.abs(factor) + (np.abs(v) + bound) * 20 * EPS
        v = v * factor
    elif gelu is not None:
        bound = 1.13 * bound + 20 * EPS * np.abs(v)  # no slope of GELU is above 1.13
        v = exact_gelu(v, gelu)
    if grad is not None:
        error = np.abs(grad.double().numpy() - v.sum(0))
        assert (error <= bound.sum(0) + rows * EPS * (np.abs(v) + bound).sum(0)).all()
    if accumulate:
        v = v + before
        bound = bound + EPS * np.abs(v)
    assert_close(out, v, bound)


def assert_close(got: Tensor, exact: np.ndarray, bound: np.ndarray) -> None:
    """Within the bound and one rounding to the dtype of got."""
    error = np.abs(got.double().numpy() - exact)
    allowed = bound + oracles.half_ulp(np.abs(exact) + bound, got.dtype)
    assert (error <= allowed).all(), (error / allowed).max()


def test_bias_gradient_does_not_depend_on_threads(isa: str, threads) -> None:
    a, _ = operand(torch.randn(200, 96))
    b, _ = operand(torch.randn(300, 96))
    grads = []
    for count in (1, 2, 3, 7):
        threads(count)
        out = torch.empty(300, 200)
        grads.append(run(a, b, Epilogue(bias_grad="result"), out))
        torch.testing.assert_close(grads[-1], out.sum(0), rtol=1e-5, atol=1e-4)
    assert all(torch.equal(grads[0], grad) for grad in grads[1:])


def part_of(o: Operand, rows: int) -> Operand:
    """The first rows of an operand."""
    return o._replace(codes=o.codes[:rows].clone(), scales=o.scales[:rows].clone())


@pytest.mark.parametrize("kernel", BLOCKS)
@pytest.mark.parametrize("small", [False, True], ids=["normal", "small"])
@pytest.mark.parametrize(
    ("gelu", "backward", "bias_grad", "accumulate"),
    [
        ("tanh", False, False, False),
        ("erf", False, False, False),
        ("tanh", True, True, False),
        ("erf", True, False, False),
        (None, False, True, False),
        (None, False, False, True),
        ("tanh", True, True, True),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_blocks_have_the_bits_of_cut_ones(
    isa: str, kernel: str, small: bool, gelu: str | None, backward: bool, bias_grad: bool,
    accumulate: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Blocks of 32 columns end next to the products of the next block, others right away.

    Tiles in software go with portable words, whose GELU has other bits than that of the cut blocks.
    """
    if not cpu.kernel_available(kernel):
        return
    rows, cols, cut = 75, 96, 85
    torch.manual_seed(3)
    a, _ = operand(torch.randn(cols, 70))
    b, _ = operand(torch.randn(rows, 70))
    if small:  # powers of two that are no normal float, results that are
        a.scales.sub_(40)
        b.scales.sub_(55)
    bias = torch.randn(cols) if not backward else None
    h = torch.randn(rows, cols).to(dtype) if backward else None
    before = torch.randn(rows, cols).to(dtype)

    def made(width: int) -> list[Tensor | None]:
        out = before[:, :width].clone()
        aux = torch.empty_like(out) if gelu and not backward else None
        epilogue = Epilogue(
            None if bias is None else bias[:width], gelu, None if h is None else h[:, :width],
            "result" if bias_grad else None, accumulate,
        )  # fmt: skip
        sums = run(part_of(a, width), b, epilogue, out, aux, kernel)
        return [out, aux, None if sums is None else sums[None]]

    for whole, part in zip(made(cols), made(cut), strict=True):
        if whole is None or part is None:
            continue
        if gelu and isa == "amx_emulated":
            torch.testing.assert_close(whole[:, :cut], part)
        else:
            assert torch.equal(whole[:, :cut], part)


@pytest.mark.parametrize("kernel", BLOCKS)
def test_large_results_are_stored_whole(isa: str, kernel: str) -> None:
    """8 MB and more pass by the caches, where the rows allow it."""
    if not cpu.kernel_available(kernel):
        return
    rows, cols = 1030, 4096
    a, _ = operand(torch.randn(cols, 32))
    b, _ = operand(torch.randn(rows, 32))
    bias = torch.randn(cols)
    results = []
    for width in (cols, cols - 1):
        out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
        aux = torch.full_like(out, torch.nan)
        run(part_of(a, width), b, Epilogue(bias[:width], "tanh"), out, aux, kernel)
        results.append((out, aux))
    for whole, part in zip(*results, strict=True):
        assert not whole.isnan().any()
        torch.testing.assert_close(whole[:, :-1], part)
