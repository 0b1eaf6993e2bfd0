"""te_mx.explain says what runs, what runs is recorded, and falling back warns once per kind."""

from __future__ import annotations

import warnings

import pytest
import torch
from native_words import GemmCall

import te_mx
from te_mx import _ops as ops
from te_mx.api import blas
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu.gemm import Panel
from te_mx.dispatch.kernels import kernels
from te_mx.dispatch.problem import STREAM_ROWS, Problem, place_of
from te_mx.runtime.kernel_log import LAST_RUN

CPU = torch.device("cpu")
OF_CPUS = [kernel for kernel in kernels("gemm") if isinstance(kernel, Panel)]


def pair(n, m, k, layout="TN", transposed=False):
    A = te_mx.quantize(torch.randn(*((m, k) if layout == "TN" else (k, m))), columnwise=True,
                       columnwise_transposed=transposed)  # fmt: skip
    B = te_mx.quantize(torch.randn(*((k, n) if layout == "NT" else (n, k))), columnwise=True,
                       columnwise_transposed=transposed)  # fmt: skip
    return A, B


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("transposed", [False, True])
def test_explain_names_what_runs(isa, layout, transposed):
    for n in (1, 16, 17, 40):
        A, B = pair(n, 24, 70, layout, transposed)
        said = te_mx.explain(A, B, layout)
        a, b = blas.operands(A, B, layout)
        ops.gemm_2d(b, a, out_dtype=torch.float32, tag=3)
        assert LAST_RUN[3] == said.kernel
        sizes = te_mx.explain(layout=layout, m=24, n=n, k=70)
        assert sizes == said


def test_every_other_kernel_has_a_reason(isa):
    said = te_mx.explain(m=24, n=4, k=70, layout="NN")
    names = [name for name, _ in said.declined]
    others = {kernel.name for kernel in kernels("gemm")} - {"zero_size"}
    assert {"reference", "sm90_adaptive", "sm90_exact", "amx_bf16", "portable_stream"} <= others
    assert set(names) == others - {said.kernel} and all(why for _, why in said.declined)
    text = str(said)
    assert text.startswith(f"D[4, 24], k 70, NN, cpu at level {isa}: {said.kernel}")
    assert all(name in text for name in names)


def test_selection_follows_the_level(isa):
    panel = te_mx.explain(m=64, n=64, k=64).kernel
    family = {"amx": "amx_bf16", "amx_emulated": "amx_bf16", "avx512_bf16": "avx512_bf16"}
    assert panel == family.get(isa, f"{isa}_f32")
    few = te_mx.explain(m=64, n=16, k=70).kernel
    assert few == {"amx_emulated": "amx_stream"}.get(isa, f"{isa}_stream")
    assert te_mx.explain(m=64, n=17, k=64).kernel == panel
    assert te_mx.explain(layout="NN", m=64, n=4, k=70).kernel == few


def test_envelope_says_yes_exactly_when_the_kernel_accepts(isa):
    assert len(OF_CPUS) == 10
    for n in (1, 16, 17):
        for layout in ("rows", "cols"):
            shape = (24, 70) if layout == "rows" else (70, 24)
            q = te_mx.quantize(torch.randn(shape), columnwise=True, columnwise_transposed=False)
            a = q.operand("rowwise" if layout == "rows" else "columnwise")
            b = te_mx.quantize(torch.randn(n, 70)).operand("rowwise")
            assert a.spec == f"mxfp8_e4m3@{layout}"
            problem = Problem("gemm", place_of(CPU), b.spec, a.spec, n, 24, 70)
            sides = a, b
            for kernel in OF_CPUS:
                call = GemmCall(kernel.name, *sides, ops.Epilogue(), torch.empty(n, 24), None)
                nbytes = call.workspace_bytes()
                scratch = torch.empty(nbytes, dtype=torch.uint8)
                accepted = call.run(scratch, nbytes) is not None
                assert accepted == (kernel.accepts(problem) is None), (kernel.name, n, layout)


def test_zero_sizes_and_other_devices():
    assert te_mx.explain(m=0, n=4, k=8).kernel == "zero_size"
    assert te_mx.explain(m=4, n=4, k=0).kernel == "zero_size"
    said = te_mx.explain(m=4, n=4, k=8, device="meta")
    assert said.kernel == "reference" and "the operands are on meta" in str(said)


