"""How benchmarks take times, make ratios of them, and print a row beside its target."""

import pytest

from benchmarks.row import Row, Target, line
from benchmarks.timing import Clock, Effort, Times, interleaved


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


def test_lead_in_calls_are_not_timed() -> None:
    log: list[str] = []

    def seconds(work) -> float:
        log.append("start")
        work()
        log.append("stop")
        return 1.0

    effort = Effort(seconds=0, min_rounds=2, max_rounds=2, min_batch_ms=3000)
    times = interleaved({"a": lambda i: log.append("call")}, effort, 0, Clock(seconds, lead_in=2))
    sizing = ["start", "call", "stop"]
    assert log == sizing + 2 * (2 * ["call"] + ["start", *(3 * ["call"]), "stop"])
    assert times.rounds == {"a": [1 / 3, 1 / 3]}


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
    for part in ("gemm TN", "12.5", "42 %", "1.50x", "1.3x / 2x, ok"):
        assert part in text
    late = Row(
        "import", "", "", 9e4, "", None, "torch", 0.09, Target(0.3, 0.1, "s", lower_is_better=True)
    )
    assert "0.09 s" in line(late.cells()) and "0.3 s / 0.1 s, aim" in line(late.cells())
