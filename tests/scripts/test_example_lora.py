"""examples/finetune_lora.py on a tiny model: what it writes, resume bit for bit, refusals."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from beside_te import import_or_skip

peft = import_or_skip("peft")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import finetune_lora  # noqa: E402  (the examples are no package)
from llama import lora, models  # noqa: E402

TINY = ["--config", "tiny", "--dtype", "bf16", "--seq", "32", "--base-steps", "4", "--steps", "6"]


def runs(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())["runs"]


def test_adapters_learn_on_codes_of_every_kind(tmp_path, capsys):
    options = [*TINY, "--steps", "30", "--base-steps", "30", "--eval-every", "10"]
    assert finetune_lora.main([*options, "--out", str(tmp_path)]) == 0
    found = runs(tmp_path)
    assert list(found) == list(lora.MODES)
    shares = {}
    for mode, run in found.items():
        size = run["base_bytes"]
        shares[mode] = size["layers"] / size["layers in bf16"]
        assert run["val_loss"] < run["losses"][0] - 0.1 and run["finished"]
        assert abs(run["val_loss"] / found["bf16"]["val_loss"] - 1) < 0.05
        layers = torch.load(tmp_path / f"{mode}.pt", weights_only=True)["model"]
        assert layers and all("lora_" in name for name in layers)  # adapters alone
        assert (tmp_path / f"{mode}-adapters" / "adapter_config.json").is_file()
    # 33 and 17 bytes for 32 elements
    assert shares == pytest.approx({"bf16": 1.0, "mxfp8": 33 / 64, "mxfp4": 17 / 64}, abs=1e-6)
    said = capsys.readouterr().out
    assert "0.52x bf16" in said and said.splitlines()[-1].startswith("next: ")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [["--dora"], ["--activations", "mxfp8"]], ids="".join)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(options, tmp_path, monkeypatch):
    options = [*TINY, "--only", "mxfp4", *options]
    assert finetune_lora.main([*options, "--out", str(tmp_path / "whole")]) == 0
    step = lora.LoraTrainer.step

    def interrupted(self):
        if self.done == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    options += ["--out", str(tmp_path / "two")]
    with monkeypatch.context() as patch:
        patch.setattr(lora.LoraTrainer, "step", interrupted)
        assert finetune_lora.main(options) == 130
    assert runs(tmp_path / "two")["mxfp4"]["steps"] == 3
    assert finetune_lora.main([*options, "--resume"]) == 0
    whole, two = (runs(tmp_path / name)["mxfp4"] for name in ("whole", "two"))
    assert two["losses"] == whole["losses"] and two["val_loss"] == whole["val_loss"]
    assert finetune_lora.main([*options, "--resume", "--rank", "4"]) == 1  # other settings


def test_a_folder_is_adapted_as_it_is(tmp_path):
    torch.manual_seed(1)
    models.build(models.config_of("tiny")).save_pretrained(tmp_path / "model")
    options = [*TINY, "--config", str(tmp_path / "model"), "--only", "mxfp8"]
    assert finetune_lora.main([*options, "--out", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "base.pt").exists() and "mxfp8" in runs(tmp_path / "out")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--rank", "0"], "--rank must be at least 1"),
        (["--lr", "0"], "--lr must be above 0"),
        (["--save-every", "0"], "--save-every must be at least 1"),
    ],
)
def test_values_that_make_no_sense(options, message, capsys):
    with pytest.raises(SystemExit):
        finetune_lora.parse(options)
    assert message in capsys.readouterr().err


def test_the_remedy_without_peft(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert finetune_lora.main([*TINY, "--out", str(tmp_path / "out")]) == 2
    assert "pip install peft" in capsys.readouterr().err and not (tmp_path / "out").exists()
