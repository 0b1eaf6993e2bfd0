"""The judge of malformed calls notices what it is there for, and a call that ends its process is
named and does not hide the others."""

from __future__ import annotations

from pathlib import Path

import judge
import misbehaving_calls
import pytest
import run_calls

COMPLAINTS = {
    "right": "",
    "silent": "taken in silence",
    "key_error": "an error of a type that says nothing: KeyError",
    "attribute_error": "not te_mx's own error: AttributeError: 'NoneType' object has no attribute",
    "torchs_error": "not te_mx's own error: TypeError: empty()",
    "nameless": "the message does not name x",
    "prints": "the message prints a tensor",
    "doubles": "",
    "forgets_signs": "taken, with another result than it stands for",
    "writes_first": "refused, but something was changed before",
}


CALLS = {call.name: call for call in misbehaving_calls.CALLS}


@pytest.mark.parametrize(("name", "expected"), COMPLAINTS.items())
def test_what_is_noticed(name, expected, monkeypatch):
    monkeypatch.setattr(judge, "OURS", Path(__file__).parent)  # as if these were te_mx's functions
    (_, _), (argument, bad) = CALLS[name].cases()
    said = judge.complaint(CALLS[name], argument, bad, "cpu")
    assert said.startswith(expected) and bool(said) == bool(expected)


def test_a_call_that_ends_its_process_is_named():
    found = run_calls.run_all("cpu", "misbehaving_calls")
    (killed,) = found["kills"]
    assert killed.startswith("x: None: the process ended with -6")
    assert found["doubles"] == [] and len(found["silent"]) == 1
