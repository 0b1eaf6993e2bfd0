"""Where K is cut into parts: the cost model, who asks for it, and that native code is told."""

from __future__ import annotations

import as_on_hopper
import fake_sm90
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st

import te_mx
from te_mx import _ops as ops
from te_mx._ops import Mode, Quantize
from te_mx.autograd import linear_recipe
from te_mx.autograd.linear_recipe import QuantizedWeight
from te_mx.backends import device_names
from te_mx.backends.reference.quantize import quantize
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90 import gemm as sm90
from te_mx.dispatch import registry
from te_mx.recipe import MXFP8BlockScaling

native = pytest.importorskip("te_mx._native")

SMS = as_on_hopper.MULTIPROCESSORS
# (n, m, k): measured on an NVIDIA H200 as worth cutting, and as not.
WORTH = [(512, 512, 16384), (1024, 1024, 16384), (256, 4096, 16384), (128, 4096, 14336),
         (128, 128, 4096), (256, 384, 8192), (256, 512, 4096), (16, 4096, 14336),
         (64, 2048, 16384), (1, 4096, 4096)]  # fmt: skip
NOT_WORTH = [(8192, 8192, 8192), (4096, 4096, 4096), (512, 512, 1024), (512, 512, 2048),
             (1024, 2048, 2048), (1024, 1024, 4096), (1152, 1280, 16384), (1536, 1536, 8192),
             (64, 8192, 8192), (1, 1, 1), (16, 16, 128)]  # fmt: skip
# Of clusters that all run at once: (m, n, k), and the parts that were the fastest of all tiles and
# parts there.
IN_CLUSTERS = {(128, 2304, 6144): 5, (256, 2304, 6144): 3, (128, 2112, 7168): 5,
               (256, 2112, 7168): 3, (128, 4096, 14336): 3, (256, 4096, 14336): 2,
               (128, 8192, 8192): 2, (128, 6144, 4096): 1, (128, 6144, 2048): 1,
               (256, 6144, 4096): 1, (512, 4096, 14336): 1}  # fmt: skip
SIZES = st.integers(1, 20000)


@pytest.mark.parametrize("sizes", WORTH, ids=str)
def test_few_tiles_and_a_long_k_are_cut(sizes):
    count = sm90.num_splits("tiles", *sizes, SMS)
    assert 1 < count <= native.SM90_MOST_PARTS
    assert sm90.split_us("tiles", *sizes, SMS, count) <= sm90.split_us("tiles", *sizes, SMS, 1)


@pytest.mark.parametrize("sizes", NOT_WORTH, ids=str)
def test_what_fills_the_chip_or_is_short_is_not(sizes):
    assert sm90.num_splits("tiles", *sizes, SMS) == 1


@pytest.mark.parametrize("sizes", IN_CLUSTERS, ids=str)
def test_clusters_have_the_parts_that_were_measured(sizes):
    assert sm90.num_splits("tiles", *sizes, SMS) == IN_CLUSTERS[sizes]


KINDS = ["tiles", "codes", "codes_before", "decode", "wide", "factors", "nvfp4", "routed"]


