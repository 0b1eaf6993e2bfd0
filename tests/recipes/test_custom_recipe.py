"""CustomRecipe and overrides: layers that differ, asked about by role and name, once."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx import formats
from te_mx.recipe import (
    BlockScaling,
    CustomRecipe,
    Float8BlockScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    Quantizer,
    QuantizerRole,
    overrides,
    resolve_recipe,
)

FOUR, EIGHT = MXFP4BlockScaling().settings, MXFP8BlockScaling().settings
ASKED: list[QuantizerRole] = []


def by_place(role: QuantizerRole):
    """The first layer in high precision, fc2 in MXFP8, all others in MXFP4 with MXFP8 gradients."""
    ASKED.append(role)
    if role.name.startswith("0."):
        return None
    if role.name.endswith("fc2"):
        return "mxfp8"
    return "mxfp8" if role.tensor_type == "grad_output" else Quantizer("mxfp4", "", "mxfp8")


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(x), approximate="tanh"))


def model(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)])


def data(rows: int = 40, width: int = 64) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def step(run, x: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of x and of all parameters."""
    module = run if isinstance(run, nn.Module) else run.__self__
    x = x.clone().requires_grad_()
    for p in module.parameters():
        p.grad = None
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def by_hand(blocks: int = 2) -> tuple[nn.Module, object]:
    """The same layers, each in a region of its own recipe."""
    made = model(blocks)
    te_mx.convert_model(made)

    def run(x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(made):
            with te_mx.autocast(enabled=i > 0, recipe=MXFP4BlockScaling()):
                h = nn.functional.gelu(block.fc1(x), approximate="tanh")
            with te_mx.autocast(enabled=i > 0, recipe=MXFP8BlockScaling()):
                x = x + block.fc2(h)
        return x

    return made, run


def expected(x: torch.Tensor) -> list[torch.Tensor]:
    made, run = by_hand()
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in made.parameters())]


def same(ones, others) -> None:
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------------ in a forward
@pytest.mark.parametrize("how", ["region", "bound", "bound fused", "checkpointed", "compiled"])
def test_layers_run_as_the_factory_says(how):
    made = model()
    recipe = CustomRecipe(by_place)
    region = how in ("region", "checkpointed", "compiled")
    te_mx.convert_model(made, recipe=None if region else recipe, fuse=how == "bound fused")
    run = made
    if region:

        def run(x):
            with te_mx.autocast(recipe=recipe):
                if how == "checkpointed":
                    return checkpoint(made, x, use_reentrant=False)
                return made(x)

        if how == "compiled":
            run = torch.compile(run, backend="aot_eager", fullgraph=True)
    x = data().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    same([y.detach(), x.grad, *(p.grad for p in made.parameters())], expected(data()))


def test_compiled_code_follows_another_recipe():
    made = model()
    te_mx.convert_model(made)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    first, second = CustomRecipe(by_place), overrides("mxfp8", {"*.fc1": None})
    for recipe in (first, second, "mxfp4", first):
        with te_mx.autocast(recipe=recipe), torch.no_grad():
            assert torch.equal(compiled(data()), made(data()))


def test_each_layer_is_asked_about_once():
    ASKED.clear()
    made = model()
    te_mx.convert_model(made)
    for _ in range(3):  # equal recipes are one
        recipe = CustomRecipe(by_place, split_k=True)
        with te_mx.autocast(recipe=recipe):
            made(data()).sum().backward()
    names = [f"{i}.fc{k}" for i in (0, 1) for k in (1, 2)]
    tensors = ("input", "weight", "grad_output")
    assert Counter(ASKED) == {QuantizerRole("linear", t, n): 1 for n in names for t in tensors}
    assert str(ASKED[0]) == "module_type=linear|tensor_type=input|name=0.fc1"


