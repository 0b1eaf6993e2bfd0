"""Experts modules of Transformers by themselves: bits, experts of other ranks, freezing, errors."""

from __future__ import annotations

import copy

import pytest
import torch
from others_experts import loop_of_linears, stand_alone
from torch import nn

import te_mx

transformers = pytest.importorskip("transformers", minversion="5.0")


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.detach() - exact.detach()).norm() / exact.detach().norm())


def routed(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, two experts of each (none has expert 3) and their weights."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(150, 64, generator=draw).to(dtype).requires_grad_()
    index = torch.rand(150, 5, generator=draw)
    index[:, 3] = 0
    index = index.topk(2).indices
    scores = torch.rand(150, 2, generator=draw).requires_grad_()
    return x, index, scores


def has_the_bits_of_a_loop(experts, x, index, scores):
    """Experts, converted here, against a loop of te_mx.Linear; their gradients."""
    held = [x, scores, *experts.parameters()]
    with te_mx.autocast():
        expected = loop_of_linears(experts, x, index, scores)
        wanted = torch.autograd.grad(expected.float().square().sum(), held)
        te_mx.convert_model(experts)
        out = experts(x, index, scores)
        got = torch.autograd.grad(out.float().square().sum(), held)
    assert torch.equal(out, expected)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    return got


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "aria", "nemotron_h"])
def test_bits_of_a_loop_of_linears(kind, dtype):
    experts = stand_alone(kind).to(dtype)
    x, index, scores = routed(dtype)
    got = has_the_bits_of_a_loop(experts, x, index, scores)
    assert all(g[3].count_nonzero() == 0 for g in got[2:])  # of the expert without tokens


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_bits_on_operands_packed_for_hopper(kind):
    """Weights [E, in, out] are packed as they lie there."""
    from as_on_hopper import hopper_with_groups

    experts, (x, index, scores) = stand_alone(kind).bfloat16(), routed(torch.bfloat16)
    with hopper_with_groups() as calls:
        has_the_bits_of_a_loop(experts, x, index, scores)
    assert {"quantize_grouped", "quantize_stacked", "gemm_rows"} <= set(calls)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("sentinel", [5, 9, -1])
def test_experts_of_other_ranks(kind, sentinel):
    """Pairs with a number that is no expert's add nothing and get nothing, whatever the token."""
    experts = stand_alone(kind)
    te_mx.convert_model(experts)
    x, index, scores = routed()
    index[:50, 1] = sentinel
    index[50:60] = sentinel
    with torch.no_grad():
        x[50:60] = float("nan")
    with te_mx.autocast():
        expected = loop_of_linears(experts, x, index, scores)
        out = experts(x, index, scores)
    assert torch.equal(out, expected)
    (out * 3).sum().backward()
    assert out[50:60].count_nonzero() == 0 and x.grad[50:60].count_nonzero() == 0
    assert scores.grad[:50, 1].count_nonzero() == 0 and scores.grad[50:60].count_nonzero() == 0
    assert torch.isfinite(out).all() and torch.isfinite(scores.grad).all()
    assert torch.isfinite(x.grad).all() and x.grad[:50].count_nonzero() > 0
    assert all(torch.isfinite(p.grad).all() for p in experts.parameters())


@pytest.mark.parametrize("fuse", [False, True])
def test_no_tokens_at_all(fuse):
    experts = stand_alone("mixtral")
    te_mx.convert_model(experts, fuse=fuse)
    x, index, scores = (t[:0].detach().requires_grad_(t.is_floating_point()) for t in routed())
    with te_mx.autocast():
        out = experts(x, index, scores)
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, 64)
    assert all(p.grad.count_nonzero() == 0 for p in experts.parameters())


def test_a_normalization_behind_the_experts():
    """Its bias would make something of the zeros of a sentinel."""
    experts = stand_alone("mixtral")
    if not hasattr(experts, "has_post_expert_norm"):
        pytest.skip("this transformers knows no normalization there")
    experts.post_expert_norm, experts.has_post_expert_norm = nn.LayerNorm(64), True
    nn.init.ones_(experts.post_expert_norm.bias)
    te_mx.convert_model(experts)
    x, index, scores = routed()
    index[:10] = 5
    with te_mx.autocast():
        out = experts(x, index, scores)
    plain = experts(x[10:], index[10:], scores[10:])
    assert out[:10].count_nonzero() == 0 and relative(out[10:], plain) < 0.08


