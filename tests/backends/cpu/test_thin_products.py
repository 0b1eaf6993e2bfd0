"""Few rows on CPUs: which products read codes as they lie (streams) and which pack panels, and that
whoever multiplies agrees."""

from __future__ import annotations

import gemm_calls
import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import te_mx
from te_mx import _ops as ops
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu.gemm import PANELS
from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.registry import pick

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")

CPU = torch.device("cpu")
MX = "mxfp8_e4m3@rows"
# (n, k): the levels whose stream takes it.
CHOICES = {
    (28800, 2): (),
    (28800, 10): (),
    (28800, 32): ("portable",),
    (33, 32): ("portable",),
    (32, 32): ("portable", "avx2"),
    (28800, 64): ("portable", "avx2", "avx512"),
    (17, 64): ("portable", "avx2", "avx512", "avx512_bf16"),
    (33, 64): ("portable", "avx2", "avx512"),
    (28800, 65): tuple(PANELS),
    (4096, 4096): tuple(PANELS),
    (10, 28800): tuple(PANELS),
    (16, 2): tuple(PANELS),
    (1, 1): tuple(PANELS),
}


@pytest.mark.parametrize("sizes", CHOICES, ids=str)
def test_a_stream_takes_few_columns_or_a_long_k(sizes):
    for level in PANELS:
        for m in (1, 2, 7, 16):  # rows do not count: batches up to 16 have the same bits
            assert cpu.stream_pays(f"{level}_stream", m, *sizes) == (level in CHOICES[sizes]), m
        assert not cpu.stream_pays(f"{level}_stream", 17, *sizes)


def kernel_of(m: int, n: int, k: int) -> str:
    return pick("gemm", CPU, MX, MX, (m, n, k)).name


def test_pick_keeps_sizes_apart(isa):
    level = "amx" if isa == "amx_emulated" else isa
    names = {True: f"{level}_stream", False: PANELS[level]}
    for m, n, k in ((4, 40, 4), (4, 40, 100), (4, 3, 4), (4, 40, 4), (16, 40, 4), (17, 3, 100)):
        takes = m <= 16 and (n == 3 or k == 100)
        assert kernel_of(m, n, k) == te_mx.explain(m=n, n=m, k=k).kernel == names[takes]
    declined = dict(te_mx.explain(m=40, n=16, k=4).declined)
    assert declined[names[True]] == "takes 16 rows of B with a longer k, this has k 4"


@pytest.mark.parametrize("k", [4, 32, 96, 128])
def test_every_road_to_a_product_of_few_rows_has_its_bits(isa, k):
    """The GEMM, a layer in training, without gradients and frozen, groups of rows, and packed
    operands; rows alone and beside others."""
    layer, x = te_mx.Linear(k, 40, bias=False), torch.randn(16, k)
    a, b = te_mx.quantize(layer.weight.detach()), te_mx.quantize(x)
    usual = ops.gemm_2d(b.operand("rowwise"), a.operand("rowwise"), out_dtype=torch.float32).out
    for _ in range(4):  # the second call packs, later ones are prepared
        assert torch.equal(te_mx.gemm(a, b, out_dtype=torch.float32)[0], usual)
    with te_mx.autocast():
        assert torch.equal(layer(x), usual)
        with torch.no_grad():
            assert torch.equal(layer(x), usual)
            assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), usual)
        grouped = te_mx.grouped_linear(x, layer.weight[None], offs=torch.tensor([16]))
        assert torch.equal(grouped, usual)
        te_mx.freeze_weights(layer)
        with torch.no_grad():
            assert torch.equal(layer(x[:5]), usual[:5]) and torch.equal(layer(x), usual)


@pytest.fixture(params=gemm_calls.PANELS, ids="-".join)
def panels(request: pytest.FixtureRequest):
    yield from gemm_calls.at_level(*request.param)


