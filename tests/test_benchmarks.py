"""The benchmark runner on tiny sizes: every benchmark gives rows, and their arithmetic is right."""

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks.row import Row, Target, line
from benchmarks.timing import Effort, Times, interleaved

PEERS = {
    "gemm": {"F.linear bf16", "dequantize + bf16"},
    "backward_gemm": {"torch.mm bf16", "dequantize + bf16"},
    "linear": {"nn.Linear bf16"},
    "decode": {"nn.Linear bf16", "dequantize + F.linear"},
    "quantize": {"memcpy of as many bytes", "torchao eager to_mx"},
    "overhead": {"added to nn.Linear bf16"},
    "import": {"after import torch"},
    "workspace": {"allocation per call"},
}


@pytest.mark.parametrize("name", runner.BENCHMARKS)
def test_benchmark_runs_and_names_its_peer(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "rows.json"
    assert runner.main([name, "--quick", "--threads", "1", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert {row["peer"] for row in record["rows"]} == PEERS[name]
    for row in record["rows"]:
        assert row["us"] > 0
        # A difference or a ratio of tiny calls is noise; it only has to be a number.
        assert isinstance(row["value"], float)
    printed = capsys.readouterr().out
    assert record["machine"]["cpu"] in printed and "measured limits" in printed
    assert printed.count("\n") >= 4 + len(record["rows"])


def test_markdown_prints_rows_of_a_table(capsys: pytest.CaptureFixture) -> None:
    runner.main(["gemm", "--quick", "--threads", "1", "--markdown"])
    table = [row for row in capsys.readouterr().out.splitlines() if row.startswith("|")]
    assert len(table) == 4 and len({row.count("|") for row in table}) == 1


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        runner.main(["gem"])
    assert "no benchmark named gem" in capsys.readouterr().err


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is ten times slower in the second round, for both: the ratio does not see it.
    times = Times({"ours": [1.0, 10.0, 1.0], "peer": [2.0, 20.0, 3.0]})
    assert times.ratio("peer", "ours") == 2.0
    assert times.difference("ours", "peer") == -2.0
    assert times.seconds("ours") == 1.0


def test_interleaving_gives_every_candidate_every_round_and_rotates() -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    calls = {name: seen[name].append for name in seen}
    effort = Effort(seconds=0, min_rounds=4, max_rounds=9, min_batch_ms=0.01)
    times = interleaved(calls, effort)
    assert [len(rounds) for rounds in times.rounds.values()] == [4, 4]
    for indices in seen.values():
        timed = indices[4:]  # after three warm-up calls and one that sizes the batch
        assert timed == list(range(len(timed)))


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (Target(1.3, 2.0), 2.1, "aim"),
        (Target(1.3, 2.0), 1.3, "ok"),
        (Target(1.3, 2.0), 1.2, "SHORT"),
        (Target(1.0, None), 5.0, "ok"),
        (Target(40, 15, "us", lower_is_better=True), 12.0, "aim"),
        (Target(40, 15, "us", lower_is_better=True), 40.0, "ok"),
        (Target(40, 15, "us", lower_is_better=True), 41.0, "SHORT"),
    ],
)
def test_verdicts(target: Target, value: float, verdict: str) -> None:
    assert target.verdict(value) == verdict


def test_line_shows_value_and_target() -> None:
    row = Row(
        "gemm TN",
        "1 2 3",
        "amx_bf16",
        12.5,
        "3 GFLOP/s",
        41.7,
        "F.linear bf16",
        1.5,
        Target(1.3, 2.0),
    )
    text = line(row.cells())
    for part in ("gemm TN", "12.5", "42 %", "1.50x", "1.3x / 2x  ok"):
        assert part in text
    late = Row(
        "import", "", "", 9e4, "", None, "torch", 0.09, Target(0.3, 0.1, "s", lower_is_better=True)
    )
    assert "0.09 s" in line(late.cells()) and "0.3 s / 0.1 s  aim" in line(late.cells())
