"""convert_model(fuse=True): MLP blocks of models as they are."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from norm_modules import relative
from torch import nn
from torch.nn.utils import parametrizations, prune

import te_mx
from te_mx.nn.surroundings import RAN
from te_mx.recipe import MXFP8BlockScaling

BF16 = torch.bfloat16


class Gated(nn.Module):
    """The MLP of Llama and its kin."""

    def __init__(self, act=None, bias=False, hidden=64, inner=96, out=None):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias)
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, out or hidden, bias)
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    """fc1, activation, fc2."""

    def __init__(self, act=None, bias=True, hidden=64, inner=96):
        super().__init__()
        self.fc1 = nn.Linear(hidden, inner, bias)
        self.act = act or nn.GELU("tanh")
        self.fc2 = nn.Linear(inner, hidden, bias)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Joined(nn.Module):
    """Phi-3: gate and up are one layer, and the product the other way round."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(64, 192)
        self.down_proj = nn.Linear(96, 64)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(up * F.silu(gate))


class Named(nn.Module):
    """Names that nobody knows, and the second layer is the one that is activated."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        a, b = self.one(x), self.two(x)
        return self.three(a * F.relu(b))


def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, **kwargs).to(BF16)


def given(rows=40):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).to(BF16)


def run(block, x, recipe=None, grad=None):
    """(y, gradients of x and of the parameters by name)."""
    x = x.detach().clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = block(x)
    named = [(n, p) for n, p in block.named_parameters() if p.requires_grad]
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype) if grad is None else grad
    got = torch.autograd.grad(y, [x, *(p for _, p in named)], grad)
    return y.detach(), dict(zip(["x", *(n for n, _ in named)], got, strict=True))


def as_module(block, recipe, x):
    """The same block as a te_mx.LayerNormMLP without a normalization."""
    first, last = (block.gate_proj, block.up_proj), block.down_proj
    module = te_mx.LayerNormMLP(
        64, 96, last.bias is not None, normalization=None, activation="swiglu", dtype=BF16
    )
    with torch.no_grad():
        module.fc1_weight.copy_(torch.cat([layer.weight for layer in first]))
        module.fc2_weight.copy_(last.weight)
        if last.bias is not None:
            module.fc1_bias.copy_(torch.cat([layer.bias for layer in first]))
            module.fc2_bias.copy_(last.bias)
    y, grads = run(module, x, recipe)
    made = {"x": grads["x"]}
    for kind in ("weight", "bias") if last.bias is not None else ("weight",):
        made[f"gate_proj.{kind}"], made[f"up_proj.{kind}"] = grads[f"fc1_{kind}"].split(96)
        made[f"down_proj.{kind}"] = grads[f"fc2_{kind}"]
    return y, made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [
        MXFP8BlockScaling(),
        MXFP8BlockScaling(one_copy_weights=True),
        MXFP8BlockScaling(backward_override="high_precision"),
        MXFP8BlockScaling(backward_override="dequantized"),
        MXFP8BlockScaling(wgrad_with_hp=True),
    ],
    ids=["default", "one_copy", "high_precision", "dequantized", "wgrad_hp"],
)
def test_bits_of_layernorm_mlp_under_every_recipe(recipe, bias):
    block, x = seeded(Gated, bias=bias), given()
    te_mx.convert_model(block, fuse=True)
    y, grads = run(block, x, recipe)
    assert block.__dict__[RAN] == "fused"
    expected_y, expected = as_module(block, recipe, x)
    assert torch.equal(y, expected_y) and set(grads) == set(expected)
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(block(x), y)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gated(),
        lambda: Gated(nn.GELU("tanh"), bias=True, out=32),
        lambda: Gated(nn.ReLU(inplace=True)),
        lambda: Gated(torch.sigmoid),
        lambda: Plain(),
        lambda: Plain(nn.GELU(), bias=False),
        lambda: Plain(nn.SiLU()),
        Joined,
        Named,
    ],
)
def test_no_further_from_exact_than_apart(make):
    """Both are off by the rounding to MXFP8; the step rounds once where the layers round thrice."""
    apart = seeded(make)
    exact = copy.deepcopy(apart).double()
    fused = copy.deepcopy(apart)
    te_mx.convert_model(apart)
    (row,) = [r for r in te_mx.convert_model(fused, fuse=True) if r.status == "fused"]
    assert row.name == "(root)" and " -> 96 -> " in row.shape
    x = given(256)
    y = run(fused, x)
    assert fused.__dict__[RAN] == "fused"
    as_layers = run(apart, x)
    truth = _exact(exact, x)
    for name, got in [("y", y[0]), *y[1].items()]:
        want = truth[0] if name == "y" else truth[1][name]
        other = as_layers[0] if name == "y" else as_layers[1][name]
        assert relative(got, want) <= 1.03 * relative(other, want) + 1e-3, name


def _exact(block, x):
    x = x.double().requires_grad_()
    y = block(x)
    names = [n for n, _ in block.named_parameters()]
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(BF16).double()
    got = torch.autograd.grad(y, [x, *block.parameters()], grad)
    return y.detach(), dict(zip(["x", *names], got, strict=True))


def test_what_stays_and_the_way_back():
    block, x = seeded(Gated), given()
    before, names, ids = block(x), list(block.state_dict()), [id(p) for p in block.parameters()]
    calls = []
    block.register_forward_hook(lambda *_: calls.append(1))
    dry = te_mx.convert_model(block, fuse=True, dry_run=True)
    assert dry.count("would fuse") == 1 and type(block) is Gated
    te_mx.convert_model(block, fuse=True)
    assert isinstance(block, Gated) and type(block).__name__ == "Gated"
    assert torch.equal(block(x), before) and len(calls) == 1
    assert list(block.state_dict()) == names and [id(p) for p in block.parameters()] == ids
    copies = copy.deepcopy(block), copy.copy(block)
    del block._forward_hooks[next(iter(block._forward_hooks))]
    copies = (*copies, pickle.loads(pickle.dumps(block)))
    y, grads = run(block, x)
    for other in copies:
        got = run(other, x)
        assert other.__dict__[RAN] == "fused" and torch.equal(got[0], y)
        assert all(torch.equal(got[1][name], grads[name]) for name in grads)
    for layer in (block.gate_proj, block.up_proj, block.down_proj):
        assert te_mx.audit(block)[layer.name].wgrad not in ("never ran", "high precision")
    back = te_mx.revert_model(block)
    assert back.count("reverted") == 4 and type(block) is Gated
    assert type(block.up_proj) is nn.Linear and torch.equal(block(x), before)
    assert te_mx.revert_model(copies[0]).count("reverted") == 4


class Adapter(nn.Module):
    """What adapters put in the place of a layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) * 2