def kept_bytes(run) -> int:
    """What backward keeps, parameters aside."""
    kept: dict[int, int] = {}

    def note(tensor):
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(kept.values())


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"])
def test_a_gate_in_one_step(name):
    """Rounded once, in bf16 nearer to fp32 than the class's own, and less is kept."""
    experts = stand_alone("mixtral", hidden_act=name)
    exact, (x, index, scores) = copy.deepcopy(experts), routed(torch.bfloat16)
    own, fused = copy.deepcopy(experts).bfloat16(), experts.bfloat16()
    te_mx.convert_model(own)
    note = te_mx.convert_model(fused, fuse=True).layers[0].note
    fuses = name != "gelu"  # that of erf
    assert ("gate fused: " in note) == fuses
    held = [x, scores]
    with te_mx.autocast():
        outs = [module(x, index, scores) for module in (own, fused)]
        assert torch.equal(*outs) == (name in ("relu", "gelu"))  # relu is exact
        kept = [kept_bytes(lambda m=module: m(x, index, scores)) for module in (own, fused)]
    assert kept[1] < kept[0] if fuses else kept[1] == kept[0]
    g = torch.randn(outs[0].shape).bfloat16()  # in fp32 every torch draws the same
    want = torch.autograd.grad(
        exact(x.float(), index, scores), (*held, *exact.parameters()), g.float()
    )
    for module, out in zip((own, fused), outs, strict=True):
        got = torch.autograd.grad(out, (*held, *module.parameters()), g)
        assert all(relative(a.float(), b) < 0.12 for a, b in zip(got, want, strict=True))
    te_mx.revert_model(fused)
    assert "_gate" not in fused.__dict__


def test_gates_that_are_not_fused():
    note = te_mx.convert_model(stand_alone("gpt_oss"), fuse=True).layers[0].note
    assert note.endswith("gate not fused: the gate is the class's own")
    note = te_mx.convert_model(stand_alone("nemotron_h"), fuse=True).layers[0].note
    assert note.endswith("gate not fused: it has no gate")


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_frozen(kind):
    experts = stand_alone(kind)
    report = te_mx.convert_model(experts)
    x, index, scores = (t.detach() for t in routed())
    masters = copy.deepcopy(experts.state_dict())
    with torch.no_grad(), te_mx.autocast():
        out = experts(x, index, scores)
        te_mx.freeze_weights(experts)
        assert torch.equal(experts(x, index, scores), out)
        experts.down_proj.mul_(2)
        assert not torch.equal(experts(x, index, scores), out)
        experts.down_proj.div_(2)
        te_mx.freeze_weights(experts, drop_master=True)
        assert torch.equal(experts(x, index, scores), out)
        (row,) = te_mx.revert_model(experts)
        assert row.status == "skipped" and "unfreeze_weights" in row.note
        assert row.shape == report.layers[0].shape != ""
        other = stand_alone(kind)
        te_mx.convert_model(other)
        other.load_state_dict(experts.state_dict())
        assert torch.equal(other(x, index, scores), out)
        te_mx.unfreeze_weights(experts, dequantize=True)
        assert torch.equal(experts(x, index, scores), out)
    for name, value in experts.state_dict().items():
        assert value.shape == masters[name].shape
        assert value.dim() == 2 or 0 < relative(value, masters[name]) < 0.04


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_registry_without_a_conversion(kind):
    import te_mx.integrations.transformers

    experts, converted = stand_alone(kind), stand_alone(kind)
    te_mx.convert_model(converted)
    given = routed()
    plain = experts(*given)
    experts.config._experts_implementation = "te_mx"
    assert torch.equal(experts(*given), plain)
    converted.config._experts_implementation = "te_mx"
    assert torch.equal(converted(*given), plain)
    with te_mx.autocast():
        assert torch.equal(experts(*given), converted(*given))
    experts.double()
    with te_mx.autocast(), pytest.raises(ValueError, match=r"gate_up_proj is torch\.float64"):
        experts(*given)


