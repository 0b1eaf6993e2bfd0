"""Malformed calls of te_mx.pytorch are refused as those of te_mx are, and its table is complete."""

from __future__ import annotations

import inspect

import pytest
import run_calls
from te_calls import CALLS
from test_table_is_complete import EVERYTHING, VARIADIC, functions, is_exempt

import te_mx
import te_mx.pytorch as te
from te_mx.pytorch import utils

HAVE = {id(function) for function in EVERYTHING.values()}  # tables of te_mx have these
PUBLIC = {f"te_mx.pytorch.{name}": getattr(te, name) for name in te.__all__} | {
    f"te_mx.pytorch.utils.{name}": getattr(utils, name) for name in utils.__all__
}
FOUND = {
    name: function
    for public, value in PUBLIC.items()
    for name, function in functions(public, value)
    if id(function) not in HAVE and not is_exempt(name)
}
# Values of any kind: hints, and arguments that only say what is not looked at.
UNUSED = {
    "te_mx.pytorch.LayerNorm": {"sm_margin"},
    "te_mx.pytorch.RMSNorm": {"sm_margin"},
    "te_mx.pytorch.LayerNormMLP": {"seq_length", "micro_batch_size"},
}
# Called with what CUDA has to capture: tests/pytorch and tests/hostile/other_calls.py.
ELSEWHERE = {"te_mx.pytorch.make_graphed_callables"}


@pytest.fixture(scope="module")
def complaints() -> dict[str, list[str]]:
    return run_calls.run_all("cpu", "te_calls")


@pytest.mark.parametrize("name", sorted({call.name for call in CALLS}))
def test_malformed_calls(name, complaints):
    assert complaints[name] == []


@pytest.mark.parametrize("name", sorted(set(FOUND) - ELSEWHERE))
def test_every_argument_is_in_the_table(name):
    calls = [call for call in CALLS if (call.covers or call.name) == name]
    wanted = {
        parameter.name
        for parameter in inspect.signature(FOUND[name]).parameters.values()
        if parameter.name != "self" and parameter.kind not in VARIADIC
    }
    tried = {argument for call in calls for argument in call.kinds}
    missing = wanted - tried - UNUSED.get(name, set())
    assert not missing, f"{name}: no malformed {', '.join(sorted(missing))}"


def test_names_are_single_and_of_something():
    names = [call.name for call in CALLS]
    assert len(set(names)) == len(names)
    assert {call.covers or call.name for call in CALLS} <= set(FOUND)
    assert set(FOUND) >= ELSEWHERE and not ELSEWHERE & set(names)
    assert "pytorch" not in te_mx.__all__
