"""What the tests of scripts share."""

import signal

import pytest


@pytest.fixture(autouse=True)
def signals():
    """main() of an example has its own handlers: this process gets back those it had."""
    own = (signal.SIGINT, signal.SIGTERM)
    before = {signum: signal.getsignal(signum) for signum in own}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)
