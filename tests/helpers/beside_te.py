"""Where the files of Transformer Engine are, and packages that want it out of the way.

The tests read its files. `make setup` installs them in a folder where Python does not look, because
it cannot be imported without its CUDA part, and peft imports it where it finds it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ASIDE = Path(sys.prefix, "aside", "transformer_engine")


def te_files() -> Path | None:
    """The folder of the package transformer_engine, aside or installed; None where it is not."""
    if ASIDE.is_dir():
        return ASIDE
    spec = importlib.util.find_spec("transformer_engine")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def import_or_skip(name: str) -> ModuleType:
    """A package that works with Transformers of today, if there is one."""
    pytest.importorskip("transformers", minversion="5.0")
    return pytest.importorskip(name)
