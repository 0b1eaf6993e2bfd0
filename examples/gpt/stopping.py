"""Ctrl-C and SIGTERM while the script starts: a message, not a traceback from inside an import."""

import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def at_start() -> None:
    """To be called before torch is imported, which takes seconds; what trains installs its own."""

    def stop(signum: int, frame: FrameType | None) -> None:
        if "--child" not in sys.argv:  # the parent reports
            os.write(2, b"stopped before training began; nothing was written\n")
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    for signum in SIGNALS:
        signal.signal(signum, stop)
