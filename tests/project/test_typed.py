"""What `dir` says of te_mx, and the script that `make lint` shows to a type checker."""

from __future__ import annotations

import torch
import typed_script
from fresh import python

import te_mx


def test_dir_is_what_is_public():
    assert dir(te_mx) == sorted(te_mx.__all__)
    assert dir(te_mx.recipe) == sorted(te_mx.recipe.__all__)


def test_the_script_runs():
    assert typed_script.main().shape == (16, 32)
    assert isinstance(te_mx.Linear(8, 8)(torch.ones(1, 8)), torch.Tensor)


ASKED = """
import importlib, inspect, pkgutil
from typing import get_type_hints
import te_mx
asked = set()
for found in pkgutil.walk_packages(te_mx.__path__, "te_mx."):
    if found.name.rpartition(".")[2] in ("__main__", "_native", "_sm90"):
        continue
    try:
        module = importlib.import_module(found.name)
    except ModuleNotFoundError as error:  # an optional package
        assert not (error.name or "").startswith("te_mx"), error
        continue
    own = [one for one in vars(module).values() if inspect.getmodule(one) is module]
    for kind in filter(inspect.isclass, own[:]):
        own += [getattr(one, "__func__", one) for one in vars(kind).values()]
    for one in own + [module]:
        if inspect.isclass(one) or inspect.isfunction(one) or one is module:
            get_type_hints(one)
            asked.add(one)
print(len(asked))
"""


def test_annotations_can_be_asked_for():
    """By typing.get_type_hints, of every module, class and function: what is quoted has names. In
    another process, as it imports all that there is."""
    done = python(ASKED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 1000
