"""Tools around te_mx layers: selective checkpointing, torch.func's gradients, FX, audit."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import te_mx
from te_mx.dispatch import run as dispatch_run
from te_mx.ops import grouped_gemm
from te_mx.recipe import Format, MXFP8BlockScaling

ROWS, SIZE = 12, 64
HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)


class Experts(nn.Module):
    """A GroupedLinear that is called like the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = te_mx.GroupedLinear(2, SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, [5, ROWS - 5])


FAMILIES = {
    "Linear": lambda: te_mx.Linear(SIZE, 48),
    "Linear, return_bias": lambda: te_mx.Linear(SIZE, 48, return_bias=True),
    "Linear, no bias": lambda: te_mx.Linear(SIZE, 48, bias=False, return_bias=True),
    "Linear, split": lambda: te_mx.Linear(SIZE, 48, parameters_split=("q", "k")),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(SIZE, 48, return_layernorm_output=True),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(SIZE, 96),
    "LayerNormMLP, swiglu": lambda: te_mx.LayerNormMLP(SIZE, 96, activation="swiglu"),
    "GroupedLinear": Experts,
}
UNGROUPED = [family for family in FAMILIES if family != "GroupedLinear"]


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family]()


def total(out) -> Tensor:
    """A loss of all that a module returned."""
    outs = (out,) if isinstance(out, Tensor) else out
    return sum(one.square().sum() for one in outs if one is not None)


def gradients(module: nn.Module, x: Tensor, loss) -> list[Tensor]:
    x.grad = None
    module.zero_grad()
    loss.backward()
    return [x.grad.clone(), *(p.grad.clone() for p in module.parameters())]


def same(got, want) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ------------------------------------------------------------------------- selective checkpointing
@pytest.fixture
def products(monkeypatch) -> list[str]:
    """One entry for each product that runs."""
    ran: list[str] = []

    def counted(name, run):
        def call(*args, **kwargs):
            ran.append(name)
            return run(*args, **kwargs)

        return call

    monkeypatch.setattr(dispatch_run, "gemm", counted("gemm", dispatch_run.gemm))
    for name in ("_run_rows", "_run_k"):
        if hasattr(grouped_gemm, name):
            monkeypatch.setattr(grouped_gemm, name, counted(name, getattr(grouped_gemm, name)))
    return ran


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_products_do_not_run_again(family, products):
    module, x = make(family), torch.randn(ROWS, SIZE, requires_grad=True)
    selective = functools.partial(create_selective_checkpoint_contexts, te_mx.checkpoint_ops())

    def step(call):
        products.clear()
        return gradients(module, x, total(call())), len(products)

    with te_mx.autocast(recipe=HYBRID):
        want, plain = step(lambda: module(x))
        got, whole = step(lambda: checkpoint(module, x, use_reentrant=False))
        assert same(got, want) and whole > plain
        got, saved = step(lambda: checkpoint(module, x, use_reentrant=False, context_fn=selective))
        assert same(got, want) and saved == plain


# --------------------------------------------------------------------------- torch.func's gradients
def loss_of(module: nn.Module, values, x: Tensor) -> Tensor:
    with te_mx.autocast(recipe=HYBRID):
        return total(functional_call(module, values, (x,)))


@pytest.mark.parametrize("family", UNGROUPED)
def test_gradients_of_torch_func_are_those_of_backward(family):
    module, x = make(family), torch.randn(ROWS, SIZE, requires_grad=True)
    values = {name: p.detach() for name, p in module.named_parameters()}
    loss = loss_of(module, dict(module.named_parameters()), x)
    want = gradients(module, x, loss)
    module.zero_grad()
    f = functools.partial(loss_of, module)
    (by_name, dx), value = torch.func.grad_and_value(f, argnums=(0, 1))(values, x.detach())
    assert torch.equal(value, loss)
    assert same([dx, *(by_name[name] for name in values)], want)
    one = next(iter(values))  # of one parameter alone
    alone = torch.func.grad(lambda v: f({**values, one: v}, x.detach()))(values[one])
    assert torch.equal(alone, by_name[one])
    out, pull = torch.func.vjp(functools.partial(f, values), x.detach())
    assert torch.equal(out, loss)
    for scale in (1.0, 2.0, 1.0):  # again and again
        (dx,) = pull(torch.tensor(scale))
        if scale == 1.0:
            assert torch.equal(dx, want[0])
    assert all(p.grad is None for p in module.parameters())
    assert te_mx.audit(module).layers[0].fprop not in ("never ran", "high precision")


