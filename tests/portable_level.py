"""A fixture of tests of `python -m te_mx`: kernels whose names are known, on any CPU."""

from __future__ import annotations

import pytest

import te_mx
from te_mx.backends.cpu import binding as cpu


@pytest.fixture
def portable(monkeypatch):
    """The portable level; nothing of the user's."""
    monkeypatch.delenv("TE_MX_TUNED", raising=False)
    te_mx.use_tuned_table(None)
    before = cpu.ISA_LEVELS[cpu.isa()]
    cpu.set_isa("portable")
    yield
    cpu.set_isa(before)
    te_mx.use_tuned_table(None)
