"""Every native GEMM kernel against fp64: shapes, orders, formats, epilogues, packing, workspaces.

The bound is oracles.gemm_bound with C = 1 for all kernels; only epilogues add slack. Extreme
scales, wide rows and NaN: test_native_gemm_edges.py.
"""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import strategies
import torch
from gemm_calls import (
    AVAILABLE,
    FORMATS,
    K_SIZES,
    KERNELS,
    LEVEL_KERNELS,
    N_SIZES,
    PANELS,
    Side,
    at_level,
    drawn,
    packed,
    random_side,
    run,
    shapes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from native_words import GemmCall

from te_mx.backends.cpu import binding as cpu
from te_mx.dispatch.calls import Epilogue
from te_mx.runtime import workspace

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")


@pytest.fixture(params=PANELS, ids=lambda pair: "-".join(pair))
def panel_kernel(request: pytest.FixtureRequest):
    yield from at_level(*request.param)


@given(data=st.data(), fmts=st.tuples(FORMATS, FORMATS))
@settings(max_examples=30)
def test_product(kernel: str, data: st.DataObject, fmts: tuple[str, str]) -> None:
    m, n, k = shapes(data, kernel)
    rng = np.random.default_rng(data.draw(strategies.SEEDS))
    a, b = random_side(rng, m, k, fmts[0]), random_side(rng, n, k, fmts[1])
    a_operand, b_operand = drawn(data, kernel, a, b)
    out = torch.full((n, m), torch.nan, dtype=data.draw(strategies.DTYPES))
    run(kernel, a_operand, b_operand, out)
    oracles.assert_gemm(out, a.values(), b.values())


@given(data=st.data(), seed=strategies.SEEDS)
@settings(max_examples=10)
def test_bits_do_not_depend_on_threads_orders_or_packing(
    kernel: str, data: st.DataObject, seed: int, threads
) -> None:
    m, n, k = shapes(data, kernel)
    rng = np.random.default_rng(seed)
    fmts = data.draw(st.sampled_from([("e4m3", "e5m2"), ("e2m1", "e4m3"), ("e5m2", "e2m1")]))
    a, b = random_side(rng, m, k, fmts[0]), random_side(rng, n, k, fmts[1])
    threads(1)
    expected, _ = run(kernel, a.operand(), b.operand())
    for count in (1, 2, 5):
        threads(count)
        for order_a in ("k_last", "k_first"):
            for order_b in ("k_last", "k_first"):
                plain = a.operand(order_a), b.operand(order_b)
                assert torch.equal(run(kernel, *plain)[0], expected)
                ready = packed(plain[0], kernel, "a"), packed(plain[1], kernel, "b")
                assert torch.equal(run(kernel, *ready)[0], expected)


@given(data=st.data(), seed=strategies.SEEDS)
@settings(max_examples=10)
def test_rows_are_independent_of_their_company(kernel: str, data: st.DataObject, seed: int) -> None:
    """Any part of the output has the bits of the whole: the order of a sum knows only k."""
    m, n, k = shapes(data, kernel)
    rng = np.random.default_rng(seed)
    a, b = random_side(rng, m, k, "e4m3"), random_side(rng, n, k, "e4m3")
    whole, _ = run(kernel, a.operand(), b.operand())
    i, j = rng.integers(0, m), rng.integers(0, n)
    part_a = Side(a.codes[i:], a.scales[i:], "e4m3")
    part_b = Side(b.codes[j : j + 1], b.scales[j : j + 1], "e4m3")
    part, _ = run(kernel, part_a.operand(), part_b.operand())
    assert torch.equal(part, whole[j : j + 1, i:])


@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 2083), (torch.float32, 1056)])
def test_results_past_the_caches_have_the_bits_of_small_ones(
    panel_kernel: str, dtype: torch.dtype, n: int
) -> None:
    """Results of 8 MB are stored past the caches; parts of them are not."""
    rng = np.random.default_rng(0)
    a, b = random_side(rng, 2048, 33, "e4m3"), random_side(rng, n, 33, "e5m2")
    epilogue = Epilogue(bias=torch.from_numpy(rng.standard_normal(2048).astype(np.float32)))
    room = torch.full((n + 2, 2048), torch.nan, dtype=dtype)
    whole = room[1:-1]
    assert room.data_ptr() % 64 == 0 and whole.nbytes >= 8 << 20
    run(panel_kernel, a.operand(), b.operand(), whole, epilogue=epilogue)
    assert bool(room[0].isnan().all()) and bool(room[-1].isnan().all())
    for begin in range(0, n, 500):
        rows = Side(b.codes[begin : begin + 500], b.scales[begin : begin + 500], "e5m2")
        part = torch.full((len(rows.codes), 2048), torch.nan, dtype=dtype)
        run(panel_kernel, a.operand(), rows.operand(), part, epilogue=epilogue)
        assert torch.equal(whole[begin : begin + 500], part)


