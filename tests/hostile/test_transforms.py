"""forward_ad, torch.func, batched gradients and tracers: what MXFP8 code cannot follow is refused,
with the layer's name and the remedy; what it need not follow stays as it is.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.fx
from families import IN, MODULES, OUT, ROWS, in_region, layer
from torch import Tensor, nn
from torch.func import functional_call

import te_mx

REMEDY = r"te_mx.autocast\(enabled=False\)"


def dual(shape: tuple[int, ...]) -> Tensor:
    return forward_ad.make_dual(torch.randn(shape), torch.randn(shape))


@pytest.mark.parametrize("family", MODULES)
def test_the_message_names_layer_carrier_shape_and_remedy(family):
    run, x = in_region("default", layer(family)), torch.randn(ROWS, IN)
    shape = rf"of shape \({ROWS}, {IN}\).*{REMEDY}"
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=rf"te_mx.{family}\(.*with a tangent.*{shape}"),
    ):
        run(dual(x.shape))
    with pytest.raises(NotImplementedError, match=rf"te_mx.{family}\(.*requires grad in.*{shape}"):
        torch.func.grad(torch.func.grad(lambda v: run(v).sum()))(x)
    with pytest.raises(NotImplementedError, match=rf"te_mx.{family}\(.*batched.*{shape}"):
        torch.vmap(run)(torch.stack([x, x]))
    y = run(x.requires_grad_())
    with pytest.raises(NotImplementedError, match=rf"te_mx.{family}: got a batched.*{REMEDY}"):
        torch.autograd.grad(y, x, torch.stack([y.detach(), y.detach()]), is_grads_batched=True)


@pytest.mark.parametrize("family", MODULES)
def test_parameters_that_carry_something(family):
    module, x = layer(family), torch.randn(ROWS, IN)
    values = {name: value.detach() for name, value in module.named_parameters()}
    module.requires_grad_(False)

    def loss(values):
        with te_mx.autocast():
            return functional_call(module, values, (x,)).sum()

    for name, value in values.items():

        def of_one(one, name=name):
            return loss({**values, name: one})

        for attempt in (
            lambda f, v: torch.func.jacrev(f)(v),
            lambda f, v: torch.func.jvp(f, (v,), (v,)),
            lambda f, v: torch.vmap(f)(torch.stack([v, v])),
        ):
            with pytest.raises(NotImplementedError, match=REMEDY):
                attempt(of_one, value)


def test_functions_on_tensors_that_carry_something():
    a, offs = te_mx.quantize(torch.randn(ROWS, IN)), torch.tensor([1, ROWS])
    x, weight = torch.randn(ROWS, IN), torch.randn(2, OUT, IN)
    calls = {
        "te_mx.quantize": lambda v: te_mx.quantize(v).dequantize(),
        "te_mx.gemm": lambda v: te_mx.gemm(a, a, bias=v[:, 0]).out,
        "grouped_wgrad": lambda v: te_mx.grouped_wgrad(v, x, offs),
        "grouped_linear": lambda v: te_mx.grouped_linear(v, weight, offs=offs),
    }
    for name, call in calls.items():
        call(x)
        for attempt in (
            lambda call: torch.func.jvp(call, (x,), (x,)),
            lambda call: torch.func.jacrev(call)(x),
            lambda call: torch.vmap(call)(torch.stack([x, x])),
        ):
            with pytest.raises(NotImplementedError, match=f"{name}: got a "):
                attempt(call)


@pytest.mark.parametrize("family", MODULES)
def test_what_carries_nothing_stays_legal(family):
    module, x, w = layer(family), torch.randn(ROWS, IN), torch.randn(3)
    run = in_region("default", module)
    wanted = run(x).detach()
    with forward_ad.dual_level():  # another tensor's level
        z = x.clone().requires_grad_()
        y = run(z)
        assert torch.equal(y, wanted)
        torch.autograd.grad(y.sum(), z)
    module.requires_grad_(False)

    def of_another(w):
        return (run(x) * w.sum()).sum()

    assert torch.allclose(torch.func.grad(of_another)(w), wanted.sum().expand(3))
    assert torch.allclose(torch.func.jvp(of_another, (w,), (w,))[1], wanted.sum() * w.sum())
    assert torch.allclose(torch.vmap(of_another)(w[:, None]), wanted.sum() * w)

    def as_features(w):
        with torch.no_grad():
            features = run(x * w.sum())
        return (features * w.sum()).sum()

    assert torch.allclose(torch.func.grad(as_features)(w), run(x * w.sum()).sum().expand(3))
    assert torch.equal(torch.func.functionalize(run)(x), wanted)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_transforms_that_are_compiled(fullgraph):
    torch._dynamo.reset()
    run, x = in_region("default", layer("Linear").requires_grad_(False)), torch.randn(ROWS, IN)

    def compiled(fn):
        torch._dynamo.reset()
        return torch.compile(fn, backend="aot_eager", fullgraph=fullgraph)

    error = torch._dynamo.exc.Unsupported if fullgraph else NotImplementedError
    text = r"NotImplementedError|te_mx.Linear" if fullgraph else rf"te_mx.Linear.*{REMEDY}"
    with pytest.raises(error, match=text):
        compiled(lambda v: torch.func.jvp(run, (v,), (v,))[1])(x)
    gradient = torch.func.grad(lambda u: run(u).sum())
    if fullgraph:
        with pytest.raises(error, match=text):
            compiled(lambda v: gradient(v))(x)
    else:  # a graph break: it runs uncompiled
        assert torch.equal(compiled(lambda v: gradient(v))(x), gradient(x))
    plain = compiled(run)
    wanted = plain(x)
    with (
        forward_ad.dual_level(),
        pytest.raises(error, match=f"{text}|dual tensor input|in dual_level"),
    ):
        plain(dual(x.shape))  # torch 2.14 refuses these itself, Dynamo where it traces all
    assert torch.equal(plain(x), wanted)
    torch._dynamo.reset()


# --------------------------------------------------------------------------------- functional_call
@pytest.mark.parametrize("arguments", [{}, {"parameters_split": ("q", "k")}, {"bias": False}])
@pytest.mark.parametrize("recipe", ["default", "float8_block", "high_precision", "off"])
@pytest.mark.parametrize("family", MODULES)
def test_functional_call(family, recipe, arguments):
    if "parameters_split" in arguments and family not in ("Linear", "LayerNormLinear"):
        arguments = {"single_grouped_weight": True} if family == "GroupedLinear" else {}
    module, other = layer(family, **arguments), layer(family, **arguments)
    run, x = in_region(recipe, other), torch.randn(ROWS, IN)
    wanted = torch.autograd.grad(run(x).square().sum(), list(other.parameters()))
    values = {name: v.detach().requires_grad_() for name, v in other.named_parameters()}
    y = in_region(recipe, lambda x: functional_call(module, values, (x,)))(x)
    got = torch.autograd.grad(y.square().sum(), list(values.values()))
    assert torch.equal(y, run(x))
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("drop_master", [False, True])
@pytest.mark.parametrize("family", MODULES)
def test_functional_call_of_frozen_layers(family, drop_master):
    """With weights of its own where it has some; without, no others are taken in silence."""
    module, other, x = layer(family), layer(family), torch.randn(ROWS, IN)
    values = {name: v.detach() for name, v in other.named_parameters()}
    te_mx.freeze_weights(module, drop_master=drop_master)
    call = in_region("default", lambda x: functional_call(module, values, (x,)))
    if drop_master:
        with pytest.raises(RuntimeError, match=rf"te_mx.{family}.*runs on its codes, but got a"):
            call(x)
    else:
        assert torch.equal(call(x), in_region("default", other)(x))


# ---------------------------------------------------------------------------------------- torch.fx
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = te_mx.LayerNormMLP(IN, 48)
        self.experts = te_mx.GroupedLinear(2, IN, OUT)
        self.down = nn.Sequential(te_mx.LayerNormLinear(OUT, IN), nn.ReLU(), te_mx.Linear(IN, OUT))

    def forward(self, x: Tensor, m_splits: list[int], first: bool | None) -> Tensor:
        x = x + self.up(x, is_first_microbatch=first)
        return self.down(self.experts(x, m_splits))


@pytest.mark.parametrize("traced_in", ["default", "off"])
def test_fx_keeps_layers_as_leaves(traced_in):
    block, x = Block(), torch.randn(ROWS, IN)
    graph = in_region(traced_in, lambda _: torch.fx.symbolic_trace(block))(x)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert calls == ["up", "experts", "down.0", "down.1", "down.2"]
    for recipe in ("default", "one_copy", "off"):  # each call runs as its region says
        got = in_region(recipe, lambda x: graph(x, [1, 2], True))(x)
        assert torch.equal(got, in_region(recipe, lambda x: block(x, [1, 2], None))(x))


def test_fx_cannot_trace_a_layer_itself():
    with pytest.raises(TypeError, match=r"te_mx.Linear\(.*trace a module that holds it"):
        torch.fx.symbolic_trace(te_mx.Linear(IN, OUT))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
@pytest.mark.parametrize("family", MODULES)
def test_torch_jit_traces_inference_alone(family):
    """It records ops, which have no gradients; torch itself only finds that two runs differ."""
    run, x = layer(family), torch.randn(ROWS, IN)
    with te_mx.autocast():
        with pytest.raises(NotImplementedError, match=rf"te_mx.{family}\(.*torch.jit.*no_grad"):
            torch.jit.trace(run, x)
        if family != "GroupedLinear":  # its splits are sizes of x, which are tensors in a trace
            with torch.no_grad():
                assert torch.equal(torch.jit.trace(run, x)(x), run(x))
