"""Training in NVFP4 on Hopper: no step falls back, results are those of the reference, and what
waits for backward is codes."""

from __future__ import annotations

import emulated_hopper
import pytest
import torch
from grouped_cases import RECIPES as RECIPES_OF_GROUPS
from grouped_cases import assert_same_as_loop, loop_of

import te_mx
from te_mx import formats
from te_mx._ops import quantize_2d
from te_mx.backends.triton import binding as triton
from te_mx.dispatch.problem import Place, Problem
from te_mx.dispatch.registry import planned_problem
from te_mx.dispatch.run import convert, dequantize
from te_mx.recipe import MXFP8BlockScaling, NVFP4BlockScaling

BF16, F32 = torch.bfloat16, torch.float32
RECIPES = [
    NVFP4BlockScaling(),
    NVFP4BlockScaling(
        disable_rht=True,
        disable_2d_quantization=True,
        keep_weight_columns=True,
        nvfp4_4over6="all",
    ),
    NVFP4BlockScaling(row_scaled_activation=True, one_copy_weights=True),
    NVFP4BlockScaling(precision="exact", backward_override="dequantized"),
]
KINDS = {
    "Linear": lambda: te_mx.Linear(70, 40, params_dtype=BF16),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(70, 48, activation="swiglu", params_dtype=BF16),
}


def step(layer, recipe):
    """A result and its gradients, of micro-batches that add to fp32 gradients."""
    torch.manual_seed(3)
    layer.zero_grad(set_to_none=True)
    x = torch.randn(50, 70).to(BF16).requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = layer(x, is_first_microbatch=True)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.filterwarnings("ignore:te_mx runs quantize on the CPU:te_mx.FallbackWarning")
@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_the_reference(kind, recipe):
    layer = KINDS[kind]()
    expected = step(layer, recipe)
    with emulated_hopper.hopper():  # where a fallback fails
        made = step(layer, recipe)
        ran = {gemm for one in te_mx.audit(layer) for gemm in (one.fprop, one.dgrad, one.wgrad)}
    assert ran - {"high precision"} == {"sm90_nvfp4"}
    for one, other in zip(expected, made, strict=True):
        assert (one.double() - other.double()).norm() <= 2e-3 * one.double().norm()


@pytest.mark.parametrize("precision", ["adaptive", "fp8"])
@pytest.mark.parametrize("inputs", ["nvfp4", "nvfp4_rows", "mxfp8"])
def test_frozen_weights_and_quantized_inputs(inputs, precision):
    layer, x = te_mx.Linear(70, 40, params_dtype=BF16), torch.randn(50, 70, dtype=BF16)
    recipe = MXFP8BlockScaling(precision=precision)
    te_mx.freeze_weights(layer, recipe=recipe, drop_master=True, fmt="nvfp4", activations=inputs)
    with torch.no_grad():
        expected = layer(x)
        with emulated_hopper.hopper():
            made = layer(x)
            ran = te_mx.audit(layer)["(root)"].fprop
            assert ran == ("fp8" if precision == "fp8" else "sm90_nvfp4")
    torch.testing.assert_close(made, expected, rtol=2**-7, atol=1e-3)


def test_groups_whose_ends_the_device_knows_are_multiplied_by_triton(monkeypatch):
    """Chosen as ops choose; Triton need not be here."""
    monkeypatch.setattr(triton, "missing", lambda: None)
    place, values = Place("cuda", 0), "nvfp4@sm90_bf16"
    with emulated_hopper.hopper():
        for op, lhs, rhs in (
            ("gemm_rows", values, "nvfp4_16x16@sm90_bf16"),
            ("gemm_rows", "mxfp8_e4m3@rows", "nvfp4@rows"),
            ("gemm_k", f"{values}_cols", "nvfp4@grouped_cols"),
        ):
            problem = Problem(op, place, lhs, rhs, 50, 40, 70, 4, ends="device", dtype=BF16)
            assert planned_problem(problem)[0].name == "triton"
            assert planned_problem(problem._replace(ends="host"))[0].name == "sm90_nvfp4"


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # of groups that share no launch
@pytest.mark.parametrize("splits", [[3, 0, 130], [0, 1, 40, 2]], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_groups_equal_a_loop(splits, bias):
    layer = te_mx.GroupedLinear(len(splits), 64, 33, bias, dtype=BF16)
    x = torch.randn(sum(splits) + 3, 64).to(BF16)
    with emulated_hopper.hopper(), te_mx.autocast(recipe=RECIPES_OF_GROUPS["nvfp4"]):
        assert_same_as_loop(layer, loop_of(layer), x, splits)


def test_inputs_wait_as_codes():
    layer, x = te_mx.Linear(128, 64, params_dtype=BF16), torch.randn(256, 128, dtype=BF16)
    with emulated_hopper.hopper(), te_mx.autocast(recipe=NVFP4BlockScaling()):
        y = layer(x.requires_grad_())
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    beside = sum(t.nbytes for t in saved if t.dtype == torch.uint8) - x.numel() * 9 // 16
    assert 0 <= beside <= 256  # a tensor scale


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # no CPU writes these
def test_values_are_those_of_the_codes():
    x = torch.randn(33, 50)
    for spec in ("nvfp4@sm90_bf16", "nvfp4_16x16@sm90_bf16_cols"):
        made = quantize_2d(x, rule="te", **{"col" if "cols" in spec else "row": spec})
        made = made.row or made.col
        of = x if made.spec == spec and made.rows == 33 else x.t()
        fmt = formats.get(spec.partition("@")[0])
        codes, scales, whole = fmt.quantize(of, "te")
        assert torch.equal(made.values(), fmt.dequantize(codes, scales, made.k, F32) * whole)
        assert torch.equal(dequantize(made, F32), made.values())
        with pytest.raises(NotImplementedError, match="does not give its bytes back"):
            convert(made, f"{fmt.name}@rows")
