"""What `make sanitize-gpu` calls is there, with as many arguments: it runs where a GPU is alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

GPU = Path(__file__).parents[1] / "gpu"


def functions(file: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(file.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def calls(part: ast.FunctionDef) -> Iterator[tuple[str, ast.FunctionDef | None, ast.Call]]:
    """The calls of functions of test files inside of a part, each with what it calls."""
    files = {
        name.asname or name.name: functions(GPU / f"{name.name}.py")
        for node in ast.walk(part)
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name.startswith("test_")
    }
    for node in ast.walk(part):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            of = files.get(called.value.id)
            if of is not None and called.attr.startswith("test_"):
                yield called.attr, of.get(called.attr), node


def test_calls_fit_the_tests_they_name():
    seen = 0
    for part in functions(GPU / "sanitize.py").values():
        for name, test, call in calls(part):
            seen += 1
            assert test is not None, f"{part.name}: there is no {name}"
            most = len(test.args.args)
            least = most - len(test.args.defaults)
            given = len(call.args) + len(call.keywords)
            assert least <= given <= most, f"{part.name}: {name} takes {least} to {most}"
    assert seen > 15
