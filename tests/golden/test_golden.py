"""No bit of any result has changed since the digests were made (tests/golden/digests.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from digests import LEVELS, cases_of, digest, path_of

from te_mx.backends.cpu import binding as cpu


def changed(level: str, device: str) -> list[str]:
    want = json.loads(path_of(level).read_text())
    cases = cases_of(device)
    assert list(cases) == list(want), "other cases than there are digests of"
    where = torch.device(device)
    return [name for name, run in cases.items() if digest(run(where)) != want[name]]


@pytest.mark.parametrize("level", [one for one in LEVELS if one in cpu.available_isa()])
def test_on_the_cpu(level):
    before = cpu.ISA_LEVELS[cpu.isa()]
    cpu.set_isa(level)
    try:
        assert changed(level, "cpu") == []
    finally:
        cpu.set_isa(before)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
def test_on_hopper():
    assert changed("sm90", "cuda") == []