def test_micro_batches_main_grad_and_delayed_gradients():
    made = model()
    te_mx.convert_model(made, recipe=CustomRecipe(by_place))
    x, plain = data(), copy.deepcopy(made)
    for module in made.modules():
        if isinstance(module, te_mx.Linear):
            module.fuse_wgrad_accumulation = True
            module.weight.main_grad = torch.zeros_like(module.weight)

    for first in (True, False):
        for model_, given in ((made, first), (plain, None)):
            y = x
            for block in model_:
                h = nn.functional.gelu(_call(block.fc1, y, given), approximate="tanh")
                y = y + _call(block.fc2, h, given)
            y.square().sum().backward()
    for one, other in zip(made.modules(), plain.modules(), strict=True):
        if isinstance(one, te_mx.Linear):
            assert torch.allclose(one.weight.main_grad, other.weight.grad, rtol=1e-5, atol=1e-5)


def _call(layer, x, first):
    return layer(x, is_first_microbatch=first) if isinstance(layer, te_mx.Linear) else layer(x)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(
    ("one", "two"), [("mxfp4", "mxfp8"), (None, "mxfp8"), ("mxfp8", None), ("mxfp8", "mxfp8")]
)
def test_the_two_layers_of_a_layernorm_mlp_may_differ(one, two, delayed):
    """As a LayerNormLinear and a Linear with torch's activation between them."""
    torch.manual_seed(0)
    given = {"normalization": "RMSNorm", "activation": "swiglu"}
    mlp = te_mx.LayerNormMLP(64, 96, name="mlp", delay_wgrad_compute=delayed, **given)
    mlp.fc1_bias.data.normal_()
    norm = te_mx.LayerNormLinear(64, 192, normalization="RMSNorm")
    last = te_mx.Linear(96, 64)
    norm.load_state_dict({
        "layer_norm_weight": mlp.layer_norm_weight, "weight": mlp.fc1_weight, "bias": mlp.fc1_bias
    })  # fmt: skip
    last.load_state_dict({"weight": mlp.fc2_weight, "bias": mlp.fc2_bias})
    recipe = overrides("mxfp8", {"mlp.fc1": one, "mlp.fc2": two})
    x, x2 = data().requires_grad_(), data().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = mlp(x)
        y.square().sum().backward()
    if delayed:
        mlp.backward_dw()
    with te_mx.autocast(one is not None, recipe=one or "mxfp8"):
        gate = norm(x2)
    a, b = gate.chunk(2, -1)
    with te_mx.autocast(two is not None, recipe=two or "mxfp8"):
        z = last(nn.functional.silu(a) * b)
    z.square().sum().backward()
    if one == two:
        return  # one step, whose activation rounds elsewhere: tests of LayerNormMLP have it
    assert torch.equal(y, z) and torch.equal(x.grad, x2.grad)
    for mine, theirs in (
        (mlp.layer_norm_weight, norm.layer_norm_weight), (mlp.fc1_weight, norm.weight),
        (mlp.fc1_bias, norm.bias), (mlp.fc2_weight, last.weight), (mlp.fc2_bias, last.bias),
    ):  # fmt: skip
        assert torch.equal(mine.grad, theirs.grad)


def test_a_layernorm_mlp_of_two_recipes_compiles_and_is_checkpointed():
    torch.manual_seed(0)
    mlp = te_mx.LayerNormMLP(64, 96, name="mlp", checkpoint=True)
    plain = copy.deepcopy(mlp)
    plain.checkpoint = False
    recipe = overrides("mxfp8", {"mlp.fc2": "mxfp4"})
    found = []
    for run in (mlp, plain, torch.compile(plain, backend="aot_eager", fullgraph=True)):
        with te_mx.autocast(recipe=recipe):
            y = run(data())
        plain.zero_grad()
        y.square().sum().backward()
        module = mlp if run is mlp else plain
        found.append([y.detach(), *(p.grad.clone() for p in module.parameters())])
    same(found[0], found[1])
    same(found[0], found[2])


