"""Four processes against one: meshes of 2 x 2, and what only shows with more ranks than two."""

from __future__ import annotations

import importlib.util

import processes
import pytest

CASES = processes.cases(
    "meshes_cases",
    "resharding_cases",
    "refused_cases",
    *(["spread_experts_cases"] if importlib.util.find_spec("transformers") else []),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run(CASES, tmp_path_factory.mktemp("ranks"), ranks=4)


@pytest.mark.parametrize("case", CASES)
def test_on_four_ranks(case, found):
    if found[case]:
        pytest.fail(found[case], pytrace=False)
