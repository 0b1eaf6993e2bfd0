"""te_mx.LayerNormMLP: numbers of every activation, arguments, checkpoints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_modules import assert_same, filled, gradients, one_after_the_other, relative
from strategies import POSITIVE, SEEDS
from test_layernorm_linear import BF16, RECIPES, mxfp8
from torch import nn

import te_mx
from te_mx import _ops as ops
from te_mx.autograd import layer as layernorm_mlp
from te_mx.autograd import linear_recipe
from te_mx.dispatch.fused import ACTIVATIONS, NORMS, Activation
from te_mx.nn import activations

GELUS = {"gelu": "tanh", "gelu_erf": "none"}
APART = [name for name in ACTIVATIONS if name not in GELUS]  # not inside the GEMM


def mlp(*args, dtype=BF16, **kwargs):
    return filled(te_mx.LayerNormMLP(*args, dtype=dtype, **kwargs))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_recipes(recipe, activation):
    m = mlp(70, 48, activation=activation, normalization="RMSNorm", zero_centered_gamma=True)
    x, g = torch.randn(3, 11, 70, dtype=BF16), torch.randn(3, 11, 70, dtype=BF16)
    apart = one_after_the_other(m, Activation(activation))
    expected = gradients(m, x, te_mx.autocast(recipe=recipe)(apart), g)
    assert_same(gradients(m, x, mxfp8(m, recipe), g), expected)


@pytest.mark.parametrize("activation", APART)
def test_it_is_its_steps_one_after_the_other(activation):
    m = mlp(64, 80, activation=activation)
    x, g = torch.randn(45, 64, dtype=BF16), torch.randn(45, 64, dtype=BF16)
    expected = gradients(m, x, te_mx.autocast()(one_after_the_other(m, m._act)), g)
    assert_same(gradients(m, x, mxfp8(m), g), expected)


@pytest.mark.parametrize("activation", GELUS)
def test_what_precedes_gelu_is_kept_only_for_a_backward_pass(activation, monkeypatch):
    kept = []

    def gemm(lhs, rhs, epilogue, **kwargs):
        made = ops.gemm_2d(lhs, rhs, epilogue, **kwargs)
        if epilogue.gelu:
            kept.append(made.aux is not None)
        return made

    monkeypatch.setattr(layernorm_mlp, "gemm_2d", gemm)
    m = mlp(64, 96, activation=activation)
    x = torch.randn(40, 64, dtype=BF16)
    expected = mxfp8(m)(x)
    with torch.no_grad():
        assert torch.equal(mxfp8(m)(x), expected)
    m.requires_grad_(False)
    m.fc2_weight.requires_grad_()  # its gradient needs the activated values alone
    y = mxfp8(m)(x)
    y.sum().backward()
    assert torch.equal(y, expected) and m.fc2_weight.grad is not None
    m.fc1_bias.requires_grad_()
    mxfp8(m)(x)
    assert kept == [True, False, False, True]


@given(POSITIVE, POSITIVE, POSITIVE, st.sampled_from(APART), st.sampled_from(NORMS), SEEDS)
def test_any_shape_is_its_steps(tokens, hidden, ffn, activation, normalization, seed):
    torch.manual_seed(seed)
    m = mlp(hidden, ffn, activation=activation, normalization=normalization)
    x, g = torch.randn(tokens, hidden, dtype=BF16), torch.randn(tokens, hidden, dtype=BF16)
    expected = gradients(m, x, te_mx.autocast()(one_after_the_other(m, m._act)), g)
    assert_same(gradients(m, x, mxfp8(m), g), expected)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("activation", GELUS)
def test_gelu_inside_the_gemms(activation, recipe):
    """GELU sees the unrounded sum, the rest is as one step after the other."""
    m = mlp(96, 130, activation=activation, dtype=torch.float32)
    x, g = torch.randn(50, 96), torch.randn(50, 96)
    expected = gradients(m, x, te_mx.autocast(recipe=recipe)(one_after_the_other(m, m._act)), g)
    got = gradients(m, x, mxfp8(m, recipe), g)
    # In fp32 the two differ by the last bits of GELU, which move a few codes to their neighbours.
    assert relative(got[0], expected[0]) < 3e-3
    for name, value in expected[1].items():
        assert relative(got[1][name], value) < 3e-3, name


@pytest.mark.parametrize("activation", GELUS)
def test_gelu_runs_in_the_epilogues(activation, monkeypatch):
    called = []
    gemm = ops.gemm_2d

    def record(lhs, rhs, epilogue, **kwargs):
        called.append({k: v for k, v in epilogue._asdict().items() if v is not None})
        return gemm(lhs, rhs, epilogue, **kwargs)

    for module in (layernorm_mlp, linear_recipe):
        monkeypatch.setattr(module, "gemm_2d", record)
    m = mlp(64, 96, activation=activation)
    gradients(m, torch.randn(32, 64, dtype=BF16), mxfp8(m))
    form = "tanh" if activation == "gelu" else "erf"
    fc1, fc2, _, dgrad2 = called[:4]
    assert fc1["gelu"] == form and "gelu_in" not in fc1 and "gelu" not in fc2
    assert dgrad2["gelu"] == form and dgrad2["bias_grad"] == "result"
    assert torch.is_tensor(dgrad2["gelu_in"]) and len(called) == 6


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_near_high_precision(activation, bias):
    m = mlp(96, 128, bias, activation=activation)
    x, g = torch.randn(128, 96, dtype=BF16), torch.randn(128, 96, dtype=BF16)
    high, low = gradients(m, x, None, g), gradients(m, x, mxfp8(m), g)
    assert relative(low[0], high[0]) < 0.08
    for name, value in high[1].items():
        assert relative(low[1][name], value) < 0.2, name


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_high_precision_is_torch(activation):
    m = mlp(70, 40, activation=activation, dtype=torch.float32)
    x = torch.randn(5, 70)
    z = nn.functional.layer_norm(x, (70,), m.layer_norm_weight, m.layer_norm_bias, 1e-5)
    h = nn.functional.linear(z, m.fc1_weight, m.fc1_bias)
    if activation in GELUS:
        a = nn.functional.gelu(h, approximate=GELUS[activation])
    else:
        a = activations.plain(h, m._act)
    assert torch.equal(m(x), nn.functional.linear(a, m.fc2_weight, m.fc2_bias))
    with torch.no_grad():
        assert relative(mxfp8(m)(x), m(x)) < 0.1


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_without_a_normalization(activation):
    m = mlp(64, 96, activation=activation, normalization=None)
    assert m.layer_norm_weight is None and "layer_norm_weight" not in m.state_dict()
    x, g = torch.randn(40, 64, dtype=BF16), torch.randn(40, 64, dtype=BF16)
    high, low = gradients(m, x, None, g), gradients(m, x, mxfp8(m), g)
    for name, value in high[1].items():
        assert relative(low[1][name], value) < 0.1, name
    with pytest.raises(ValueError, match="needs a normalization"):
        te_mx.LayerNormMLP(8, 8, normalization=None, return_layernorm_output=True)


@pytest.mark.parametrize("activation", ["gelu", "geglu"])
@pytest.mark.parametrize("shape", [(0, 40), (1, 40), (5, 0, 40), (2, 3, 40)])
def test_shapes(shape, activation):
    m = mlp(40, 33, activation=activation)
    out, grads = gradients(m, torch.randn(shape, dtype=BF16), mxfp8(m))
    assert out.shape == shape and grads["x"].shape == shape
    assert all(grads[name].shape == p.shape for name, p in m.named_parameters())


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_only_what_needs_a_gradient(activation):
    m = mlp(64, 32, activation=activation)
    x, g = torch.randn(7, 64, dtype=BF16), torch.randn(7, 64, dtype=BF16)
    _, full = gradients(m, x, mxfp8(m), g)
    names = [name for name, _ in m.named_parameters()]
    for kept in (["x"], ["fc1_bias"], ["fc2_bias"], ["fc1_weight"], ["fc2_weight"], names):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(name in kept)
            parameter.grad = None
        leaf = x.clone().requires_grad_("x" in kept)
        mxfp8(m)(leaf).backward(g)
        for name, value in (("x", leaf), *m.named_parameters()):
            if name in kept:
                torch.testing.assert_close(value.grad, full[name], rtol=0, atol=0)
            else:
                assert value.grad is None
    assert torch.equal(mxfp8(m)(x), mxfp8(m)(leaf))


def test_what_it_returns():
    m = mlp(64, 32, return_bias=True, return_layernorm_output=True)
    x = torch.randn(7, 64, dtype=BF16, requires_grad=True)
    for run in (m, mxfp8(m)):
        out, bias, z = run(x)
        assert out.shape == z.shape == x.shape and bias is m.fc2_bias
        (out.sum() + z.sum()).backward()
    with torch.no_grad():
        out, bias, z = mxfp8(m)(x)
        assert z.shape == x.shape


def test_initialization_and_names_are_transformer_engines():
    m = te_mx.LayerNormMLP(256, 300, activation="swiglu")
    assert {name: tuple(p.shape) for name, p in m.named_parameters()} == {
        "layer_norm_weight": (256,), "layer_norm_bias": (256,), "fc1_weight": (600, 256),
        "fc1_bias": (600,), "fc2_weight": (256, 300), "fc2_bias": (256,),
    }  # fmt: skip
    for weight in (m.fc1_weight, m.fc2_weight):
        assert abs(weight.std().item() - 0.023) < 1e-3
    assert not m.fc1_bias.any() and not m.fc2_bias.any()
    own = te_mx.LayerNormMLP(
        8, 8, False, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_
    )
    assert (own.fc1_weight == 1).all() and not own.fc2_weight.any() and own.fc1_bias is None


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "clamped_swiglu"])
def test_compiled(activation):
    torch._dynamo.reset()
    m = mlp(64, 32, activation=activation)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    x, g = torch.randn(6, 64, dtype=BF16), torch.randn(6, 64, dtype=BF16)
    assert_same(gradients(m, x, mxfp8(compiled), g), gradients(m, x, mxfp8(m), g))


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
def test_as_on_hopper(monkeypatch):
    """Packed operands through the same functions; the reference multiplies them."""
    m = mlp(64, 96, activation="swiglu")
    x, g = torch.randn(40, 64, dtype=BF16), torch.randn(40, 64, dtype=BF16)
    plain = gradients(m, x, mxfp8(m), g)
    form = ops.OperandLayouts("mxfp8_e4m3@sm90:8", "mxfp8_e4m3@sm90:8")
    monkeypatch.setattr(linear_recipe, "roles", lambda *_: linear_recipe.Roles(form, form, form))
    packed = gradients(m, x, mxfp8(m), g)
    for name, value in plain[1].items():
        assert relative(packed[1][name], value) < 0.02, name


@pytest.mark.parametrize("region", [True, False])
@pytest.mark.parametrize("how", ["plain", "main_grad", "delayed", "first", "compiled"])
def test_checkpoint_is_the_same_for_less_memory(how, region):
    """Also with where weight gradients go, kept weights, and everything that is returned."""
    torch.manual_seed(0)
    given = {"fuse_wgrad_accumulation": how == "main_grad", "delay_wgrad_compute": how == "delayed"}
    plain = mlp(64, 32, return_bias=True, return_layernorm_output=True, **given)
    with_it = mlp(64, 32, return_bias=True, return_layernorm_output=True, checkpoint=True, **given)
    with_it.load_state_dict(plain.state_dict())
    x, found, kept = torch.randn(6, 64, dtype=BF16), [], []
    for m in (plain, with_it):
        if how == "main_grad":
            for w in (m.fc1_weight, m.fc2_weight):
                w.main_grad = torch.ones_like(w, dtype=torch.float32)
        inp, bytes_ = x.clone().requires_grad_(), []
        call = torch.compile(m, backend="eager") if how == "compiled" else m

        def pack(t, to=bytes_):
            to.append(t.numel())
            return t

        with (
            te_mx.autocast(enabled=region),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            out, bias, z = call(inp, *([True] if how == "first" else []))
        (out.float() * 3 + z.float()).sum().backward()
        if how == "delayed":
            m.backward_dw()
        grads = [getattr(p, "main_grad", p.grad) for p in m.parameters()]
        found.append([out, z, inp.grad, *(g for g in grads if g is not None)])
        kept.append(sum(bytes_))
        assert bias is m.fc2_bias or how == "compiled"
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert how == "compiled" or kept[1] < kept[0]


def test_errors():
    with pytest.raises(ValueError, match="activation must be one of"):
        te_mx.LayerNormMLP(8, 8, activation="mish")
    with pytest.raises(ValueError, match="activation_params are for clamped_swiglu"):
        te_mx.LayerNormMLP(8, 8, activation_params={"limit": 1.0})
    with pytest.raises(TypeError, match="must be a number"):
        te_mx.LayerNormMLP(8, 8, activation="clamped_swiglu", activation_params={"limit": "7"})
    m = te_mx.LayerNormMLP(
        8, 8, activation="clamped_swiglu",
        activation_params={"limit": 3, "alpha": 1.5, "glu_linear_offset": 0.0}, name="mlp",
    )  # fmt: skip
    assert m._act == Activation("clamped_swiglu", 3.0, 1.5, 0.0)
    with pytest.raises(ValueError, match="LayerNormMLP 'mlp': the last dimension"):
        mxfp8(m)(torch.randn(3, 60))


def test_audit():
    model = nn.Sequential(mlp(64, 32))
    x = torch.randn(6, 64, dtype=BF16, requires_grad=True)
    mxfp8(model)(x).sum().backward()
    report = te_mx.audit(model)
    assert [row.name for row in report] == ["0.fc1", "0.fc2"]
    for row in report:
        assert row.kind == "te_mx.LayerNormMLP" and "never ran" not in row
    model(x)
    assert te_mx.audit(model)["0.fc2"].wgrad == "high precision"
