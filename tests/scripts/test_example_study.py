"""examples/train_llama.py --recipes: many runs, one table, in several sittings."""

import json
import re
import sys
import warnings
import weakref
from pathlib import Path

import as_on_hopper
import pytest
import torch

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_llama  # noqa: E402  (the examples are no package)
from gpt import memory  # noqa: E402
from gpt import train as gpt_train  # noqa: E402
from llama import recipes, study, train  # noqa: E402

import te_mx  # noqa: E402
from te_mx.recipes.custom import settings_of  # noqa: E402

TINY = ["--config", "tiny", "--dtype", "bf16", "--steps", "4", "--seeds", "2"]


def options(out: Path, *more: str) -> list[str]:
    return [*TINY, "--recipes", "again,mxfp4_all-final", "--out", str(out), *more]


def test_a_study_that_was_cut_short_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    """And ends as one that was not."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_llama.main(options(whole)) == 0
    said = capsys.readouterr().out
    rows = json.loads((whole / "study.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["bf16", "again", "mxfp4_all-final"]
    assert all(row["seeds"] == [0, 1] and row["loss_std"] > 0 for row in rows)
    assert rows[0]["gap_percent"] == 0 and 0 < abs(rows[1]["gap_percent"]) < 2
    assert [row["same_weights"] is None for row in rows] == [True, True, False]
    assert 0 < abs(rows[2]["same_weights"]) < 1  # percent
    assert re.search(r"again +2 +\d\.\d{4} +\d\.\d{4} +[+-]\d\.\d\d %", said)
    assert not list(whole.glob("*.pt"))
    step, steps = train.LlamaTrainer.step, []

    def counted(self):
        steps.append(self.done)
        return step(self)

    def clock():  # each sitting is over after a few steps
        return 0.0 if len(steps) % 7 < 6 else 1e6

    monkeypatch.setattr(train.LlamaTrainer, "step", counted)
    monkeypatch.setattr(study.time, "time", clock)
    sittings = 0
    while (code := train_llama.main(options(parts, "--time-limit", "1"))) == 130:
        assert "the same command goes on" in capsys.readouterr().err
        assert sittings > 0 or len(list(parts.glob("*.pt"))) == 1
        steps.append(0)  # another sitting
        sittings += 1
    assert code == 0 and sittings >= 3 and not list(parts.glob("*.pt"))
    for path in whole.glob("*-seed*.json"):
        one, other = (json.loads((folder / path.name).read_text()) for folder in (whole, parts))
        assert one["losses"] == other["losses"] and one["val_loss"] == other["val_loss"]
    assert train_llama.main(options(parts, "--lr", "1e-3")) == 1
    assert "is of other settings (lr: 0.002 there, 0.001 here)" in capsys.readouterr().err


def test_runs_go_on_from_one_checkpoint(tmp_path, capsys, monkeypatch):
    """Each from the bits of the same weights and moments, on batches of its own; the memory of the
    first run is given back before they start."""
    living, given_back, run = weakref.WeakSet(), [], study.run

    class Trainer(train.LlamaTrainer):
        def __init__(self, *args):
            super().__init__(*args)
            living.add(self)

    def alone(*args):
        assert given_back == [0]
        return run(*args)

    monkeypatch.setattr(train, "LlamaTrainer", Trainer)
    monkeypatch.setattr(study, "run", alone)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(len(living)))
    assert train_llama.main(options(tmp_path, "--begin", "6")) == 0
    begin = torch.load(tmp_path / "begin-6.pt", weights_only=True)
    assert begin["settings"]["seed"] == 2 and begin["settings"]["mode"] == "bf16"
    runs = {p.stem: json.loads(p.read_text()) for p in tmp_path.glob("*-seed*.json")}
    assert len(runs) == 6
    firsts = [runs[f"{name}-seed0"]["losses"][0] for name in ("bf16", "mxfp4_all-final")]
    assert max(firsts) < begin["losses"][0] - 0.1 and abs(firsts[1] / firsts[0] - 1) < 0.02
    one, other = (runs[f"bf16-seed{seed}"]["losses"] for seed in (0, 1))
    assert one[0] != other[0]
    written = (tmp_path / "begin-6.pt").stat().st_mtime_ns
    assert train_llama.main(options(tmp_path, "--begin", "6")) == 0  # nothing is left to do
    assert (tmp_path / "begin-6.pt").stat().st_mtime_ns == written
    for record in tmp_path.glob("*-seed*.json"):
        record.unlink()
    capsys.readouterr()
    assert train_llama.main(options(tmp_path, "--begin", "6", "--lr", "1e-3")) == 1
    said = capsys.readouterr().err
    assert "begin-6.pt is of other settings (lr: 0.002 there, 0.001 here): take another" in said
    trainer = train.LlamaTrainer(
        train.LlamaSettings(**begin["settings"] | {"begin": str(tmp_path / "begin-6.pt"),
        "mode": "mxfp8", "recipe": "mxfp8"}), gpt_train.data.load(""),
    )  # fmt: skip
    weights = dict(trainer.model.named_parameters())
    assert all(torch.equal(weights[k], v) for k, v in begin["model"].items() if k in weights)
    moments = [trainer.optimizer.state[p]["exp_avg"] for p in trainer.model.parameters()]
    stored = [begin["optimizer"]["state"][i]["exp_avg"] for i in range(len(moments))]
    assert all(torch.equal(a, b) for a, b in zip(moments, stored, strict=True))
    with pytest.raises(SystemExit):
        train_llama.parse(["--begin", "6"])


def test_workers_share_the_runs(tmp_path, capfd):
    """One process a GPU; here on the CPU."""
    args = train_llama.parse(options(tmp_path, "--threads", "1"))

    def settings(mode):
        return train_llama.settings(args, mode)

    tmp_path.joinpath("mxfp8-seed1.pt").write_bytes(b"no checkpoint")
    assert study.main(settings, ["mxfp8"], 2, tmp_path, 2, None) == 1
    said = capfd.readouterr()
    assert "mxfp8-seed1 failed:" in said.err and "1 runs failed" in said.err
    assert said.out.count("steps, loss") == 3
    assert re.search(r"^bf16 +2 .*\nmxfp8 +1 ", said.out, re.MULTILINE)


@pytest.mark.parametrize("name", recipes.ALL)
def test_every_recipe_is_one(name):
    layers = 4
    plan = recipes.plan_of(name, layers)
    for recipe in filter(None, (plan.recipe, plan.final)):
        found = te_mx.recipe.resolve_recipe(recipe)
        if not found.custom():
            continue
        asked = [f"model.layers.{i}.{what}_proj" for i in range(layers) for what in ("q", "down")]
        each = {settings_of(found.chosen, (layer,), "linear") for layer in asked}
        assert len(each) == {"dgrad8": 1, "sum": 3}.get(name.rpartition("-")[2], 2)
    assert plan.now(0, 10) == plan.recipe
    assert plan.now(10, 10) == (plan.recipe if plan.final is None else plan.final)
    if name.endswith("final"):
        assert [plan.now(done, 10) for done in (8, 9, 10)] == [name[:-6], "mxfp8", "mxfp8"]


def test_no_recipe_of_the_study_falls_back_on_hopper():
    """Of all, NVFP4 too."""
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    with as_on_hopper.hopper(as_on_hopper.Idle()), warnings.catch_warnings():
        warnings.simplefilter("error", te_mx.FallbackWarning)
        for name in recipes.ALL:
            layer = te_mx.Linear(256, 256, dtype=torch.bfloat16, name="model.layers.1.q")
            with te_mx.autocast(recipe=recipes.plan_of(name, 4).recipe):
                layer(x).sum().backward()


def test_what_a_forward_keeps_is_counted_and_given_back():
    """A graph whose outputs are saved does not hold itself."""
    layer = torch.nn.Linear(64, 64)
    x, ref = torch.randn(8, 64), None

    def forward():
        nonlocal ref
        y = layer(x).exp()  # saves its result
        ref = weakref.ref(y)
        return y.sum()

    assert memory.saved_for_backward_mb(forward, layer) == pytest.approx(2 * 8 * 64 * 4 / 1e6)
    assert ref() is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--recipes", "nonsense"], "got 'nonsense'"),
        (["--recipes", "all", "--only", "mxfp8"], "without --parallel and --only"),
        (["--time-limit", "9"], "go with --recipes"),
        (["--recipes", "all", "--time-limit", "0"], "must be above 0"),
        (["--recipes", "all", "--gpus", "3"], "--gpus must be 1 to 1"),
    ],
)
def test_options_that_mean_nothing(given, says, capsys):
    with pytest.raises(SystemExit):
        train_llama.parse([*TINY, *given])
    assert says in capsys.readouterr().err
    assert gpt_train.WHEN_STOPPED < 0
