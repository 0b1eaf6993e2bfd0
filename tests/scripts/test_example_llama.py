"""examples/train_llama.py on tiny models: both runs, seeds, resume bit for bit, what it refuses."""

import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_llama  # noqa: E402  (the examples are no package)
from gpt import data, report, seeds  # noqa: E402
from gpt.train import Trainer, run  # noqa: E402
from llama import models, train  # noqa: E402

MODES = ("bf16", "mxfp8")
TINY = ["--config", "tiny", "--dtype", "bf16"]


@pytest.fixture(scope="module")
def text() -> data.Text:
    return data.load()


def settings(mode: str, *options: str) -> train.LlamaSettings:
    chosen = train_llama.settings(train_llama.parse([*TINY, *options]), mode)
    return replace(chosen, eval_every=2, eval_batches=1)


def trained(chosen: train.LlamaSettings, path: Path, text: data.Text, **how: object) -> dict:
    return run(chosen, path, text=text, make=train.LlamaTrainer, **how)


@pytest.mark.parametrize(("shape", "mode"), [("tiny", "mxfp8"), ("mixtral-tiny", "bf16")])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(
    shape: str, mode: str, text: data.Text, tmp_path: Path
) -> None:
    chosen = settings(mode, "--config", shape, "--steps", "6")
    whole = trained(chosen, tmp_path / "whole.pt", text)
    path = tmp_path / "two.pt"
    assert trained(chosen, path, text, should_stop=lambda done: done == 3)["steps"] == 3
    resumed = trained(chosen, path, text, resume=True)
    assert resumed["finished"] and resumed["losses"] == whole["losses"]
    assert resumed["val"] == whole["val"] and resumed["val_loss"] == whole["val_loss"]
    with pytest.raises(ValueError, match="fuse: True there, False here"):
        trained(replace(chosen, fuse=False), path, text, resume=True)


def test_both_runs_start_from_the_same_weights_and_learn_alike(
    text: data.Text, tmp_path: Path
) -> None:
    runs = {m: trained(settings(m), tmp_path / "run.pt", text, save_every=0) for m in MODES}
    assert abs(runs["mxfp8"]["losses"][0] / runs["bf16"]["losses"][0] - 1) < 5e-3
    for one in runs.values():
        assert one["val_loss"] < 0.8 * one["losses"][0]
    assert abs(report.compare(runs["bf16"], runs["mxfp8"])["gap_percent"]) < 2
    # The seven linear layers of the block were converted and trained; the head was left alone.
    kernels = runs["mxfp8"]["kernels"]
    assert kernels.pop("high precision") == 1 and runs["bf16"]["kernels"] == {}
    assert sum(kernels.values()) == 7 and not any("never" in name for name in kernels)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (["--fp32-params"], torch.float32),
        (["--dtype", "fp32"], torch.float32),
        (["--no-fuse", "--recipe", "mxfp8-floor", "--attn", "eager"], torch.bfloat16),
        (["--layers", "2"], torch.bfloat16),
    ],
)
def test_options_reach_the_model(options: list[str], dtype: torch.dtype, text: data.Text) -> None:
    chosen = settings("mxfp8", *options)
    trainer = train.LlamaTrainer(chosen, text)
    assert {p.dtype for p in trainer.model.parameters()} == {dtype}
    assert len(trainer.model.model.layers) == (chosen.layers or 1)
    attention = {"auto": "sdpa"}.get(chosen.attention, chosen.attention)
    assert trainer.model.config._attn_implementation == attention
    assert trainer.step() == pytest.approx(5.5, abs=0.2)  # ln 256, before anything was learnt


SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
CONFIGS = {
    "qwen3": {**SMALL, "layer_types": ["full_attention"] * 2},
    "gemma2": {**SMALL, "query_pre_attn_scalar": 32},  # has no sdpa
    "gemma3": {
        "text_config": {**SMALL, "model_type": "gemma3_text"},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 128},
    "mamba": {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 4},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_of_other_architectures(kind: str, text: data.Text, tmp_path: Path) -> None:
    fields = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **CONFIGS[kind]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **fields}))
    options = ["--config", str(path), "--layers", "1", "--seq", "32", "--batch", "2"]
    assert train_llama.lacks(train_llama.parse(options)) is None
    trainer = train.LlamaTrainer(settings("mxfp8", *options), text)
    assert trainer.step() == pytest.approx(5.6, abs=1.5)
    kernels = trainer.kernels()
    assert kernels["high precision"] == 1 and len(kernels) >= 2
    assert trainer.model.config.num_hidden_layers == 1


def test_a_config_without_a_causal_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "vocab_size": 256}')
    says = train_llama.lacks(train_llama.parse(["--config", str(tmp_path)]))
    assert says is not None and "T5Config" in says and "\n" not in says


def test_compiled_run_trains_like_the_eager_one(
    text: data.Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend="eager"))
    eager, compiled = (
        train.LlamaTrainer(settings("mxfp8", *options), text) for options in ([], ["--compile"])
    )
    for _ in range(2):
        assert compiled.step() == pytest.approx(eager.step(), rel=2e-3)
    assert compiled.forward is not compiled.model and compiled.kernels() == {}


