"""The report of te_mx.inspect: tables, JSON, the picture."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from torch import nn

import te_mx
from te_mx.inspection import Reading
from te_mx.inspection.report import in_lines


def made(layers=4, **how):
    """A report with a layer that has outliers, one of zeros, one of exact weights and one with a
    NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    with torch.no_grad():
        model[0].weight[:, 5] *= 1e5
        model[1].weight.zero_()
        model[2].weight.fill_(0.5)
        model[3].weight[3, 3] = math.nan
    return te_mx.inspect(model, torch.randn(40, 64), **how)


@pytest.fixture(scope="module")
def report():
    return made()


def test_json_goes_round(report, tmp_path):
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == text + "\n"

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    read = json.loads(text, parse_constant=refuse)
    assert read["te_mx"] == 1 and read["rules"] == report.about.rules
    assert read["loss"] is None and read["left"] == []  # the loss is NaN
    again = [Reading(**row) for row in read["readings"]]
    for one, other in zip(again, report, strict=True):
        tiles = None if one.tiles is None else tuple(one.tiles)
        exact = other.sqnr == math.inf
        assert exact == (one.note == "exact" and one.sqnr is None)
        sqnr = math.inf if exact else one.sqnr
        assert one._replace(tiles=tiles, sqnr=sqnr) == other


def test_readings_by_layer_and_the_worst(report):
    assert len(report) == sum(len(report[layer]) for layer in report.layers) == len(list(report))
    assert {r.note for r in report["1"] if r.role == "w"} == {"all zero"}
    assert {r.note for r in report["2"] if r.role == "w"} == {"exact"}
    with pytest.raises(KeyError, match=r"named 'x'; there are 0, 1, 2, \.\.\."):
        report["x"]

    worst = report.worst(3, "e4m3", "w")
    assert [r.layer for r in worst] == ["3", "3", "0"]
    assert worst[0].note == "not finite" and worst[0].nonfinite == 1 / 64**2
    assert worst[2].sqnr == min(
        r.sqnr for r in report["0"] if (r.role, r.format) == ("w", "mxfp8_e4m3")
    )
    assert report.worst(0) == [] and len(report.worst(10**6)) < len(report)
    both = [r.sqnr for r in report["0"] if (r.role, r.format) == ("w", "mxfp4")]
    assert report.lower("0", "w", "mxfp4").sqnr == min(both) < max(both)
    assert report.lower("0", "w", "none") is None
    for bad, error in (({"n": -1}, "n must be"), ({"fmt": "nf4"}, "fmt"), ({"role": "y"}, "role")):
        with pytest.raises(ValueError, match=error):
            report.worst(**bad)


def test_text_says_what_matters(report):
    text = str(report)
    assert text == repr(report) and "4 linear layers" in text
    assert "NaN or Inf in g of 0, g of 1, g of 2, w of 3, g of 3" in text
    assert "closest to x: 4 bits mxfp4" in text
    lines = text.splitlines()
    row = next(line.split() for line in lines if line.startswith("w     fprop  mxfp4"))
    own = [r for r in report if (r.role, r.gemm, r.format) == ("w", "fprop", "mxfp4")]
    lowest = min((r for r in own if r.sqnr is not None), key=lambda r: r.sqnr)
    assert row[4:6] == [f"{lowest.sqnr:.1f}" + "!" * (lowest.layer == "3"), lowest.layer]
    table = report.table().splitlines()
    assert len(table) == 2 + 4 * 3
    assert table[2 + 3 + 1].split()[:4] == ["1", "w", "all", "zero"]
    assert table[2 + 2 * 3 + 1].split() == ["2", "w", *["exact"] * len(report.formats)]
    assert table[2 + 3 * 3 + 1].split()[2].endswith("!")


# Few layers with numbers in them, many with some names, one format, no gradients, no tiles.
@pytest.mark.parametrize(
    ("layers", "how"),
    [(4, {}), (70, {"fmt": "mxfp4"}), (4, {"fmt": "mxfp6_e3m2", "gradients": False})],
)
def test_the_picture(layers, how, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    made(layers, **how).to_png(tmp_path / "report.png")
    pixels = image.imread(tmp_path / "report.png")
    assert min(pixels.shape[:2]) > 500
    colours = {tuple((255 * p[:3]).astype(int)) for p in pixels[::4, ::4].reshape(-1, 4)}
    assert len(colours) > 50  # maps, bars and text, and not an empty page


def test_a_picture_needs_a_path(report):
    for path in (None, 3, ["x"]):
        with pytest.raises(TypeError, match="path must be"):
            report.to_png(path)


def test_without_matplotlib_the_error_names_the_remedy(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.to_png(tmp_path / "report.png")
    assert not list(tmp_path.iterdir())


def test_names_of_formats_fit_below_their_columns():
    names = te_mx.formats.names()
    assert max(len(line) for name in names for line in in_lines(name).splitlines()) <= 8
    assert len({in_lines(name) for name in names}) == len(names)


def test_progress_is_shown_where_tqdm_is_installed(monkeypatch):
    class Bar:
        def __init__(self, **how):
            bars.append(self)
            self.how, self.count = how, 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self):
            self.count += 1

    bars: list[Bar] = []
    monkeypatch.setitem(sys.modules, "tqdm", type(sys)("tqdm"))
    sys.modules["tqdm"].tqdm = Bar
    made(fmt="mxfp4")
    made(fmt="mxfp4", progress=False)
    (bar,) = bars
    assert bar.how["total"] == bar.count == 8 and bar.how["disable"] is None


def test_what_is_nan_throughout_is_not_called_zero():
    layer = nn.Linear(64, 32)
    text = str(te_mx.inspect(layer, torch.full((4, 64), math.nan), fmt=["mxfp4"]))
    assert "x: NaN/Inf" in text and "closest to w: 4 bits" in text and "all zero" not in text
    text = str(te_mx.inspect(layer, torch.zeros(4, 64), fmt=["mxfp4"]))
    assert "x: all zero" in text and "NaN/Inf" not in text
