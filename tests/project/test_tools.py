"""Tools around te_mx layers: selective checkpointing, torch.func's gradients, FX, audit."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import te_mx
from te_mx._ops import grouped_gemm
from te_mx.dispatch import run as dispatch_run
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


@pytest.fixture
def clean_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------- selective checkpointing
@pytest.fixture
def products(by_steps, monkeypatch) -> list[str]:
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


def test_selective_checkpointing_in_compiled_code(clean_dynamo):
    module, x = make("LayerNormMLP"), torch.randn(ROWS, SIZE, requires_grad=True)
    context = functools.partial(create_selective_checkpoint_contexts, te_mx.checkpoint_ops())

    def run(x):
        return checkpoint(module, x, use_reentrant=False, context_fn=context)

    with te_mx.autocast(recipe=HYBRID):
        want = gradients(module, x, total(module(x)))
        y = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    assert same(gradients(module, x, total(y)), want)


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


# ------------------------------------------------------------------------------------------- audit
def counted() -> tuple[list, object]:
    graphs: list = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return graphs, backend


def test_layers_that_ran_in_compiled_code_only(clean_dynamo):
    """One graph for all blocks: nothing in it may belong to a single layer."""
    blocks = nn.ModuleList(te_mx.LayerNormMLP(SIZE, 96) for _ in range(3))
    idle = te_mx.LayerNormMLP(SIZE, 96)
    graphs, backend = counted()
    x = torch.randn(ROWS, SIZE)
    with te_mx.autocast():
        for block in blocks:
            block.compile(backend=backend, fullgraph=True)
            x = block(x.detach().requires_grad_())
    assert len(graphs) == 1
    for block in blocks:
        assert {row[2:5] for row in te_mx.audit(block)} == {("compiled: not recorded",) * 3}
    assert {row[2:5] for row in te_mx.audit(idle)} == {("never ran",) * 3}
    with te_mx.autocast():
        idle(x)
    assert te_mx.audit(idle).layers[0].fprop not in ("compiled: not recorded", "never ran")


@pytest.mark.parametrize("frozen", ["", "kept", "dropped"])
@pytest.mark.parametrize("family", ["Linear", "GroupedLinear"])
def test_compiled_weights_of_all_kinds(family, frozen, clean_dynamo):
    model = nn.Sequential(make(family))
    if frozen:
        te_mx.freeze_weights(model, drop_master=frozen == "dropped")
    assert te_mx.audit(model).layers[0].fprop == "never ran"
    x = torch.randn(ROWS, SIZE)
    with te_mx.autocast(), torch.no_grad():
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        ran = te_mx.audit(model).layers[0].fprop
        if family == "Linear" and frozen:  # few rows, which find their layer
            model(x)
            assert ran == te_mx.audit(model).layers[0].fprop
        else:
            assert ran == "compiled: not recorded"


def test_the_memory_of_layers():
    """q and k save one input, which is counted for both and once in the total."""
    model = nn.ModuleDict(
        {"q": nn.Linear(SIZE, 32), "k": nn.Linear(SIZE, 32), "mx": te_mx.Linear(32, 32)}
    )
    x = torch.randn(ROWS, SIZE, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"nothing was recorded of this ModuleDict; run a"):
        te_mx.audit(model, memory=True)
    with te_mx.record_saved(model), te_mx.autocast():
        h = model["q"](x) + model["k"](x)
        y = model["mx"](h.sigmoid())
    report = te_mx.audit(model, memory=True)
    whole = 4 * ROWS * SIZE
    assert report["q"].saved == report["k"].saved == (whole, whole)
    # Codes and scales of the input by columns, for wgrad; at most those of the weight, for dgrad.
    codes, weight = ROWS * 32 + 32, 32 * 32 + 32
    assert codes <= report["mx"].saved.bytes <= codes + weight and report["mx"].saved.shared == 0
    assert report.memory.layers == whole + report["mx"].saved.bytes
    assert report.memory.elsewhere == 4 * ROWS * 32  # what sigmoid returned
    assert report.memory.total == sum(report.memory)
    assert f"{whole} bytes" not in str(te_mx.audit(model))
    assert "of them shared" in str(report) and f"{report.memory.elsewhere} elsewhere" in str(report)
    y.sum().backward()  # what was recorded still goes backward
    assert x.grad is not None and model["mx"].weight.grad is not None


def test_memory_is_that_of_the_last_record_and_leaves_nothing_behind():
    model = nn.Sequential(te_mx.LayerNormMLP(SIZE, 96), nn.ReLU())
    x = torch.randn(256, SIZE)
    with te_mx.record_saved(model):
        model(x).sum().backward()
    plain = te_mx.audit(model, memory=True)["0.fc1"].saved
    with te_mx.record_saved(model), te_mx.autocast():
        y = model(x)
    report = te_mx.audit(model, memory=True)
    assert report["0.fc1"].saved.bytes < plain.bytes and report["0.fc2"].saved is None
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    recorded = te_mx.record_saved(model)
    with pytest.raises(ValueError, match="inside"), recorded:
        model[0](x)
        raise ValueError("inside")
    assert te_mx.audit(model, memory=True)["0.fc1"].saved == report["0.fc1"].saved  # as before
    with pytest.raises(RuntimeError, match="entered before"), recorded:
        pass
    with te_mx.record_saved(model), torch.no_grad():
        model(x)
    assert te_mx.audit(model, memory=True)["0.fc1"].saved == (0, 0)
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None


def test_checkpointed_layers_keep_nothing():
    model = nn.Sequential(te_mx.Linear(SIZE, SIZE), te_mx.Linear(SIZE, SIZE))
    x = torch.randn(ROWS, SIZE, requires_grad=True)
    with te_mx.record_saved(model), te_mx.autocast():
        y = model[1](checkpoint(model[0], x, use_reentrant=False))
    report = te_mx.audit(model, memory=True)
    assert report["0"].saved.bytes == 0 < report["1"].saved.bytes
    y.sum().backward()
