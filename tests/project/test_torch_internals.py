"""te_mx/torch_internals.py says what te_mx does in a torch that has lost a private name: that."""

from __future__ import annotations

from pathlib import Path

from fresh import run_file


def test_training_without_each_name(tmp_path):
    """Gradients are right, or a feature is refused that cannot be had without the name."""
    script = Path(__file__).with_name("without_internals.py")
    ran = run_file(script, tmp_path)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0 and len(lines) > 10, ran.stderr
    assert [line for line in lines if not line.endswith(": ok")] == [], ran.stderr
