"""On a GPU: the tuner, every configuration of the adaptive GEMM, and generation in a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import te_mx
from te_mx.commands import timing
from te_mx.commands.candidates import Contest, make_weights
from te_mx.commands.main import main
from te_mx.commands.shapes import Shape
from te_mx.commands.tune import _settings
from te_mx.dispatch.problem import place_of
from te_mx.dispatch.tuned import table, tables
from te_mx.dispatch.tuned.table import DEFAULT, Row

CUDA = torch.device("cuda", 0)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, tables.OFF)
    te_mx.use_tuned_table(None)
    yield
    monkeypatch.undo()
    te_mx.use_tuned_table(None)


@pytest.mark.parametrize("formats", ["mxfp8_e4m3", "mxfp4"])
@pytest.mark.parametrize("m", [1, 16, 33])
def test_every_candidate_computes_the_same(formats, m):
    """Those that cut K into parts too; all close to the default, and equal from call to call."""
    settings = _settings(formats, split_k=True)
    weights = make_weights(384, 1024, settings, CUDA)
    contest = Contest(Shape(m, 384, 1024), settings, weights.kept[:2], CUDA)
    names = [one.name for one in contest.candidates]
    assert len(names) == len(set(names)) and "sm90_adaptive, tile 64x128" in names
    said: list[str] = []
    contest.check(said.append)
    assert not said and len(contest.candidates) == len(names)
    for one in contest.candidates:
        call = contest.call(one)
        assert torch.equal(call(0), call(1))


def test_the_tuner_writes_a_table_that_is_followed(tmp_path, monkeypatch):
    out = tmp_path / "t.csv"
    command = ["tune", "--device", "cuda", "--shapes", "1x512x1024,16x512x1024", "--rounds", "3"]
    assert main([*command, "--out", str(out)]) == 0
    rows = table.read(out)
    assert {row.key.device for row in rows} == {tables.device_name(place_of(CUDA))}
    assert len(rows) == 4 and all(0.5 < row.us < 1000 for row in rows)
    monkeypatch.delenv(tables.VARIABLE)
    forced = [Row(row.key, "sm90_adaptive", "tile 128x128", *row[3:]) for row in rows]
    table.write(out, forced)
    te_mx.use_tuned_table(out)
    found = te_mx.explain(m=512, n=16, k=1024, device="cuda")
    assert found.tuned.endswith("configuration tile 128x128")
    layer = te_mx.Linear(1024, 512, dtype=torch.bfloat16, device=CUDA)
    te_mx.freeze_weights(layer)
    x = torch.randn(16, 1024, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad(), te_mx.autocast():
        tuned = layer(x)
        table.write(out, [row._replace(use=DEFAULT, configuration="") for row in forced])
        te_mx.use_tuned_table(None)
        torch.testing.assert_close(layer(x), tuned)


def test_times_are_those_of_weights_from_memory():
    """A large copy in a graph takes what the memory allows."""
    size = 64 << 20
    sets = timing.sets_for(size, CUDA)
    sources = [torch.empty(size, dtype=torch.uint8, device=CUDA) for _ in range(sets)]
    target = torch.empty_like(sources[0])
    calls = {"copy": lambda i: target.copy_(sources[i])}
    us = timing.microseconds(calls, sets, CUDA, 3)["copy"]
    assert 2 * size / us / 1e3 < 6000  # GB/s: above it a cache would have answered


@pytest.mark.parametrize("mode", ["bf16", "mxfp8", "mxfp4"])
def test_generation_in_a_graph_is_that_without(mode, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from llama import decoding

    class Bar:
        def update(self, count: int) -> None:
            pass

    tokens = []
    for graph in (True, False):
        settings = decoding.DecodeSettings(
            mode, "small", tokens=24, batch=2, device="cuda", graph=graph, repeats=2
        )
        tokens.append(decoding.run(settings, None, Bar())["tokens"])
    assert tokens[0] == tokens[1]
