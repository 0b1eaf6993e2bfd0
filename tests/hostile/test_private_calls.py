"""A call of a private op, or of a function of a native module, may raise; it never ends the
process."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import fresh
import private_calls
import pytest
import torch

HERE = Path(__file__).parent
MODULES = ["te_mx._native", "te_mx._sm90"]
BUILT = [name for name in MODULES if importlib.util.find_spec(name) is not None]


def test_the_table_has_every_op():
    import te_mx.weights.traced  # noqa: F401 (it defines two)

    schemas = torch._C._jit_get_all_schemas()
    ops = {one.name.removeprefix("te_mx::") for one in schemas if one.name.startswith("te_mx::")}
    assert ops == {name for name, _ in private_calls.op_calls()}


@pytest.mark.parametrize("what", ["ops", *BUILT])
def test_no_call_ends_the_process(what, tmp_path):
    log, first, ended = tmp_path / "log", 0, []
    while len(ended) < 5:
        script = HERE / "private_calls.py"
        process = fresh.run_file(script, what, log, first, CUDA_VISIBLE_DEVICES="")
        number, name, *_ = log.read_text().split("\n") if log.exists() else ("0", "start")
        if process.returncode == 0:
            break
        how = process.returncode
        ended.append(f"{signal.Signals(-how).name if how < 0 else process.stderr[-600:]}: {name}")
        first = int(number) + 1
    assert not ended, "\n".join(ended)
    assert name == "all" and int(number) > 300
