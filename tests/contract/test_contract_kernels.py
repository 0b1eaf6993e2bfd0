"""What every registered kernel must do: where its envelope says yes it runs, and gives what the
reference gives; the registry picks the first that says yes; workspaces end where they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from kernel_calls import CASES, ELSEWHERE, EXAMPLES, reference

from te_mx.dispatch.explain import explain_problem
from te_mx.dispatch.kernels import PreferredLayouts, kernels, ops
from te_mx.dispatch.registry import choose, pick_problem
from te_mx.layouts import get
from te_mx.runtime import workspace

DEVICES = ["cpu"]
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
    DEVICES.append("cuda:0")
OPTIONAL = "linear_infer", "linear_frozen"  # ops that no kernel need take
every_device = pytest.mark.parametrize("device", DEVICES)
allowed = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")


def test_every_op_has_a_case():
    assert {op for op in ops() if kernels(op)} == {*CASES, *ELSEWHERE}


@allowed
@every_device
@pytest.mark.parametrize("op", list(CASES))
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_kernel_runs_what_it_accepts(op, device, isa, data):
    case = CASES[op](data, torch.device(device))
    accepting = [k for k in kernels(op) if k.accepts(case.problem) is None]
    if op in OPTIONAL:
        want = case.run(None)
    else:
        assert pick_problem(case.problem) is accepting[0]
        want = case.run(reference(op))
    for kernel in accepting:
        if kernel.name == "reference":
            continue
        with workspace.guarded():
            got = case.run(kernel)
        assert got is not None, f"{kernel.name} accepts {case.problem} and refuses to run it"
        if case.exact:
            assert len(got) == len(want)
            for mine, theirs in zip(got, want, strict=True):
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
                assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        else:
            bound = case.bound
            if bound is None:
                bound = case.relative * want[0].double().abs().clamp(min=case.floor)
            far = (got[0].double() - want[0].double()).abs() > bound
            # Near the largest number of a dtype one may be infinite and the other not.
            fits = want[0].double().abs() + bound < torch.finfo(want[0].dtype).max
            assert not bool((far & fits).any()), f"{kernel.name} on {case.problem}"


@every_device
@pytest.mark.parametrize("op", list(CASES))
@settings(max_examples=5)
@given(data=st.data())
def test_reasons_wants_and_explanations(op, device, data):
    problem = CASES[op](data, torch.device(device)).problem
    for kernel in kernels(op):
        reason = kernel.accepts(problem)
        assert reason is None or (reason and reason[0].islower() and not reason.endswith("."))
        if reason is None:
            preferred_layouts = kernel.preferred_layouts(problem)
            assert (
                isinstance(preferred_layouts, PreferredLayouts)
                and get(preferred_layouts.row)
                and get(preferred_layouts.col)
            )
            assert kernel.parts(problem) >= 1 and isinstance(kernel.note(problem), str)
    if op not in OPTIONAL:
        chosen, declined = choose(problem)
        said = explain_problem(problem, "a problem")
        assert said.kernel == chosen.name
        names = [name for name, _ in said.declined]
        assert set(names) >= {name for name, _ in declined if name != "zero_size"}


def test_names_are_known_once():
    for op in ops():
        names = [kernel.name for kernel in kernels(op)]
        assert len(set(names)) == len(names)
        assert [k.rank for k in kernels(op)] == sorted(k.rank for k in kernels(op))
