"""What `dir` says of te_mx, and the script that `make lint` shows to a type checker."""

from __future__ import annotations

import torch
import typed_script

import te_mx


def test_dir_is_what_is_public():
    assert dir(te_mx) == sorted(te_mx.__all__)
    assert dir(te_mx.recipe) == sorted(te_mx.recipe.__all__)


def test_the_script_runs():
    assert typed_script.main().shape == (16, 32)
    assert isinstance(te_mx.Linear(8, 8)(torch.ones(1, 8)), torch.Tensor)
