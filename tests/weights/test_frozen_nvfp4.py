"""Frozen NVFP4 weights: what they take, what they multiply, and state_dicts that do not fit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import te_mx
from te_mx.backends.cpu.binding import native

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
BF16, F32 = torch.bfloat16, torch.float32


def frozen(fmt="nvfp4", activations="bf16", layer=None):
    layer = layer or te_mx.Linear(80, 48, params_dtype=BF16)
    te_mx.freeze_weights(layer, drop_master=True, fmt=fmt, activations=activations)
    return layer


def test_what_it_takes_and_says():
    layer = frozen(layer=te_mx.Linear(1024, 512, bias=False))
    assert "lies as nvfp4@rows, 0.56 bytes a parameter" in repr(layer)
    assert sum(t.nbytes for t in layer.buffers()) <= 0.5626 * 1024 * 512
    assert sum(t.nbytes for t in layer.state_dict().values()) <= 0.5626 * 1024 * 512
    layer(torch.randn(3, 1024))
    said = str(te_mx.audit(layer))
    assert "_stream" in said or native() is None
    assert "nvfp4" in said


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("activations", ["bf16", "mxfp8", "mxfp4", "nvfp4", "nvfp4_rows"])
def test_products_and_gradients_of_inputs(fmt, activations):
    """fprop is te_mx.gemm's, dgrad a product with the values of the codes."""
    torch.manual_seed(0)
    layer = frozen(fmt, activations)
    values = layer._source.values(layer, "weight")
    w = te_mx.MXTensor((48, 80), fmt, rowwise_data=layer._codes("weight")[0],
                       rowwise_scale=layer._codes("weight")[1],
                       tensor_scale=layer._codes("weight")[2])  # fmt: skip
    x = torch.randn(7, 80, dtype=BF16, requires_grad=True)
    y = layer(x)
    given = x.detach() if activations == "bf16" else te_mx.quantize(x.detach(), fmt=activations)
    expected = te_mx.gemm(w, given, bias=layer.bias, out_dtype=BF16).out
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), y, rtol=1e-2, atol=1e-2)
    g = torch.randn_like(y)
    y.backward(g)
    expected = (g.float() @ w.dequantize()).to(BF16)
    torch.testing.assert_close(x.grad, expected, rtol=2e-2, atol=2e-2)
    if (fmt, activations) in (("nvfp4", "bf16"), ("nvfp4_16x16", "nvfp4_rows")):
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
    assert torch.equal(values, w.dequantize(BF16))


def test_encoded_anew_in_fp8():
    """Of frozen weights and te_mx.gemm, by a bound; whatever else asks for it is told."""
    torch.manual_seed(0)
    recipe = te_mx.recipe.MXFP8BlockScaling(precision="fp8")
    layer = te_mx.LayerNormMLP(96, 64, activation="swiglu", params_dtype=BF16)
    x = torch.randn(30, 96, dtype=BF16, requires_grad=True)
    with te_mx.autocast(recipe=recipe), pytest.raises(RuntimeError, match="of NVFP4 with NVFP4"):
        layer(x)
    with pytest.raises(ValueError, match="leaves inputs in 16 bits, and precision 'fp8'"):
        te_mx.freeze_weights(layer, drop_master=True, recipe=recipe, activations="bf16")
    how = {"fmt": "nvfp4", "activations": "mxfp8"}
    te_mx.freeze_weights(layer, drop_master=True, recipe=recipe, **how)
    y = layer(x)
    y.sum().backward()
    assert te_mx.audit(layer)["(root).fc2"].fprop == "fp8"
    with te_mx.autocast(recipe=te_mx.recipe.MXFP8BlockScaling()):
        exactly = layer(x.detach())
    assert 1e-3 < (y - exactly).norm() / exactly.norm() < 0.06
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))

    # Rows and blocks far apart, zeros; every element moves by a 16th of itself.
    w = torch.randn(64, 96) * torch.logspace(-6, 6, 64)[:, None]
    w[:, :16] *= 2.0**-6
    w[5] = 0
    one = te_mx.quantize(torch.eye(96), fmt="mxfp8_e4m3")
    for fmt in ("nvfp4", "nvfp4_16x16", "nvfp4_rows"):
        q = te_mx.quantize(w, fmt=fmt)
        made = te_mx.gemm(q, one, precision="fp8", out_dtype=F32).out.t()
        off = (made - q.dequantize()).abs()
        assert (off <= q.dequantize().abs() * 1.004 / 16).all()
        q = te_mx.quantize(torch.randn(512, 96), fmt=fmt)
        made = te_mx.gemm(q, one, precision="fp8", out_dtype=F32).out.t()
        assert 0.02 < (made - q.dequantize()).norm() / q.dequantize().norm() < 0.032
    said = str(te_mx.explain(q, one, precision="fp8"))
    assert ": fp8\n" in said and "note: as mxfp8_e4m3, then" in said
    wide = te_mx.quantize(torch.eye(96), fmt="fp8_e4m3_1x128")
    for a, b in ((one, one), (wide, q)):
        with pytest.raises(RuntimeError, match="no kernel for precision 'fp8', which"):
            te_mx.gemm(a, b, precision="fp8")
    with pytest.raises(ValueError, match="precision 'fp8'"):
        te_mx.gemm(q, one, precision="fp8", accumulate=True)
    with pytest.raises(
        ValueError, match=r"precision 'fp8' .* quantize both, at least one to NVFP4"
    ):
        te_mx.gemm(q, x.detach(), precision="fp8")


