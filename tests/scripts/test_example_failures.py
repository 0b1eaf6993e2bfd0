"""examples/train_gpt.py when something goes wrong: it says what, and an earlier run stays whole."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402  (the examples are no package)
from gpt import data, report, stopping, train  # noqa: E402

TINY = ["--preset", "tiny", "--batch", "2", "--steps", "2", "--dtype", "bf16"]
OLD = ["bf16.json", "bf16.pt", "mxfp8.json", "mxfp8.pt"]


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = torch.arange(5000, dtype=torch.uint8)
    monkeypatch.setattr(data, "load", lambda folder: data.Text(letters, letters, 1))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A folder with the files of an earlier run, which nobody may read here."""
    for name in OLD:
        (tmp_path / name).write_text("old")
    return tmp_path


def main(out: Path, *options: str) -> int:
    return train_gpt.main([*TINY, "--out", str(out), *options])


def child_that(monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Children that run this code instead of a training run."""
    code = f"import os, signal, sys, time\n{does}"
    monkeypatch.setattr(train_gpt, "command", lambda argv, mode: [sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eval-every", "-1"], "must be 0 or more, got 50 and -1"),
        (["--save-every", "-1"], "must be 0 or more, got -1 and 40"),
        (["--steps", "0"], "must be at least 1"),
        (["--only", "fp32"], "needs --dtype fp32"),
        (["--recipe", "fp6"], "invalid choice"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--lr", "nan"], "--lr must be above 0"),
        (["--lr", "0"], "--lr must be above 0"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--device", "gpu"], "must be cpu, cuda, cuda:1, ..., got gpu"),
        (["--device", "meta"], "must be cpu or cuda, got meta"),
        (["--device", "cuda:99"], "CUDA devices here"),
    ],
)
def test_wrong_options_leave_an_earlier_run_alone(
    options: list[str], message: str, finished: Path, capsys: pytest.CaptureFixture
) -> None:
    try:
        code = main(finished, *options)
    except SystemExit as left:
        code = left.code
    assert code == 2 and message in capsys.readouterr().err
    assert sorted(os.listdir(finished)) == OLD


def test_a_machine_that_lacks_something_is_told_first(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert main(finished / "bf16.pt") == 2
    assert "bf16.pt" in capsys.readouterr().err  # a file, not a folder
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(finished)})
    assert main(finished) == 2
    assert f"{finished} has 0 .py files" in capsys.readouterr().err
    assert main(finished, "--text", str(finished / "none")) == 2
    assert "--text is a folder with many .py" in capsys.readouterr().err
    assert sorted(os.listdir(finished)) == OLD


@pytest.mark.parametrize(
    ("does", "code", "message"),
    [
        ("sys.exit(1)", 1, "the bf16 run failed"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "the bf16 run was killed by SIGKILL"),
        (  # a SIGTERM of the script itself reaches the child while that starts
            "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)",
            143,
            "the bf16 run was stopped before its first step",
        ),
    ],
)
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_child_that_ends_early(
    does: str, code: int, message: str, resume: list[str], finished: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    child_that(monkeypatch, does)
    assert main(finished, *resume) == code
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""  # the old table would look like a new one
    assert sorted(os.listdir(finished)) == OLD


def test_a_run_replaces_an_earlier_one_at_its_first_step(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = []
    step = train.Trainer.step

    def watched(self: train.Trainer) -> float:
        there.append(sorted(os.listdir(finished)))
        return step(self)

    monkeypatch.setattr(train.Trainer, "step", watched)
    assert main(finished, "--only", "bf16", "--child", "--save-every", "0") == 0
    assert there == [OLD, []]  # of both runs, that none may end up beside the other's
    assert json.loads((finished / "bf16.json").read_text())["finished"]


def test_resume_without_a_checkpoint_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(tmp_path, "--only", "bf16", "--child", "--resume", "--save-every", "0") == 0
    assert "bf16.pt is not there: starting from the beginning" in capsys.readouterr().err


def test_without_evaluations_there_is_the_last_one(tmp_path: Path) -> None:
    args = train_gpt.parse([*TINY, "--eval-every", "0"])
    run = train.run(train_gpt.settings(args, "bf16"), tmp_path / "bf16.pt", save_every=0)
    assert run["val"] == [] and run["val_loss"] > 0
    report.write({"bf16": run}, tmp_path)
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "other", "weights"])
def test_a_damaged_checkpoint_is_named(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "bf16.pt"
    train.Trainer(train_gpt.settings(train_gpt.parse(TINY), "bf16"), text=None).save(path)
    whole = path.read_bytes()
    if damage == "other":
        torch.save({"weight": torch.zeros(3)}, path)
    elif damage == "weights":
        state = torch.load(path, weights_only=True)
        state["model"].popitem()
        torch.save(state, path)
    else:
        cut = {"empty": b"", "text": b"no checkpoint", "cut": whole[: len(whole) // 2]}
        path.write_bytes(cut[damage])
    assert main(tmp_path, "--only", "bf16", "--resume") == 1
    said = capsys.readouterr()
    assert f"error: {path} is damaged" in said.err and "without --resume" in said.err
    assert said.out == "" and "Traceback" not in said.err


@pytest.mark.parametrize("has_bf16", [False, True])
def test_the_baseline_is_fp32_where_torch_has_no_bf16_products(has_bf16, monkeypatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    assert train_gpt.parse([]).dtype == ("bf16" if has_bf16 else "fp32")
    assert train_gpt.parse(["--device", "cuda"]).dtype == "bf16"
    assert train_gpt.parse(["--dtype", "bf16"]).dtype == "bf16"


@pytest.mark.parametrize("script", ["train_gpt.py", "train_moe.py"])
@pytest.mark.parametrize("signum", stopping.SIGNALS)
def test_a_signal_while_the_script_starts_leaves_a_message(
    script: str, signum: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(
        "import time\nprint('importing torch', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "importing torch\n"
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signum
    assert errors == "stopped before training began; nothing was written\n"
