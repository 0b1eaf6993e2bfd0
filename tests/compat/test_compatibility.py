"""te_mx against the list of Transformer Engine's arguments in transformer_engine.json.

Modules are covered as soon as te_mx has them: the tests run over the list, and a module that te_mx
exports must agree with its part of it.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import listing
import pytest
import torch
from beside_te import te_files

import te_mx
from te_mx.nn import arguments as te_arguments

DATA = listing.load()
HERE = [module for module in DATA["modules"] if hasattr(te_mx, module)]
PARTS = [(module, part) for module in HERE for part in DATA["modules"][module]]

SMALLEST: dict[str, dict[str, Any]] = {
    "Linear": {"in_features": 64, "out_features": 32},
    "LayerNormLinear": {"in_features": 64, "out_features": 32},
    "LayerNormMLP": {"hidden_size": 64, "ffn_hidden_size": 96},
    "GroupedLinear": {"num_gemms": 2, "in_features": 64, "out_features": 32},
}
CALL: dict[str, dict[str, Any]] = {"GroupedLinear": {"m_splits": [3, 5]}}
REFUSED = [
    (module, part, entry["name"], entry["default"])
    for module, part in PARTS
    for entry in DATA["modules"][module][part]
    if entry["status"] == "refused"
]


def test_the_list_covers_what_te_mx_has():
    assert "Linear" in HERE
    assert set(DATA["modules"]) == set(te_arguments.CONSTRUCTORS) == set(SMALLEST)
    names = {e["name"] for m in DATA["modules"].values() for part in m.values() for e in part}
    assert set(te_arguments.ABSENT) <= names


@pytest.mark.parametrize("module", DATA["modules"])
def test_the_list_is_well_formed(module):
    for entries in DATA["modules"][module].values():
        assert listing.malformed(entries) == []
        assert len({entry["name"] for entry in entries}) == len(entries)


@pytest.mark.parametrize(("module", "part"), PARTS)
def test_signatures_agree_with_the_list(module, part):
    function = getattr(getattr(te_mx, module), listing.METHODS[part])
    table = te_arguments.CONSTRUCTORS[module] if part == "constructor" else frozenset()
    assert listing.disagreements(function, DATA["modules"][module][part], table) == []


@pytest.mark.parametrize("module", HERE)
def test_forward_takes_its_arguments_in_the_same_order(module):
    """So that calls with positional arguments mean the same."""
    taken = list(inspect.signature(getattr(te_mx, module).forward).parameters)[1:]
    listed = [e.get("te_mx", e["name"]) for e in DATA["modules"][module]["forward"]]
    assert taken[: len(listed)] == listed


@pytest.mark.parametrize("name", DATA["contexts"])
def test_contexts_take_the_arguments_in_the_same_order(name):
    entries = DATA["contexts"][name]
    assert listing.malformed(entries) == []
    assert listing.disagreements(getattr(te_mx, name), entries) == []
    assert list(inspect.signature(getattr(te_mx, name)).parameters) == [e["name"] for e in entries]


@pytest.mark.parametrize("module", DATA["modules"])
def test_the_table_of_refused_arguments_agrees_with_the_list(module):
    """Also for modules that te_mx does not have yet."""
    for part, entries in DATA["modules"][module].items():
        refused = {
            e["name"]: (e["default"], e["note"]) for e in entries if e["status"] == "refused"
        }
        if part == "constructor":
            assert te_arguments.CONSTRUCTORS[module] == set(refused)
        assert {name: tuple(te_arguments.ABSENT[name]) for name in refused} == refused


@pytest.mark.parametrize(("module", "part", "name", "default"), REFUSED)
def test_refused_arguments_raise_when_set(module, part, name, default):
    kind, smallest = getattr(te_mx, module), SMALLEST[module]
    for value in ("set", not default if type(default) is bool else 7):
        says = f"te_mx.{module}: {name}="
        if part == "constructor":
            kind(**smallest, **{name: default})
            with pytest.raises(NotImplementedError, match=says):
                kind(**smallest, **{name: value})
            continue
        layer, call = kind(**smallest), CALL.get(module, {})
        with te_mx.autocast():
            layer(torch.randn(8, 64), **call, **{name: default})
            with pytest.raises(NotImplementedError, match=says):
                layer(torch.randn(8, 64), **call, **{name: value})


def test_versions_of_torch_that_are_named_have_run():
    root = listing.PAGE.parents[1]
    if not (root / "README.md").is_file():
        pytest.skip("the tests run on an installed wheel")
    minor = lambda version: ".".join(version.split(".")[:2])  # noqa: E731
    first, last = minor(listing.TORCH[0][0]), minor(listing.TORCH[-1][0])
    assert f'"torch>={first}"' in (root / "pyproject.toml").read_text()
    assert f"PyTorch {first} to {last}" in (root / "README.md").read_text()
    assert f"needs PyTorch {first} or newer" in Path(te_mx.__file__).read_text()
    pins = (root / "constraints.txt").read_text()
    (version,) = re.findall(r"^torch==(\S+)$", pins, re.MULTILINE)
    assert version in [row[0] for row in listing.TORCH], f"torch {version} has no row"


def test_the_page_is_up_to_date():
    if not listing.PAGE.parent.is_dir():
        pytest.skip("docs/ is not here: the tests run on an installed wheel")
    again = "run python tests/compat/listing.py"
    assert listing.PAGE.read_text() == listing.page(DATA), again


# ---------------------------------------------------------------- the comparison finds mistakes
def like(one, *, two=2, three=None):
    """A stand-in for a signature."""


ENTRIES = [
    {"name": "one", "status": "accepted"},
    {"name": "two", "default": 2, "status": "accepted"},
    {"name": "third", "default": None, "status": "renamed", "te_mx": "three", "note": "why"},
    {"name": "four", "default": 4, "status": "refused", "note": "why"},
]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, []),
        ({1: {"default": 3}}, ["two has the default 2, the list says 3"]),
        ({1: {"te_mx_default": 4}}, ["two has the default 2, the list says 4"]),
        ({0: {"name": "zero"}}, ["zero is missing (accepted)"]),
        ({0: {"default": 0}}, ["the list says 0"]),
        ({2: {"name": "two"}}, ["two is listed as renamed to three, and is there"]),
        ({2: {"te_mx": "drei"}}, ["drei is missing (renamed)"]),
        ({3: {"name": "five"}}, ["five is missing (refused)", "four is in the table"]),
        ({3: {"name": "two"}}, ["two has the default 2", "four is in the table"]),
    ],
)
def test_disagreements_are_found(change, says):
    entries = [{**entry, **change.get(i, {})} for i, entry in enumerate(ENTRIES)]
    found = listing.disagreements(like, entries, frozenset({"four"}))
    assert len(found) == len(says)
    assert all(part in line for part, line in zip(says, found, strict=True))


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "x", "status": "ignored"},
        {"name": "x", "default": 1, "status": "refused"},
        {"name": "x", "status": "refused", "note": "why"},
        {"name": "x", "status": "renamed", "note": "why"},
        {"name": "x", "status": "accepted", "te_mx": "y"},
        {"name": "x", "status": "accepted", "te_mx_default": 1},
        {"name": "x", "status": "accepted", "reason": "why"},
    ],
)
def test_malformed_entries_are_found(entry):
    assert len(listing.malformed([entry])) >= 1


# --------------------------------------------------------- the list against Transformer Engine
INSTALLED = te_files()
FILES = {
    "Linear": "linear.py",
    "LayerNormLinear": "layernorm_linear.py",
    "LayerNormMLP": "layernorm_mlp.py",
    "GroupedLinear": "grouped_linear.py",
}


def theirs_of(arguments: ast.arguments) -> list[tuple[Any, ...]]:
    """Names and defaults of a function's arguments but for self."""
    named = [a.arg for a in arguments.args if a.arg != "self"]
    required = len(named) - len(arguments.defaults)
    return [(name,) for name in named[:required]] + [
        (name, ast.literal_eval(default))
        for name, default in zip(named[required:], arguments.defaults, strict=True)
    ]