def test_explain_errors():
    A, _ = pair(4, 24, 70)
    with pytest.raises(ValueError, match=r"two MXTensors .* or three sizes"):
        te_mx.explain(A)
    with pytest.raises(TypeError, match=r"B must be an MXTensor, got .* torch multiplies"):
        te_mx.explain(A, torch.ones(3, 70, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="or three sizes"):
        te_mx.explain(m=1, n=2)
    with pytest.raises(ValueError, match=r'layout must be "TN", "NN" or "NT", got \'TT\' .*swap'):
        te_mx.explain(layout="TT", m=1, n=2, k=3)


def test_wide_rows_run_on_wide_f64():
    """Blocks of one row 2^90 apart: too wide for values relative to the row, and still exact."""
    x = torch.ones(40, 64)
    x[:, 32:] *= 2.0**-90
    A, B = te_mx.quantize(x[:24]), te_mx.quantize(x)
    ops.gemm_2d(B.operand("rowwise"), A.operand("rowwise"), out_dtype=torch.float32, tag=5)
    assert LAST_RUN[5] == "wide_f64"
    assert "wide_f64" in te_mx.explain(A, B).note


def test_wide_spread_is_the_native_constant():
    assert cpu.native().WIDE_SPREAD == cpu.WIDE_SPREAD
    assert cpu.native().STREAM_MAX_ROWS == STREAM_ROWS


def test_native_runs_without_warnings(isa, fresh_warnings):
    A, B = pair(20, 24, 70)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te_mx.gemm(A, B)
        te_mx.gemm(te_mx.quantize(torch.randn(0, 8)), te_mx.quantize(torch.randn(3, 8)))
        A.dequantize()


def test_fallback_warns_once_per_kind(no_native):
    x = torch.randn(20, 64)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            A = te_mx.quantize(x)
            te_mx.gemm(A, A)
            A.dequantize()
    kinds = [str(w.message) for w in seen if w.category is te_mx.FallbackWarning]
    assert len(kinds) == 3
    for kind, text in zip(("quantize", "gemm", "dequantize"), kinds, strict=True):
        assert f"te_mx runs {kind} on the CPU" in text and "hidden by a test" in text
    said = te_mx.explain(A, A)
    assert said.kernel == "reference" and "hidden by a test" in said.note
    whys = dict(said.declined)
    assert all(whys[kernel.name] == "needs the native module" for kernel in OF_CPUS)
    assert whys["sm90_adaptive"] == "runs on CUDA, the operands are on cpu"


def test_reference_gives_the_same_without_native(no_native):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        A = te_mx.quantize(torch.randn(20, 64), columnwise=True)
        ops.gemm_2d(A.operand("rowwise"), A.operand("rowwise"), out_dtype=torch.float32, tag=6)
    assert LAST_RUN[6] == "reference"


def test_an_unsupported_native_status_falls_back_visibly(monkeypatch, fresh_warnings):
    unsupported = 2
    monkeypatch.setattr(cpu.native(), "gemm", lambda args: (unsupported, 0))
    A, B = pair(20, 24, 64)
    with pytest.warns(te_mx.FallbackWarning, match="gemm on the CPU .*native code does not take"):
        ops.gemm_2d(B.operand("rowwise"), A.operand("rowwise"), out_dtype=torch.float32, tag=8)
    assert LAST_RUN[8] == "reference"


def test_bad_native_statuses_raise():
    assert cpu.supported(0) and not cpu.supported(2)
    with pytest.raises(RuntimeError, match="internal error: a native kernel refused"):
        cpu.supported(1)
    with pytest.raises(RuntimeError, match="workspace too small"):
        cpu.supported(3)
    with pytest.raises(RuntimeError, match="native status 9"):
        cpu.supported(9)


def test_set_isa_errors():
    with pytest.raises(ValueError, match="level must be one of portable"):
        cpu.set_isa("sse2")
    missing = [level for level in cpu.ISA_LEVELS if level not in cpu.available_isa()]
    for level in missing:
        with pytest.raises(RuntimeError, match=f"cannot run the level '{level}'"):
            cpu.set_isa(level)


def test_isa_without_native(no_native):
    assert cpu.isa() == -1 and cpu.available_isa() == [] and not cpu.kernel_available("amx_bf16")
    with pytest.raises(RuntimeError, match="hidden by a test"):
        cpu.set_isa("portable")


def test_formats_without_a_native_kernel(fresh_warnings):
    """The reference takes any pair, says so once, and explain says why."""
    x, w = torch.randn(20, 70), torch.randn(24, 70)
    few, usual = te_mx.quantize(torch.randn(4, 70)), te_mx.quantize(x)
    with pytest.warns(te_mx.FallbackWarning, match="quantize on the CPU .*not mxfp6_e2m3"):
        A = te_mx.quantize(w, fmt="mxfp6_e2m3")
    for B in (few, usual):
        said = te_mx.explain(A, B)
        assert said.kernel == "reference"
        whys = dict(said.declined)
        for kernel in OF_CPUS:
            why = whys[kernel.name]
            assert why.startswith("takes mxfp8_e4m3, mxfp8_e5m2, mxfp4")
            assert why.endswith(", not mxfp6_e2m3")
    with pytest.warns(te_mx.FallbackWarning, match="gemm on the CPU .*not mxfp6_e2m3"):
        out = te_mx.gemm(A, usual, out_dtype=torch.float32).out
    with pytest.warns(te_mx.FallbackWarning, match="dequantize on the CPU .*not mxfp6_e2m3"):
        values = A.dequantize(torch.bfloat16)
    expected = usual.dequantize(torch.float64) @ values.double().t()
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    te_mx.gemm(A, few)  # nothing is said twice
    with pytest.raises(ValueError, match="tiles of MXFP8 and MXFP4 tensors, A is mxfp6_e2m3"):
        te_mx.explain(A, usual, classes=True)


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
def test_sizes_under_a_recipe():
    """The formats of each GEMM of a layer: what te_mx.gemm of such tensors says."""
    recipe = te_mx.recipe.BlockScaling("mxfp8_e4m3", "mxfp6_e2m3", "mxfp8_e5m2")
    fmts = {"x": "e4m3", "w": "mxfp6_e2m3", "g": "e5m2"}
    for layout, roles in {"TN": "wx", "NN": "wg", "NT": "xg"}.items():
        A, B = (
            te_mx.quantize(torch.ones(40, 40), fmt=fmts[role], columnwise=True) for role in roles
        )
        said = te_mx.explain(A, B, layout)
        sizes = te_mx.explain(m=40, n=40, k=40, layout=layout, recipe=recipe)
        assert (sizes.kernel, sizes.declined) == (said.kernel, said.declined)
    grouped = te_mx.explain_grouped([33, 0], in_features=40, out_features=40, recipe=recipe)
    assert (grouped.fprop, grouped.dgrad) == ("reference", "reference")
    assert grouped.wgrad == te_mx.explain(m=40, n=40, k=40, layout="NT").kernel
    with pytest.raises(ValueError, match="recipe names the formats of sizes"):
        te_mx.explain(A, B, recipe=recipe)


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
@pytest.mark.parametrize(("precision", "fmt"), [("fp8", "e4m3"), ("invariant", "mxfp6_e2m3")])
def test_what_is_refused_is_said_before(precision, fmt):
    A = te_mx.quantize(torch.ones(40, 64), fmt)
    with pytest.raises(RuntimeError, match=f"precision '{precision}'"):
        te_mx.gemm(A, A, precision=precision)
    said = te_mx.explain(A, A, precision=precision)
    assert said.note == f"te_mx refuses it at precision '{precision}', which no kernel has"
    assert not te_mx.explain(A, A).note.startswith("te_mx refuses")


def test_groups_at_precisions_of_forward():
    """Backward of a layer does not have them, whatever the format."""
    for precision in ("fp8", "invariant"):
        sizes = {"in_features": 64, "out_features": 96, "recipe": "nvfp4"}
        said = te_mx.explain_grouped([33, 2], precision=precision, **sizes)
        usual = te_mx.explain_grouped([33, 2], **sizes)
        assert (said.dgrad, said.wgrad) == (usual.dgrad, usual.wgrad)
    assert te_mx.explain_grouped([33], precision="fp8", **sizes).fprop == "fp8"