@given(st.sampled_from(KINDS), SIZES, SIZES, st.integers(1, 200000), st.integers(1, 132))
def test_every_part_has_some_of_k(kind, m, n, k, sms):
    count = sm90.num_splits(kind, m, n, k, sms)
    least = 2 if kind == "decode" else 1  # its CTAs have two warpgroups
    assert 1 <= count <= max(least, min(native.SM90_MOST_PARTS, -(-k // native.SM90_STEP_K)))
    sm90.num_splits.cache_clear()
    assert sm90.num_splits(kind, m, n, k, sms) == count


@given(st.sampled_from(KINDS[3:]), st.integers(1, 64), SIZES, st.integers(1, 60000))
def test_rows_that_stand_beside_a_row_cut_no_k_of_weights_that_stand_still(kind, m, n, k):
    rows = [m, 1, 64] if kind in ("factors", "nvfp4") else [m, 1, 100 * m]
    assert len({sm90.num_splits(kind, one, n, k, SMS) for one in rows}) == 1


@given(st.integers(1, 64), st.integers(100, 60000))
def test_a_gpu_that_one_tile_fills_cuts_nothing(n, k):
    assert sm90.num_splits("tiles", n, 128, k, 1) == 1


def test_native_code_describes_its_tiles():
    tiles = native.sm90_gemm_tiles()
    assert [tile["name"] for tile in tiles] == [
        "192x128, clusters of 2", "256x128, clusters of 2", "128x128", "64x128"
    ]  # fmt: skip
    assert all(tile["cycles"] > 0 and tile["us"] > 0 for tile in tiles)


@given(SIZES, SIZES, st.booleans(), st.sampled_from([78, 114, 132]))
def test_the_tile_with_the_fewest_cycles_is_chosen(m, n, full, sms):
    def cycles(tile):
        clusters = -(-m // tile["m"]) * -(-n // tile["n"])
        return -(-clusters // (sms // tile["cluster"])) * tile["cycles"]

    fit = {
        i: cycles(tile)
        for i, tile in enumerate(native.sm90_gemm_tiles())
        if tile["full"] or not full
    }
    assert native.sm90_gemm_config(m, n, full, sms) == min(fit, key=fit.get)


# --------------------------------------------------------------------------------- who asks for it
@pytest.fixture
def told(threads):
    """The Hopper backend on CPU tensors, and the parts that its native GEMM was told of."""
    threads(1)
    made = []

    def gemm(args):
        if args.workspace_bytes >= fake_sm90.OWN_SCRATCH:  # else the workspace is asked for next
            made.append(args.parts)
        return fake_gemm(args)

    def workspace_bytes(args):
        return fake_sm90.OWN_SCRATCH * args.parts

    fake_gemm = fake_sm90.gemm
    with as_on_hopper.hopper() as patch:
        patch.setattr(fake_sm90, "gemm", gemm)
        patch.setattr(fake_sm90, "workspace_bytes", workspace_bytes)
        yield made


def sides(m, n, k):
    return [
        quantize(Quantize(torch.randn(rows, k), "mxfp8_e4m3@rows", "", "rceil")).row
        for rows in (m, n)
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_native_code_is_told_the_parts(told, packed, guarded):
    m, n, k = 40, 24, 4096
    lhs, rhs = sides(m, n, k)
    if packed:
        lhs, rhs = (ops.convert_2d(operand, "mxfp8_e4m3@sm90:8") for operand in (lhs, rhs))
    parts = sm90.num_splits("tiles", m, n, k, SMS)
    assert parts > 1
    for mode, want in ((Mode(), 1), (Mode(split_k=True), parts)):
        ops.gemm_2d(lhs, rhs, out_dtype=torch.float32, mode=mode)
        assert told.pop() == want and not told


def test_explain_says_how_many(monkeypatch):
    monkeypatch.setattr(binding, "_problems", {0: None})
    registry.forget()
    monkeypatch.setattr(sm90, "multiprocessors", lambda index: SMS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device_names, "_full_name", lambda index: "a GPU without tables")
    sizes = {"m": 512, "n": 512, "k": 16384, "device": "cuda:0"}
    said = te_mx.explain(**sizes)
    assert said.kernel == "sm90_adaptive" and said.parts == 6
    assert "k is cut into 6 parts" in str(said)
    for whole in (te_mx.explain(**sizes, split_k=False), te_mx.explain(**sizes, precision="exact"),
                  te_mx.explain(**{**sizes, "n": 8192, "m": 8192})):  # fmt: skip
        assert whole.parts == 1 and "parts" not in str(whole)
    assert te_mx.explain(m=512, n=512, k=16384).parts == 1
    registry.forget()


def test_gemm_takes_a_bool_and_changes_nothing_on_a_cpu():
    a, b = (te_mx.quantize(strategies.tensor("outliers", r, 4096, r, torch.float32))
            for r in (8, 24))  # fmt: skip
    outs = [te_mx.gemm(a, b, split_k=split, out_dtype=torch.float32).out for split in (True, False)]
    assert torch.equal(*outs)
    assert torch.equal(te_mx.gemm(a, b, out_dtype=torch.float32).out, outs[0])
    for wrong in (None, 4):
        with pytest.raises(TypeError, match=f"split_k must be a bool, got {wrong}"):
            te_mx.gemm(a, b, split_k=wrong)


def test_modes_of_functions_and_recipes(by_steps, monkeypatch):
    modes = []
    gemm_2d = ops.gemm_2d

    def record(*args, mode, **kwargs):
        modes.append(mode)
        return gemm_2d(*args, mode=mode, **kwargs)

    for module in (ops, linear_recipe):
        monkeypatch.setattr(module, "gemm_2d", record)
    a = te_mx.quantize(torch.randn(8, 64))
    te_mx.gemm(a, a)
    te_mx.gemm(a, a, split_k=False)
    assert [mode.split_k for mode in modes] == [True, False]
    layer, x = te_mx.Linear(64, 40), torch.randn(5, 64, requires_grad=True)
    for recipe in (MXFP8BlockScaling(), MXFP8BlockScaling(split_k=True)):
        modes.clear()
        with te_mx.autocast(recipe=recipe):
            layer(x).sum().backward()
        assert [mode.split_k for mode in modes] == [recipe.split_k] * 3  # fprop, dgrad, wgrad


def test_the_recipe_field():
    assert not MXFP8BlockScaling().split_k and not MXFP8BlockScaling().settings.split_k
    cut = MXFP8BlockScaling(split_k=True)
    assert cut.settings.split_k and "split_k=True" in repr(cut)
    with pytest.raises(TypeError, match="split_k must be a bool, got 1"):
        MXFP8BlockScaling(split_k=1)


def test_a_weight_packed_for_one_serves_the_other(told):
    plain, cut = MXFP8BlockScaling().settings, MXFP8BlockScaling(split_k=True).settings
    exact = MXFP8BlockScaling(precision="exact").settings
    codes, words = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(1, 2, 132, dtype=torch.int32)
    operand = ops.Operand(codes, words, "mxfp8_e4m3@sm90:8", 4, 32)
    weight = QuantizedWeight(plain, operand, None)
    assert weight.serves(plain, codes.device, False)
    assert weight.serves(cut, codes.device, False)
    assert not weight.serves(exact, codes.device, False)
