"""Two processes against one, bit for bit: the cases of the modules beside this one."""

from __future__ import annotations

import pytest
import two_ranks

MODULES = ("tensor_parallel_cases", "data_parallel_cases", "checkpoint_cases")
_found: dict[str, dict[str, str]] = {}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in MODULES for name in two_ranks.cases(module)]
)
def test_on_two_ranks(module, name, tmp_path_factory):
    if module not in _found:
        _found[module] = two_ranks.run(module, tmp_path_factory.mktemp(module))
    if _found[module][name]:
        pytest.fail(_found[module][name], pytrace=False)
