"""On a GPU: the tuner, every configuration of the adaptive GEMM, and generation in a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import te_mx
from te_mx.commands import candidates
from te_mx.commands.candidates import Contest, Layers, Shape, candidates_of, leave
from te_mx.commands.main import main
from te_mx.commands.tune import recipe_of
from te_mx.dispatch.problem import place_of
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.tables import DEFAULT, Row, key_of

CUDA = torch.device("cuda", 0)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, tables.OFF)
    te_mx.use_tuned_table(None)
    yield
    monkeypatch.undo()
    te_mx.use_tuned_table(None)


@pytest.mark.parametrize("w", ["mxfp8_e4m3", "mxfp4"])
@pytest.mark.parametrize("plain", [False, True])
def test_every_candidate_computes_the_same(w, plain):
    """Those that cut K into parts too; all close to the default, and equal from call to call."""
    recipe = recipe_of(w, split_k=True)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        layers = Layers(Shape(1, 384, 1024), recipe, CUDA)
        for m in (1, 16, 33):
            contest = Contest(Shape(m, 384, 1024), layers, plain)
            problems = contest.problems()
            assert problems[-1].op == "gemm"
            for problem in problems:
                found = candidates_of(problem, any_bits=True)
                assert len({one.name for one in found}) == len(found) > 1

                def rows(one, key=key_of(problem)):  # noqa: B008 (of this turn)
                    return [one.row(key)]

                assert contest.wrong(found, rows) == {}
                for one in found:
                    trial = contest.trial(rows(one))
                    trial.prepare()
                    assert torch.equal(trial.call(0), trial.call(1))
    leave()


def test_the_tuner_writes_a_table_that_is_followed(tmp_path, monkeypatch):
    out = tmp_path / "t.csv"
    command = ["tune", "--device", "cuda", "--shapes", "1x512x1024,16x512x1024", "--rounds", "3"]
    assert main([*command, "--out", str(out)]) == 0
    everything = tables.read(out)
    assert {row.key.device for row in everything} == {tables.device_name(place_of(CUDA))}
    rows = [row for row in everything if row.key.operation == "gemm"]
    assert len(rows) == 4 and all(0.5 < row.us < 1000 for row in rows)
    monkeypatch.delenv(tables.VARIABLE)
    forced = [Row(row.key, "sm90_adaptive", "tile 128x128", *row[3:]) for row in rows]
    tables.write(out, forced)
    te_mx.use_tuned_table(out)
    found = te_mx.explain(m=512, n=16, k=1024, device="cuda")
    assert found.tuned.endswith("configuration tile 128x128")
    layer = te_mx.Linear(1024, 512, dtype=torch.bfloat16, device=CUDA)
    te_mx.freeze_weights(layer)
    x = torch.randn(16, 1024, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad(), te_mx.autocast():
        tuned = layer(x)
        tables.write(out, [row._replace(use=DEFAULT, configuration="") for row in forced])
        te_mx.use_tuned_table(None)
        torch.testing.assert_close(layer(x), tuned)


def test_times_are_those_of_weights_from_memory():
    """A large copy in a graph takes what the memory allows."""
    size = 64 << 20
    sets = candidates.sets_for(size, CUDA)
    sources = [torch.empty(size, dtype=torch.uint8, device=CUDA) for _ in range(sets)]
    target = torch.empty_like(sources[0])
    trial = candidates.Trial(lambda: None, lambda i: target.copy_(sources[i]))
    us = candidates.microseconds({"copy": trial}, sets, CUDA, 3)["copy"]
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
            mode, "small", tokens=24, batches=(2,), device="cuda", graph=graph, repeats=2
        )
        tokens.append(decoding.run(settings, None, Bar())["tokens"])
    assert tokens[0] == tokens[1]
