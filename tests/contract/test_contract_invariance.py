"""precision="invariant": a row of a forward result has the same bits beside any others, in training
and frozen, dense, in groups and routed, eager and compiled (docs/invariance.md)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import te_mx
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.run import fall_back, reference
from te_mx.recipe import (
    BlockScaling,
    Float8BlockScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = {
    "mxfp8": MXFP8BlockScaling(precision="invariant"),
    "mxfp4": MXFP4BlockScaling(precision="invariant"),
    "fp8": Float8BlockScaling(precision="invariant"),
    "fp8 fp32": Float8BlockScaling(precision="invariant", use_f32_scales=True),
    "nvfp4": NVFP4BlockScaling(True, True, row_scaled_activation=True, precision="invariant"),
    "mixed": BlockScaling(x="mxfp8_e5m2", w="mxfp4", precision="invariant"),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
CPU, A = torch.device("cpu"), "mxfp8_e4m3@rows"
TOKENS = 512


def tokens(k: int, rows: int = TOKENS) -> Tensor:
    """bf16 rows of any kind: plain, all zeros, of a range that no single exponent spans, of NaN."""
    x = torch.randn(rows, k, dtype=torch.bfloat16)
    x[3::53] = 0
    x[5::47, : k // 2] *= 2.0**-100
    x[5::47, k // 2 :] *= 2.0**20
    x[11::97, 0] = torch.nan
    x[13::89] *= 2.0**-120
    return x


def same(part: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(part, whole, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=8)
@given(data=st.data())
def test_rows_of_a_layer_have_the_same_bits_at_any_number_of_rows(isa, data):
    recipe = RECIPES[data.draw(st.sampled_from(list(RECIPES)))]
    n, k = data.draw(st.sampled_from([16, 40, 96])), data.draw(st.sampled_from([32, 96, 288, 1024]))
    layer, x = te_mx.Linear(k, n, params_dtype=torch.bfloat16), tokens(k)
    sizes = data.draw(st.sets(st.integers(1, 300), max_size=6)) | {1, 16, 17, 33}
    first = data.draw(st.integers(0, TOKENS - max(sizes)))
    with te_mx.autocast(recipe=recipe):
        whole = layer(x)
        parts = [(slice(first, first + rows), x[first : first + rows].clone()) for rows in sizes]
        for part, rows in parts:
            same(layer(rows), whole[part])
        with torch.no_grad():
            same(layer(x), whole)
    te_mx.freeze_weights(layer, recipe=recipe, drop_master=data.draw(st.booleans()))
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        same(layer(x), whole)
        for part, rows in parts:
            same(layer(rows), whole[part])


def test_every_number_of_rows_up_to_300_and_many(isa):
    """Each number in one recipe, in training or frozen."""
    for i, recipe in enumerate(RECIPES.values()):
        layer, x = te_mx.Linear(96, 16, params_dtype=torch.bfloat16), tokens(96, 16384)
        with te_mx.autocast(recipe=recipe), torch.no_grad():
            whole = layer(x)
            for rows in (*range(1 + i, 301, 2 * len(RECIPES)), 512, 777, 4096):
                same(layer(x[-rows:]), whole[-rows:])
            te_mx.freeze_weights(layer, recipe=recipe, drop_master=True)
            for rows in (*range(1 + i + len(RECIPES), 301, 2 * len(RECIPES)), 512, 777, 16384):
                same(layer(x[-rows:]), whole[-rows:])


@recipes
def test_rows_of_groups_and_of_experts_are_those_of_layers(isa, recipe):
    experts, n, k = 3, 40, 96
    layers = [te_mx.Linear(k, n, bias=False, params_dtype=torch.bfloat16) for _ in range(experts)]
    x = tokens(k, 120)
    splits = [1, 17, 102]
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        whole = torch.cat([one(part) for one, part in zip(layers, x.split(splits), strict=True)])
        grouped = te_mx.GroupedLinear(experts, k, n, bias=False, params_dtype=torch.bfloat16)
        for i, one in enumerate(layers):
            getattr(grouped, f"weight{i}").copy_(one.weight)
        same(grouped(x, splits), whole)
        said = recipe.settings
        w = [te_mx.quantize(one.weight, said.w, scale_rule=said.scale_rule) for one in layers]
        ids = torch.repeat_interleave(torch.arange(experts), torch.tensor(splits))
        count = torch.tensor([len(ids)], dtype=torch.int32)
        routing = None, ids.int(), count
        if recipe is RECIPES["nvfp4"]:  # which no kernel of routed rows takes
            with pytest.raises(RuntimeError, match="no kernel for moe_gemm"):
                te_mx.moe.grouped_gemm(x, w, *routing, top_k=1, block_m=1)
        else:
            same(te_mx.moe.grouped_gemm(x, w, *routing, top_k=1, block_m=1), whole)


def test_compiled_code_has_the_bits_of_eager_code():
    first, second = (te_mx.Linear(96, 40, params_dtype=torch.bfloat16) for _ in range(2))
    te_mx.freeze_weights(second, drop_master=True, recipe=RECIPES["mxfp4"])

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        with te_mx.autocast(recipe=RECIPES["mxfp8"]):
            y = first(rows)
        with te_mx.autocast(recipe=RECIPES["mxfp4"]):
            return y, second(rows)

    x, compiled = tokens(96), torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for rows in (x, x[40:47].clone()):
        for part, one in zip(compiled(rows), run(x), strict=True):
            same(part, one if rows is x else one[40:47])


def test_gemm_has_them_and_refuses_what_is_not_about_rows():
    a, b = (te_mx.quantize(torch.randn(rows, 96)) for rows in (40, 33))
    whole = te_mx.gemm(a, b, precision="invariant").out
    same(te_mx.gemm(a, te_mx.quantize(b.dequantize()[5:6]), precision="invariant").out, whole[5:6])
    for more in ({"grad": True}, {"accumulate": True, "out": whole.clone()}):
        with pytest.raises(ValueError, match="'invariant' is about rows of forward products"):
            te_mx.gemm(a, b, precision="invariant", **more)
    with pytest.raises(ValueError, match="split_k cuts K by the number of rows"):
        MXFP8BlockScaling(precision="invariant", split_k=True)


def test_what_sums_in_another_order_declines_and_nothing_falls_back(portable):
    said = te_mx.explain(m=4096, n=1, k=4096, precision="invariant")
    assert said.kernel == "portable_f32"
    assert "may give a row other bits" in dict(said.declined)["portable_stream"]
    problem = Problem("gemm", place_of(CPU), A, A, 4, 4, 64, precision="invariant")
    with pytest.raises(RuntimeError, match=r"no kernel for gemm of .* 'invariant' asks for"):
        fall_back(reference("gemm"), problem)
    with pytest.raises(ValueError, match="multiplies codes with codes"):
        te_mx.gemm(
            te_mx.quantize(torch.ones(4, 64)), torch.ones(4, 64).bfloat16(), precision="invariant"
        )
    layer = te_mx.Linear(64, 32)
    with pytest.raises(ValueError, match="whose sums depend on the number of rows"):
        te_mx.freeze_weights(layer, True, recipe=RECIPES["mxfp8"], activations="bf16")
