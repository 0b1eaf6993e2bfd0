"""The command line: which command, and what a wrong use prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from te_mx.commands import doctor, explain, tune

WRONG_USE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. What is asked wrongly is said in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m te_mx", description="What te_mx runs on this machine, and how fast."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in (tune, doctor, explain):
        words = (module.__doc__ or "").strip().splitlines()[0]
        name = module.__name__.rpartition(".")[2]
        one = commands.add_parser(name, help=words, description=words)
        module.add_options(one)
        one.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE
