"""te_mx.pytorch and te_mx.common: names, defaults, recipes, regions, the shim."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import sys
import warnings
from pathlib import Path

import pytest
import te_source
import torch
from fresh import python

import te_mx
import te_mx.pytorch as te
from te_mx.common import recipe as recipes
from te_mx.pytorch import fp8, utils
from te_mx.te import modules

LIST = json.loads(
    Path(__file__).parents[1].joinpath("compat", "transformer_engine.json").read_text()
)


LINEARS = {"Linear": (64, 32), "LayerNormLinear": (64, 32), "LayerNormMLP": (64, 96),
           "GroupedLinear": (2, 64, 32)}  # fmt: skip


# ------------------------------------------------------------------------------------------- names
def defined(*parts: str) -> list[ast.stmt]:
    return ast.parse(te_source.path(*parts).read_text()).body


def recipe_file() -> list[ast.stmt]:
    return defined("..", "common", "recipe", "__init__.py")


def test_names_are_transformer_engines():
    """All but te_mx's own two: none is invented."""
    body = [*defined("__init__.py"), *defined("attention", "rope.py")]
    there = {a.name for n in body if isinstance(n, ast.ImportFrom) for a in n.names}
    there |= {n.name for n in body if isinstance(n, ast.FunctionDef)}
    assert set(te.__all__) - {"install_shim", "remove_shim"} <= there
    assert all(getattr(te, name).__doc__ for name in te.__all__)
    classes = {n.name for n in recipe_file() if isinstance(n, ast.ClassDef)}
    assert set(recipes.__all__) - {"RecipeWarning"} <= classes


def test_what_there_is_not_says_why():
    assert not hasattr(te, "ops")
    with pytest.raises(AttributeError, match="has no ops: te_mx has no sequences of fusible"):
        te.ops  # noqa: B018
    with pytest.raises(AttributeError, match=r"te_mx\.pytorch has no nonsense$"):
        te.nonsense  # noqa: B018


def test_the_package_finds_it_by_attribute_and_loads_it_late():
    code = (
        "import sys, te_mx as te\n"
        "assert not any(name.startswith('te_mx.pytorch') for name in sys.modules)\n"
        "print(te.pytorch.Linear.__module__, te.common.recipe.Format.HYBRID.name)\n"
        "assert 'transformer_engine' not in sys.modules\n"
        "try: te.nonsense\n"
        "except AttributeError as error: print(error)"
    )
    done = python(code)
    assert done.stdout.splitlines() == [
        "te_mx.te.modules HYBRID", "module 'te_mx' has no attribute 'nonsense'"
    ], done.stderr  # fmt: skip


# ----------------------------------------------------------------------- modules as they are built
@pytest.mark.parametrize("kind", LINEARS)
def test_arguments_come_in_transformer_engines_order(kind):
    entries = LIST["modules"][kind]["constructor"]
    order = modules.ORDERS[kind]
    assert [entry["name"] for entry in entries][: len(order)] == list(order)
    signature = list(inspect.signature(getattr(te, kind)).parameters.values())
    assert tuple(p.name for p in signature[: len(order)]) == order
    made = getattr(te, kind)
    defaults = {e["name"]: e["default"] for e in entries if "default" in e} | {"device": "cpu"}
    sizes = LINEARS[kind]
    assert isinstance(
        made(*sizes, *[defaults[name] for name in order[len(sizes) :]]), torch.nn.Module
    )
    with pytest.raises(TypeError, match=rf"takes {len(order)} positional arguments"):
        made(*sizes, *range(len(order)))
    with pytest.raises(TypeError, match=f"{order[0]} is given twice"):
        made(*sizes, **{order[0]: 64})
    with pytest.raises(TypeError, match=f"{order[1]}.* must be given"):
        made(sizes[0])


