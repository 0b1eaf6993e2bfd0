"""A case that fails is one failure, wherever its ranks were."""

from __future__ import annotations

import processes


def test_ranks_that_lost_step(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 1.0)
    found = processes.run(processes.cases("lost_step"), tmp_path)
    for name in ("fails_on_one", "one_waits"):
        assert "as rank 1 must" in found[f"lost_step.{name}"]
    assert "rank 0: did not come back" in found["lost_step.one_waits"]
    assert found["lost_step.in_step"] == ""


def test_ranks_that_take_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 600.0)
    found = processes.run(["lost_step.one_waits", "lost_step.in_step"], tmp_path, limit=4)
    assert "rank 0: did not come back" in found["lost_step.one_waits"]
    assert found["lost_step.in_step"] == "never ran: 4 s were over"
