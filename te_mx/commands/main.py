"""The command line: which command, and what a wrong use prints."""

import argparse
import os
import sys
from collections.abc import Sequence

import te_mx
from te_mx.commands import conformance, doctor, explain, tune

WRONG_USE = 2
UNREAD = 141  # what a shell reports of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. What is asked wrongly is said in one line; where nobody
    reads on, as behind `| head`, it ends."""
    parser = argparse.ArgumentParser(
        prog="python -m te_mx", description="What te_mx runs on this machine, and how fast."
    )
    parser.add_argument("--version", action="version", version=f"te_mx {te_mx.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in (tune, doctor, explain, conformance):
        words = " ".join((module.__doc__ or "").split())
        name = module.__name__.rpartition(".")[2]
        one = commands.add_parser(name, help=words, description=words)
        module.add_options(one)
        one.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes stdout once more when it ends: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE
