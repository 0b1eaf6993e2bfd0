"""Malformed calls of the whole public API: each is refused by te_mx before anything runs, or gives
what plain torch gives. No crash, no internal error, no silent acceptance.
"""

from __future__ import annotations

import pytest
import run_calls
from public_calls import CALLS

NAMES = [call.name for call in CALLS]


@pytest.fixture(scope="module")
def complaints() -> dict[str, list[str]]:
    return run_calls.run_all("cpu")


def test_there_are_many_calls_and_names_are_single():
    assert len(run_calls.all_cases()) > 500
    assert len(set(NAMES)) == len(NAMES)
    cases = run_calls.all_cases()
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize("name", NAMES)
def test_malformed_calls(name, complaints):
    assert complaints[name] == []