def replaced(block):
    block.up_proj = Adapter(block.up_proj)


def hooked(block):
    block.gate_proj.register_forward_hook(lambda *args: args[2] * 2)


def wrapped(block):
    old = block.down_proj.forward
    block.down_proj.forward = lambda x: old(x) * 2


def pruned(block):
    prune.l1_unstructured(block.gate_proj, "weight", 0.5)


def normed(block):
    parametrizations.weight_norm(block.down_proj)


def other_activation(block):
    block.act_fn = nn.ReLU()


def frozen(block):
    te_mx.freeze_weights(block.up_proj)


def delayed(block):
    block.up_proj.delay_wgrad_compute = True


def own_class(block):
    block.gate_proj.__class__ = type("Sub", (te_mx.Linear,), {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, "up_proj was replaced by a Adapter"),
        (hooked, "gate_proj has hooks"),
        (wrapped, "down_proj has hooks or a forward of its own"),
        (pruned, "gate_proj has hooks"),
        (normed, "down_proj was replaced"),
        (other_activation, "act_fn was changed"),
        (frozen, "up_proj is frozen"),
        (delayed, "up_proj has return_bias"),
        (own_class, "gate_proj was replaced by a Sub"),
    ],
)
def test_changes_after_the_fusion_are_noticed(change, reason):
    fused, plain, x = seeded(Gated), seeded(Gated), given()
    te_mx.convert_model(fused, fuse=True)
    te_mx.convert_model(plain)
    for block in (fused, plain):
        change(block)
    with te_mx.autocast(), torch.no_grad():
        assert torch.equal(fused(x), plain(x))
        assert fused.__dict__[RAN].startswith(reason)
        assert reason in str(te_mx.audit(fused))


def test_a_forward_that_is_replaced_later_runs(monkeypatch):
    block, x = seeded(Gated), given()
    te_mx.convert_model(block, fuse=True)
    monkeypatch.setattr(Gated, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    with te_mx.autocast(), torch.no_grad():
        assert torch.equal(block(x), block.down_proj(block.up_proj(x)))


class Scaled(Gated):
    def forward(self, x):
        return super().forward(x) * 0.5


class Shifted(Gated):
    def forward(self, x):
        return super().forward(x + 1)


class Twice(Gated):
    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x) + 0 * self.gate_proj(x))


class Dropped(Gated):
    def forward(self, x):
        h = F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.1, self.training)
        return self.down_proj(h)


