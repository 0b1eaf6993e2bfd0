"""Compiled code of frozen layers takes the kernels for few rows that eager code takes: one op that
looks, when it runs, for what the module of the weight keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from emulated_hopper import PRODUCTS, hopper
from functorch.compile import make_boxed_func
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.compile_utils import fx_graph_cse

import te_mx
from te_mx.backends.sm90.decode import Decode
from te_mx.recipe import BlockScaling, Float8BlockScaling
from te_mx.recipes.settings import in_words, of_words
from te_mx.weights import changes as frozen_owners

K, N = 72, 40
BF16 = torch.bfloat16
RECIPES = {
    "mxfp8": BlockScaling(x="mxfp8_e4m3", w="mxfp8_e4m3", g="mxfp8_e5m2"),
    "mxfp4": BlockScaling(x="mxfp8_e4m3", w="mxfp4", g="mxfp8_e5m2"),
    "fp8_block": Float8BlockScaling(),
}
KINDS = {
    "linear": lambda: te_mx.Linear(K, N, dtype=BF16),
    "split": lambda: te_mx.Linear(K, N, dtype=BF16, bias=False, parameters_split=("q", "k")),
    "norm": lambda: te_mx.LayerNormLinear(K, N, dtype=BF16, return_bias=True),
    "mlp": lambda: te_mx.LayerNormMLP(K, N, dtype=BF16, activation="gelu"),
    "gated": lambda: te_mx.LayerNormMLP(K, N, dtype=BF16, activation="swiglu"),
}


@pytest.fixture(autouse=True)
def on_hopper():
    torch._dynamo.reset()
    with hopper():
        yield
    torch._dynamo.reset()


class Compiled:
    """A module compiled as one graph, with the number of graphs so far."""

    def __init__(self, module, **kwargs):
        self.graphs = 0
        torch._dynamo.reset()
        self.run = torch.compile(module, fullgraph=True, backend=self._backend, **kwargs)

    def _backend(self, graph, inputs):
        self.graphs += 1

        def keep(traced, _):
            self.code = fx_graph_cse(traced.graph).python_code("self").src
            return make_boxed_func(traced.forward)

        return aot_module_simplified(graph, inputs, keep)

    def __call__(self, x, *args, recipe="mxfp8"):
        return run(self.run, x, *args, recipe=recipe)


def run(module, x, *args, recipe="mxfp8"):
    with torch.no_grad(), te_mx.autocast(recipe=RECIPES[recipe]):
        return module(x, *args)


def frozen(kind="linear", recipe="mxfp8", drop=False, **kwargs):
    torch.manual_seed(3)
    module = KINDS[kind]()
    te_mx.freeze_weights(module, drop_master=drop, recipe=RECIPES[recipe], **kwargs)
    return module


def rows(m):
    return torch.randn(m, K, dtype=BF16)


def same(got, expected):
    if isinstance(got, torch.Tensor):
        return torch.equal(got, expected)
    return all(map(same, got, expected))


def calls():
    made = list(PRODUCTS)
    PRODUCTS.clear()
    return made


@pytest.mark.parametrize(
    ("kind", "recipe", "drop"),
    [
        ("linear", "mxfp8", False), ("linear", "mxfp4", True), ("linear", "fp8_block", True),
        ("split", "mxfp8", False), ("norm", "mxfp8", False), ("norm", "mxfp4", True),
        ("mlp", "fp8_block", False), ("mlp", "mxfp4", True), ("gated", "mxfp8", True),
    ],
)  # fmt: skip
def test_the_native_calls_and_the_bits_are_those_of_eager(kind, recipe, drop):
    module = frozen(kind, recipe, drop)
    compiled = Compiled(module)
    kernel = "sm90_mxfp4" if recipe == "mxfp4" else "sm90_decode"
    for m in (1, 3, 32, 33, 65):
        x = rows(m)
        expected, eager = run(module, x, recipe=recipe), calls()
        assert same(compiled(x, recipe=recipe), expected) and calls() == eager
        most = 64 if drop or recipe == "mxfp8" else 256
        assert bool(eager) == (m <= most or recipe == "mxfp4")
        if eager:
            module.__dict__["_tag"] = -1
            compiled(x, recipe=recipe)
            assert {row.fprop for row in te_mx.audit(module).layers} == {kernel}
            calls()
    # One row, and any number of rows.
    assert compiled.graphs == 2


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("linear", {}), ("linear", {"drop": True}), ("norm", {"drop": True}), ("mlp", {}),
        ("gated", {"drop": True}),
        ("mlp", {"recipe": "mxfp4", "drop": True, "activations": "bf16"}),
    ],
)  # fmt: skip
def test_one_graph_of_any_number_of_rows(kind, how):
    """With the native calls and the bits of eager code, on either side of few rows."""
    module = frozen(kind, **how)
    for bounds in (None, (2, 256)) if kind in ("norm", "gated") else (None,):
        compiled, few, first = Compiled(module, dynamic=None if bounds else True), 0, 0
        for m in (2, 40, 7, 64, 65, 90):
            x = rows(m).view(m, 1, K)
            if bounds:
                torch._dynamo.mark_dynamic(x, 0, min=bounds[0], max=bounds[1])
            expected, eager = run(module, x), calls()
            assert same(compiled(x), expected) and calls() == eager
            few, first = few + bool(eager), compiled.graphs if m == 2 else first
        assert compiled.graphs == first and few >= 2


@pytest.mark.parametrize(("least", "most"), [(2, 30), (65, 256)])
def test_bounds_that_settle_it_leave_one_way(least, most):
    module = frozen()
    compiled, x = Compiled(module), rows(least + 3)
    torch._dynamo.mark_dynamic(x, 0, min=least, max=most)
    assert same(compiled(x), run(module, x)) and compiled.graphs == 1
    assert "quantize_beyond" not in compiled.code
    assert ("frozen_product" in compiled.code) == (most <= 32)


def test_any_number_of_rows_are_quantized_once_for_all_layers():
    first, second = frozen(), frozen(drop=True)
    compiled = Compiled(lambda x: (first(x), second(x)), dynamic=True)
    for m in (90, 3):
        x = rows(m)
        assert same(compiled(x), (run(first, x), run(second, x)))
    assert compiled.code.count("te_mx.quantize_beyond") == 1
    assert compiled.graphs == 1


@pytest.mark.parametrize("act", ["linear", "mlp"])
def test_inputs_as_they_are(act):
    module = frozen(act, "mxfp4", True, activations="bf16")
    compiled, x = Compiled(module), rows(5)
    expected, eager = run(module, x), calls()
    assert eager and same(compiled(x), expected) and calls() == eager


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_no_change_of_a_weight_is_missed_and_nothing_compiles_anew(kind, drop, monkeypatch):
    made = []
    form = Decode.form
    monkeypatch.setattr(Decode, "form", lambda *a: made.append(1) or form(*a))
    module, x = frozen(kind, drop=drop), rows(4)
    compiled = Compiled(module)

    def reload():
        state = {name: t.clone() for name, t in module.state_dict().items()}
        if drop:
            state["weight_scale"] += 1
        else:
            state["weight"] *= 2
        module.load_state_dict(state)

    def in_place():
        with torch.no_grad():
            (module.weight_scale.add_(1) if drop else module.weight.mul_(2))

    def memory():
        with torch.no_grad():
            if not drop:
                module.weight.data = module.weight * 2
            else:
                module.weight_scale.add_(1)

    for change in (None, in_place, reload, memory):
        if change is not None:
            change()
        before = len(made)
        got = [compiled(x) for _ in range(3)]
        assert len(made) == before + 1 and len(calls()) == 3  # one form for each state
        fresh = KINDS[kind]()
        te_mx.freeze_weights(fresh, drop_master=drop, recipe=RECIPES["mxfp8"])
        fresh.load_state_dict(module.state_dict())
        expected = run(fresh, x)
        calls()
        assert all(same(one, expected) for one in got)
    assert compiled.graphs == 1


def test_many_rows_see_changes_too_and_quantize_their_input_once():
    first, second = frozen(), frozen()
    compiled, x = Compiled(lambda x: (first(x), second(x))), rows(90)
    for _ in range(2):
        fresh = [KINDS["linear"]() for _ in range(2)]
        for one, layer in zip(fresh, (first, second), strict=True):
            one.load_state_dict(layer.state_dict())
        got = compiled(x)
        assert same(got, [run(one, x) for one in fresh])
        with torch.no_grad():
            first.weight.mul_(2)
            second.load_state_dict({"weight": second.weight * 3, "bias": second.bias})
    assert compiled.graphs == 1 and calls() == []
    assert compiled.code.count("te_mx.quantize") == 1


@pytest.mark.parametrize(
    ("kind", "grad"),
    [("linear", True), ("split", True), ("norm", False), ("mlp", False), ("gated", True)],
)
def test_changes_are_seen_at_many_rows_and_in_training(kind, grad):
    check_changes(frozen(kind), grad)


def check_changes(module, grad, *args):
    compiled, x, outs = Compiled(module), rows(90), []

    def step(run):
        leaf = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad), te_mx.autocast(recipe=RECIPES["mxfp8"]):
            y = run(leaf, *args)
            y = y[0] if isinstance(y, tuple) else y
        if grad:
            y.float().sum().backward()
        return y.detach(), leaf.grad if grad else y

    step(module)  # keeps what its gradients want
    for _ in range(2):
        outs.append(step(compiled.run))
        assert same(outs[-1], step(module))
        with torch.no_grad():
            for one in module.parameters():
                one.mul_(2)
    assert not same(*outs) and compiled.graphs == 1 and calls() == []


@pytest.mark.parametrize("drop", [False, True])
def test_eager_and_compiled_code_share_what_is_kept(drop, monkeypatch):
    made = []
    form = Decode.form
    monkeypatch.setattr(Decode, "form", lambda *a: made.append(1) or form(*a))
    module, x = frozen(drop=drop), rows(4)
    assert same(Compiled(module)(x), run(module, x)) and len(made) == 1
    other = copy.deepcopy(module)
    assert same(Compiled(other)(x), run(other, x)) and len(made) == 2


def test_layers_of_one_shape_share_a_graph():
    layers = [frozen(drop=True) for _ in range(3)]
    compiled, x = Compiled(lambda x, layer: layer(x)), rows(4)
    for layer in layers:
        assert same(compiled(x, layer), run(layer, x))
    assert compiled.graphs == 1


def test_tensors_that_no_module_holds_are_quantized():
    """functional_call, and a weight that the graph itself changes."""
    module, x = frozen(), rows(4)
    other = {"weight": torch.randn(N, K, dtype=BF16), "bias": torch.randn(N, dtype=BF16)}
    plain = te_mx.Linear(K, N, dtype=BF16)
    plain.load_state_dict(other)

    def call(x, given):
        return torch.func.functional_call(module, given, (x,))

    with te_mx.autocast(recipe=RECIPES["mxfp8"]):
        assert same(Compiled(call)(x, other), run(plain, x))

    def step(x):
        module.weight.mul_(2)
        return module(x)

    plain.load_state_dict({"weight": module.weight * 2, "bias": module.bias})
    assert same(Compiled(step)(x), run(plain, x))
    assert calls() == []


def test_gradients_are_those_of_eager():
    module, x = frozen(), rows(4)
    compiled, grads = Compiled(module), []
    for one in (module, compiled.run):
        leaf = x.clone().requires_grad_()
        with te_mx.autocast(recipe=RECIPES["mxfp8"]):
            one(leaf).float().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads) and calls() == []


def test_a_capture_keeps_nothing_that_it_made(monkeypatch):
    module, x = frozen(drop=True), rows(4)
    compiled = Compiled(module)
    places = "te_mx.weights.decode.capturing", "te_mx.weights.traced.capturing"
    for place in places:
        monkeypatch.setattr(place, lambda device: True)
    captured = compiled(x)
    assert calls() == [] and not module._source.decode_weights.made
    for place in places:
        monkeypatch.setattr(place, lambda device: False)
    expected = compiled(x)
    for place in places:
        monkeypatch.setattr(place, lambda device: True)
    assert same(compiled(x), expected) and len(calls()) == 2
    assert module._source.decode_weights.in_graphs == [
        module._source.decode_weights.made["weight"].weight
    ]
    torch.testing.assert_close(captured, expected, rtol=0.02, atol=0.02)


def test_exported_programs_hold_ops_of_codes_alone():
    module = nn.Sequential(frozen(drop=True))
    with torch.no_grad(), te_mx.autocast(recipe=RECIPES["mxfp8"]):
        for strict in (False, True):
            program = torch.export.export(module, (rows(4),), strict=strict)
            assert "frozen_product" not in program.graph_module.code
            assert "te_mx.gemm" in program.graph_module.code


def test_compiled_code_is_not_taken_for_an_export(monkeypatch):
    """Dynamo of torch 2.11 says True of any is_exporting() in the code that it traces."""
    asked = torch.compiler.is_dynamo_compiling
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: asked())
    module, x = frozen(), rows(4)
    compiled = Compiled(module)
    before = compiled(x)
    with torch.no_grad():
        module.weight.mul_(2)
    assert not same(compiled(x), before) and len(calls()) == 2


def test_the_op_on_tensors_without_data():
    module = frozen(drop=True)
    held = module._held_tensors("weight")
    words = in_words(RECIPES["mxfp8"].settings)
    x = rows(3)
    row = te_mx._ops.quantize_2d(x, "mxfp8_e4m3@rows").row
    bias = module.bias.detach()
    given = x, *row[:3], 2, held, bias, None, "weight", "codes", words, N, "", BF16
    torch.library.opcheck(torch.ops.te_mx.frozen_product.default, given)
    kept = frozen()
    torch.library.opcheck(torch.ops.te_mx.quantize_beyond.default, (x, 2, row.spec, "rceil"))
    given = *row[:5], [kept.weight.detach()], kept.bias.detach(), "weight", words, N, "", BF16
    torch.library.opcheck(torch.ops.te_mx.frozen_gemm.default, given)
    assert of_words(words) == RECIPES["mxfp8"].settings


def test_owners_go_with_their_modules():
    before = len(frozen_owners._owners)
    module = frozen(drop=True)
    assert len(frozen_owners._owners) > before
    held = module._held_tensors("weight")
    assert frozen_owners.owner_of(held, "weight") is module
    te_mx.unfreeze_weights(module, dequantize=True)
    assert frozen_owners.owner_of(held, "weight") is None
    del module, held
    assert len(frozen_owners._owners) <= before + 1


# ------------------------------------------------------------------------------------------- groups
SPLITS = [3, 0, 5, 1]


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("mxfp8", {}), ("mxfp4", {"drop": True}), ("fp8_block", {"single_grouped_weight": True}),
        ("mxfp8", {"bias": False}),
    ],
    ids=str,
)  # fmt: skip
def test_groups(recipe, how):
    with hopper():
        check_groups(recipe, **how)


def test_changes_of_groups_are_seen_at_many_rows():
    with hopper():
        layer = te_mx.GroupedLinear(3, K, N, dtype=BF16)
        te_mx.freeze_weights(layer)
        check_changes(layer, False, torch.tensor([50, 0, 40]))


def check_groups(recipe, drop=False, **how):
    layer = te_mx.GroupedLinear(len(SPLITS), K, N, dtype=BF16, **how)
    te_mx.freeze_weights(layer, drop_master=drop, recipe=RECIPES[recipe])
    compiled, splits = Compiled(layer), torch.tensor(SPLITS)
    for m in (11, 9, 64):
        x = rows(m)
        expected, eager = run(layer, x, splits, recipe=recipe), calls()
        assert len(eager) == 1
        assert same(compiled(x, splits, recipe=recipe), expected) and calls() == eager
    if not drop:
        with torch.no_grad():
            held = layer.weight if "single_grouped_weight" in how else layer.weight2
            held.mul_(2)
        before = calls()
        got = compiled(x, splits, recipe=recipe)
        assert not same(got, expected)
        assert same(got, run(layer, x, splits, recipe=recipe)) and not before
    assert compiled.graphs <= 2
