"""The native Hopper module on a machine that may have no GPU, no driver and no CUDA toolkit."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import pytest
import torch

from te_mx.backends.sm90 import binding as sm90

SPEC = importlib.util.find_spec("te_mx._sm90")
LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("te_mx._sm90", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.available(), "torch" in sys.modules)
"""
built = pytest.mark.skipif(SPEC is None, reason="te_mx was built without Hopper kernels")


@built
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_it_needs_no_cuda_library_and_no_torch():
    said = subprocess.run(
        ["readelf", "-d", SPEC.origin], capture_output=True, text=True, check=True
    ).stdout
    needed = [line.split("[")[1].rstrip("]") for line in said.splitlines() if "NEEDED" in line]
    assert any(name.startswith("libc.") for name in needed), said
    plain = ("libc.", "libm.", "libstdc++.", "libgcc_s.", "libdl.", "librt.", "libpthread.", "ld-")
    assert [name for name in needed if not name.startswith(plain)] == []


@built
def test_it_imports_alone_and_says_whether_it_can_run():
    """In a process of its own, so that nothing else has loaded CUDA or torch before."""
    said = subprocess.run(
        [sys.executable, "-c", LOAD, SPEC.origin], capture_output=True, text=True, check=True
    ).stdout.split()
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    assert said == [str(hopper), "False"]


@built
def test_it_describes_its_kernels_without_a_gpu():
    native = sm90.native()
    assert native is not None
    assert native.config_count() >= 1
    codes, words = native.packed_bytes(300, 1000)[1], native.packed_bytes(300, 1000)[0]
    assert words >= codes >= 300 * 1008


@pytest.mark.skipif(SPEC is not None, reason="te_mx was built with Hopper kernels")
def test_without_it_everything_else_imports(monkeypatch):
    monkeypatch.setattr(sm90, "_native", None)
    monkeypatch.setattr(sm90, "_import_error", None)
    assert sm90.native() is None
    assert "te_mx._sm90" in str(sm90._import_error)


def test_a_launch_that_fails_is_an_error_and_no_fallback(monkeypatch):
    """The reference would run on in a capture that is lost, and say nothing of why."""

    class Module:
        @staticmethod
        def error_text():
            return "operation not permitted"

    monkeypatch.setattr(sm90, "_native", Module)
    assert sm90.supported(0)
    assert not sm90.supported(2)
    with pytest.raises(
        RuntimeError, match=r"could not be launched: operation not permitted\. .*gc"
    ):
        sm90.supported(4)