class WithNorm(Gated):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(96)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Scaled, "changes or adds to the result of its last layer"),
        (Shifted, "changes its input"),
        (Twice, "does not call each of its layers once"),
        (Dropped, "no activation that te_mx has in training"),
        (lambda: Gated(nn.Tanh()), "no activation that te_mx has"),
        (lambda: Gated(nn.GELU()), "no activation that te_mx has"),
        (lambda: Gated(nn.ReLU6()), "no activation that te_mx has"),
        (WithNorm, "holds more than the layers"),
    ],
)
def test_blocks_that_are_none_stay_with_a_reason(make, reason):
    block = seeded(make)
    generator = torch.get_rng_state()
    report = te_mx.convert_model(block.eval(), fuse=True)
    assert "(root)" not in report.fused and reason in report.skipped["(root)"]
    assert len(report.converted) == 3
    assert type(block).__name__ in ("Gated", "Scaled", "Shifted", "Twice", "Dropped", "WithNorm")
    assert torch.equal(torch.get_rng_state(), generator)
    excluded = te_mx.convert_model(Gated(), fuse=True, filter_fn=lambda _, name: name != "up_proj")
    assert excluded.fused == [] and "up_proj is excluded by filter_fn" in str(excluded)


def test_only_some_gradients():
    block, x = seeded(Gated, bias=True), given()
    te_mx.convert_model(block, fuse=True)
    _, expected = run(block, x)
    for trains in ("gate_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"):
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(name == trains)
        with te_mx.autocast():
            y = block(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        grads = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
        assert list(grads) == [trains] and torch.equal(grads[trains], expected[trains])
        block.zero_grad(set_to_none=True)


def test_main_grads():
    """Added to main_grad of each parameter, where they lie."""
    block, x = seeded(Gated), given()
    te_mx.convert_model(block, fuse=True)
    _, expected = run(block, x)
    for layer in (block.gate_proj, block.up_proj, block.down_proj):
        layer.fuse_wgrad_accumulation = True
        layer.weight.main_grad = torch.ones(layer.weight.shape)
    with te_mx.autocast():
        y = block(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    assert block.__dict__[RAN] == "fused"
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(block, name).weight
        assert weight.grad is None
        assert relative(weight.main_grad - 1, expected[f"{name}.weight"]) < 3e-3


def test_nothing_joined_and_no_activation_is_kept():
    """Kept for backward: h, the codes of x, and what the weights keep; never a copy of w1."""
    block, x = seeded(Gated, hidden=128, inner=256), torch.randn(64, 128, dtype=BF16)
    te_mx.convert_model(block, fuse=True)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), te_mx.autocast():
        block(x.requires_grad_())
    floats = [tuple(t.shape) for t in kept if t.is_floating_point() and t.numel()]
    own = [tuple(p.shape) for p in block.parameters()]
    assert [shape for shape in floats if shape not in own] == [(64, 512)]
    assert (512, 128) not in floats
    a_codes = [t for t in kept if t.dtype is torch.uint8 and t.numel() == 64 * 256]
    assert not a_codes


def test_compiled_in_one_graph():
    block, x = seeded(Gated, bias=True), given()
    te_mx.convert_model(block, fuse=True)
    y, grads = run(block, x)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = run(compiled, x)
    assert torch.equal(got[0], y)
    for name, grad in grads.items():
        assert torch.equal(got[1][name if name == "x" else f"_orig_mod.{name}"], grad), name


def test_compiled_code_keeps_no_joined_weight():
    """Where backward reads the weights themselves, it joins them again."""
    block, saved = seeded(Gated, hidden=128, inner=256), []
    te_mx.convert_model(block, fuse=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(64, 128, dtype=BF16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, te_mx.autocast(recipe=MXFP8BlockScaling(backward_override="high_precision")):
        compiled(x)
    shapes = [tuple(t.shape) for t in saved]
    assert shapes.count((256, 128)) == 2 and (512, 128) not in shapes


def test_checkpointed_second_derivatives_and_functional_calls():
    block, x = seeded(Gated), given()
    te_mx.convert_model(block, fuse=True)
    y, grads = run(block, x)
    again = lambda inp: torch.utils.checkpoint.checkpoint(block, inp, use_reentrant=False)  # noqa: E731
    leaf = x.clone().requires_grad_()
    with te_mx.autocast():
        z = again(leaf)
    z.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    assert torch.equal(z, y) and torch.equal(leaf.grad, grads["x"])
    with te_mx.autocast():
        z = block(leaf)
    (dx,) = torch.autograd.grad(z.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dx.sum().backward()
    values = {name: value.detach() * 2 for name, value in block.named_parameters()}
    with te_mx.autocast(), torch.no_grad():
        got = torch.func.functional_call(block, values, (x,))
        assert not torch.equal(got, y)


def test_traced_by_fx_its_layers_are_in_the_graph():
    block, x = seeded(Gated), given()
    te_mx.convert_model(block, fuse=True)
    assert str(inspect.signature(block.forward)) == "(x)"
    graph = torch.fx.symbolic_trace(block)
    assert next(n.target for n in graph.graph.nodes if n.op == "call_module") == "gate_proj"
    with te_mx.autocast(), torch.no_grad():
        assert torch.equal(graph(x), Gated.forward(block, x))