@pytest.mark.parametrize(
    ("kind", "split"), [*((kind, False) for kind in LINEARS), ("Linear", True),
                        ("LayerNormLinear", True)]
)  # fmt: skip
def test_weights_start_as_in_transformer_engine(kind, split):
    given = {"parameters_split": ("a", "b")} if split else {}
    sizes = (256, 512) if kind != "GroupedLinear" else (2, 256, 512)
    made = getattr(te, kind)(*sizes, **given)
    assert isinstance(made, getattr(te_mx, kind))
    for name, parameter in made.named_parameters():
        if "bias" in name:
            assert not parameter.any(), name
        elif "layer_norm" not in name:
            assert abs(parameter.std().item() - 0.023) < 0.001, name
    ones = getattr(te, kind)(*sizes, init_method=torch.nn.init.ones_, **given)
    weights = {n: p for n, p in ones.named_parameters() if p.dim() > 1 and "fc2" not in n}
    assert weights and all(p.eq(1).all() for p in weights.values())


def test_modules_are_made_where_the_gpu_is(monkeypatch):
    assert modules.default_device().type == "cpu" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert modules.default_device() == torch.device("cuda", 1)
    with torch.device("meta"):
        for made in (te.Linear(8, 8), te.TransformerLayer(8, 8, 2), te.RMSNorm(8)):
            assert all(p.is_meta for p in made.parameters())


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [8, (3, 8)])
def test_norms(centered, shape):
    x = torch.randn(4, 3, 8, requires_grad=True)
    sizes = (shape,) if isinstance(shape, int) else shape
    for kind, function in (("LayerNorm", "layer_norm"), ("RMSNorm", "rms_norm")):
        made = getattr(te, kind)(shape, zero_centered_gamma=centered, eps=1e-3)
        start = 0.0 if centered else 1.0
        assert torch.equal(made.weight, torch.full(sizes, start))
        made.weight.data.normal_()
        extra = [made.bias.data.normal_()] if kind == "LayerNorm" else []
        assert [*made.state_dict()] == ["weight", "bias"][: 1 + len(extra)]
        expected = getattr(torch.nn.functional, function)(
            x, sizes, made.weight + float(centered), *extra, 1e-3
        )
        assert torch.equal(made(x), expected)
        made.load_state_dict({**made.state_dict(), "_extra_state": torch.empty(0)}, strict=True)
        assert made(x.bfloat16()).dtype == torch.bfloat16
        marked = getattr(te, kind)(shape, sequence_parallel=True)
        assert all(p.sequence_parallel for p in marked.parameters())
        meta = getattr(te, kind)(shape, device="meta")
        meta.reset_parameters()
        assert not meta.weight.is_meta and meta.weight.eq(1).all()


NORMED = {
    "LayerNorm": (lambda: te.LayerNorm(64, params_dtype=torch.bfloat16), "bias"),
    "fp32 parameters": (lambda: te.LayerNorm(64), "bias"),
    "LayerNormLinear": (
        lambda: te.LayerNormLinear(64, 64, params_dtype=torch.bfloat16), "layer_norm_bias"
    ),
    "LayerNormMLP": (
        lambda: te.LayerNormMLP(64, 64, params_dtype=torch.bfloat16), "layer_norm_bias"
    ),
}  # fmt: skip


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("kind", NORMED)
def test_gradients_of_16_bit_norms_are_added_up_in_fp32(kind, region, centered):
    """One number a row, thousands of them: sums in bf16 stop at 256 (kind LayerNorm)."""
    torch.manual_seed(0)
    build, bias = NORMED[kind]
    made = build()
    made.zero_centered_gamma = centered
    x = torch.randn(2048, 64).bfloat16()
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.copy_(torch.randn_like(p) * 0.2 if name.endswith("weight") else p)
    exact = copy.deepcopy(made).double()
    with te.autocast(enabled=region):
        y = made(x)
    y.float().sum().backward()
    exact(x.double()).sum().backward()
    allowed = 0.1 if region and bias != "bias" else 0.01
    for name in (bias, bias.replace("bias", "weight")):
        got, wanted = made.get_parameter(name).grad, exact.get_parameter(name).grad
        assert (got - wanted).abs().max() < allowed * wanted.abs().max(), name


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_follow_torchs_autocast(kind):
    made = getattr(te, kind)(8)
    x = torch.randn(4, 8)
    plain = made(x)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(made(x), plain.to(dtype))
            assert made(x.bfloat16()).dtype == dtype


