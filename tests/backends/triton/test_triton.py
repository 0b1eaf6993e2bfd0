"""Triton's kernels in its interpreter, in processes of their own: Triton lies aside, where only
these find it, and reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from fresh import python, run_file

HERE = Path(__file__).parent
ASIDE = Path(sys.prefix, "aside_triton")
_found = importlib.util.find_spec("triton") is not None or (ASIDE / "triton").is_dir()
TRITON = pytest.mark.skipif(not _found, reason="Triton is not installed")


@TRITON
@pytest.mark.parametrize("case", ["routed", "modules"])
def test_interpreted(case, *more, file="interpreted.py"):
    made = run_file(HERE / file, case, *more, TRITON_INTERPRET="1", TE_MX_BACKEND="triton")
    assert made.returncode == 0, made.stderr[-3000:]


@TRITON
@pytest.mark.parametrize(
    "cases",
    [
        ("bytes", "random", "units", "words", "executed", "reasons"),
        ("nvfp4", "norms", "activations"),
    ],
)
def test_interpreted_quantizers(cases):
    test_interpreted(*cases, file="interpreted_quantize.py")


@TRITON
def test_interpreted_pieces_of_a_decoder():
    test_interpreted("pieces", "generation", "heads", file="interpreted_decoder.py")


def test_without_triton_or_a_gpu_for_it_kernels_say_so():
    said = python(
        "import importlib.util, sys, torch; importlib.util.find_spec = lambda name, *_: None\n"
        "import te_mx; from te_mx.dispatch.kernels import kernels\n"
        "from te_mx.dispatch.problem import Place, Problem\n"
        "one = next(k for k in kernels('gemm') if k.name == 'triton')\n"
        "spec = 'mxfp8_e4m3@rows'\n"
        "for old in (False, True):\n"
        "    torch.cuda.is_available = lambda: old\n"
        "    torch.cuda.get_device_capability = lambda index: (7, 5)\n"
        "    print(one.accepts(Problem('gemm', Place('cuda', 0), spec, spec, 8, 8, 32)))\n"
        "print('te_mx.backends.triton.kernels' in sys.modules)"
    )
    assert said.stdout.splitlines() == [
        "needs Triton, which is not installed: pip install triton",
        "needs compute capability 8.0, the GPU has 7.5", "False"
    ]  # fmt: skip


def test_a_backend_of_another_name_is_refused():
    said = python("import te_mx, torch; te_mx.quantize(torch.ones(1, 32))", TE_MX_BACKEND="tritn")
    assert (
        said.returncode and 'TE_MX_BACKEND must be "triton" or "vendor" or not set' in said.stderr
    )