def listed(entries: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(e["name"], e["default"]) if "default" in e else (e["name"],) for e in entries]


def parsed(*path: str) -> list[Any]:
    """What a file of Transformer Engine defines: read from its source, because its modules cannot
    be imported without its CUDA library."""
    return ast.parse(INSTALLED.joinpath("pytorch", *path).read_text()).body


@pytest.mark.skipif(INSTALLED is None, reason="transformer_engine is not installed")
@pytest.mark.parametrize("module", DATA["modules"])
def test_the_list_is_that_of_transformer_engine(module):
    defined = parsed("module", FILES[module])
    body = next(n.body for n in defined if isinstance(n, ast.ClassDef) and n.name == module)
    functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
    for part, method in listing.METHODS.items():
        theirs = theirs_of(functions[method].args)
        assert listed(DATA["modules"][module][part]) == theirs


@pytest.mark.skipif(INSTALLED is None, reason="transformer_engine is not installed")
def test_the_list_of_contexts_is_that_of_transformer_engine():
    defined = {getattr(n, "name", None): n for n in parsed("quantization.py")}
    methods = {n.name: n for n in defined["autocast"].body if isinstance(n, ast.FunctionDef)}
    assert listed(DATA["contexts"]["autocast"]) == theirs_of(methods["__init__"].args)
    assert listed(DATA["contexts"]["fp8_autocast"]) == theirs_of(defined["fp8_autocast"].args)