def test_padding_is_none():
    x, splits = torch.randn(7, 4), [3, 4]
    same, sizes = te.Fp8Padding(2)(x, splits)
    assert same is x and sizes is splits and te.Fp8Unpadding(2, align_size=16)(x, splits) is x
    with pytest.raises(ValueError, match="m_splits must be num_gemms=2"):
        te.Fp8Padding(2)(x, [7])


# ----------------------------------------------------------------------------- recipes and regions
@pytest.mark.parametrize("kind", ["DelayedScaling", "Float8CurrentScaling"])
def test_recipes_of_one_scale_a_tensor_are_mapped_and_say_so(kind):
    with pytest.warns(recipes.RecipeWarning, match=f"{kind} stands for MXFP8BlockScaling") as seen:
        recipe = getattr(recipes, kind)(
            fp8_format=recipes.Format.E4M3, backward_override="high_precision"
        )
    assert seen[0].filename == __file__
    runs = te_mx.recipe.MXFP8BlockScaling(backward_override="high_precision")
    assert recipe.settings == runs.settings
    layer, x = te.Linear(64, 32), torch.randn(4, 64)
    outputs = []
    for one in (recipe, runs):
        with te.fp8_autocast(enabled=True, calibrating=True, fp8_recipe=one, fp8_group=object()):
            outputs.append(layer(x))
    assert torch.equal(*outputs) and not torch.equal(outputs[0], layer(x))
    with pytest.raises(NotImplementedError, match=f"{kind}.fp8_dpa=True is not supported"):
        getattr(recipes, kind)(fp8_dpa=True)
    with pytest.raises(ValueError, match=f"{kind}.*E5M2"):
        getattr(recipes, kind)(fp8_format=recipes.Format.E5M2)


@pytest.mark.filterwarnings("ignore::te_mx.common.recipe.RecipeWarning")
def test_recipes_say_what_kind_they_are():
    """By all predicates that Transformer Engine's base class has, on classes and on objects."""
    base = next(n for n in recipe_file() if isinstance(n, ast.ClassDef) and n.name == "Recipe")
    asked = [n.name for n in base.body if isinstance(n, ast.FunctionDef) and n.decorator_list]
    asked = [name for name in asked if not name.startswith("_")]
    true = {
        recipes.MXFP8BlockScaling: {"mxfp8"},
        recipes.Float8BlockScaling: {"float8_block_scaling"},
        recipes.DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
        recipes.Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
        te_mx.recipe.MXFP4BlockScaling: set(),
        te_mx.recipe.BlockScaling: set(),
    }
    assert {"mxfp8", "nvfp4", "custom"} <= set(asked)
    for kind, names in true.items():
        made = (
            kind(x="mxfp4", w="mxfp4", g="mxfp8_e4m3")
            if kind.__name__ == "BlockScaling"
            else kind()
        )
        for one in (kind, made):
            assert {name for name in asked if getattr(one, name)() is True} == names


@pytest.mark.filterwarnings("ignore::te_mx.common.recipe.RecipeWarning")
def test_their_fields_are_transformer_engines():
    classes = {n.name: n for n in recipe_file() if isinstance(n, ast.ClassDef)}
    for kind in ("DelayedScaling", "Float8CurrentScaling", "NVFP4BlockScaling"):
        theirs = [n.target.id for n in classes[kind].body if isinstance(n, ast.AnnAssign)]
        ours = list(inspect.signature(getattr(recipes, kind)).parameters)
        assert (ours[: len(theirs)] if kind.startswith("NVFP4") else ours) == theirs
    recipes.DelayedScaling(
        margin=1, amax_history_len=16, amax_compute_algo="most_recent", reduce_amax=False
    )
    for field, value in (("amax_history_len", 0), ("amax_compute_algo", "least"), ("margin", 0.5)):
        with pytest.raises((TypeError, ValueError), match=f"DelayedScaling.{field}"):
            recipes.DelayedScaling(**{field: value})