def test_groups_and_functions_of_groups():
    torch.manual_seed(0)
    layer = te_mx.GroupedLinear(2, 64, 32, name="experts")
    seen = []

    def factory(role):
        seen.append(role)
        return "mxfp4" if role.name == "experts" else "mxfp8" if role.name != "plain" else None

    recipe, x, splits = CustomRecipe(factory), data(), [24, 16]
    with te_mx.autocast(recipe=recipe):
        y = layer(x, splits)
    assert {role.module_type for role in seen} == {"grouped_linear"}
    with te_mx.autocast(recipe=BlockScaling(x="mxfp4", w="mxfp4", g="mxfp4")):
        assert torch.equal(y, layer(x, splits))
    weights, offs = torch.randn(2, 32, 64), torch.tensor([24, 40])
    with te_mx.autocast(recipe=recipe):
        y = te_mx.grouped_linear(x, weights, offs=offs)
    assert torch.equal(y, te_mx.grouped_linear(x, weights, offs=offs))
    with pytest.raises(ValueError, match="returns None for grouped_linear of no name"):
        te_mx.grouped_linear(x, weights, offs=offs, recipe=overrides(None, {}))


# ------------------------------------------------------------------------------- in convert_model
def test_the_report_says_what_each_layer_got():
    made = model(3)
    made.append(nn.Linear(64, 8))
    recipe = overrides("mxfp4", {"0.*": None, "*fc2": "mxfp8", "3": None})
    report = te_mx.convert_model(made, recipe=recipe)
    notes = {row.name: row.note for row in report}
    assert notes["0.fc1"] == "high precision, as the recipe says by '0.*'" == notes["0.fc2"]
    assert notes["1.fc1"] == "x mxfp4, w mxfp4, g mxfp8_e4m3"
    assert notes["2.fc2"] == "mxfp8_e4m3 by '*fc2'"
    assert set(report.skipped) == {"0.fc1", "0.fc2", "3"} and type(made[3]) is nn.Linear
    assert made[1].fc1._bound == FOUR and made[1].fc2._bound == EIGHT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(data()).sum().backward()
    assert [row.fprop for row in te_mx.audit(made)].count("high precision") == 3
    # Another one: layers that are te_mx's already go back to high precision, without a warning.
    report = te_mx.convert_model(made, recipe=overrides("mxfp8", {"1.*": None}))
    assert made[1].fc1._bound is None and made[2].fc1._bound == EIGHT
    assert "high precision" in {row.name: row.note for row in report}["1.fc1"]
    plain = copy.deepcopy(made[1])
    te_mx.revert_model(plain)
    assert torch.equal(plain(data()), made[1](data()))
    assert te_mx.freeze_weights(made) == 5 and not made[1].fc1._source.standing


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("1.fc3", "'1.fc3' matches none of the 4 layers of the model; near are .*1.fc"),
     ("model.0.*", "'model.0.*' matches none")],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_is_refused(pattern, says):
    made = model()
    with pytest.raises(ValueError, match=says):
        te_mx.convert_model(made, recipe=overrides("mxfp8", {"*.fc2": None, pattern: "mxfp4"}))
    assert type(made[0].fc1) is nn.Linear


