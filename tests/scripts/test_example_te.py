"""examples/te_quickstart.py on a small layer: the same layer built four ways."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from te_mx.common.recipe import RecipeWarning

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import te_quickstart


def test_the_four_layers_are_one(capsys):
    small = ["--device=cpu", "--hidden=64", "--heads=4", "--length=16", "--batch=2", "--steps=1"]
    with pytest.warns(RecipeWarning, match="DelayedScaling stands for MXFP8BlockScaling"):
        gaps = te_quickstart.main(small)
    said = capsys.readouterr().out
    assert len(gaps) == 7 and said.count(" ms ") == 7
    assert said.splitlines()[-1].startswith("next: ")
    for name, gap in gaps.items():
        if name.endswith("bf16"):
            assert gap < 2.0**-7, name  # roundings of bf16 on the way
        else:
            assert 1e-3 < gap < 0.08, name