def test_custom_recipe_has_transformer_engines_fields():
    (found,) = [n for n in recipe_file() if getattr(n, "name", "") == "CustomRecipe"]
    fields = [n.target.id for n in found.body if isinstance(n, ast.AnnAssign)]
    assert [f.name for f in dataclasses.fields(recipes.CustomRecipe)][: len(fields)] == fields
    (found,) = [n for n in defined("quantization.py") if getattr(n, "name", "") == "QuantizerRole"]
    fields = [n.target.id for n in found.body if isinstance(n, ast.AnnAssign)]
    assert [f.name for f in dataclasses.fields(te.QuantizerRole)] == fields


def test_modules_made_in_a_quantized_init_are_as_ever():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.fp8_model_init(enabled=False):
            te.Linear(8, 8)
    with pytest.warns(recipes.RecipeWarning, match="trains from high-precision parameters") as seen:
        made = te.quantized_model_init(recipe=te_mx.get_default_recipe())
    assert seen[0].filename == __file__
    with made:
        layer = te.Linear(8, 8)
    assert layer.weight.dtype == torch.float32


@pytest.mark.filterwarnings("ignore::te_mx.common.recipe.RecipeWarning")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_weights_start_with_is_preserved(device):
    """Also where they are made real later, outside."""
    made = {}
    with te.quantized_model_init(preserve_high_precision_init_val=True):
        for kind, sizes in LINEARS.items():
            made[kind] = getattr(te, kind)(*sizes, params_dtype=torch.bfloat16, device=device)
        made["split"] = te.Linear(64, 32, parameters_split=("a", "b"), device=device)
        with te.quantized_model_init():
            plain = te.Linear(8, 8, device=device)
        with te.quantized_model_init(enabled=False, preserve_high_precision_init_val=True):
            off = te.Linear(8, 8, device=device)
        assert fp8.FP8GlobalStateManager.with_high_precision_init_val()
    assert not fp8.FP8GlobalStateManager.with_high_precision_init_val()
    for module in (plain, off, te.Linear(8, 8)):
        assert not hasattr(module.weight, "get_high_precision_init_val")
    for module in made.values():
        if device == "meta":
            module.reset_parameters()
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                assert not hasattr(parameter, "get_high_precision_init_val"), name
                continue
            started = parameter.detach().clone()
            parameter.data.add_(1.0)
            value = parameter.get_high_precision_init_val()
            assert value.device.type == "cpu" and torch.equal(value, started), name
            parameter.clear_high_precision_init_val()
            assert parameter.get_high_precision_init_val() is None


def test_the_global_state_is_that_of_the_regions():
    manager = fp8.FP8GlobalStateManager
    assert not manager.is_fp8_enabled() and manager.get_fp8_recipe() == te.get_default_recipe()
    floor = te_mx.recipe.MXFP8BlockScaling(scale_rule="floor")
    with te.autocast(recipe=floor):
        manager.reset()
        assert manager.is_fp8_enabled() and manager.get_fp8_recipe() == floor
        with te.autocast(enabled=False):
            assert not manager.is_fp8_enabled()
    assert manager.is_fp8_calibration() is manager.with_fp8_parameters() is False
    assert manager.get_fp8_group() is None
    assert manager.is_fp8_available() == manager.is_mxfp8_available() == (True, "")
    assert manager.is_fp8_block_scaling_available() == (True, "")
    assert manager.is_nvfp4_available() == te.is_nvfp4_available(True)
    for name in [name for name in vars(manager) if not name.startswith("_")]:
        one = getattr(manager, name)
        assert (one.__name__, bool(one.__doc__)) == (name, True)  # as help() shows it
        assert not inspect.signature(one).parameters
    with pytest.raises(AttributeError, match=r"has no global_amax_buffer: block scales follow"):
        manager.global_amax_buffer  # noqa: B018


def test_utils(monkeypatch):
    theirs = {n.name for n in defined("utils.py") if isinstance(n, ast.FunctionDef)}
    assert set(utils.__all__) <= theirs
    weight = torch.empty(512, 512)
    for init, deviation in (
        (utils.init_method_normal(0.5), 0.5),
        (utils.scaled_init_method_normal(0.5, 8), 0.125),
    ):
        assert init(weight) is weight
        assert abs(weight.std() - deviation) < 0.01 * deviation and abs(weight.mean()) < 0.01
    te.Linear(8, 8, init_method=utils.init_method_normal(0.1))
    for wrong in (lambda: utils.init_method_normal(-1.0),
                  lambda: utils.scaled_init_method_normal(-1.0, 1),
                  lambda: utils.scaled_init_method_normal(1.0, 0)):  # fmt: skip
        with pytest.raises(ValueError, match=r"sigma must be 0 or more|num_layers must be"):
            wrong()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="there is no GPU"):
        te.get_device_compute_capability()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert te.get_device_compute_capability() == (9, 0)


