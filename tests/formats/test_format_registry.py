"""The registry: names, short names, and what a format is as a value."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

from te_mx import formats
from te_mx.formats import Element, Format, Scaling
from te_mx.formats import format as by_name

E3M0 = Element("e3m0", exponent_bits=3, mantissa_bits=0, bias=3, max=16.0)


@pytest.fixture
def empty_places(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(by_name, "_formats", dict(by_name._formats))
    monkeypatch.setattr(by_name, "_by_any_name", dict(by_name._by_any_name))


def test_names():
    names = formats.names()
    assert {"mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"} <= set(names)
    assert [formats.get(name).name for name in names] == list(names)
    assert [str(formats.get(name)) for name in names] == list(names)


def test_short_names():
    assert formats.get("e4m3") is formats.get("mxfp8_e4m3")
    assert formats.get("e5m2") is formats.get("mxfp8_e5m2")
    assert "e4m3" not in formats.names()


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"fmt must be one of .*'mxfp4'.*, got 'e9m9'"):
        formats.get("e9m9")


def test_register(empty_places):
    mine = formats.register(Format("mine", E3M0, Scaling((1, 16)), short_names=("m",)))
    assert formats.get("m") is formats.get("mine") is mine
    assert formats.names()[-1] == "mine"
    # A new element and another block: nothing else is needed.
    x = torch.tensor([[1.0] * 16 + [-16.0, 2.0, 0.2]])
    codes, scales = mine.quantize(x, "rceil")
    assert scales.tolist() == [[123, 127]]
    values = mine.dequantize(codes, scales, 19, torch.float32)
    assert torch.equal(values, x.where(x != 0.2, 0.25))


@pytest.mark.parametrize("names", [("mxfp4",), ("new", "e4m3")])
def test_a_taken_name_changes_nothing(empty_places, names):
    before = formats.names()
    with pytest.raises(ValueError, match=rf"the name '{names[-1]}' is taken by mxfp"):
        formats.register(Format(names[0], E3M0, Scaling(), short_names=names[1:]))
    assert formats.names() == before


def test_a_format_is_one_object():
    for name in formats.names():
        fmt = formats.get(name)
        assert copy.deepcopy(fmt) is fmt and pickle.loads(pickle.dumps(fmt)) is fmt
        assert {fmt: 1}[formats.get(name)] == 1
        assert fmt == formats.get(name)
        assert name.startswith("fp8_") or fmt.scaling == Scaling((1, 32), "e8m0")


def test_scale_dtypes():
    assert Scaling().torch_dtype == torch.float8_e8m0fnu
    blockwise = Scaling((128, 128), "fp32", ("fp32",))
    assert (blockwise.storage, blockwise.torch_dtype) == (torch.float32, torch.float32)
    with pytest.raises(ValueError, match='scale must be "e8m0", "fp32" or "e4m3", got \'e5m2\''):
        Scaling(scale="e5m2")
    # Shapes know blocks of rows already.
    fmt = Format("blockwise", formats.get("e4m3").element, blockwise)
    assert fmt.scales_shape(200, 300) == (2, 3) and fmt.codes_shape(200, 300) == (200, 300)


def test_one_file_a_family_of_formats():
    """Only a backend with kernels of its own for a format may know it besides, what is made for it
    by name, as a recipe, the names that other libraries' checkpoints have for it, what conformance
    tries, and the formats that te_mx.inspect reads unasked."""
    package = Path(formats.__file__).parent
    aside = {"backends", "inspection", "checkpoints", "conformance"}
    sources = [p for p in package.parent.rglob("*.py") if not aside & set(p.parts)]
    for name in ("mxfp6_e2m3", "mxfp6_e3m2"):
        users = [path.name for path in sources if name in path.read_text()]
        assert users == ["mxfp6.py"]
    assert len((package / "mxfp6.py").read_text().splitlines()) <= 80


def test_the_docs_show_the_whole_file_of_mxfp4():
    source = (Path(formats.__file__).parent / "mxfp4.py").read_text()
    docs = Path(__file__).parents[2] / "docs" / "adding.md"
    assert f"```python\n{source}```" in docs.read_text()