def test_rows_that_do_not_depend_on_each_other():
    """Inputs with a scale a row, or as they are; one scale for all is refused."""
    recipe = te_mx.recipe.MXFP8BlockScaling(precision="invariant")
    layer = te_mx.Linear(80, 48)
    with pytest.raises(ValueError, match="inputs in nvfp4 have one tensor scale"):
        te_mx.freeze_weights(layer, recipe=recipe, drop_master=True, fmt="nvfp4",
                             activations="nvfp4")  # fmt: skip
    frozen(activations="nvfp4_rows", layer=layer)
    x = torch.randn(5, 80) * torch.logspace(0, 4, 5)[:, None]
    with torch.no_grad():
        y = layer(x)
        for i in range(5):
            assert torch.equal(layer(x[i : i + 1]), y[i : i + 1])


def test_copies_files_and_devices():
    torch.manual_seed(0)
    build = lambda: te_mx.GroupedLinear(2, 80, 48, params_dtype=BF16)  # noqa: E731
    layer, x = frozen(layer=build()), torch.randn(6, 80, dtype=BF16)
    y, state = layer(x, [2, 4]), layer.state_dict()
    assert state["weight1_scale_2"].shape == () and state["weight0_scale"].dtype == (
        torch.float8_e4m3fn
    )
    stacked = te_mx.GroupedLinear(2, 80, 48, params_dtype=BF16, single_grouped_weight=True)
    with torch.device("meta"):
        outline = build()
    outline.load_state_dict(state, assign=True)
    empty = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    alone = build()
    alone.load_state_dict(dict(state))  # as safetensors holds it: the format by names and shapes
    te_mx.freeze_weights(alone, drop_master=True, activations="bf16")
    for other in (stacked, empty):
        other.load_state_dict(state)
    for other in (stacked, empty, outline, alone, layer.half().bfloat16(), copy.deepcopy(layer),
                  pickle.loads(pickle.dumps(layer))):  # fmt: skip
        assert torch.equal(other(x, [2, 4]), y)
    te_mx.unfreeze_weights(stacked, dequantize=True)
    assert torch.equal(stacked.weight, layer._source.values(layer, "weight"))


def test_state_dicts_that_do_not_fit():
    good = dict(frozen().state_dict())
    e = 1 / good["weight_scale_2"]
    for change, said in (
        ({"weight_scale_2": None}, "needs a tensor scale beside them, called .* with _scale_2"),
        ({"weight_scale_2": e * torch.nan}, r"must be positive and finite, got \[nan\]"),
        ({"weight_scale_2": good["weight_scale_2"].double()}, "tensor scale must be a float32"),
        ({"weight_scale_2": torch.ones(3)}, r"must have shape \(\), got \(3,\)"),
        (
            {"weight_scale_2": e},
            rf"weights go up to .*, the reciprocal, they go .* {2688 / e:.3g}:",
        ),
        ({"weight_scale": good["weight_scale"].float()}, "must be float8_e4m3fn, or their bytes"),
        ({"weight_scale": good["weight_scale"][:, :3]}, r"one scale per 16 columns"),
        ({"weight": good["weight"][:, :30]}, r"must be \(48, 40\) and \(48, 5\)"),
    ):
        state = {k: v for k, v in (good | change).items() if v is not None}
        for layer in (frozen(), te_mx.Linear(80, 48, params_dtype=BF16)):
            before = copy.deepcopy(layer.state_dict())
            with pytest.raises(RuntimeError, match=said if layer._source.dropped else "weight"):
                layer.load_state_dict(state)
            after = layer.state_dict()
            assert all(torch.equal(before[k].view(-1), after[k].view(-1)) for k in before)
