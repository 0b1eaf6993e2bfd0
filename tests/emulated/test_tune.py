"""Which kernels of Hopper the tuner holds against each other."""

from __future__ import annotations

import as_on_hopper
import pytest
import torch
from emulated_hopper import CALLS, hopper

import te_mx
from te_mx.backends.sm90.gemm import num_splits
from te_mx.commands import candidates, tune
from te_mx.commands.candidates import Shape
from te_mx.dispatch.problem import Place
from te_mx.dispatch.tuned.tables import key_of

pytestmark = pytest.mark.usefixtures("untuned", "portable")


@pytest.mark.parametrize("w", ["mxfp8_e4m3", "mxfp4"])
def test_candidates_of_hopper_are_its_tiles_and_parts(monkeypatch, w):
    """Who competes, and that each one's call is made."""
    monkeypatch.setattr(candidates, "cache_bytes", lambda device: 1 << 10)
    with hopper():
        recipe = tune.recipe_of(w, split_k=True)
        with torch.no_grad(), te_mx.autocast(recipe=recipe):
            layers = candidates.Layers(Shape(4, 64, 512), recipe, torch.device("cpu"))
            assert len(layers.kept) == len(layers.plain) >= 2
            contest = candidates.Contest(Shape(4, 64, 512), layers)
            *in_one_call, problem = contest.problems()
            steps = [candidates.Candidate("steps").row(key_of(one)) for one in in_one_call]
            found = candidates.candidates_of(problem, any_bits=True)
            same = candidates.candidates_of(problem)
            long = candidates.candidates_of(problem._replace(n=2048, k=7168))
            CALLS.clear()
            assert contest.wrong(found, lambda one: [*steps, one.row(key_of(problem))]) == {}
        # Not where it asks for a workspace.
        gemms = [call.args for call in CALLS if call.name == "gemm" and call.status == 0]
        asked = [(args.kernel, args.parts) for args in gemms]
        candidates.leave()
    assert problem.op == "gemm" and problem.place == Place("cuda", 0)
    tiles = [f"sm90_adaptive, tile {t}" for t in ("192x128", "256x128", "128x128", "64x128")]
    parts = [f"sm90_adaptive, parts {parts}" for parts in (2, 3, 4)]
    # Weights of 4 bits are unpacked to tiles before.
    assert [one.name for one in found] == ["sm90_adaptive", *tiles, *parts]
    usual = num_splits("tiles", 4, 64, 512, as_on_hopper.MULTIPROCESSORS)
    # Blocks of D of any size have the same bits; in calls that cut k, tiles would leave it whole.
    assert usual == 1 and [one.name for one in same] == ["sm90_adaptive", *tiles]
    cut = num_splits("tiles", 4, 2048, 7168, as_on_hopper.MULTIPROCESSORS)
    assert cut > 1
    assert [one.name for one in long] == ["sm90_adaptive", f"sm90_adaptive, parts {cut}"]
    assert asked == [
        (-1, usual),
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (-1, 2),
        (-1, 3),
        (-1, 4),
    ]
