"""What the tests of scripts share."""

import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True)
def signals():
    """main() of an example has its own handlers: this process gets back those it had."""
    own = (signal.SIGINT, signal.SIGTERM)
    before = {signum: signal.getsignal(signum) for signum in own}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch):
    """Runs a script of examples/ as python does and gives its exit status, but in this process, and
    so the processes that it starts: torch is imported already."""
    from gpt import script

    def run(name: str, *options: str) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [str(EXAMPLES / name), *options])
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as left:
                return left.code or 0
        return 0

    def started(command: list[str]) -> SimpleNamespace:
        code = run(*command[1:])
        return SimpleNamespace(wait=lambda: code)

    threads = torch.get_num_threads()
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(Popen=started))
    yield run
    torch.set_num_threads(threads)
