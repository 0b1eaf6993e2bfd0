"""`python -m te_mx doctor`."""

from __future__ import annotations

import pytest
import torch

import te_mx
from te_mx.backends.cpu import binding as cpu
from te_mx.commands import doctor
from te_mx.commands.main import main
from te_mx.dispatch.tuned import tables

pytestmark = [
    pytest.mark.skipif(cpu.missing_reason() is not None, reason="no native module"),
    pytest.mark.usefixtures("untuned", "portable"),
]


def diagnosis(capsys, *arguments):
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out


def test_a_healthy_machine(capsys, tmp_path, monkeypatch):
    path = tmp_path / "mine.csv"
    tables.write(
        path, [tables.Row(tables.Key("h200", "gemm", "a", "b", 1, 1, 1), "x", "", 1, "y", 2)]
    )
    monkeypatch.setenv("TE_MX_TUNED", str(path))
    code, said = diagnosis(capsys)
    assert code == 0 and said.rstrip().endswith("nothing is wrong")
    for words in (f"by {cpu.native().COMPILER}", f"te_mx {te_mx.__version__}",
                  f"torch {torch.__version__}", "level portable",
                  f"{path}, 0 of 1 rows are for this device", f"TE_MX_TUNED={path}",
                  "on portable_stream: off by", "on portable_f32: off by"):  # fmt: skip
        assert words in said
    if "avx2" in cpu.available_isa():
        assert "not avx2: TE_MX_CPU_ISA" in said
    assert doctor._why_not("amx", {"avx512f"}) == "the CPU does not have amx_tile, amx_bf16" or (
        "amx" in cpu.available_isa()
    )


def test_what_is_wrong_is_said_and_is_the_exit_status(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TE_MX_TUNED", str(tmp_path / "nothing.csv"))
    te_mx.use_tuned_table(None)
    code, said = diagnosis(capsys, "--no-gemm")
    assert code == 1 and "WRONG: ValueError: te_mx: the tuned table" in said
    assert "against fp64" not in said
    monkeypatch.delenv("TE_MX_TUNED")
    gemm = te_mx.gemm
    off = lambda *a, **k: gemm(*a, **k)._replace(out=gemm(*a, **k).out * 1.01)  # noqa: E731
    monkeypatch.setattr(doctor.te_mx, "gemm", off)
    code, said = diagnosis(capsys)
    assert code == 1 and said.count("WRONG: cpu:") == len(doctor.GEMMS)
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "native", lambda: None)
    monkeypatch.setattr(cpu, "missing_reason", lambda: "it was not built")
    code, said = diagnosis(capsys, "--no-gemm")
    monkeypatch.undo()
    assert code == 1 and "WRONG: everything runs in plain torch: it was not built" in said


def test_a_gpu_that_nobody_has_run(monkeypatch):
    why = "needs a Hopper GPU (sm_90), cuda:1 is sm_100"
    monkeypatch.setattr(doctor.sm90, "problem", lambda index: why)
    monkeypatch.setattr(doctor.triton, "missing", lambda: None)
    said = list(doctor._kernels(1, False))
    assert said[0] == f"cuda:1 runs Triton's kernels, and cuBLAS's where torch has them ({why})"
    assert "had no such GPU" in said[1] and "te_mx conformance --device cuda:1" in said[2]
    assert next(doctor._kernels(1, True)).startswith(doctor.WRONG)
    monkeypatch.setattr(doctor, "forced", "triton")
    assert list(doctor._kernels(1, True)) == said[:1]
    monkeypatch.setattr(doctor.triton, "missing", lambda: "needs Triton: pip install triton")
    assert "plain torch" in (line := next(doctor._kernels(1, False))) and "pip install" in line