def test_layers_of_different_recipes_are_not_fused():
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(64, 96, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(96, 64, bias=False)

        def forward(self, x):
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.RMSNorm(64), MLP()

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    torch.manual_seed(0)
    made = nn.Sequential(Norms(), Norms())
    other = copy.deepcopy(made)
    recipe = overrides("mxfp8", {"0.*down_proj": "mxfp4", "1.*gate_proj": "mxfp8-floor"})
    report = te_mx.convert_model(made, recipe=recipe, fuse=True)
    assert "its layers run with different recipes" in report.skipped["0.mlp"]
    te_mx.convert_model(other, recipe=recipe)
    y, z = (one(data().bfloat16()) for one in (made.bfloat16(), other.bfloat16()))
    assert torch.allclose(y, z, rtol=0.05, atol=0.05)
    sequence = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    report = te_mx.convert_model(sequence, recipe=overrides("mxfp8", {"3": "mxfp4"}), fuse=True)
    assert "different recipes" in report.skipped["0"] and sequence[3]._bound == FOUR
    sequence = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    te_mx.convert_model(sequence, recipe=overrides("mxfp8", {"[13]": "mxfp4"}), fuse=True)
    assert type(sequence[0]) is te_mx.LayerNormMLP and sequence[0]._bound == FOUR


def test_bound_layers_are_saved_copied_and_frozen():
    made = model()
    te_mx.convert_model(made, recipe=CustomRecipe(by_place))
    other = pickle.loads(pickle.dumps(copy.deepcopy(made)))
    assert torch.equal(other(data()), made(data()))
    buffer = io.BytesIO()
    te_mx.freeze_weights(made, drop_master=True)
    torch.save(made.state_dict(), buffer)
    assert made[1].fc1._source.saved[0] == "mxfp4" and made[1].fc2._source.saved[0] == "mxfp8_e4m3"
    assert torch.equal(other(data()), made(data()))
    loaded = model()
    te_mx.convert_model(loaded, recipe=CustomRecipe(by_place))
    loaded.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    assert torch.equal(loaded(data()), made(data()))
    mlp = te_mx.LayerNormMLP(64, 96, name="mlp")
    mixed = overrides("mxfp8", {"mlp.fc2": "mxfp4"})
    with pytest.raises(ValueError, match="its weights have different recipes"):
        te_mx.freeze_weights(mlp, recipe=mixed)
    te_mx.freeze_weights(mlp, recipe="mxfp8", drop_master=True)
    with te_mx.autocast(recipe=mixed), pytest.raises(NotImplementedError, match="unfreeze it"):
        mlp(data())


# ----------------------------------------------------------------------------------- what is said
def settings(*answers, **options):
    said = dict(zip(("input", "weight", "grad_output"), answers, strict=True))
    recipe = CustomRecipe(lambda role: said[role.tensor_type], **options)
    made = te_mx.Linear(64, 64)
    te_mx.convert_model(made, recipe=recipe)
    return made._bound


def test_answers_mean_what_recipes_mean():
    eight = ("mxfp8",) * 3
    assert settings(*eight) == settings(*[formats.get("mxfp8_e4m3")] * 3) == EIGHT
    assert settings("mxfp8", "mxfp8", "mxfp8_e5m2") == resolve_recipe("mxfp8-hybrid").settings
    assert settings(*[("mxfp8", "floor")] * 3) == resolve_recipe("mxfp8-floor").settings
    blocks = ["fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e4m3_1x128"]
    assert settings(*blocks) == Float8BlockScaling().settings
    deep = settings(*[(fmt, "fp32") for fmt in blocks])
    assert deep == te_mx.recipe.DeepSeekV3().settings
    sides = Quantizer("mxfp4", "", "mxfp8")
    assert settings(sides, sides, "mxfp8") == FOUR
    turned = "mxfp4+rht32:0x5b39a1c6"
    every = settings(("mxfp4", "", turned), "mxfp4", ("mxfp4", "rceil+sr", turned))
    assert every == resolve_recipe("mxfp4_all").settings
    assert settings(*[MXFP4BlockScaling(g="mxfp4")] * 3) == every
    plain = MXFP8BlockScaling(backward_override="high_precision").settings
    assert settings("mxfp8", "mxfp8", None) == plain
    given = {"precision": "exact", "one_copy_weights": True, "backward_override": "dequantized"}
    assert settings(*eight, **given) == MXFP8BlockScaling(**given).settings
    assert settings(None, None, None) is None


@pytest.mark.parametrize(
    ("answers", "error", "says"),
    [
        (("mxfp8", None, "mxfp8"), NotImplementedError, "products of one quantized operand"),
        ((None, None, "mxfp8"), ValueError, "nothing to multiply gradients with"),
        (("mxfp8", "mxfp9", "mxfp8"), ValueError, "'mxfp9'"),
        ((1, 1, 1), TypeError, "a factory returns None, a format"),
        ((("mxfp8", "rceil", None, 1),) * 3, TypeError, "an answer is"),
        ((("mxfp8", "round"),) * 3, ValueError, "mxfp8_e4m3 has rules 'rceil'"),
        ((("mxfp8", "floor"), "mxfp8", "mxfp8"), NotImplementedError, "have one scale rule"),
        ((("mxfp4", "rceil+sr"),) * 3, NotImplementedError, "gradients alone are rounded"),
        (("mxfp4+rht32:0x1",) * 3, ValueError, "columnwise formats have alone"),
        ((("mxfp4", "", "mxfp4+rht32:0x1"), "mxfp4", "mxfp4"), ValueError, "both sides of wgrad"),
        ((("mxfp8", "", "fp8_e4m3_1x128"),) * 3, ValueError, "does not know the rule"),
        ((MXFP8BlockScaling(), "mxfp8", "mxfp8"), ValueError, "all three tensors"),
        ((CustomRecipe(by_place),) * 3, ValueError, "is no CustomRecipe"),
    ],
)
def test_answers_that_mean_nothing_name_the_layer(answers, error, says):
    with pytest.raises(error, match=f"CustomRecipe: of .* qfactory said input.*{says}"):
        settings(*answers)


def test_a_factory_by_its_import_path():
    here = __name__
    for path in (f"{here}:by_place", f"{here}.by_place"):
        assert CustomRecipe(path) == CustomRecipe(by_place)
    assert pickle.loads(pickle.dumps(CustomRecipe(by_place))) == CustomRecipe(by_place)
    recipe = CustomRecipe(by_place)
    assert recipe.custom() and not recipe.mxfp8() and "by_place" in repr(recipe)
    recipe.backward_override = "dequantized"
    assert recipe != CustomRecipe(by_place)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"qfactory": 3}, TypeError, "qfactory must be a function"),
        ({"qfactory": dict}, TypeError, "qfactory must be a function"),
        ({"qfactory": "no_such_module:name"}, ValueError, "No module named 'no_such_module'"),
        ({"qfactory": "te_mx:nothing"}, ValueError, "nothing"),
        ({"qfactory": "name"}, ValueError, "'package.module:name'"),
        ({"qfactory": "te_mx.recipe:NAMED"}, ValueError, "must name a function"),
        ({"qfactory": by_place, "fp8_dpa": True}, NotImplementedError, "CustomRecipe.fp8_dpa"),
        ({"qfactory": by_place, "quantization_alignment": 0}, ValueError, "quantization_alignment"),
        ({"qfactory": by_place, "backward_override": "x"}, ValueError, "backward_override"),
    ],
)
def test_fields_that_mean_nothing_are_refused(given, error, says):
    with pytest.raises(error, match=says):
        CustomRecipe(**given)


