"""What te_mx says about Hopper: explain, audit, and the reference backend on other GPUs."""

from __future__ import annotations

import pytest
import sm90_bounds as bounds
import torch
from torch import nn

import te_mx
from te_mx import _ops as ops
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.backends.triton import binding as triton
from te_mx.dispatch import registry
from te_mx.recipe import MXFP8BlockScaling
from te_mx.runtime import kernel_log

SIZES = {"m": 300, "n": 200, "k": 256}


def test_explain_names_the_kernel_and_why_not_the_other():
    for precision, kernel, other in (
        ("adaptive", "sm90_adaptive", "sm90_exact"),
        ("exact", "sm90_exact", "sm90_adaptive"),
    ):
        said = te_mx.explain(**SIZES, device="cuda", precision=precision)
        assert said.kernel == kernel
        declined = dict(said.declined)
        assert repr(precision) in declined[other]
        assert "CPU" in declined["portable_f32"]
        assert "reference" in declined
    assert te_mx.explain(m=0, n=5, k=5, device="cuda").kernel == "zero_size"
    assert te_mx.explain(**SIZES, device="cuda", alignment_spread=3).note.count("2^3") == 1


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("spread", [0, 8])
def test_explain_counts_the_classes_that_the_kernel_meets(layout, spread):
    a, b = (torch.randn(500, 500, device="cuda") for _ in range(2))
    a[:128] *= torch.exp2(torch.randint(-30, 30, (128, 1), device="cuda").float())
    b[:, 200:232] *= 2.0**20
    A, B = (te_mx.quantize(x, columnwise=True) for x in (a, b))
    note = te_mx.explain(A, B, layout, classes=True, alignment_spread=spread).note
    for name, tensor, usage in zip("AB", (A, B), _usages(layout), strict=True):
        operand = tensor.operand(usage)
        packed = ops.kept_form(operand, "rhs", ops.Mode("adaptive", spread))
        counts = torch.bincount(sm90_tiles.classes(packed).flatten().int(), minlength=4).tolist()
        assert sum(counts) == 16
        words = ("tile-shared", "row-shared", "spread", "far")
        want = ", ".join(f"{c} {w}" for c, w in zip(counts, words, strict=True) if c)
        assert f"{name} has {want} tiles" in note


def _usages(layout):
    return {
        "TN": ("rowwise", "rowwise"),
        "NN": ("columnwise", "rowwise"),
        "NT": ("columnwise", "columnwise"),
    }[layout]


def test_audit_names_what_ran():
    model = te_mx.convert_model(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))).model.cuda()
    x = torch.randn(40, 64, device="cuda", requires_grad=True)
    assert {layer.fprop for layer in te_mx.audit(model)} == {"never ran"}
    for precision in ("adaptive", "exact"):
        with te_mx.autocast(recipe=MXFP8BlockScaling(precision=precision)):
            y = model(x)
        y.sum().backward()
        for layer in te_mx.audit(model):
            assert set(layer[2:5]) == {f"sm90_{precision}"}
    model(x)
    assert {layer.fprop for layer in te_mx.audit(model)} == {"high precision"}


def test_operands_for_one_precision_are_refused_by_the_other():
    x = torch.randn(40, 64, device="cuda")
    operand = ops.quantize_2d(x, "mxfp8_e4m3@sm90:8").row
    with pytest.raises(ValueError, match="exact"):
        ops.gemm_2d(operand, operand, out_dtype=torch.float32, mode=ops.Mode("exact"))


def test_wrong_words_are_refused():
    A = te_mx.quantize(torch.randn(40, 64, device="cuda"))
    with pytest.raises(ValueError, match="adaptive"):
        te_mx.gemm(A, A, precision="fast")
    for spread in (-1, 9):
        with pytest.raises(ValueError, match="alignment_spread"):
            te_mx.gemm(A, A, alignment_spread=spread)
    with pytest.raises(ValueError, match="move one"):
        te_mx.gemm(A, A.to("cpu"))


@pytest.fixture
def anew(monkeypatch):
    """Kernels are chosen anew, in the test and after it."""
    monkeypatch.setattr(binding, "_problems", {})
    monkeypatch.setattr(kernel_log, "_warned", set())
    registry.forget()
    yield monkeypatch
    monkeypatch.undo()
    registry.forget()


@pytest.fixture
def without_triton(anew):
    anew.setattr(triton, "missing", lambda: "needs Triton")


@pytest.fixture
def other_gpu(anew):
    """As if the device were an Ada GPU."""
    anew.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))


@pytest.mark.usefixtures("without_triton")
def test_other_gpus_run_the_reference_and_say_so(other_gpu):
    said = te_mx.explain(**SIZES, device="cuda")
    assert said.kernel == "reference"
    declined = dict(said.declined)
    for kernel in ("sm90_adaptive", "sm90_exact"):
        assert declined[kernel] == "needs a Hopper GPU (sm_90), cuda:0 is sm_89"

    a, b = bounds.pair("channels", 200, 136, 320)
    with pytest.warns(te_mx.FallbackWarning, match="quantize on cuda:0 .*sm_89"):
        A = te_mx.quantize(a, columnwise=True)
    B = te_mx.quantize(b)
    assert not A.columnwise_transposed
    for tensor, x in ((A, a), (B, b)):
        want = te_mx.quantize(x.cpu(), columnwise=tensor is A)
        assert tensor.to("cpu").equal(want)
    with pytest.warns(te_mx.FallbackWarning, match="gemm on cuda:0 .*sm_89"):
        out = te_mx.gemm(A, B, out_dtype=torch.float32).out
    va, vb = (bounds.mx_values(t.operand("rowwise")) for t in (A, B))
    bounds.assert_close(out, vb @ va.t(), bounds.fp32_sums(va, vb))
    assert torch.equal(te_mx.gemm(A, B, precision="exact", out_dtype=torch.float32).out, out)


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
@pytest.mark.parametrize("kernel", ["triton", "reference"])
def test_a_linear_trains_on_other_gpus(other_gpu, anew, request, kernel):
    if kernel == "reference":
        request.getfixturevalue("without_triton")
    else:
        # Triton asks torch as well, at its first kernel, and what it compiles has to run here.
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        of_this = GPUTarget("cuda", 90, 32)
        anew.setattr(driver.active, "get_current_target", lambda: of_this)
    torch.manual_seed(0)
    on_gpu, on_cpu = te_mx.Linear(96, 64, device="cuda"), te_mx.Linear(96, 64)
    on_cpu.load_state_dict(on_gpu.state_dict())
    x, grad = torch.randn(50, 96), torch.randn(50, 64)
    results = []
    for linear, device in ((on_gpu, "cuda"), (on_cpu, "cpu")):
        leaf = x.to(device).requires_grad_()
        with te_mx.autocast():
            y = linear(leaf)
        y.backward(grad.to(device))
        results.append(
            [t.detach().cpu() for t in (y, leaf.grad, linear.weight.grad, linear.bias.grad)]
        )
    assert te_mx.audit(on_gpu)["(root)"][2:5] == (kernel,) * 3
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
@pytest.mark.usefixtures("without_triton")
def test_a_build_without_the_kernels_says_what_to_do(anew):
    anew.setattr(binding, "_native", None)
    anew.setattr(binding, "_import_error", "No module named 'te_mx._sm90'")
    said = te_mx.explain(**SIZES, device="cuda")
    assert said.kernel == "reference"
    assert "nvcc" in dict(said.declined)["sm90_adaptive"]
    A = te_mx.quantize(torch.randn(40, 64, device="cuda"))
    assert te_mx.gemm(A, A).out.isfinite().all()
