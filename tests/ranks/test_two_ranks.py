"""Two processes against one, bit for bit: the cases of the modules beside this one."""

from __future__ import annotations

import importlib.util

import processes
import pytest

CASES = processes.cases(
    "tensor_parallel_cases",
    "data_parallel_cases",
    "gathered_codes_cases",
    "gathered_parts_cases",
    *(["experts_cases"] if importlib.util.find_spec("transformers") else []),
    "node_cases",
    "block_cases",
    "group_cases",
    "sequence_cases",
    "normalized_cases",
    "checkpoint_cases",
    "combinations",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run([*CASES, processes.DIES], tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case, found):
    if found[case]:
        pytest.fail(found[case], pytrace=False)


def test_a_rank_that_dies(found):
    """The other one ends with an error that says so, not in silence or forever."""
    if found[processes.DIES]:
        pytest.fail(found[processes.DIES], pytrace=False)