def test_what_cannot_be_converted_is_said():
    replaced = stand_alone("mixtral")
    replaced.forward = replaced.forward
    parallel = stand_alone("mixtral")
    parallel.forward, parallel._is_expert_parallel = parallel.forward, True
    model = nn.ModuleDict(
        {
            "wide": stand_alone("mixtral").double(),
            "replaced": replaced,
            "parallel": parallel,
            "odd": stand_alone("gpt_oss"),
            "fine": stand_alone("aria"),
        }
    )
    model["odd"].num_experts = 4
    reasons = te_mx.convert_model(model).skipped
    assert "gate_up_proj is torch.float64" in reasons["wide"]
    assert "forward was replaced" in reasons["replaced"]
    assert 'experts_implementation="te_mx"' in reasons["parallel"]
    assert "num_experts is not the 5 of gate_up_proj" in reasons["odd"]
    assert "fine" not in reasons


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda x, i, s: (x[:, :32], i, s), ValueError, "last dimension of inp must be"),
        (lambda x, i, s: (x[None], i, s), ValueError, r"hidden_states must be a tensor \[tokens"),
        (lambda x, i, s: (x[:9], i, s), ValueError, r"for the tokens of hidden_states \(9, 64\)"),
        (lambda x, i, s: (x, i.float(), s), TypeError, "top_k_index must be int32 or int64"),
        (lambda x, i, s: (x, i, s[:, :1]), ValueError, r"got \(150, 2\) and \(150, 1\)"),
        (lambda x, i, s: (x.long(), i, s), TypeError, "takes dense tensors in float32"),
    ],
)
def test_malformed_calls(change, error, says):
    experts = stand_alone("mixtral")
    te_mx.convert_model(experts)
    given = change(*(t.detach() for t in routed()))
    with te_mx.autocast(), pytest.raises(error, match=says):
        experts(*given)


def test_derivatives_that_there_are_not():
    experts = stand_alone("mixtral")
    te_mx.convert_model(experts)
    x, index, scores = routed()
    with te_mx.autocast():
        out = experts(x, index, scores)
        with pytest.raises(NotImplementedError, match="MixtralExperts"):
            torch.func.grad(lambda x: experts(x, index, scores).sum())(x.detach())
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice through a quantized linear layer"):
        dx.sum().backward()


def test_a_leaf_of_torch_fx():
    experts = stand_alone("mixtral")
    te_mx.convert_model(experts)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, x, index, scores):
            return self.experts(x, index, scores) + x

    given, block = routed(), Block()
    graph = torch.fx.symbolic_trace(block)
    with te_mx.autocast():
        assert torch.equal(graph(*given), block(*given))
    assert not hasattr(
        experts, "reset_parameters"
    )  # what materializes meta parameters looks for it


@pytest.mark.parametrize("bound", [False, True])
def test_the_two_products_may_run_with_different_recipes(bound):
    experts = stand_alone("mixtral")
    x, index, scores = routed()
    asked = []

    def factory(role):
        asked.append(role)
        return "mxfp4" if role.name.endswith("down_proj") else "mxfp8"

    holder = nn.ModuleDict({"experts": experts})
    recipe = te_mx.recipe.CustomRecipe(factory)
    report = te_mx.convert_model(holder, recipe=recipe if bound else None)
    with te_mx.autocast(recipe=recipe) if not bound else torch.enable_grad():
        y = experts(x, index, scores)
        y.square().sum().backward()
    assert {role.name for role in asked} == {"experts.gate_up_proj", "experts.down_proj"}
    assert {role.module_type for role in asked} == {"grouped_linear"}
    assert not bound or "mxfp8_e4m3; mxfp4" in next(iter(report)).note
    four = te_mx.recipe.BlockScaling("mxfp4", "mxfp4", "mxfp4")
    recipes = {"gate_up_proj": "mxfp8", "down_proj": four}
    product = experts._product

    def alone(x, offs, key, bias, settings):
        return product(x, offs, key, bias, te_mx.recipe.resolve_recipe(recipes[key]).settings)

    experts.__dict__["_product"] = alone
    with te_mx.autocast():
        assert torch.equal(experts(x, index, scores), y)
    del experts.__dict__["_product"]
    some = te_mx.recipe.overrides("mxfp8", {"*down_proj": None})
    with te_mx.autocast(recipe=some), pytest.raises(NotImplementedError, match="all or none"):
        experts(x, index, scores)