@given(data=st.data(), seed=strategies.SEEDS, gelu=strategies.GELUS)
@settings(max_examples=10)
def test_forward_epilogue(kernel: str, data: st.DataObject, seed: int, gelu: str) -> None:
    """bias, aux, GELU and accumulation together; the operand bias gradient sums the rows of b."""
    kind = data.draw(st.sampled_from([None, "operand"]))
    m, n, k = shapes(data, kernel)
    rng = np.random.default_rng(seed)
    a = random_side(rng, m, k, "e4m3", 117, 121)
    b = random_side(rng, n, k, "e4m3", 117, 121)
    bias = torch.from_numpy(rng.standard_normal(m).astype(np.float32))
    old = torch.from_numpy(rng.standard_normal((n, m)).astype(np.float32))
    out, aux = old.clone(), torch.full((n, m), torch.nan)
    epilogue = Epilogue(bias=bias, gelu=gelu, accumulate=True, bias_grad=kind)
    _, bias_grad = run(kernel, a.operand(), b.operand(), out, aux, epilogue)
    va, vb = a.values(), b.values()
    pre = vb @ va.T + bias.double().numpy()
    ulp = 2.0**-22 * (np.abs(pre) + 1)
    oracles.assert_gemm(aux, va, vb, pre, ulp)
    exact = oracles.gelu(pre, gelu) + old.double().numpy()
    # |GELU'| < 1.13, so the accumulator's error grows by no more.
    slack = 0.13 * oracles.gemm_bound(va, vb) + 4 * ulp + 2.0**-22 * np.abs(old.double().numpy())
    oracles.assert_gemm(out, va, vb, exact, slack)
    if kind == "operand":
        error = np.abs(bias_grad.double().numpy() - vb.sum(1))
        assert (error <= (k + 2) * 2.0**-24 * np.abs(vb).sum(1)).all()


@given(data=st.data(), seed=strategies.SEEDS, gelu=strategies.GELUS)
@settings(max_examples=10)
def test_backward_epilogue(kernel: str, data: st.DataObject, seed: int, gelu: str, threads) -> None:
    """The derivative of GELU at gelu_in; the bias gradient of the result, whatever the threads."""
    m, n, k = shapes(data, kernel)
    rng = np.random.default_rng(seed)
    a = random_side(rng, m, k, "e4m3", 117, 121)
    b = random_side(rng, n, k, "e5m2", 117, 121)
    gelu_in = torch.from_numpy(rng.standard_normal((n, m)).astype(np.float32))
    epilogue = Epilogue(gelu=gelu, gelu_in=gelu_in, bias_grad="result")
    threads(2)
    out, bias_grad = run(kernel, a.operand(), b.operand(), epilogue=epilogue)
    va, vb = a.values(), b.values()
    exact = (vb @ va.T) * oracles.dgelu(gelu_in.double().numpy(), gelu)
    slack = 0.13 * oracles.gemm_bound(va, vb) + 2.0**-20 * np.abs(vb @ va.T)
    oracles.assert_gemm(out, va, vb, exact, slack)
    wide = out.double()
    error = (bias_grad - wide.sum(0)).abs()
    assert bool((error <= (n + 2) * 2.0**-24 * wide.abs().sum(0)).all())
    threads(1)
    _, again = run(kernel, a.operand(), b.operand(), epilogue=epilogue)
    assert torch.equal(again, bias_grad)


