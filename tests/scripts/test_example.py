"""examples/train_gpt.py on a tiny model: both runs, resume bit for bit, Ctrl-C, what it writes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402  (the examples are no package)
from gpt import data, moe, report, train  # noqa: E402

MODES = ("bf16", "mxfp8")
TINY = ["--preset", "tiny", "--batch", "2", "--dtype", "bf16"]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[NO_GPU, pytest.mark.gpu])]


@pytest.fixture(scope="module")
def text() -> data.Text:
    return data.load()


def settings(mode: str, **changes: object) -> train.Settings:
    tiny = {
        "preset": "tiny",
        "steps": 6,
        "eval_every": 2,
        "eval_batches": 1,
        "final_eval_batches": 1,
    }
    return train.Settings(mode=mode, **{**tiny, **changes})


def test_text_is_split_by_whole_files(text: data.Text) -> None:
    share = len(text.val) / (len(text.train) + len(text.val))
    assert 0.05 < share < 0.2
    assert text.files > 300
    assert (
        int((text.train == 0).sum() + (text.val == 0).sum()) >= text.files
    )  # a zero byte ends each


def test_text_of_a_folder(tmp_path: Path) -> None:
    for i in range(64):
        (tmp_path / f"{i}.md").write_text(f"page {i}")
    (tmp_path / "image.png").write_bytes(b"\xff")
    text = data.load(str(tmp_path))
    whole = torch.cat([text.train, text.val]).numpy().tobytes()
    assert sorted(whole.split(b"\0")) == sorted([b"", *(b"page %d" % i for i in range(64))])
    assert text.files == 64 and len(text.val)


def test_batches_depend_on_seed_and_step_only(text: data.Text) -> None:
    first = data.train_batch(text, 1, 5, 2, 16)
    torch.rand(3)
    assert all(map(torch.equal, first, data.train_batch(text, 1, 5, 2, 16)))
    assert not torch.equal(first[0], data.train_batch(text, 1, 6, 2, 16)[0])
    assert not torch.equal(first[0], data.train_batch(text, 2, 5, 2, 16)[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])  # the target is the next byte


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch):
    """As --deterministic: without it attention on a GPU adds gradients in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", ["tiny", "moe-tiny"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("deterministic")
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(
    device: str, preset: str, mode: str, text: data.Text, tmp_path: Path
) -> None:
    chosen = settings(mode, device=device, preset=preset)
    whole = train.run(chosen, tmp_path / "whole.pt", text=text)
    stopped = train.run(chosen, tmp_path / "two.pt", text=text, should_stop=lambda done: done == 3)
    assert not stopped["finished"] and stopped["steps"] == 3
    resumed = train.run(chosen, tmp_path / "two.pt", text=text, resume=True)
    assert resumed["finished"]
    assert resumed["losses"] == whole["losses"]
    assert resumed["val"] == whole["val"] and resumed["val_loss"] == whole["val_loss"]
    ours, theirs = (torch.load(tmp_path / f, weights_only=True) for f in ("two.pt", "whole.pt"))
    for name, value in ours["model"].items():
        assert torch.equal(value, theirs["model"][name]), name
    assert torch.equal(ours["rng"], theirs["rng"])


def runs_that_learn_alike(text: data.Text, folder: Path, **how: str) -> dict:
    runs = {
        m: train.run(settings(m, steps=40, **how), folder / f"{m}.pt", text=text) for m in MODES
    }
    assert abs(runs["mxfp8"]["losses"][0] / runs["bf16"]["losses"][0] - 1) < 5e-3
    for run in runs.values():
        assert run["val_loss"] < 0.95 * run["losses"][0]
    assert abs(report.compare(runs["bf16"], runs["mxfp8"])["gap_percent"]) < 1
    return runs


def test_both_runs_start_from_the_same_weights_and_learn_alike(
    text: data.Text, tmp_path: Path
) -> None:
    runs = runs_that_learn_alike(text, tmp_path)
    # 4 linear layers in the block were converted and trained; the head was left alone.
    assert runs["bf16"]["kernels"] == {}
    kernels = runs["mxfp8"]["kernels"]
    assert kernels.pop("high precision") == 1
    assert sum(kernels.values()) == 4 and not any("never" in name for name in kernels)
    saved = [run["memory_mb"]["saved_for_backward"] for run in runs.values()]
    assert saved[1] < saved[0]


def test_mixture_of_experts_learns_alike_in_both(text: data.Text, tmp_path: Path) -> None:
    runs = runs_that_learn_alike(text, tmp_path, preset="moe-tiny")
    # Two layers of attention and two grouped layers; the head and the router stay as they are.
    kernels = runs["mxfp8"]["kernels"]
    assert kernels.pop("high precision") == 2
    assert sum(kernels.values()) == 4 and not any("never" in name for name in kernels)


def test_experts_are_weighted_and_kept_busy() -> None:
    layer = moe.MoE(width=16, hidden=24, experts=4, active=2, balance=0.5)
    x = torch.randn(3, 5, 16, requires_grad=True)
    flat = x.detach().view(15, 16)
    p, chosen = layer.router(flat).softmax(-1).topk(2)
    expected = torch.zeros(15, 16)
    for row in range(15):
        for share, expert in zip(p[row] / p[row].sum(), chosen[row], strict=True):
            up = torch.nn.functional.gelu(flat[row] @ layer.up.weight[expert].T, approximate="tanh")
            expected[row] += share * (up @ layer.down.weight[expert].T)
    y = layer(x)
    torch.testing.assert_close(y.view(15, 16), expected)
    # Of a result that nobody uses only the balancing loss has a gradient.
    (grad,) = torch.autograd.grad((y * 0).sum(), layer.router.weight)
    assert float(grad.abs().sum()) > 0