def test_answers():
    for name in ("fp8", "mxfp8", "fp8_block_scaling", "bf16", "nvfp4"):
        ask = getattr(te, f"is_{name}_available")
        assert ask() is True and ask(return_reason=True) == (True, "")
    assert fp8.check_mxfp8_support() == fp8.check_fp8_support() == (True, "")
    assert fp8.check_fp8_block_scaling_support() == (True, "")
    assert fp8.check_nvfp4_support() == te.is_nvfp4_available(True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_runs_again_with_the_recipe_of_the_call(reentrant):
    layer = te.LayerNormMLP(32, 64)
    x = torch.randn(4, 32, requires_grad=True)
    calls = []
    handle = layer.register_forward_pre_hook(lambda *_: calls.append(1))
    found = []
    for wrapped in (False, True):
        layer.zero_grad()
        x.grad = None
        with te.autocast():
            if wrapped:
                out = te.checkpoint(
                    layer, x, use_reentrant=reentrant, distribute_saved_activations=False,
                    tp_group=None, is_first_microbatch=None,
                )  # fmt: skip
            else:
                out = layer(x)
        out.sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
    handle.remove()
    assert len(calls) == 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(NotImplementedError, match="distribute_saved_activations=True"):
        te.checkpoint(layer, x, distribute_saved_activations=True)


def test_graphs_take_transformer_engines_arguments(monkeypatch):
    from te_mx.pytorch import graph

    seen = []
    monkeypatch.setattr(graph, "captured", lambda *args, recipe: seen.append((args, recipe)))
    theirs = te_source.arguments("graph.py", of="make_graphed_callables", method="")
    layer, args = te.Linear(8, 8), (torch.randn(2, 8),)
    given = {name: value for name, value in theirs.items() if value is not ...}
    te.make_graphed_callables(layer, args, **given)
    te.make_graphed_callables(layer, args, fp8_enabled=True, fp8_recipe=te.get_default_recipe())
    assert seen[0] == ((layer, args, 3, False, None), None)
    assert seen[1][1] == te_mx.get_default_recipe()
    for name, value in {"sample_kwargs": {}, "fp8_weight_caching": True, "_order": [1]}.items():
        with pytest.raises(NotImplementedError, match="is not supported"):
            te.make_graphed_callables(layer, args, **{name: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        te.make_graphed_callables(layer, args, nonsense=1)


# ---------------------------------------------------------------------------------------- the shim
SHIM = """
import importlib.util, sys, warnings
import te_mx.pytorch as te
te.install_shim()
te.install_shim()
assert importlib.util.find_spec("transformer_engine") is not None
import transformer_engine as whole
import transformer_engine.pytorch as theirs
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.attention import RotaryPositionEmbedding
from transformer_engine.pytorch.fp8 import MXFP8BlockScaling, check_mxfp8_support, fp8_model_init
import transformer_engine.pytorch.attention.rope as rope
assert rope.RotaryPositionEmbedding is RotaryPositionEmbedding
assert theirs is te and whole.pytorch.Linear is te.Linear and whole.__version__.startswith("2.")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    DelayedScaling(fp8_format=Format.HYBRID)
print(seen[0].category.__name__)
te.remove_shim()
print(sorted(name for name in sys.modules if name.startswith("transformer_engine")))
"""


def test_the_shim_answers_an_import_and_goes_away():
    done = python(SHIM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["RecipeWarning", "[]"]


@pytest.mark.parametrize("name", ["transformer_engine", "transformer_engine.common"])
def test_the_shim_gives_way_to_the_real_one(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, type(sys)(name))
    with pytest.raises(RuntimeError, match="was imported already"):
        te.install_shim()
    te.remove_shim()  # changes nothing
    assert name in sys.modules
