"""The Python side of the Hopper backend over its kernels on the CPU (emulated_hopper.py): what
there is no stand-in for. `make test-emulated` runs it; without TE_MX_EMULATED, which names the
module, nothing is collected.
"""

from __future__ import annotations

from collections.abc import Iterator

import emulated_hopper
import pytest

collect_ignore_glob = [] if emulated_hopper.path() else ["test_*.py"]


def pytest_report_header() -> list[str]:
    return ["tests/emulated: nothing collected, see make test-emulated"] * len(collect_ignore_glob)


@pytest.fixture(autouse=True)
def seeded_machine(request: pytest.FixtureRequest) -> None:
    emulated_hopper.begin(request.node.nodeid)


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with emulated_hopper.hopper():
        yield