def test_a_config_file_and_a_folder_with_weights(text: data.Text, tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved = models.build(models.config_of("mixtral-tiny"))
    saved.save_pretrained(tmp_path)
    from_file = settings("bf16", "--config", str(tmp_path / "config.json"))
    from_folder = settings("bf16", "--config", str(tmp_path))
    fresh, loaded = (train.LlamaTrainer(s, text).model for s in (from_file, from_folder))
    assert type(fresh) is type(loaded) is type(saved)
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert not torch.equal(fresh.lm_head.weight, saved.lm_head.weight)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "a model is one of tiny, small, .*, a config.json or a folder with one, got "),
        ("{}", "no config of Transformers with a model_type"),
        ('{"model_type": "none-such"}', "none-such"),
        ('{"model_type": "llama", "vocab_size": 100}', "bytes need a vocabulary of 256"),
        ('{"model_type": "llama", "max_position_embeddings": 1024}', "--seq is at most 1024"),
    ],
)
def test_a_model_that_cannot_be_trained_is_told_first(
    written: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out"
    if written is not None:
        config.write_text(written)
    assert train_llama.main(["--config", str(config), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err) and not any(out.iterdir())


@pytest.mark.parametrize(
    ("module", "version", "message"),
    [
        (None, "", "not installed: pip install"),
        (transformers, "4.57.1", "found 4.57.1: pip install"),
    ],
)
def test_the_remedy_without_a_usable_transformers(
    module: object, version: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        monkeypatch.setattr(transformers, "__version__", version)
    monkeypatch.setitem(sys.modules, "transformers", module)
    with pytest.raises(RuntimeError, match=message):
        models.config_of("tiny")


def test_size_follows_the_device_until_it_is_given() -> None:
    large = train_llama.settings(train_llama.parse(["--device", "cuda"]), "mxfp8")
    assert (large.preset, large.steps, large.tokens_per_step) == ("400m", 300, 16384)
    given = train_llama.settings(train_llama.parse(["--seq", "16", "--batch", "3"]), "mxfp8")
    assert (given.preset, given.tokens_per_step) == ("small", 48)


# The sizes that the project's table speaks of, in millions of parameters.
@pytest.mark.parametrize(
    ("shape", "millions"),
    [("400m", 412), ("861m", 861), ("8b-layers", 1571), ("mixtral", 1582), ("qwen3-moe", 1415)],
)
def test_shapes_have_the_size_they_are_named_after(shape: str, millions: int) -> None:
    with torch.device("meta"):
        model = models.build(models.config_of(shape))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_seeds_are_averaged() -> None:
    def record(seed: int, loss: float) -> dict:
        return {
            "settings": {"seed": seed}, "seeds": {str(seed): loss}, "losses": [loss + 1, loss],
            "val": [(1, loss)], "val_loss": loss, "tokens_per_second": 10.0 * seed,
            "step_seconds": [1.0, 2.0, 3.0], "train_seconds": 2.0, "steps": 2,
            "memory_mb": {"peak": 10.0 + seed},
        }  # fmt: skip

    plain = seeds.mean([record(1, 2.0), record(2, 4.0)])
    assert plain["losses"] == [4.0, 3.0] and plain["val"] == [(1, 3.0)] and plain["val_loss"] == 3.0
    assert plain["memory_mb"] == {"peak": 12.0} and plain["tokens_per_second"] == 15.0
    ours = seeds.mean([record(1, 2.02), record(2, 4.0)])
    assert report.gaps_by_seed(plain, ours) == pytest.approx([1.0, 0.0])
    # Runs of other seeds are not compared.
    assert report.both({"bf16": plain, "mxfp8": ours}) is not None
    assert report.both({"bf16": plain, "mxfp8": record(1, 2.0)}) is None


def test_interrupted_in_its_second_seed_it_keeps_the_first_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: train.LlamaTrainer) -> float:
        if self.settings.seed == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return Trainer.step(self)

    options = [*TINY, "--steps", "3", "--seeds", "2", "--only", "mxfp8", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(train.LlamaTrainer, "step", interrupted)
        assert train_llama.main(options) == 130
    first = json.loads((tmp_path / "mxfp8.json").read_text())
    assert first["finished"] and list(first["seeds"]) == ["0"]
    assert train_llama.main([*options, "--resume"]) == 0
    both = json.loads((tmp_path / "mxfp8.json").read_text())
    assert list(both["seeds"]) == ["0", "1"] and both["seeds"]["0"] == first["seeds"]["0"]


def test_script_trains_every_seed_and_writes_what_it_found(
    tmp_path: Path, run_script, capsys: pytest.CaptureFixture
) -> None:
    options = [*TINY, "--out", str(tmp_path), "--steps", "2", "--seeds", "2"]
    assert run_script("train_llama.py", *options) == 0
    said = capsys.readouterr().out
    for words in ("validation loss", "gap", "2 seeds", "tokens/s", "7 linear layers on"):
        assert words in said
    runs = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert set(runs) == set(MODES)
    assert all(set(one["seeds"]) == {"0", "1"} for one in runs.values())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.glob("*.pt")} == {
        f"{mode}-seed{seed}.pt" for mode in MODES for seed in (0, 1)
    }
