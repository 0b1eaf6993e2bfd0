"""Functions of Transformer Engine that need only torch, taken out of its source: its package cannot
be imported without its CUDA library. They serve as an oracle.
"""

from __future__ import annotations

import ast
import functools
import math
import warnings
from pathlib import Path
from typing import Any, Optional, Union

import pytest
import torch
from beside_te import te_files

FILES = te_files()


def path(*parts: str) -> Path:
    if FILES is None:
        pytest.skip("transformer_engine is not installed")
    return FILES.joinpath("pytorch", *parts)


@functools.cache
def functions(*parts: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Functions of a file, on the CPU."""
    text = path(*parts).read_text()
    found = [n for n in ast.parse(text).body if getattr(n, "name", None) in names]
    assert len(found) == len(names)
    made: dict[str, Any] = {
        "torch": torch, "math": math, "warnings": warnings, "Optional": Optional, "Union": Union,
        "Tuple": tuple, "Dict": dict, "Any": Any, "List": list,
    }  # fmt: skip
    for node in found:
        code = ast.unparse(node).replace("'cuda'", "'cpu'")
        exec(compile(code, str(parts[-1]), "exec"), made)
    return made


def arguments(*parts: str, of: str, method: str) -> dict[str, Any]:
    """Names and defaults of a method's arguments, without self; those it needs are Ellipsis."""
    body = ast.parse(path(*parts).read_text()).body
    owner = next(n for n in body if getattr(n, "name", None) == of)
    call = owner if isinstance(owner, ast.FunctionDef) else next(
        n for n in owner.body if getattr(n, "name", None) == method
    )  # fmt: skip
    named = [a.arg for a in call.args.args if a.arg != "self"]
    defaults = [ast.literal_eval(d) for d in call.args.defaults]
    found = dict.fromkeys(named[: len(named) - len(defaults)], ...)
    found |= dict(zip(named[len(found) :], defaults, strict=True))
    keyword = zip(call.args.kwonlyargs, call.args.kw_defaults, strict=True)
    return found | {a.arg: ast.literal_eval(d) for a, d in keyword if d is not None}
