"""Recipes: values, validation, names of Transformer Engine."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx import formats
from te_mx.backends.reference.gemm import ReferenceGemm
from te_mx.common import recipe as te_recipe
from te_mx.recipe import (
    BlockScaling,
    DeepSeekV3,
    Float8BlockScaling,
    Format,
    MMParams,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    Settings,
    resolve_recipe,
)


def test_defaults_are_those_of_transformer_engine():
    recipe = MXFP8BlockScaling()
    assert recipe.fp8_format is Format.E4M3
    names = [field.name for field in dataclasses.fields(recipe)]
    assert names[:6] == [
        "margin",
        "fp8_format",
        "fp8_dpa",
        "fp8_mha",
        "backward_override",
        "enable_2d_quantization",
    ]
    assert te_mx.get_default_recipe() == recipe


def test_format_ranges():
    assert (Format.E4M3.value.max_fwd, Format.E4M3.value.max_bwd) == (448, 448)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    assert len({Format.E4M3, Format.E5M2, Format.HYBRID}) == 3


def test_settings():
    e4m3, e5m2 = "mxfp8_e4m3", "mxfp8_e5m2"
    plain = Settings(e4m3, e4m3, e4m3, "rceil", "adaptive", 8, None)
    assert MXFP8BlockScaling().settings == plain
    # wgrad_hp, one_copy, split_k, keep_columns; formats and rules that are the same
    assert plain[7:] == (False,) * 4 + ("",) * 5
    hybrid = MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_rule="floor")
    assert hybrid.settings == plain._replace(g=e5m2, scale_rule="floor")
    changed = MXFP8BlockScaling(
        precision="exact", alignment_spread=3, wgrad_with_hp=True, one_copy_weights=True,
        split_k=True,
    )  # fmt: skip
    assert changed.settings == Settings(
        e4m3, e4m3, e4m3, "rceil", "exact", 3, None, True, True, True
    )
    assert MXFP8BlockScaling(keep_weight_columns=True).settings == plain._replace(keep_columns=True)
    kept = MXFP8BlockScaling(backward_override="dequantized")
    assert kept.settings == plain._replace(backward="dequantized")


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"fp8_format": Format.E5M2}, ValueError, "fp8_format=Format.E5M2"),
        ({"fp8_format": "E4M3"}, TypeError, "fp8_format must be a te_mx.recipe.Format"),
        ({"scale_rule": "even"}, ValueError, "scale_rule must be one of 'rceil', 'floor'"),
        ({"backward_override": "bf16"}, ValueError, "backward_override must be one of None"),
        ({"margin": 1}, NotImplementedError, "margin=1"),
        ({"fp8_dpa": True}, NotImplementedError, "fp8_dpa"),
        ({"fp8_mha": True}, NotImplementedError, "fp8_mha"),
        ({"enable_2d_quantization": True}, NotImplementedError, "enable_2d_quantization"),
    ],
)
def test_refused_fields_are_named(kwargs, error, says):
    with pytest.raises(error, match=says):
        MXFP8BlockScaling(**kwargs)


def test_is_a_value():
    recipe = MXFP8BlockScaling(scale_rule="floor")
    assert recipe == MXFP8BlockScaling(scale_rule="floor") != MXFP8BlockScaling()
    assert hash(recipe) == hash(copy.deepcopy(recipe))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert dataclasses.replace(recipe, scale_rule="rceil") == MXFP8BlockScaling()


MAPPED = pytest.mark.filterwarnings("ignore::te_mx.common.recipe.RecipeWarning")
FIELDS = {
    "MXFP8BlockScaling": (MXFP8BlockScaling, {"scale_rule": "floor", "fp8_format": Format.HYBRID}),
    "Float8BlockScaling": (Float8BlockScaling, {"use_f32_scales": True, "amax_epsilon": 1e-6}),
    "MXFP4BlockScaling": (MXFP4BlockScaling, {"g": "mxfp4", "x": "e4m3", "scale_rule": "even"}),
    "BlockScaling": (BlockScaling, {"x": "mxfp4", "g": formats.get("mxfp8_e5m2")}),
    "DelayedScaling": (te_recipe.DelayedScaling, {"fp8_format": Format.E4M3, "margin": 3}),
    "Float8CurrentScaling": (te_recipe.Float8CurrentScaling, {"use_power_2_scales": True}),
}


@MAPPED
@pytest.mark.parametrize("kind", FIELDS)
def test_fields_may_be_set(kind):
    """One by one: the recipe that has them from the start; warnings are given once."""
    make, fields = FIELDS[kind]
    fields = {"backward_override": "dequantized", **fields}
    recipe, plain = make(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, value in fields.items():
            setattr(recipe, name, value)
    wanted = make(**fields)
    assert recipe == wanted != plain and recipe.settings == wanted.settings
    assert hash(recipe) == hash(wanted) and repr(recipe) == repr(wanted)
    copies = copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))
    assert all(each == recipe and each.settings == recipe.settings for each in copies)
    copies[0].backward_override = None  # of the copy alone
    assert recipe == wanted
    assert make() == plain  # defaults are nobody's


@MAPPED
@pytest.mark.parametrize("kind", FIELDS)
def test_what_is_refused_changes_nothing(kind):
    recipe = FIELDS[kind][0]()
    before, settings = copy.copy(recipe), recipe.settings
    with pytest.raises(ValueError, match=rf"{kind}.backward_override must be one of None"):
        recipe.backward_override = "bf16"
    with pytest.raises(AttributeError, match=f"{kind} has no field backward_overide; it has"):
        recipe.backward_overide = None
    with pytest.raises(AttributeError, match="fields cannot be deleted"):
        del recipe.backward_override
    assert recipe == before and recipe.settings is settings and repr(recipe) == repr(before)


def test_a_region_goes_on_with_what_the_recipe_was():
    torch.manual_seed(0)
    layer, x = te_mx.Linear(64, 32), torch.randn(8, 64, requires_grad=True)

    def gradients(y: torch.Tensor) -> list[torch.Tensor]:
        return torch.autograd.grad(y.sum(), (x, layer.weight))

    found = []
    for recipe in (MXFP8BlockScaling(), MXFP8BlockScaling(backward_override="high_precision")):
        with te_mx.autocast(recipe=recipe):
            found.append(gradients(layer(x)))
    assert not torch.equal(found[0][0], found[1][0])
    recipe = MXFP8BlockScaling()
    region = te_mx.autocast(recipe=recipe)
    decorated = te_mx.autocast(recipe=recipe)(layer)
    with region:
        recipe.backward_override = "high_precision"
        inside = layer(x)
        again = checkpoint(layer, x, use_reentrant=False)
        assert te_mx.context.region.current_recipe() == MXFP8BlockScaling()
    with region:
        later = layer(x)
    for y in (inside, again, later, decorated(x)):
        assert all(torch.equal(a, b) for a, b in zip(gradients(y), found[0], strict=True))
    with te_mx.autocast(recipe=recipe):
        new = layer(x)
    assert all(torch.equal(a, b) for a, b in zip(gradients(new), found[1], strict=True))


def test_a_bound_recipe_stays_what_it_was():
    recipe = MXFP8BlockScaling()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    report = te_mx.convert_model(model, recipe=recipe)
    said = str(report)
    recipe.scale_rule = "floor"
    assert model[0].__dict__["_bound"] == MXFP8BlockScaling().settings and str(report) == said
    default = te_mx.get_default_recipe()
    default.scale_rule = "floor"  # of this object alone
    assert te_mx.get_default_recipe() == resolve_recipe(None) == MXFP8BlockScaling()


def test_compiled_code_follows_a_recipe_that_is_set():
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x, recipe = te_mx.Linear(64, 32), torch.randn(8, 64) * 447, MXFP8BlockScaling()

    def forward(x: torch.Tensor) -> torch.Tensor:
        with te_mx.autocast(recipe=recipe):
            return layer(x)

    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    results = []
    for rule in ("rceil", "floor", "rceil"):
        recipe.scale_rule = rule
        results.append(compiled(x))
        assert torch.equal(results[-1], forward(x))
    assert not torch.equal(results[0], results[1])


def test_quantization_of_roles_is_that_of_the_recipe():
    recipe, roles = Float8BlockScaling(), ("fwd_inp", "fwd_weight", "bwd_grad")
    for changes in ({}, {"use_f32_scales": True}, {"amax_epsilon": 1e-6}):
        for name, value in changes.items():
            setattr(recipe, name, value)
        params = te_recipe.QParams(not recipe.use_f32_scales, recipe.amax_epsilon)
        for role in roles:
            assert getattr(recipe, f"fp8_quant_{role}") == params
            setattr(recipe, f"fp8_quant_{role}", params)
    with pytest.raises(NotImplementedError, match="quantizes all roles alike"):
        recipe.fp8_quant_bwd_grad = te_recipe.QParams(power_2_scale=True)
    with pytest.raises(TypeError, match=r"QParams\.stochastic_rounding must be a bool"):
        te_recipe.QParams(stochastic_rounding=1)
    with pytest.raises(ValueError, match=r"QParams\.amax_epsilon must be 0 or more"):
        te_recipe.QParams(amax_epsilon=-1.0)


def test_repr_shows_what_matters():
    assert repr(MXFP8BlockScaling()) == "MXFP8BlockScaling(fp8_format=E4M3, scale_rule='rceil')"
    assert "HYBRID" in repr(MXFP8BlockScaling(fp8_format=Format.HYBRID))


def test_resolve_recipe():
    recipe = MXFP8BlockScaling(scale_rule="floor")
    assert resolve_recipe(recipe) is recipe
    assert resolve_recipe(None) == te_mx.get_default_recipe()
    with pytest.raises(TypeError, match=r"one of te_mx.recipe or its name, .* got 8 of type int"):
        resolve_recipe(8)
    with pytest.raises(TypeError, match=r"pass an instance: MXFP8BlockScaling\(\)"):
        resolve_recipe(MXFP8BlockScaling)
    for uncalled in (Float8BlockScaling, DeepSeekV3):
        with pytest.raises(TypeError, match=rf"pass an instance: {uncalled.__name__}\(\)"):
            resolve_recipe(uncalled)


def test_recipes_have_names():
    assert resolve_recipe("mxfp8") == te_mx.get_default_recipe()
    assert resolve_recipe("deepseek_v3") == DeepSeekV3()
    assert resolve_recipe("mxfp4_all") == te_mx.recipe.MXFP4BlockScaling(g="mxfp4")
    with pytest.raises(ValueError, match=r"must be one of mxfp8, mxfp8-hybrid, .*, got 'fp8'"):
        te_mx.autocast(recipe="fp8")
    layer, x = te_mx.Linear(64, 8), torch.randn(4, 64)
    report = te_mx.convert_model(torch.nn.Sequential(layer), recipe="mxfp4")
    assert report.recipe == te_mx.recipe.MXFP4BlockScaling()
    bound = layer(x)
    with te_mx.autocast(recipe="mxfp4"):
        assert torch.equal(layer(x), bound)
    with te_mx.autocast(recipe="mxfp8"):
        assert not torch.equal(layer(x), bound)


def test_availability():
    assert te_mx.is_mxfp8_available() is True
    assert te_mx.is_mxfp8_available(return_reason=True) == (True, "")


# ----------------------------------------------------------------------------- blockwise FP8
def test_float8_block_scaling():
    row, square = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
    plain = Settings(row, square, row, "pow2", "adaptive", 8, None)
    recipe = Float8BlockScaling()
    assert recipe.settings == plain and resolve_recipe(recipe) is recipe
    assert repr(recipe) == "Float8BlockScaling(fp8_format=E4M3)"
    assert DeepSeekV3() == Float8BlockScaling(use_f32_scales=True) != recipe
    assert DeepSeekV3().settings == plain._replace(scale_rule="fp32")
    changed = Float8BlockScaling(
        True, Format.HYBRID, w_block_scaling_dim=1, amax_epsilon=1e-6, one_copy_weights=True,
        keep_weight_columns=True,
    )  # fmt: skip
    assert changed.settings == plain._replace(
        w=row, g="fp8_e5m2_1x128", scale_rule="fp32:1e-06", one_copy=True, keep_columns=True
    )
    assert pickle.loads(pickle.dumps(changed)) == changed == copy.deepcopy(changed)
    assert Float8BlockScaling(amax_epsilon=np.float64(1e-6)).amax_epsilon == 1e-6
    assert "amax_epsilon=1e-06" in repr(changed) and hash(changed) == hash(copy.copy(changed))
    assert all(formats.get(name).scaling.knows(changed.scale_rule) for name in changed.settings[:3])


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"use_f32_scales": 1}, TypeError, "Float8BlockScaling.use_f32_scales must be a bool"),
        ({"fp8_format": Format.E5M2}, ValueError, "Float8BlockScaling.fp8_format=Format.E5M2"),
        ({"fp8_format": "E4M3"}, TypeError, "Float8BlockScaling.fp8_format must be a te_mx"),
        ({"x_block_scaling_dim": 2}, NotImplementedError, "x_block_scaling_dim=2"),
        ({"grad_block_scaling_dim": 2}, NotImplementedError, "grad_block_scaling_dim=2"),
        ({"w_block_scaling_dim": 3}, ValueError, "w_block_scaling_dim must be 1 or 2, got 3"),
        ({"w_block_scaling_dim": 2.0}, TypeError, "w_block_scaling_dim must be 1 or 2, got 2.0"),
        ({"fp8_gemm_fprop": True}, TypeError, "fp8_gemm_fprop must be a te_mx.recipe.MMParams"),
        ({"fp8_gemm_dgrad": MMParams(False)}, NotImplementedError, "fp8_gemm_dgrad.use_split"),
        ({"fp8_dpa": True}, NotImplementedError, "fp8_dpa"),
        ({"fp8_mha": True}, NotImplementedError, "fp8_mha"),
        ({"amax_epsilon": -1e-9}, ValueError, "amax_epsilon must be 0 or more"),
        ({"amax_epsilon": float("nan")}, ValueError, "amax_epsilon must be finite"),
        ({"amax_epsilon": 1e39}, ValueError, "amax_epsilon must be an fp32 number, got 1e\\+39"),
        ({"amax_epsilon": "0"}, TypeError, "amax_epsilon must be a number, got '0'"),
        ({"backward_override": "bf16"}, ValueError, "Float8BlockScaling.backward_override must"),
        ({"scale_rule": "fp32"}, TypeError, "unexpected keyword argument 'scale_rule'"),
    ],
    ids=str,
)
def test_what_float8_block_scaling_refuses(kwargs, error, says):
    with pytest.raises(error, match=says):
        Float8BlockScaling(**kwargs)


@pytest.mark.parametrize("role", ["x", "g"])
@pytest.mark.parametrize("block", ["128x128", "128x1"])
def test_blocks_of_several_rows_hold_no_tokens_of_groups(role, block):
    """Said by the forward pass, of gradients too."""
    row, wide = "fp8_e4m3_1x128", f"fp8_e4m3_{block}"
    recipe = BlockScaling(**{"x": row, "w": row, "g": row, role: wide}, scale_rule="pow2")
    layer, x = te_mx.GroupedLinear(2, 40, 24), torch.randn(30, 40)
    says = f"{role} cannot have format {wide}: its blocks hold several rows, which may belong"
    for splits in ([10, 20], torch.tensor([10, 20])):
        with te_mx.autocast(recipe=recipe), pytest.raises(ValueError, match=says):
            layer(x, splits)
    with pytest.raises(ValueError, match=says):
        te_mx.grouped_wgrad(torch.randn(30, 24), x, torch.tensor([10, 30]), recipe=recipe)


# -------------------------------------------------------------------------------- any format
def test_block_scaling_takes_names_and_formats():
    recipe = BlockScaling(x="e4m3", w=formats.get("mxfp4"), g="e5m2")
    assert (recipe.x, recipe.w, recipe.g) == ("mxfp8_e4m3", "mxfp4", "mxfp8_e5m2")
    assert repr(recipe) == "BlockScaling(x='mxfp8_e4m3', w='mxfp4', g='mxfp8_e5m2')"
    assert repr(BlockScaling(scale_rule="even")).endswith("g='mxfp8_e4m3', scale_rule='even')")
    assert BlockScaling().settings == MXFP8BlockScaling().settings
    assert recipe == BlockScaling(w="mxfp4", g="mxfp8_e5m2") != BlockScaling()
    assert hash(recipe) == hash(copy.deepcopy(recipe))
    assert pickle.loads(pickle.dumps(recipe)) == recipe == resolve_recipe(recipe)
    assert dataclasses.replace(recipe, w="e4m3", g="e4m3") == BlockScaling()
    assert recipe.settings[:3] == (recipe.x, recipe.w, recipe.g)


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"x": "fp4"}, ValueError, r"BlockScaling\.x must be one of .*'mxfp4', .*, got 'fp4'"),
        ({"w": None}, ValueError, r"BlockScaling\.w must be one of .* got None"),
        ({"g": "mxfp4+rht32:0x1"}, ValueError, r"BlockScaling\.g must be one of .* got 'mxfp4\+"),
        ({"g": ["mxfp4"]}, ValueError, r"BlockScaling\.g must be one of .* got .*mxfp4"),
        ({"scale_rule": "ceil"}, ValueError, r"scale_rule must be one of .*'even'.* got 'ceil'"),
        ({"scale_rule": None}, ValueError, r"scale_rule must be one of .* got None"),
        (
            {"backward_override": "bf16"},
            ValueError,
            r"BlockScaling\.backward_override must be one of None",
        ),
        ({"precision": "fast"}, ValueError, r"BlockScaling\.precision must be one of 'adaptive'"),
        ({"alignment_spread": 9}, ValueError, r"BlockScaling\.alignment_spread must be 0 to 8"),
        ({"alignment_spread": True}, TypeError, r"alignment_spread must be an int"),
        ({"split_k": 1}, TypeError, r"BlockScaling\.split_k must be"),
        ({"wgrad_with_hp": True, "backward_override": "dequantized"}, ValueError, "already says"),
        ({"fp8_format": "E4M3"}, TypeError, "unexpected keyword argument 'fp8_format'"),
    ],
    ids=str,
)
def test_what_block_scaling_refuses(kwargs, error, says):
    with pytest.raises(error, match=says):
        BlockScaling(**kwargs)


def test_formats_that_no_kernel_multiplies(monkeypatch):
    def accepts(self, problem):
        return "takes no mxfp4 on the right" if problem.rhs.startswith("mxfp4@") else None

    monkeypatch.setattr(ReferenceGemm, "accepts", accepts)
    BlockScaling(g="mxfp4")
    says = "no kernel multiplies x='mxfp8_e4m3' with w='mxfp4': .*reference takes no mxfp4 on the"
    with pytest.raises(ValueError, match=says):
        BlockScaling(w="mxfp4")
