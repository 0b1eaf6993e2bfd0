"""te_mx.Linear: what it is outside autocast, and its forward inside."""

from __future__ import annotations

import copy
import io
import pickle

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import FINITE_KINDS, SEEDS, SIZES, tensor
from torch import nn

import te_mx
from te_mx.recipe import Float8BlockScaling, Format, MXFP4BlockScaling, MXFP8BlockScaling
from te_mx.weights.source import WeightSource

RECIPES = [
    MXFP8BlockScaling(),
    MXFP8BlockScaling(fp8_format=Format.HYBRID),
    MXFP8BlockScaling(scale_rule="floor"),
    Float8BlockScaling(),
    Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID, amax_epsilon=1e-3),
    MXFP4BlockScaling(x="mxfp8_e4m3", scale_rule="even"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pair(k: int, n: int, **kwargs) -> tuple[te_mx.Linear, nn.Linear]:
    """A te_mx.Linear and an nn.Linear with the same parameters."""
    ours, plain = te_mx.Linear(k, n, **kwargs), nn.Linear(k, n, **kwargs)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def by_hand(x, layer, recipe, out_dtype):
    """The forward out of the public functions."""
    rule, formats = recipe.scale_rule, recipe.settings
    w = te_mx.quantize(layer.weight, fmt=formats.w, scale_rule=rule)
    x_q = te_mx.quantize(x, fmt=formats.x, scale_rule=rule)
    y = te_mx.gemm(w, x_q, "TN", bias=layer.bias, out_dtype=out_dtype)
    return y.out.view(*x.shape[:-1], layer.out_features)


# ------------------------------------------------------------------------------ it is nn.Linear
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_outside_autocast_it_is_nn_linear(dtype, bias):
    ours, plain = pair(20, 12, bias=bias, dtype=dtype)
    x = torch.randn(3, 5, 20, dtype=dtype)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    ys = [ours(xs[0]), plain(xs[1])]
    for y in ys:
        y.square().sum().backward()
    assert torch.equal(*ys)
    assert torch.equal(xs[0].grad, xs[1].grad)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with te_mx.autocast(enabled=False):
        assert torch.equal(ours(x), ys[0])


def test_initialization_and_parameters_are_those_of_nn_linear():
    torch.manual_seed(3)
    plain = nn.Linear(10, 6)
    torch.manual_seed(3)
    ours = te_mx.Linear(10, 6)
    assert isinstance(ours, nn.Linear)
    assert list(ours.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    assert torch.equal(ours.weight, plain.weight) and torch.equal(ours.bias, plain.bias)
    assert repr(ours) == "Linear(in_features=10, out_features=6, bias=True)"


def test_constructor_arguments():
    layer = te_mx.Linear(4, 3, False, "meta", torch.bfloat16)
    assert layer.bias is None and layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    assert te_mx.Linear(4, 3, params_dtype=torch.float16).weight.dtype == torch.float16
    with pytest.raises(ValueError, match=r"dtype=torch.float32 and params_dtype=torch.float16"):
        te_mx.Linear(4, 3, dtype=torch.float32, params_dtype=torch.float16)
    layer = te_mx.Linear(4, 3, init_method=nn.init.ones_)
    assert torch.equal(layer.weight, torch.ones(3, 4))
    nn.init.zeros_(layer.weight)
    layer.reset_parameters()
    assert torch.equal(layer.weight, torch.ones(3, 4))


def test_deferred_initialization():
    layer = te_mx.Linear(40, 3, device="meta", init_method=lambda w: nn.init.constant_(w, 0.5))
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    with te_mx.autocast():
        y = layer(torch.ones(1, 40))
    torch.testing.assert_close(y, 20 + layer.bias[None])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("on", [True, False])
def test_return_bias(bias, on):
    layer = te_mx.Linear(40, 5, bias, return_bias=True)
    same = te_mx.Linear(40, 5, bias=False)
    same.load_state_dict({"weight": layer.weight.detach()})
    x = torch.randn(2, 40)
    with te_mx.autocast(enabled=on):
        y, returned = layer(x)
        assert torch.equal(y, same(x))
    assert returned is layer.bias


# ---------------------------------------------------------------------------- forward in MXFP8
@given(st.lists(SIZES, max_size=2), SIZES, SIZES, st.sampled_from(RECIPES), st.booleans(), SEEDS)
def test_forward_equals_the_public_functions(leading, k, n, recipe, bias, seed):
    torch.manual_seed(seed)
    dtype = DTYPES[seed % 3]
    layer = te_mx.Linear(k, n, bias, dtype=dtype)
    x = torch.randn(*leading, k).to(dtype)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        y = layer(x)
    assert y.shape == (*leading, n) and y.dtype == dtype
    if k:
        assert torch.equal(y, by_hand(x, layer, recipe, dtype))
    else:
        expected = layer.bias.expand(y.shape) if bias else torch.zeros_like(y)
        assert torch.equal(y, expected)


@given(SIZES.filter(bool), SIZES.filter(bool), st.sampled_from(FINITE_KINDS), SEEDS)
def test_forward_within_the_bound_of_fp64(m, k, kind, seed):
    layer = te_mx.Linear(k, 40)
    x = tensor(kind, m, k, seed, torch.float32).clamp(-(2**60), 2**60)
    with torch.no_grad(), te_mx.autocast():
        y = layer(x)
    xq, wq = te_mx.quantize(x), te_mx.quantize(layer.weight)
    a, b = (q.dequantize(torch.float64).numpy() for q in (wq, xq))
    exact = b @ a.T + oracles.numpy_of(layer.bias)
    oracles.assert_gemm(y, a, b, exact, slack=abs(exact) * 2.0**-23)


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_is_close_to_high_precision(recipe):
    ours, plain = pair(256, 128)
    x = torch.randn(64, 256)
    with te_mx.autocast(recipe=recipe):
        y = ours(x)
    gap = (y - plain(x)).norm() / plain(x).norm()
    four = "mxfp4" in (recipe.settings.x, recipe.settings.w)
    # floor saturates; 2 significant bits instead of 4.
    assert 1e-3 < gap < (0.12 if four else 0.05 if recipe.scale_rule == "rceil" else 0.07)


@pytest.mark.parametrize("grad", [False, True])
def test_strides_do_not_matter(grad):
    layer = te_mx.Linear(48, 24)
    base = torch.randn(5, 48, 7, requires_grad=grad)
    views = [
        base.transpose(1, 2),
        base.permute(2, 0, 1),
        base[::2].transpose(1, 2),
        base.transpose(1, 2)[:, :1].expand(5, 6, 48),
    ]
    with te_mx.autocast():
        for view in views:
            assert torch.equal(layer(view), layer(view.contiguous()))


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
def test_output_dtype_follows_the_input(x_dtype, w_dtype):
    layer = te_mx.Linear(40, 8, dtype=w_dtype)
    x = torch.randn(3, 40, dtype=x_dtype)
    with te_mx.autocast():
        assert layer(x).dtype == x_dtype


def test_output_dtype_follows_torch_autocast():
    layer = te_mx.Linear(40, 8)
    x = torch.randn(3, 40)
    with te_mx.autocast(), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, by_hand(x, layer, RECIPES[0], torch.bfloat16))
    with te_mx.autocast(), torch.autocast("cpu", torch.float16):
        assert layer(x).dtype == torch.float16
    with te_mx.autocast(), torch.autocast("cpu", enabled=False):
        assert layer(x).dtype == torch.float32


def test_nan_and_inf_are_not_hidden():
    layer = te_mx.Linear(64, 8)
    x = torch.randn(4, 64)
    x[1, 3], x[2, 60] = float("nan"), float("inf")
    with te_mx.autocast():
        y = layer(x)
    assert y[[0, 3]].isfinite().all() and y[[1, 2]].isnan().all()


def test_rows_are_independent_of_the_batch():
    layer = te_mx.Linear(96, 40)
    x = torch.randn(130, 96)
    with te_mx.autocast():
        full = layer(x)
        assert torch.equal(layer(x.view(10, 13, 96)).view(130, 40), full)
        torch.testing.assert_close(layer(x[:5]), full[:5])
        assert layer(x[0]).shape == (40,)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_no_graph_is_made(mode):
    layer = te_mx.Linear(40, 8)
    x = torch.randn(3, 40)
    with te_mx.autocast():
        expected = layer(x)
        with mode():
            y = layer(x)
    assert not y.requires_grad and expected.requires_grad
    assert torch.equal(y, expected)


# ------------------------------------------------------------------------------------- errors
def test_errors_name_layer_got_expected_and_remedy():
    layer = te_mx.Linear(40, 8, name="decoder.up")
    with te_mx.autocast():
        with pytest.raises(ValueError, match=r"'decoder.up'.*in_features=40.*\(3, 41\)"):
            layer(torch.randn(3, 41))
        with pytest.raises(ValueError, match=r"in_features=40.*\(\)"):
            layer(torch.tensor(1.0))
        with pytest.raises(TypeError, match=r"torch.float64.*enabled=False"):
            layer(torch.randn(3, 40, dtype=torch.float64))
        with (
            te_mx.autocast(recipe="mxfp4"),
            pytest.raises(TypeError, match=r"force \(x mxfp4, w mxfp4, g mxfp8_e4m3\) takes"),
        ):
            layer(torch.randn(3, 40, dtype=torch.float64))
        with pytest.raises(TypeError, match=r"torch.int64"):
            layer(torch.ones(3, 40, dtype=torch.int64))
        with pytest.raises(ValueError, match="inp is on meta and weight on cpu"):
            layer(torch.randn(3, 40, device="meta"))
        with pytest.raises(ValueError, match=r"te_mx.Linear.in_features=4, out_features=2"):
            te_mx.Linear(4, 2)(torch.randn(3))


def test_runs_on_meta():
    layer = te_mx.Linear(40, 8, device="meta")
    with te_mx.autocast():
        y = layer(torch.randn(2, 3, 40, device="meta"))
        y.sum().backward()
    assert y.shape == (2, 3, 8) and layer.weight.grad.shape == (8, 40)


# ------------------------------------------------------------------- copies, tying, other torch
def test_deepcopy_and_pickle():
    layer = te_mx.Linear(40, 8, name="one", return_bias=True)
    x = torch.randn(3, 40)
    with te_mx.autocast():
        expected = layer(x, is_first_microbatch=True)[0]
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        copies = [
            copy.deepcopy(layer),
            pickle.loads(pickle.dumps(layer)),
            torch.load(buffer, weights_only=False),
        ]
        for other in copies:
            assert other.name == "one" and other.return_bias
            assert other._tag == -1 and type(other._source) is WeightSource
            assert torch.equal(other(x)[0], expected)
            assert other._tag != layer._tag


def test_functional_call_sees_the_given_weight():
    layer = te_mx.Linear(40, 8)
    other = te_mx.Linear(40, 8)
    x = torch.randn(3, 40)
    with te_mx.autocast():
        y = torch.func.functional_call(layer, dict(other.named_parameters()), (x,))
        assert torch.equal(y, other(x))


def test_tied_weights():
    embedding, head = nn.Embedding(24, 40), te_mx.Linear(40, 24, bias=False)
    head.weight = embedding.weight
    with te_mx.autocast():
        head(embedding(torch.tensor([1, 5]))).sum().backward()
    assert head.weight.grad is embedding.weight.grad
    assert (embedding.weight.grad.abs().sum(1) > 0).all()


def test_parametrized_and_weight_normed():
    x = torch.randn(3, 40)
    layer = te_mx.Linear(40, 8)
    nn.utils.parametrizations.weight_norm(layer)
    with te_mx.autocast():
        layer(x).sum().backward()
        same = te_mx.Linear(40, 8)
        same.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
        assert torch.equal(same(x), layer(x))
    assert all(p.grad is not None for p in layer.parameters())


def test_hooks_run():
    layer = te_mx.Linear(40, 8)
    seen = []
    layer.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    layer.register_forward_hook(lambda m, a, out: seen.append("post"))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    layer.weight.register_hook(lambda g: seen.append("weight"))
    with te_mx.autocast():
        layer(torch.randn(3, 40, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["backward", "post", "pre", "weight"]


def test_audit_says_what_ran():
    model = nn.Sequential(te_mx.Linear(40, 40), nn.ReLU(), te_mx.Linear(40, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    report = te_mx.audit(model)
    assert len(report) == 3
    assert report["0"].fprop == report["2"].wgrad == "never ran"
    with te_mx.autocast():
        model(torch.randn(3, 40)).sum().backward()
    report = te_mx.audit(model)
    assert report["0"].wgrad == "not needed" != report["0"].fprop
    assert report["0"].dgrad == "never ran"  # whether an input needs one shows in a backward pass
    assert {"never ran", "not needed", "high precision"}.isdisjoint(report["2"][2:5])
    model[0].weight.requires_grad_(True)
    with te_mx.autocast():
        model(torch.randn(3, 40)).sum().backward()
    first = te_mx.audit(model)["0"]
    assert first.dgrad == "not needed" and first.wgrad not in ("not needed", "never ran")
    assert report["3"].kind == "torch.Linear" and report["3"].fprop == "high precision"
    model(torch.randn(3, 40))
    assert te_mx.audit(model)["2"].fprop == "high precision"
    te_mx.freeze_weights(model)
    assert te_mx.audit(model)["2"].weight == "frozen"
    te_mx.freeze_weights(model, drop_master=True)
    assert te_mx.audit(model[2])["(root)"].weight == "frozen, no master"
    text = str(te_mx.audit(model))
    assert "frozen, no master" in text and text.splitlines()[0].startswith("layer")
    assert [layer.name for layer in report] == ["0", "2", "3"]
    with pytest.raises(KeyError, match="no linear layer is named '1'"):
        report["1"]
