"""q, k and v of an attention as one product in compiled code: who is found, and that results are
those of the layers.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hf_models import keep_head, model_of, tokens
from mlp_blocks import BF16, run, seeded
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.autograd.joined_linear import Call, joined_linear
from te_mx.fusion.readers import argument_read_by
from te_mx.nn.joined_layers import JoinedReaders
from te_mx.recipe import Float8BlockScaling, MXFP8BlockScaling
from te_mx.recipes.resolve import resolve_recipe

NAMES = ("q_proj", "k_proj", "v_proj")
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


class Attention(nn.Module):
    """As small as one can be, with layers of several sizes."""

    def __init__(self, bias=False):
        super().__init__()
        self.q_proj = nn.Linear(64, 256, bias)
        self.k_proj = nn.Linear(64, 128, bias)
        self.v_proj = nn.Linear(64, 128, bias)

    def forward(self, x, scale=1.0):
        rows = x.shape[0]
        q = self.q_proj(x).view(rows, 2, 128).sum(1)
        return torch.cat([q * scale + self.k_proj(x).sigmoid(), self.v_proj(x)], -1)


class Adds(Attention):
    def forward(self, x):
        x = x + 1
        return self.q_proj(x).sum() + self.k_proj(x).sum() + self.v_proj(x).sum()


class Looks(Attention):
    def forward(self, x):
        return (self.q_proj(x).sum() + self.k_proj(x).sum() + self.v_proj(x).sum()).to(x.dtype)


class Twice(Attention):
    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x), self.v_proj(x)


class Weight(Attention):
    def forward(self, x):
        return self.q_proj(x) + self.k_proj.weight.sum(), self.k_proj(x), self.v_proj(x)


class Other(Attention):
    def forward(self, x, memory):
        return self.q_proj(x), self.k_proj(memory), self.v_proj(memory)


@pytest.fixture(autouse=True)
def compiles_anew():
    """All modules that got a class in place have one forward, which is compiled so many times."""
    torch.compiler.reset()


def passing(forward):
    @functools.wraps(forward)
    def passed(self, x):
        return forward(self, x)

    return passed


class Wrapped(Attention):
    @passing
    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def given(rows=40):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).to(BF16)


def seeded_numbers(seed, cols):
    return torch.randn(40, cols, generator=torch.Generator().manual_seed(seed)).to(BF16)


def fused(**kwargs):
    module = seeded(Attention, **kwargs)
    report = te_mx.convert_model(module, fuse=True)
    assert report.fused == ["(root)"] and isinstance(module, JoinedReaders)
    return module


def compiled(module):
    """Compiled to one graph; where it and that of its backward are recorded."""
    graphs = AotEagerAndRecordGraphs()
    return torch.compile(module, fullgraph=True, backend=graphs), graphs


def count(graph, op):
    return sum(node.target is getattr(torch.ops.te_mx, op).default for node in graph.graph.nodes)


def counts(graphs):
    (forward,), (backward,) = graphs.fw_graphs, graphs.bw_graphs
    return [count(graph, op) for graph in (forward, backward) for op in ("gemm", "quantize_joined")]


JOINED, APART = [1, 1, 2, 1], [3, 0, 6, 0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [
        MXFP8BlockScaling(),
        MXFP8BlockScaling(one_copy_weights=True),
        MXFP8BlockScaling(keep_weight_columns=True),
        MXFP8BlockScaling(backward_override="high_precision"),
        MXFP8BlockScaling(backward_override="dequantized"),
        MXFP8BlockScaling(wgrad_with_hp=True),
        Float8BlockScaling(),
    ],
    ids=str,
)
def test_bits_of_the_layers_under_every_recipe(recipe, bias):
    """But for dx: of the layers it is a sum of sums that were rounded."""
    module = seeded(Attention, bias=bias)
    te_mx.convert_model(module)
    settings = resolve_recipe(recipe).settings
    layers = [getattr(module, name) for name in NAMES]
    held = [t for layer in layers for t in (layer.weight, layer.bias)]
    leaves = [t for t in held if t is not None]
    grads = [seeded_numbers(n, layer.out_features) for n, layer in enumerate(layers)]

    x = given().requires_grad_()
    ys = joined_linear(x, held, Call(settings, BF16))
    got = torch.autograd.grad(ys, [x, *leaves], grads)
    x = given().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        want_ys = [layer(x) for layer in layers]
    want = torch.autograd.grad(want_ys, [x, *leaves], grads)
    for made, wanted in zip([*ys, *got[1:]], [*want_ys, *want[1:]], strict=True):
        assert torch.equal(made, wanted)
    error = (got[0].double() - want[0].double()).norm() / want[0].double().norm()
    assert 0 < error < 4e-3


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("bias", [True, False])
def test_compiled_code_multiplies_once(bias):
    module = fused(bias=bias)
    y, grads = run(module, given())
    made, graphs = compiled(module)
    got = run(made, given())
    assert counts(graphs) == JOINED
    assert torch.equal(got[0], y)
    for name, grad in grads.items():
        if name != "x":
            assert torch.equal(got[1][f"_orig_mod.{name}"], grad), name
    assert torch.allclose(got[1]["x"].float(), grads["x"].float(), rtol=0.05, atol=0.02)


def hook(module):
    module.k_proj.register_forward_hook(lambda *_: None)


def freeze(module):
    te_mx.freeze_weights(module.v_proj)


def swap(module):
    module.q_proj = nn.Linear(64, 256, False, dtype=BF16)


def resize(module):
    module.k_proj.weight = nn.Parameter(module.k_proj.weight.detach().half())


@pytest.mark.parametrize("change", [hook, freeze, resize], ids=lambda f: f.__name__)
def test_layers_that_changed_run_by_themselves(change):
    module = fused()
    change(module)
    x = given().requires_grad_()
    with te_mx.autocast():
        y = module(x)
        made, graphs = compiled(module)
        assert torch.equal(made(x), y)
    assert count(graphs.fw_graphs[0], "gemm") == 3
    swap(module)
    with te_mx.autocast():
        assert torch.isfinite(torch.compile(module, backend="eager")(x)).all()


def test_outside_of_regions_and_without_gradients():
    module = fused()
    x = given()
    made, graphs = compiled(module)
    assert torch.equal(made(x), module(x))
    with te_mx.autocast(), torch.no_grad():
        assert torch.equal(made(x), module(x))
    assert not any(count(graph, "quantize_joined") for graph in graphs.fw_graphs)


def test_by_keyword_and_recomputed():
    module = fused()
    x = given().requires_grad_()
    with te_mx.autocast():
        want = module(x=x, scale=2.0)

    def call(x):
        return checkpoint(module, x=x, scale=2.0, use_reentrant=False)

    made, graphs = compiled(call)
    with te_mx.autocast():
        y = made(x)
    assert torch.equal(y, want)
    y.float().sum().backward()
    assert count(graphs.fw_graphs[0], "quantize_joined") == 1
    assert x.grad is not None and module.k_proj.weight.grad is not None


class Breaks(Attention):
    def forward(self, x):
        q = self.q_proj(x)
        torch._dynamo.graph_break()
        return torch.cat([q, self.k_proj(x), self.v_proj(x)], -1)


def test_results_pass_a_break_of_the_graph():
    module = seeded(Breaks)
    assert te_mx.convert_model(module, fuse=True).fused == ["(root)"]
    y, grads = run(module, given())
    got = run(torch.compile(module, backend="aot_eager"), given())
    assert torch.equal(got[0], y)
    for name in NAMES:
        assert torch.equal(got[1][f"_orig_mod.{name}.weight"], grads[f"{name}.weight"])


def test_copied_and_given_back():
    module = fused()
    twin = copy.deepcopy(module)
    assert isinstance(twin, JoinedReaders) and te_mx.convert_model(twin, fuse=True).fused == []
    assert te_mx.revert_model(module).count("reverted") == 4
    assert type(module) is Attention and not any("te_mx" in key for key in module.__dict__)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi"])
def test_attentions_of_transformers_are_found(name):
    model = model_of(name, **WIDE)
    report = te_mx.convert_model(model, fuse=True, filter_fn=keep_head)
    (row,) = [row for row in report if "one product in compiled code" in row.note]
    assert row.shape == "256 -> 256 + 128 + 128" and row.status == "fused"


@pytest.mark.parametrize("kind", [Adds, Looks, Twice, Weight, Other, Wrapped])
def test_who_does_more_with_its_input_is_left(kind):
    module = kind()
    assert argument_read_by(module, NAMES) is None
    assert te_mx.convert_model(module, fuse=True).fused == []
    assert argument_read_by(Attention(), NAMES) == "x"


def test_a_compiled_model_trains_as_in_eager_mode():
    model = model_of("Llama", **WIDE)
    te_mx.convert_model(model, fuse=True, filter_fn=keep_head)
    ids = tokens()
    made, graphs = compiled(model)
    losses = []
    for one in (model, made):
        model.zero_grad()
        with te_mx.autocast():
            loss = one(ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append((loss.item(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    assert counts(graphs) == [4, 2, 8, 2]  # qkv, o, gate and up, down
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)
    error = (losses[0][1] - losses[1][1]).float().norm() / losses[0][1].float().norm()
    assert error < 0.1
