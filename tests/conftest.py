"""Shared fixtures: instruction-set levels, thread counts, clean caches; hypothesis profiles that
print their seeds.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import te_mx
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import linear as cpu_linear
from te_mx.dispatch import registry
from te_mx.dispatch.tuned import tables
from te_mx.recipe import Float8BlockScaling, MXFP8BlockScaling
from te_mx.recipes import resolve
from te_mx.runtime import kernel_log, workspace

# What tests share; and they take cases from those of their neighbours.
sys.path += [str(Path(__file__).parent / folder) for folder in ("helpers", "nn")]

_COMMON = {
    "deadline": None,  # the first example of a test may compile or load the native module
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("default", max_examples=40, **_COMMON)
settings.register_profile("thorough", max_examples=400, **_COMMON)
settings.load_profile(os.environ.get("TE_MX_TEST_PROFILE", "default"))

LEVELS = cpu.available_isa()


def pytest_configure(config: pytest.Config) -> None:
    if cpu.missing_reason() is None:  # then nothing may fall back unless a test asks for it
        config.addinivalue_line("filterwarnings", "error::te_mx.FallbackWarning")
        # Blockwise FP8 has native kernels on CPUs alone.
        blockwise = "on cuda.* not (fp8_|pow2|fp32)"
        config.addinivalue_line("filterwarnings", f"ignore:.*{blockwise}:te_mx.FallbackWarning")
        # The reference alone has MXFP4, the rule "even", stochastic rounding, Hadamard transforms.
        mxfp4 = r"not (mxfp4|even|stochastically|mxfp8_\w+\+rht)"
        config.addinivalue_line("filterwarnings", f"ignore:.*{mxfp4}:te_mx.FallbackWarning")


def pytest_report_header() -> list[str]:
    native = cpu.missing_reason() or f"levels {', '.join(LEVELS)}"
    return [
        f"te_mx: torch {torch.__version__}, {torch.get_num_threads()} threads, native: {native}"
    ]


@pytest.fixture(autouse=True, scope="module")
def imports_stay() -> None:
    """What was imported is not walked by every collection of garbage, which tests may ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tests that draw from torch's generator directly give the same data in every run."""
    torch.manual_seed(0)


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch):
    """No tuned table of the user's, nor one that a test leaves behind."""
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    te_mx.use_tuned_table(None)
    yield
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    te_mx.use_tuned_table(None)


@pytest.fixture
def portable():
    """The portable level, where the names of all kernels are known, on any CPU."""
    before = cpu.ISA_LEVELS[cpu.isa()]
    cpu.set_isa("portable")
    yield
    cpu.set_isa(before)


@pytest.fixture(params=LEVELS)
def isa(request: pytest.FixtureRequest):
    """Every level that this machine can run, one after the other."""
    before = cpu.ISA_LEVELS[cpu.isa()]
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


@pytest.fixture
def by_steps():
    """Small layers run their steps on CPUs too, for tests that watch these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_linear.Small, "accepts", lambda self, problem: "stands aside")
        registry.forget()
        yield
    registry.forget()


@pytest.fixture
def threads():
    """Restores torch's thread count; gives the function that sets it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=[MXFP8BlockScaling(), Float8BlockScaling()], ids=["mxfp8", "float8_block"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The default recipe, and blockwise FP8 in its place: what works under one does under both."""
    monkeypatch.setattr(resolve, "_DEFAULT", request.param)
    return request.param


@pytest.fixture
def guarded():
    """Guard bytes behind every workspace of the test."""
    with workspace.guarded():
        yield


@pytest.fixture
def fresh_warnings(monkeypatch: pytest.MonkeyPatch):
    """Warnings of fallbacks that were given already are given again."""
    monkeypatch.setattr(kernel_log, "_warned", set())


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch):
    """As if the native module had not been built."""
    monkeypatch.setattr(cpu, "_native", None)
    monkeypatch.setattr(cpu, "_reason", "the native module is hidden by a test")
    monkeypatch.setattr(kernel_log, "_warned", set())
    registry.forget()
    yield
    monkeypatch.undo()
    registry.forget()
