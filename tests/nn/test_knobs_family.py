"""Training knobs that every module has, under every recipe and outside te_mx.autocast: the same
bits as the plain path, and gradients in the place that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from norm_modules import filled
from torch import Tensor, nn

import te_mx
from te_mx.recipe import (
    Float8BlockScaling,
    Format,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4 on the CPU

IN, ROWS, SPLITS = 70, 45, [7, 0, 31]
BF16 = torch.bfloat16
RECIPES = {
    "default": MXFP8BlockScaling(),
    "hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "high_precision": MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized": MXFP8BlockScaling(backward_override="dequantized"),
    "wgrad_with_hp": MXFP8BlockScaling(wgrad_with_hp=True),
    "one_copy": MXFP8BlockScaling(one_copy_weights=True),
    "kept_columns": MXFP8BlockScaling(keep_weight_columns=True),
    "outside": None,
    "blockwise": Float8BlockScaling(),
    "fp32_scales": Float8BlockScaling(use_f32_scales=True, one_copy_weights=True),
    "mxfp4": MXFP4BlockScaling(one_copy_weights=True),
    "mxfp4_all": MXFP4BlockScaling(g="mxfp4"),
    "nvfp4": NVFP4BlockScaling(row_scaled_activation=True),
}
FAMILY: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **o: te_mx.Linear(IN, 33, **o),
    "LayerNormLinear": lambda **o: filled(te_mx.LayerNormLinear(IN, 33, **o)),
    "LayerNormMLP": lambda **o: filled(te_mx.LayerNormMLP(IN, 48, **o)),
    "swiglu": lambda **o: filled(te_mx.LayerNormMLP(IN, 48, activation="swiglu", **o)),
    "GroupedLinear": lambda **o: te_mx.GroupedLinear(3, IN, 33, **o),
    "stacked": lambda **o: te_mx.GroupedLinear(3, IN, 33, single_grouped_weight=True, **o),
}
every = pytest.mark.parametrize("kind", FAMILY)
recipes = pytest.mark.parametrize("recipe", RECIPES)


def pair(kind: str, dtype: torch.dtype = BF16, **knobs) -> tuple[nn.Module, nn.Module]:
    plain, other = FAMILY[kind](dtype=dtype), FAMILY[kind](dtype=dtype, **knobs)
    other.load_state_dict(plain.state_dict())
    return plain, other


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are those of GEMMs."""
    return {n: p for n, p in module.named_parameters() if p.dim() > 1 and "bias" not in n}