@pytest.mark.parametrize("recipe", ["mxfp8", "float8_block", "mxfp4_all"])
def test_moe_script_is_the_same_script_with_experts(
    recipe: str, tmp_path: Path, run_script, capsys: pytest.CaptureFixture
) -> None:
    options = [*TINY, "--out", str(tmp_path), "--steps", "2", "--only", "mxfp8", "--recipe", recipe]
    options[options.index("tiny")] = "moe-tiny"
    assert run_script("train_moe.py", *options) == 0
    said = capsys.readouterr().out
    assert "validation loss" in said and (tmp_path / "loss.png").exists()
    assert said.splitlines()[-1].startswith("next: your own experts")


def test_its_help_is_its_own(run_script, capsys: pytest.CaptureFixture) -> None:
    assert run_script("train_moe.py", "--help") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "MLPs are mixtures of 8 experts" in words and "(default: runs/moe)" in words
    assert "{moe-tiny,moe,moe-large}" in words and "(default: moe, moe-large on a GPU)" in words
    assert "default: None" not in words and "default: False" not in words


def test_checkpoint_of_other_settings_is_refused(text: data.Text, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    train.run(settings("bf16", steps=1), path, text=text)
    with pytest.raises(ValueError, match="seed: 0 there, 3 here"):
        train.run(settings("bf16", steps=1, seed=3), path, text=text, resume=True)


def test_resumed_with_more_steps_it_trains_longer(text: data.Text, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    short = train.run(settings("bf16", steps=2), path, text=text)
    longer = train.run(settings("bf16", steps=4), path, text=text, resume=True)
    assert longer["finished"] and longer["steps"] == 4
    assert longer["losses"][:2] == short["losses"]
    with pytest.raises(ValueError, match="steps: 4 there, 3 here"):
        train.run(settings("bf16", steps=3), path, text=text, resume=True)


@pytest.mark.parametrize(
    ("steps", "seconds", "said"),
    [(60, [1.0, 1.1, 1.4], True), (49, [1.0, 1.1, 1.4], False), (60, [1.0, 1.1, 1.6], False)],
)
def test_a_title_has_no_ratio_of_few_or_scattered_steps(
    steps: int, seconds: list[float], said: bool
) -> None:
    run = {
        "model": "GPT", "parameters": 10**6, "steps": steps, "seeds": {"0": 2.0}, "val_loss": 2.0,
        "tokens_per_second": 5.0, "step_seconds": seconds,
    }  # fmt: skip
    steady = {**run, "step_seconds": [1.0, 1.0, 1.0]}
    assert ("x tokens/s" in report._title({"bf16": steady, "mxfp8": run})) is said
    assert "gap +0.00 %" in report._title({"bf16": steady, "mxfp8": run})


def test_without_checkpoints_nothing_is_written(text: data.Text, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    assert train.run(settings("bf16", steps=2), path, text=text, save_every=0)["finished"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ("small", 8, 5e-4)),  # what `make train` runs
        (["--device", "cuda"], ("large", 16, 2.5e-4)),
        (["--device", "cuda", "--preset", "medium", "--lr", "1e-3"], ("medium", 8, 1e-3)),
        (["--preset", "large", "--batch", "4"], ("large", 4, 2.5e-4)),
    ],
)
def test_size_follows_the_device_until_it_is_given(
    options: list[str], expected: tuple[str, int, float]
) -> None:
    chosen = train_gpt.settings(train_gpt.parse(options), "mxfp8")
    assert (chosen.preset, chosen.batch, chosen.lr) == expected


def test_large_preset_fills_a_gpu() -> None:
    chosen = train_gpt.settings(train_gpt.parse(["--device", "cuda"]), "mxfp8")
    assert chosen.tokens_per_step >= 16384 and chosen.model.width >= 2048


@pytest.mark.parametrize("recipe", ["mxfp8-hybrid", "mxfp8-floor", "mxfp8-exact"])
def test_other_recipes_and_fp32_train(recipe: str, text: data.Text, tmp_path: Path) -> None:
    chosen = settings("mxfp8", steps=2, recipe=recipe, dtype="fp32")
    assert train.run(chosen, tmp_path / "run.pt", text=text)["finished"]


def test_script_writes_table_plot_and_record(
    tmp_path: Path, run_script, capsys: pytest.CaptureFixture
) -> None:
    options = [*TINY, "--out", str(tmp_path), "--steps", "4", "--threads", "1"]
    assert run_script("train_gpt.py", *options) == 0
    said = capsys.readouterr()
    for word in ("validation loss", "gap", "tokens/s", "peak memory", "linear layers on"):
        assert word in said.out
    assert said.out.splitlines()[-1].startswith("next: python examples/train_moe.py")
    assert "tokens/s" in said.err  # the progress bar
    record = json.loads((tmp_path / "run.json").read_text())
    assert set(record["runs"]) == set(MODES)
    assert record["comparison"].keys() == {"gap_percent", "speedup"}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_interrupt_leaves_checkpoint_and_plot_and_resumes(tmp_path: Path, run_script) -> None:
    """With real processes: the script, and the one that trains."""
    options = [*TINY, "--out", str(tmp_path), "--steps", "150", "--save-every", "5"]
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *options, "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "bf16.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "--resume" in errors
    record = json.loads((tmp_path / "run.json").read_text())["runs"]["bf16"]
    assert not record["finished"] and 5 <= record["steps"] < 150
    assert (tmp_path / "loss.png").exists()
    assert run_script("train_gpt.py", *options, "--only", "bf16", "--resume") == 0
    losses = json.loads((tmp_path / "run.json").read_text())["runs"]["bf16"]["losses"]
    assert len(losses) == 150 and losses[: record["steps"]] == record["losses"]
