"""Training knobs of te_mx.Linear: main_grad, delayed wgrad, saved inputs, split parameters."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS, SIZES
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.recipe import Float8BlockScaling, Format, MXFP4BlockScaling, MXFP8BlockScaling

RECIPES = [
    MXFP8BlockScaling(),
    MXFP8BlockScaling(fp8_format=Format.HYBRID),
    MXFP8BlockScaling(backward_override="high_precision"),
    MXFP8BlockScaling(backward_override="dequantized"),
    MXFP8BlockScaling(wgrad_with_hp=True),
    None,  # outside autocast
    Float8BlockScaling(),
    Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID),
    MXFP4BlockScaling(g="mxfp4", stochastic_rounding=False),
]
DTYPES = [torch.float32, torch.bfloat16]


def region(recipe):
    return te_mx.autocast(enabled=recipe is not None, recipe=recipe)


def twin(layer, **kwargs):
    """A layer with the same parameters and other arguments."""
    other = te_mx.Linear(
        layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype,
        **kwargs,
    )  # fmt: skip
    if other._split is None:
        other.load_state_dict(layer.state_dict())
        return other
    state = {}
    for kind, value in layer.state_dict().items():
        pieces = value.split(list(other._split.values()))
        state.update({f"{n}_{kind}": p for n, p in zip(other._split, pieces, strict=True)})
    other.load_state_dict(state)
    return other


def run(layer, x, grad, recipe=RECIPES[0], forward=None, **kwargs):
    x = x.detach().clone().requires_grad_()
    with region(recipe):
        y = (layer if forward is None else forward)(x, **kwargs)
    y.backward(grad)
    return [y.detach(), x.grad]


def assert_same(got, expected):
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def case(k=70, n=33, m=20, dtype=torch.float32):
    return (
        te_mx.Linear(k, n, dtype=dtype), torch.randn(m, k, dtype=dtype),
        torch.randn(m, n, dtype=dtype),
    )  # fmt: skip


# ------------------------------------------------------------------------------ main_grad
def wide_wgrad(layer, x, grad, recipe):
    """The wgrad with fp32 sums and no rounding after them."""
    if recipe is None or recipe.backward_override or recipe.wgrad_with_hp:
        if recipe is not None and recipe.backward_override == "dequantized":
            x = te_mx.quantize(x).dequantize(x.dtype)
        return grad.float().t() @ x.float()
    fmts, how = recipe.settings, {"columnwise": True, "scale_rule": recipe.scale_rule}
    xq = te_mx.quantize(x, fmt=fmts.x_columns, **how)
    gq = te_mx.quantize(grad, fmt=fmts.g_columns, **how)
    return te_mx.gemm(xq, gq, "NT", out_dtype=torch.float32).out


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_main_grad_gets_the_fp32_sums(recipe, dtype):
    layer = te_mx.Linear(70, 33, dtype=dtype, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.randn(33, 70)
    expected = layer.weight.main_grad.clone()
    for _ in range(3):
        x, grad = torch.randn(20, 70, dtype=dtype), torch.randn(20, 33, dtype=dtype)
        assert_same(run(layer, x, grad, recipe), run(twin(layer), x, grad, recipe))
        expected += wide_wgrad(layer, x, grad, recipe)
    assert layer.weight.grad is None and layer.bias.grad is not None
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=1e-6, atol=1e-5)


def test_high_precision_wgrad_into_main_grad_is_not_rounded():
    layer, x, grad = case(dtype=torch.bfloat16)
    layer = twin(layer, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(33, 70)
    run(layer, x, grad, RECIPES[2])
    exact = grad.double().t() @ x.double()
    torch.testing.assert_close(layer.weight.main_grad.double(), exact, rtol=1e-6, atol=1e-5)


@given(SIZES, SIZES, SIZES, st.sampled_from(RECIPES[:2]), st.booleans(), SEEDS)
def test_main_grad_bits(m, k, n, recipe, first, seed):
    """From zero, and where the first micro-batch overwrites, it holds the wgrad bit for bit."""
    torch.manual_seed(seed)
    layer, x, grad = case(k, n, m)
    plain = twin(layer)
    run(plain, x, grad, recipe)
    layer = twin(layer, fuse_wgrad_accumulation=True)
    fill = float("nan") if first else 0.0
    layer.weight.main_grad = torch.full((n, k), fill)
    run(layer, x, grad, recipe, is_first_microbatch=True if first else None)
    assert torch.equal(layer.weight.main_grad, plain.weight.grad)
    run(layer, x, grad, recipe, is_first_microbatch=False if first else None)
    run(plain, x, grad, recipe)
    assert torch.equal(layer.weight.main_grad, plain.weight.grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_overwrite_main_grad(recipe):
    layer, x, grad = case()
    layer = twin(layer, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((33, 70), float("nan"))
    layer.weight.overwrite_main_grad = True
    plain = twin(layer)
    run(plain, x, grad, recipe)
    for _ in range(2):
        run(layer, x, grad, recipe)
        assert torch.equal(layer.weight.main_grad, plain.weight.grad)


@pytest.mark.parametrize("recipe", RECIPES[::5])
def test_stand_in_for_grad(recipe):
    layer, x, grad = case()
    layer = twin(layer, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(33, 70)
    fired = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    run(layer, x, grad, recipe)
    assert layer.weight.grad is None
    fired.clear()
    layer.weight.grad_added_to_main_grad = False
    run(layer, x, grad, recipe)
    assert layer.weight.grad_added_to_main_grad is True and len(fired) == 1
    assert layer.weight.grad.shape == (33, 70) and layer.weight.grad.dtype == torch.float32
    other = twin(layer, fuse_wgrad_accumulation=True)
    other.weight.main_grad = torch.zeros(33, 70)
    other.weight.grad_added_to_main_grad = False
    other.weight.zero_out_wgrad = True
    layer.weight.grad.fill_(5)  # other layers of the shape share it
    run(other, x, grad, recipe)
    assert torch.equal(other.weight.grad, torch.zeros(33, 70))
    assert other.weight.grad.data_ptr() == layer.weight.grad.data_ptr()


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(
    ("main_grad", "says"),
    [
        (None, r"'up': fuse_wgrad_accumulation=True.*torch.zeros_like\(weight"),
        (torch.zeros(70, 33), r"main_grad must be \(33, 70\) on cpu.*got \(70, 33\)"),
        (torch.zeros(33, 70, device="meta"), "on cpu as the weight.* on meta"),
        (torch.zeros(70, 33).t(), r"must be contiguous.*strides \(1, 33\)"),
        (torch.zeros(33, 70, dtype=torch.float64), "got torch.float64"),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES[::5])
def test_wrong_main_grad_is_refused_in_backward(main_grad, says, recipe, delay):
    layer = te_mx.Linear(
        70, 33, name="up", fuse_wgrad_accumulation=True, delay_wgrad_compute=delay
    )  # fmt: skip
    if main_grad is not None:
        layer.weight.main_grad = main_grad
    with region(recipe):
        y = layer(torch.randn(5, 70))
    with pytest.raises(RuntimeError, match=says):
        y.sum().backward()


def test_frozen_and_inference_touch_no_main_grad():
    layer, x, grad = case()
    layer = twin(layer, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    with torch.no_grad(), te_mx.autocast():
        layer(x)
    layer.weight.requires_grad_(False)
    for recipe in RECIPES:
        run(layer, x, grad, recipe)
    assert not layer._delayed


# --------------------------------------------------------------------------- delayed wgrad
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("save_x", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_delayed_wgrad_equals_the_plain_path(recipe, save_x, dtype):
    plain, *_ = case(dtype=dtype)
    layer = twin(plain, delay_wgrad_compute=True, save_original_input=save_x)
    assert layer.need_backward_dw() and not plain.need_backward_dw()
    steps = [case(dtype=dtype)[1:] for _ in range(3)]
    for x, grad in steps:
        assert_same(run(layer, x, grad, recipe), run(plain, x, grad, recipe))
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, plain.bias.grad)  # not delayed
    for _ in steps:
        layer.backward_dw()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert layer.weight.grad.is_leaf and not layer.weight.grad.requires_grad
    with pytest.raises(RuntimeError, match="no weight gradient is waiting"):
        layer.backward_dw()


@pytest.mark.parametrize("recipe", RECIPES)
def test_delayed_and_fused(recipe):
    plain, x, grad = case()
    layer = twin(plain, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(33, 70)
    layer.weight.grad_added_to_main_grad = False
    run(plain, x, grad, recipe)
    run(layer, x, grad, recipe)
    assert layer.weight.grad_added_to_main_grad and not layer.weight.main_grad.any()
    layer.backward_dw()
    assert torch.equal(layer.weight.main_grad, plain.weight.grad)


def test_delayed_backward_passes_are_first_in_first_out():
    layer, x, grad = case()
    layer = twin(layer, delay_wgrad_compute=True)
    run(layer, x, grad)
    run(layer, 2 * x, grad)
    layer.backward_dw()
    first = layer.weight.grad.clone()
    plain = twin(layer)
    run(plain, x, grad)
    assert torch.equal(first, plain.weight.grad)


def test_hooks_and_marks_of_delayed_layers():
    layer, x, grad = case()
    layer.backward_dw()  # does nothing without the knob
    layer = twin(layer, delay_wgrad_compute=True)
    assert layer.weight.skip_backward_post_hook and layer.bias.skip_backward_post_hook
    seen = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(layer.weight.grad))
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append("second"))
    run(layer, x, grad)
    assert not seen
    layer.backward_dw()
    assert seen[0] is layer.weight.grad and seen[1] == "second"


def test_a_copy_waits_for_nothing():
    layer, x, grad = case()
    layer = twin(layer, delay_wgrad_compute=True)
    run(layer, x, grad)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.delay_wgrad_compute and not other._delayed
    assert len(layer._delayed) == 1


def test_delaying_a_computed_weight_is_refused():
    layer = te_mx.Linear(40, 8, delay_wgrad_compute=True)
    nn.utils.parametrizations.weight_norm(layer)
    with te_mx.autocast(), pytest.raises(RuntimeError, match="needs weights that are parameters"):
        layer(torch.randn(3, 40))


@pytest.mark.parametrize("reentrant", [True, False])
def test_knobs_under_activation_checkpointing(reentrant):
    plain, x, grad = case()
    run(plain, x, grad)
    for fuse, delay in itertools.product([False, True], repeat=2):
        layer = twin(plain, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay)
        layer.weight.main_grad = torch.zeros(33, 70)
        run(layer, x, grad, forward=lambda x: checkpoint(layer, x, use_reentrant=reentrant))  # noqa: B023
        if delay:
            layer.backward_dw()
        got = layer.weight.main_grad if fuse else layer.weight.grad
        assert torch.equal(got, plain.weight.grad)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_code_calls_such_layers_outside_its_graph(recipe, inside):
    torch._dynamo.reset()
    plain, x, grad = case()
    layer = twin(plain, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(33, 70)

    def forward(x):
        if inside:
            with region(recipe):
                return layer(x * 2) + 1
        return layer(x * 2) + 1

    expected = run(plain, x * 2, grad, recipe)
    got = run(layer, x, grad, recipe, torch.compile(forward, backend="aot_eager"))
    assert_same(got, [expected[0] + 1, expected[1] * 2])
    assert torch.equal(layer.weight.main_grad, plain.weight.grad)
    with region(recipe), pytest.raises(Exception, match="that goes to main_grad or is delayed"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


# -------------------------------------------------------------------- save_original_input
@given(
    st.lists(SIZES, max_size=2), SIZES, SIZES, st.sampled_from(RECIPES), st.booleans(), SEEDS
)  # fmt: skip
def test_saving_the_input_changes_nothing(leading, k, n, recipe, bias, seed):
    torch.manual_seed(seed)
    layers = [te_mx.Linear(k, n, bias)]
    layers.append(te_mx.Linear(k, n, bias, save_original_input=True))
    layers[1].load_state_dict(layers[0].state_dict())
    x, grad = torch.randn(*leading, k), torch.randn(*leading, n)
    results = [run(layer, x, grad, recipe) for layer in layers]
    assert_same(*results)
    assert_same(*([p.grad for p in layer.parameters()] for layer in layers))


def test_saving_the_input_saves_the_input():
    layer = te_mx.Linear(1024, 64, save_original_input=True)
    x = torch.randn(256, 1024)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with te_mx.autocast(), hooks:
        layer(x)
    assert [t.data_ptr() for t in saved if t.numel()] == [x.data_ptr()]


def test_saved_input_compiles():
    torch._dynamo.reset()
    plain, x, grad = case()
    layer = twin(plain, save_original_input=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(run(layer, x, grad, forward=compiled), run(plain, x, grad))
    assert torch.equal(layer.weight.grad, plain.weight.grad)