def step(module: nn.Module, recipe: str, seed: int = 0, **options) -> Tensor:
    """One forward and backward; the gradient of the input."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # of stochastic rounding
    dtype = next(module.parameters()).dtype
    x = torch.randn(ROWS, IN, generator=generator).to(dtype).requires_grad_()
    args = (x, SPLITS) if isinstance(module, te_mx.GroupedLinear) else (x,)
    with te_mx.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        y = module(*args, **options)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return x.grad


def assert_same_gradients(got: nn.Module, expected: nn.Module, rtol: float = 0) -> None:
    for (name, ours), theirs in zip(
        got.named_parameters(), expected.parameters(), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}"
        )


@every
@recipes
def test_delayed_wgrad_equals_the_plain_path(kind, recipe):
    plain, other = pair(kind, delay_wgrad_compute=True)
    for seed in range(2):
        dx = step(other, recipe, seed)
        assert torch.equal(dx, step(plain, recipe, seed))
        if seed == 0:
            assert all(p.grad is None for p in weights_of(other).values())
        other.backward_dw()  # one call for all weights
    if recipe == "outside":  # torch rounds the sums of a bias before te_mx adds them up, or after
        assert_same_gradients(other, plain, 2e-2)
    else:
        assert_same_gradients(other, plain)
    with pytest.raises(RuntimeError, match="no weight gradient is waiting"):
        other.backward_dw()


@every
@recipes
@pytest.mark.parametrize("delay", [False, True])
def test_main_grad(kind, recipe, delay):
    """Added to what is there, or written over it in the first micro-batch."""
    plain, other = pair(
        kind, torch.float32, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay
    )
    weights = weights_of(other)
    for p in weights.values():
        p.main_grad, p.grad_added_to_main_grad = torch.full_like(p, 5.0), False
    for seed, first in enumerate((True, False)):
        assert torch.equal(
            step(other, recipe, seed, is_first_microbatch=first), step(plain, recipe, seed)
        )
        if delay:
            other.backward_dw()
    for name, theirs in weights_of(plain).items():
        torch.testing.assert_close(weights[name].main_grad, theirs.grad, rtol=1e-5, atol=1e-5)
        assert weights[name].grad_added_to_main_grad
    for p in weights.values():
        p.overwrite_main_grad = True
        p.main_grad.fill_(7.0)
    step(other, recipe, 1)
    if delay:
        other.backward_dw()
    plain.zero_grad()
    step(plain, recipe, 1)
    for name, theirs in weights_of(plain).items():
        torch.testing.assert_close(weights[name].main_grad, theirs.grad, rtol=1e-5, atol=1e-5)


# Stochastic rounding draws once for all groups, and a loop for each of its layers.
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("mxfp4_all", "nvfp4")])
@pytest.mark.parametrize("kind", ["GroupedLinear", "stacked"])
@pytest.mark.parametrize("save", [False, True])
def test_grouped_main_grads_are_those_of_a_loop(kind, recipe, save):
    """In bf16: sums in fp32 all the way, never rounded on the way to main_grad."""
    layer = FAMILY[kind](dtype=BF16, fuse_wgrad_accumulation=True, save_original_input=save)
    for p in weights_of(layer).values():
        p.main_grad = torch.full(p.shape, 0.5)
    loop = []
    for weight, bias in zip(layer.weights(), layer.biases(), strict=True):
        loop.append(te_mx.Linear(IN, 33, dtype=BF16, fuse_wgrad_accumulation=True))
        loop[-1].load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
        loop[-1].weight.main_grad = torch.full(weight.shape, 0.5)
    x, g = torch.randn(ROWS, IN).to(BF16), torch.randn(ROWS, 33).to(BF16)
    with te_mx.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        y = layer(x, SPLITS)
        apart = [one(part) for one, part in zip(loop, x[: sum(SPLITS)].split(SPLITS), strict=True)]
    y.backward(g)
    torch.cat(apart).backward(g[: sum(SPLITS)])
    made = [p.main_grad for p in weights_of(layer).values()]
    made = made[0] if kind == "stacked" else torch.stack(made)
    assert torch.equal(made, torch.stack([one.weight.main_grad for one in loop]))


@every
def test_what_is_wrong_with_main_grad_is_said(kind):
    _, other = pair(kind, fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match=r"main_grad, and the weight has none; set it"):
        step(other, "default")


@every
def test_hooks_and_marks_of_delayed_modules(kind):
    plain, other = pair(kind, delay_wgrad_compute=True)
    assert other.need_backward_dw() and not plain.need_backward_dw()
    assert all(p.skip_backward_post_hook for p in other.parameters())
    ran = []
    other.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
    step(other, "default")
    other.backward_dw()
    plain.backward_dw()  # does nothing
    assert ran == [1]


@every
@recipes
def test_micro_batch_caching_equals_no_caching(kind, recipe):
    plain, other = pair(kind)
    for seed, first in enumerate((True, False, False)):
        dx = step(other, recipe, seed, is_first_microbatch=first)
        assert torch.equal(dx, step(plain, recipe, seed))
    assert_same_gradients(other, plain)


@every
@pytest.mark.parametrize("frozen", [False, True])
def test_one_copy_weights_keep_one_copy(kind, frozen):
    module = FAMILY[kind]()
    with te_mx.autocast(recipe=RECIPES["one_copy"]):
        if frozen:
            te_mx.freeze_weights(module)
    step(module, "one_copy", is_first_microbatch=None if frozen else True)
    kept = module._source.kept
    held = sum(kept[k].row.codes.numel() + kept[k].row.scales.numel() for k in kept)
    assert all(kept[key].col is None and kept[key].row.packed is None for key in kept)
    sizes = {name: p.shape for name, p in weights_of(module).items()}
    assert held == sum(s.numel() + s.numel() // s[-1] * -(-s[-1] // 32) for s in sizes.values())


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear", "stacked"])
@recipes
def test_saving_the_input_changes_nothing(kind, recipe):
    plain, other = pair(kind, save_original_input=True)
    assert torch.equal(step(other, recipe), step(plain, recipe))
    assert_same_gradients(other, plain)


@pytest.mark.parametrize("recipe", ["default", "kept_columns", "one_copy"])
def test_grouped_inputs_that_are_saved_are_the_input(recipe):
    layer = te_mx.GroupedLinear(3, IN, 33, save_original_input=True)
    x, saved = torch.randn(ROWS, IN, requires_grad=True), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with te_mx.autocast(recipe=RECIPES[recipe]), hooks:
        layer(x, SPLITS)
    floats = {t.data_ptr() for t in saved if t.dtype == torch.float32 and t.numel()}
    weights = {weight.data_ptr() for weight in weights_of(layer).values()}
    assert floats == {x.data_ptr()} | (weights if recipe == "default" else set())


@every
def test_delaying_a_computed_weight_is_refused(kind):
    module = FAMILY[kind](delay_wgrad_compute=True)
    nn.utils.parametrizations.weight_norm(module, next(iter(weights_of(module))))
    with pytest.raises(RuntimeError, match="needs weights that are parameters"):
        step(module, "default")


@pytest.mark.parametrize("enabled", [True, False])
def test_grouped_gradients_elsewhere_need_known_splits(enabled, monkeypatch):
    layer = te_mx.GroupedLinear(3, IN, 33, delay_wgrad_compute=True)
    for module in ("grouped", "grouped_loop"):
        monkeypatch.setattr(f"te_mx.autograd.{module}.readable", lambda offs: False)
    recipe = "wgrad_with_hp" if enabled else "outside"
    with pytest.raises(NotImplementedError, match="m_splits as a list or on the CPU"):
        step(layer, recipe)
