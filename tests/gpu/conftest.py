"""Every test in this folder needs a Hopper GPU and a build with its kernels, or the kernels built
for the CPU (emulated_hopper.py): csrc/sm90/README.md.

Without them nothing is collected; the reason is printed when the folder is named on the command
line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import emulated_hopper
import pytest
import torch

from te_mx._ops import library

HERE = Path(__file__).parent


def _missing() -> str | None:
    if emulated_hopper.path() is not None:
        return None
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "needs a Hopper GPU"
    try:
        import te_mx._sm90 as native
    except ImportError as error:
        return f"te_mx has no Hopper kernels: {error}"
    return None if native.available() else "the driver encodes no tensor maps"


MISSING = _missing()
collect_ignore_glob = [] if MISSING is None else ["test_*.py"]
if emulated_hopper.path() is not None:
    collect_ignore_glob = list(emulated_hopper.NEED_A_GPU)


def pytest_report_header() -> list[str]:
    return [] if MISSING is None else [f"tests/gpu: nothing collected, {MISSING}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    if emulated_hopper.path() is not None:
        left_out = set(here) - emulated_hopper.chosen(here)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if MISSING is not None:  # a file named on the command line is collected all the same
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(autouse=emulated_hopper.path() is not None)
def emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs on the CPU."""
    with emulated_hopper.emulated(request.node.nodeid):
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives memory full of one byte, so that what nobody wrote shows."""
    empty = torch.empty

    def fill(*args, **kwargs):
        made = empty(*args, **kwargs)
        if made.numel():
            (made if made.dim() else made.view(1)).view(torch.uint8).fill_(0xA5)
        return made

    monkeypatch.setattr(torch, "empty", fill)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers call kernels without the dispatcher, as on a GPU: the mode by which tensors of "cuda"
    lie on the CPU is none that wants to see calls."""
    if emulated_hopper.path() is not None:
        monkeypatch.setattr(library, "has_torch_function", lambda tensors: False)
