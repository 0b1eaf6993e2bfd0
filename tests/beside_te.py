"""peft, and the trainers of Transformers with it, beside Transformer Engine's meta package.

That package raises when it is imported without its CUDA part, and peft imports it where it finds
it. Users do not have it unless they have all of it; the tests have it to read its files.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest


def import_or_skip(name: str) -> ModuleType:
    """A package that imports peft, if there is one."""
    pytest.importorskip("transformers", minversion="5.0")
    absent = "transformer_engine" not in sys.modules
    if absent:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    try:
        if importlib.util.find_spec("peft") is not None:
            importlib.import_module("peft")
        return pytest.importorskip(name)
    finally:
        if absent:
            del sys.modules["transformer_engine"]