@pytest.mark.parametrize("m, n, k", [(0, 3, 40), (3, 0, 40), (3, 4, 0), (0, 0, 0), (33, 5, 0)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_empty_problems(kernel: str, m: int, n: int, k: int, accumulate: bool) -> None:
    """No k: the epilogue of zeros. No rows: nothing but the bias gradients."""
    rng = np.random.default_rng(0)
    a, b = random_side(rng, m, k, "e4m3"), random_side(rng, n, k, "e4m3")
    bias, out = torch.arange(m, dtype=torch.float32), torch.full((n, m), 0.5)
    epilogue = Epilogue(bias=bias, accumulate=accumulate, bias_grad="result")
    _, bias_grad = run(kernel, a.operand(), b.operand(), out, epilogue=epilogue)
    assert torch.equal(out, bias.expand(n, m) + (0.5 if accumulate else 0.0))
    assert torch.equal(bias_grad, n * bias)
    out = torch.empty(n, m)
    epilogue = Epilogue(bias_grad="operand")
    _, bias_grad = run(kernel, a.operand(), b.operand(), out, epilogue=epilogue)
    exact = torch.from_numpy(b.values().sum(1))
    assert torch.allclose(bias_grad.double(), exact, rtol=1e-5, atol=1e-5 * 448 * 2**15)


def test_streams_refuse_more_rows_than_they_have_room_for() -> None:
    level, name = next(pair for pair in KERNELS if "stream" in pair[1])
    before = cpu.ISA_LEVELS[cpu.isa()]
    cpu.set_isa(level)
    try:
        rng = np.random.default_rng(0)
        a, b = random_side(rng, 8, 64, "e4m3"), random_side(rng, 17, 64, "e4m3")
        out = torch.empty(17, 8)
        call = GemmCall(name, a.operand(), b.operand(), Epilogue(), out, None)
        nbytes = call.workspace_bytes()
        scratch = workspace.acquire(torch.device("cpu"), nbytes)
        assert call.run(scratch, nbytes) is None
    finally:
        cpu.set_isa(before)


def test_a_workspace_that_is_too_small_is_refused(panel_kernel: str) -> None:
    rng = np.random.default_rng(0)
    a, b = random_side(rng, 40, 64, "e4m3"), random_side(rng, 40, 64, "e4m3")
    plain, out = (a.operand(), b.operand()), torch.empty(40, 40)
    call = GemmCall(panel_kernel, *plain, Epilogue(), out, None)
    nbytes = call.workspace_bytes()
    assert nbytes > 0
    with pytest.raises(RuntimeError, match="workspace too small"):
        call.run(workspace.acquire(torch.device("cpu"), nbytes), nbytes - 1)
    ready = packed(plain[0], panel_kernel, "a"), packed(plain[1], panel_kernel, "b")
    call = GemmCall(panel_kernel, *ready, Epilogue(), out, None)
    assert call.workspace_bytes() == 0  # packed operands, nothing to reduce: no scratch


@given(data=st.data(), seed=strategies.SEEDS, fmt=strategies.FORMATS, role=st.sampled_from("ab"))
@settings(max_examples=20)
@pytest.mark.skipif("avx512_bf16" not in AVAILABLE, reason="needs AVX512-BF16")
def test_bf16_panels_have_the_bytes_of_the_portable_ones(
    data: st.DataObject, seed: int, fmt: str, role: str
) -> None:
    """avx512_bf16 and emulated tiles share one packed form, made by vector and by scalar code."""
    rng = np.random.default_rng(seed)
    side = random_side(rng, data.draw(N_SIZES), data.draw(K_SIZES), fmt)
    side.scales[rng.random(side.scales.shape) < 0.1] = 255
    for order in ("k_last", "k_first"):
        forms = []
        for level, name in (("avx512_bf16", "avx512_bf16"), ("amx_emulated", "amx_bf16")):
            for _ in at_level(level, name):
                operand = packed(side.operand(order), name, role)
                forms.append(operand.packed[2 * cpu.HEADER_BYTES :].clone())
        assert torch.equal(*forms)


@pytest.mark.parametrize("level", [AVAILABLE[-2]])  # the best level with instructions of its own
def test_large_problems_are_cut_into_chunks(level: str) -> None:
    """k is so long that both sides are packed in chunks; packed ahead they give the same bits."""
    for name in at_level(level, LEVEL_KERNELS[level][-2]):
        rng = np.random.default_rng(1)
        m, n, k = 523, 521, 32768
        a, b = random_side(rng, m, k, "e4m3"), random_side(rng, n, k, "e4m3")
        epilogue = Epilogue(bias_grad="operand")
        out, sums = run(name, a.operand(), b.operand(), epilogue=epilogue)
        ready = packed(a.operand(), name, "a"), packed(b.operand(), name, "b")
        whole, whole_sums = run(name, *ready, epilogue=epilogue)
        assert torch.equal(out, whole)
        assert torch.equal(sums, whole_sums)
        rows, columns = [0, 511, 512, 520], [0, 100, 511, 512, 522]
        va, vb = (
            Side(s.codes[i], s.scales[i], "e4m3").values() for s, i in ((a, columns), (b, rows))
        )
        oracles.assert_gemm(out[rows][:, columns], va, vb)