@given(data=st.data(), seed=strategies.SEEDS, k=st.integers(1, 32))
@settings(max_examples=40)
def test_one_block_of_k_has_the_bits_of_packed_operands(panels: str, data, seed: int, k: int):
    """Of many rows with few, the many may be decoded where they are multiplied: with every
    epilogue, far scales and NaN."""
    rng = np.random.default_rng(seed)
    few, many = data.draw(st.integers(1, 66)), data.draw(st.integers(1, 600))
    m, n = data.draw(st.sampled_from([(few, many), (many, few)]))
    far = {"low": 1, "high": 254} if data.draw(st.booleans()) else {}
    formats = [data.draw(gemm_calls.FORMATS) for _ in range(2)]
    sides = [
        gemm_calls.random_side(rng, rows, k, fmt, **far)
        for rows, fmt in zip((n, m), formats, strict=True)
    ]
    if data.draw(st.booleans()):
        for side in sides:
            side.scales[rng.random(side.scales.shape) < 0.05] = 255
    dtype = data.draw(strategies.DTYPES)
    gelu = data.draw(st.sampled_from([None, None, "tanh"]))
    epilogue = Epilogue(
        bias=torch.randn(n, dtype=dtype) if data.draw(st.booleans()) else None,
        gelu=gelu,
        bias_grad=data.draw(st.sampled_from([None, None, "operand", "result"])),
        accumulate=data.draw(st.booleans()),
    )
    before = torch.randn(m, n).to(dtype)

    def product(packs: bool) -> list:
        out, aux = before.clone(), torch.zeros(m, n, dtype=dtype) if gelu else None
        made = [side.operand(data.draw(gemm_calls.ORDERS)) for side in sides]
        if packs:
            made = [
                gemm_calls.packed(one, panels, role) for one, role in zip(made, "ab", strict=True)
            ]
        _, sums = gemm_calls.run(panels, *made, out, aux, epilogue)
        return [one for one in (out, aux, sums) if one is not None]

    for got, expected in zip(product(False), product(True), strict=True):
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(got.isnan(), expected.isnan())


def test_operands_that_stand_still_are_packed_where_panels_run(isa):
    level = "amx" if isa == "amx_emulated" else isa
    for k, packs in ((4, True), (128, False)):
        a, b = te_mx.quantize(torch.randn(40, k)), te_mx.quantize(torch.randn(16, k))
        mode = ops.Mode()
        assert ops.worth_packing(b.operand("rowwise"), a.operand("rowwise"), mode) is packs
        assert kernel_of(16, 40, k) == (PANELS[level] if packs else f"{level}_stream")


def test_one_team_for_all_steps_of_a_call(threads):
    """Every team that is called together waits for its slowest thread, on a busy machine for
    milliseconds: scales, both packs, the product and sums are steps of one."""
    threads(2)
    native = cpu.native()
    x, w = torch.randn(512, 1024), torch.randn(600, 1024)
    a, b = te_mx.quantize(w).operand("rowwise"), te_mx.quantize(x).operand("rowwise")

    def teams(call) -> int:
        before = native.parallel_regions()
        call()
        return native.parallel_regions() - before

    expected = ops.gemm_2d(b, a, out_dtype=torch.float32).out
    sums = Epilogue(bias_grad="operand")
    assert teams(lambda: ops.gemm_2d(b, a, out_dtype=torch.float32)) == 1
    assert teams(lambda: ops.gemm_2d(b, a, sums, out_dtype=torch.float32)) == 1
    layer = te_mx.Linear(1024, 600, bias=False)
    with torch.no_grad(), te_mx.autocast():
        assert teams(lambda: layer(x[:400])) == 1  # small: quantized in the same call
        head = te_mx.Linear(4096, 10)
        assert teams(lambda: head(torch.ones(8, 4096))) == 0  # over before a team comes
    with te_mx.autocast():
        y, late = layer(x[:400].requires_grad_()), native.late_steps()
        y.sum().backward()
    assert native.late_steps() == late, "wgrad runs after dgrad sent the team away"
    threads(1)
    assert teams(lambda: ops.gemm_2d(b, a, out_dtype=torch.float32)) == 0
    assert torch.equal(ops.gemm_2d(b, a, out_dtype=torch.float32).out, expected)