def test_explain_is_asked_about_one_layer():
    recipe, sizes = overrides("mxfp8", {"first": None, "fc2": "mxfp4"}), {"m": 64, "n": 64, "k": 64}
    with pytest.raises(ValueError, match=r"here no layer is meant: pass that of one, recipe.of"):
        te_mx.explain(**sizes, recipe=recipe)
    for name, same in (("fc1", "mxfp8"), ("fc2", "mxfp4")):
        made = recipe.of(name)
        assert made.settings == resolve_recipe(same).settings and made == recipe.of(name)
        assert te_mx.explain(**sizes, recipe=made) == te_mx.explain(**sizes, recipe=same)
    assert recipe.of("first") is None
    with pytest.raises(TypeError, match="name must be a str"):
        recipe.of(3)
    with pytest.raises(ValueError, match="module_type must be one of 'linear'"):
        recipe.of("fc1", "dpa")


def test_overrides_refuses_what_is_no_recipe():
    with pytest.raises(TypeError, match="patterns must be a dict"):
        overrides("mxfp8", ["*"])
    with pytest.raises(ValueError, match="recipe must be one of"):
        overrides("mxfp8", {"*": "nonsense"})
    with pytest.raises(ValueError, match="says by itself"):
        overrides(CustomRecipe(by_place), {})