def test_parameters_outside_of_the_transform():
    """They require grad below the level: backward() of the value reaches them."""
    module, x = make("LayerNormMLP"), torch.randn(ROWS, SIZE, requires_grad=True)
    want = gradients(module, x, loss_of(module, dict(module.named_parameters()), x))
    module.zero_grad()
    f = functools.partial(loss_of, module, dict(module.named_parameters()))
    value, _ = torch.func.vjp(f, x.detach())
    value.backward()
    assert same([p.grad for p in module.parameters()], want[1:])
    dx = torch.func.grad(f)(x.detach())
    assert torch.equal(dx, want[0]) and dx.requires_grad
    with pytest.raises(NotImplementedError, match=r"MLP.*second derivative.*enabled=False"):
        dx.sum().backward()


def test_other_transforms_stay_refused():
    module, x = make("Linear"), torch.randn(ROWS, SIZE)
    values = {name: p.detach() for name, p in module.named_parameters()}
    f = functools.partial(loss_of, module, values)
    for transformed in (
        torch.func.grad(lambda v: torch.func.grad(f)(v).sum()),
        torch.func.jacrev(f), torch.func.jacfwd(f), torch.func.hessian(f),
        torch.func.vmap(lambda v: torch.func.grad(f)(v[None]), 0),
        lambda v: torch.func.jvp(torch.func.grad(f), (v,), (v,)),
        lambda v: torch.func.jvp(torch.func.vjp(f, v)[1], (torch.ones(()),), (torch.ones(()),)),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=r"te_mx.Linear.*enabled=False"):
            transformed(x)
    for how in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        routed = te_mx.Linear(SIZE, SIZE, **{how: True})
        values = dict(routed.named_parameters())
        with pytest.raises(NotImplementedError, match="transform of torch"):
            torch.func.grad(functools.partial(loss_of, routed, values))(x)
    grouped = Experts()
    with pytest.raises(NotImplementedError, match=r"te_mx.GroupedLinear.*enabled=False"):
        torch.func.grad(functools.partial(loss_of, grouped, dict(grouped.named_parameters())))(x)


# ---------------------------------------------------------------------------------------------- FX
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_leaves_of_fx_graphs(family):
    model = nn.Sequential(nn.LayerNorm(SIZE), make(family))
    traced = torch.fx.symbolic_trace(model)
    called = [traced.get_submodule(n.target) for n in traced.graph.nodes if n.op == "call_module"]
    assert [type(module).__module__.split(".")[0] for module in called] == ["torch", "te_mx"]
    x = torch.randn(ROWS, SIZE)
    for region in (te_mx.autocast(), te_mx.autocast(enabled=False), te_mx.autocast(recipe=HYBRID)):
        with region:  # one graph for all
            assert torch.equal(total(traced(x)), total(model(x)))


def test_splits_that_a_graph_computes():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = te_mx.GroupedLinear(2, SIZE, SIZE)

        def forward(self, x, splits):
            return self.experts(x.relu(), m_splits=splits)

    model, x = Routed(), torch.randn(ROWS, SIZE)
    traced = torch.fx.symbolic_trace(model)
    with te_mx.autocast():
        assert torch.equal(traced(x, [5, 7]), model(x, [5, 7]))
