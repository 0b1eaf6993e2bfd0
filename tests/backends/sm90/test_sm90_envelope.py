"""Which problems the kernels of the Hopper backend take, and what they say of others."""

from __future__ import annotations

import as_on_hopper
import fake_sm90
import pytest
import torch

from te_mx.backends.sm90 import binding
from te_mx.dispatch import operand_layouts, registry
from te_mx.dispatch.problem import Place, Problem

E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"


@pytest.fixture(autouse=True)
def hopper():
    with as_on_hopper.hopper():
        yield


def gemm_problem(index=0, m=8, precision="adaptive"):
    return Problem(
        "gemm", Place("cuda", index), f"{E4M3}@rows", f"{E4M3}@cols", m, 8, 8, precision=precision
    )


@pytest.mark.parametrize(
    ("capability", "module", "said"),
    [
        ((8, 9), fake_sm90, "needs a Hopper GPU (sm_90), cuda:0 is sm_89"),
        ((12, 0), fake_sm90, "sm_120"),
        ((9, 0), None, "nvcc"),
    ],
)
def test_reasons_not_to_run(monkeypatch, capability, module, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(binding, "_problems", {})
    monkeypatch.setattr(binding, "_native", module)
    monkeypatch.setattr(binding, "_import_error", None if module else "not built")
    registry.forget()
    kernel, declined = registry.choose(gemm_problem())
    assert kernel.name == "reference"
    assert said in dict(declined)["sm90_adaptive"]
    assert said in dict(declined)["sm90_exact"]
    sides = f"{E4M3}@rows", f"{E4M3}@cols"
    assert registry.pick("gemm", as_on_hopper.HOPPER, *sides, (8, 8, 8)).name == "reference"


def test_the_table_of_kernels_on_hopper():
    device, sides = as_on_hopper.HOPPER, (f"{E4M3}@rows", f"{E4M3}@cols")
    for precision in ("adaptive", "exact"):
        name = f"sm90_{precision}"
        assert registry.choose(gemm_problem(precision=precision))[0].name == name
        for sizes, want in (((8, 8, 8), name), ((0, 8, 8), "zero_size")):
            picked = registry.pick("gemm", device, *sides, sizes, precision=precision)
            assert picked.name == want
    found = operand_layouts.operand_layouts(device, E5M2, E4M3, "adaptive", 5)
    assert found == (f"{E5M2}@sm90:5", f"{E5M2}@sm90:5")
    assert operand_layouts.operand_layouts(device, E4M3, E5M2, "adaptive", 5, right=True) == (
        f"{E4M3}@sm90:5", f"{E4M3}@sm90:5",
    )  # fmt: skip
    assert operand_layouts.operand_layouts(device, E5M2, E4M3, "exact", 5) == (
        f"{E5M2}@rows",
        f"{E5M2}@rows",
    )
    tokens = operand_layouts.operand_layouts(device, E5M2, E4M3, "adaptive", 5, "gemm_rows")
    assert tokens == (f"{E5M2}@sm90_rows:5", f"{E5M2}@sm90_k:5")


@pytest.mark.parametrize("lhs", [E4M3, E5M2, "mxfp4"])
def test_e5m2_on_the_right_is_multiplied_exactly(lhs):
    """Every kernel of the tensor cores says so by name."""
    sides = {"lhs": f"{lhs}@rows", "rhs": f"{E5M2}@rows"}
    wanted = f"takes {E5M2} on the left of products, as gradients are, not on the right as weights"
    for layouts, op in (
        (("rows", "rows"), "gemm"), (("sm90_rows:8", "sm90:8"), "gemm_rows"),
        (("sm90_k:8", "sm90_k:8"), "gemm_k"), (("rows", "rows"), "moe_gemm"),
    ):  # fmt: skip
        specs = {"lhs": f"{lhs}@{layouts[0]}", "rhs": f"{E5M2}@{layouts[1]}"}
        kernel, declined = registry.choose(gemm_problem()._replace(op=op, n=32, k=32, **specs))
        assert kernel.name == ("sm90_exact" if op == "gemm" else "reference")
        said = [why for name, why in declined if name in ("sm90_adaptive", "sm90_moe")]
        assert said == [wanted] or (op, lhs) == ("moe_gemm", "mxfp4")
    problem = gemm_problem()._replace(**sides)
    assert registry.choose(problem)[0].note(problem) == f"sm90_adaptive {wanted}"
    for op, specs in (
        ("quantize_weights", (f"{E5M2}@rows", "")), ("quantize_weights", ("", f"{E5M2}@sm90:8")),
        ("columns_of_weights", (f"{E5M2}@rows", f"{E5M2}@sm90:8")),
    ):  # fmt: skip
        problem = gemm_problem()._replace(op=op, lhs=specs[0], rhs=specs[1])
        assert wanted in dict(registry.choose(problem)[1])["sm90"]
    for fmt, other in ((lhs, E5M2), (E5M2, lhs)):
        found = operand_layouts.operand_layouts(
            as_on_hopper.HOPPER, fmt, other, "adaptive", 8, right=fmt is E5M2
        )
        assert {one.partition("@")[2] for one in found} <= {"rows", "cols"}


def test_formats_and_rules_that_native_code_does_not_know():
    """Their kernels are asked, and say why not."""
    for spec, rule, said in (
        ("mxfp6_e3m2@rows", "rceil", "takes mxfp8_e4m3, mxfp8_e5m2, mxfp4, not mxfp6_e3m2"),
        (f"{E4M3}@grouped_cols", "rceil", "takes the layouts rows, cols, sm90{}, not grouped_cols"),
    ):
        for op, (lhs, rhs) in (("quantize", (spec, "")), ("gemm", (f"{E5M2}@rows", spec))):
            problem = gemm_problem()._replace(op=op, lhs=lhs, rhs=rhs, rule=rule)
            kernel, declined = registry.choose(problem)
            name = "sm90" if op == "quantize" else "sm90_adaptive"
            more = "" if op == "quantize" else ", sm90_nvfp4"  # which is unpacked
            assert kernel.name == "reference" and dict(declined)[name] == said.format(more)


def test_directions_that_one_read_does_not_make():
    for row, col in (
        (f"{E4M3}@rows", f"{E5M2}@rows"),
        (f"{E4M3}@sm90:8", f"{E4M3}@rows"),
        (f"{E4M3}@sm90:8", f"{E4M3}@sm90:3"),
        (f"{E4M3}@cols", f"{E4M3}@rows"),
    ):
        problem = gemm_problem()._replace(op="quantize", lhs=row, rhs=col)
        kernel, declined = registry.choose(problem)
        assert kernel.name == "reference" and "makes" in dict(declined)["sm90"]
