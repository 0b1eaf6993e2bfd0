"""What a benchmark measured is kept as data, and comes back as the newest of each kind."""

from __future__ import annotations

import pytest

from benchmarks import results
from benchmarks.__main__ import parse
from benchmarks.row import Row, Target

CPU = {"name": "host", "cpu": "AMD EPYC 9575F 64-Core Processor (family 26, model 2)"}
GPU = {"name": "NVIDIA H200", "torch": "2.11.0"}


def row(value: float, shape: str = "1 2 3", peer: str = "bf16") -> Row:
    return Row("gemm", shape, "kernel", 10.0, "", None, peer, value, Target(1.2, None))


def test_files_are_named_by_machine_and_day(tmp_path):
    paths = [results.save({**m, "date": "2026-11-28"}, [row(1)], "", tmp_path) for m in (CPU, GPU)]
    assert [p.name for p in paths] == [
        "amd-epyc-9575f-2026-11-28.json",
        "nvidia-h200-2026-11-28.json",
    ]
    assert "host" not in paths[0].read_text()


def test_the_newest_row_counts(tmp_path):
    for date, rows in (
        ("2026-11-28", [row(1.5), row(1.1, peer="other")]),
        ("2026-11-28", [row(1.6)]),  # measured again on the same day
        ("2026-11-02", [row(9.0), row(8.0, "4 5 6")]),
    ):
        results.save({**GPU, "date": date}, rows, f"command of {date}", tmp_path)
    files = results.machines(tmp_path)["nvidia-h200"]
    found = {(r["shape"], r["peer"]): (r["value"], r["date"]) for r in results.rows_of(files)}
    assert found == {
        ("1 2 3", "bf16"): (1.6, "2026-11-28"),
        ("1 2 3", "other"): (1.1, "2026-11-28"),
        ("4 5 6", "bf16"): (8.0, "2026-11-02"),
    }
    assert results.rows_of(files)[0]["verdict"] == "ok"


def test_tiny_sizes_are_not_saved(capsys):
    with pytest.raises(SystemExit):
        parse(["gemm", "--quick", "--save"])
    assert "--quick measures nothing" in capsys.readouterr().err
    assert parse(["gemm", "--save", "--seconds", "2"]).command == (
        "python -m benchmarks gemm --seconds 2"
    )
