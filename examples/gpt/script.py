"""What the training scripts share: options, a process for each run, Ctrl-C, table and plot."""

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

import te_mx
from gpt import data, devices, precision, report, seeds, stopping, train

FAILED, WRONG_USE = 1, 2
STOPPED = 130  # what a shell reports after Ctrl-C


@dataclass(frozen=True)
class Script:
    """What differs between the scripts.

    `settings(args, mode)` are those of the first seed, `trainer` makes a run of them, and
    `command(mode)` starts this script again for one mode. `lacks(args)` says what else a run needs
    and does not find; `then` is what to try next. Of several processes that train together, the one
    that is `first` writes and prints, and all stop where one of them was told to, as `agree` finds.
    """

    settings: Callable[[argparse.Namespace, str], train.Settings]
    command: Callable[[str], list[str]]
    trainer: type[train.Trainer] = train.Trainer
    lacks: Callable[[argparse.Namespace], str | None] = lambda args: None
    then: str = ""
    together: bool = False
    first: bool = True
    agree: Callable[[bool], bool] = lambda stop: stop


def add_options(
    p: argparse.ArgumentParser, d: train.Settings, out: str,
    recipes: Collection[str] = te_mx.recipe.NAMED,
) -> None:  # fmt: skip
    """The options of every script; of those without a default here each script has its own."""
    p.add_argument("--batch", type=int, default=argparse.SUPPRESS, help="sequences a step")
    p.add_argument("--lr", type=float, default=argparse.SUPPRESS, help="highest learning rate")
    p.add_argument("--device", default=d.device, help="cpu, cuda, cuda:1, ...")
    p.add_argument(
        "--dtype", choices=precision.DTYPES, default=argparse.SUPPRESS,
        help="activations (default: bf16; fp32 on a CPU without bf16 instructions, where torch's "
        "bf16 takes a minute a step)",
    )  # fmt: skip
    p.add_argument("--recipe", choices=recipes, default=d.recipe, help="of the MXFP8 run")
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="runs of each, from --seed on; the mean"
    )
    p.add_argument("--only", choices=[*precision.DTYPES, "mxfp8"], help="one of the two runs")
    p.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoints in --out; more --steps than there train longer",
    )
    p.add_argument(
        "--save-every", type=int, default=50, metavar="STEPS", help="0 writes no checkpoint"
    )
    p.add_argument(
        "--eval-every", type=int, default=d.eval_every, metavar="STEPS", help="0: at the end only"
    )
    p.add_argument(
        "--text", default=d.text, metavar="FOLDER",
        help=f"train on its {', '.join(data.ENDINGS)} files (default: Python's standard library)",
    )  # fmt: skip
    p.add_argument("--threads", type=int, help="CPU threads; torch decides if not given")
    p.add_argument(
        "--deterministic", action="store_true",
        help="the same bits in every run on a GPU too, where attention adds in any order otherwise",
    )  # fmt: skip
    p.add_argument("--out", type=Path, default=Path(out), help="folder of what is written")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # the parent reports


def check_options(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Leave with a message where a value makes no sense."""
    if args.only not in (None, "mxfp8", args.dtype):
        p.error(f"--only {args.only} needs --dtype {args.only}, got --dtype {args.dtype}")
    if args.steps < 1 or args.batch < 1:
        p.error(f"--steps and --batch must be at least 1, got {args.steps} and {args.batch}")
    if args.save_every < 0 or args.eval_every < 0:
        given = f"{args.save_every} and {args.eval_every}"
        p.error(f"--save-every and --eval-every must be 0 or more, got {given}")
    if args.threads is not None and args.threads < 1:
        p.error(f"--threads must be at least 1, got {args.threads}")
    if not 0 < args.lr < math.inf:
        p.error(f"--lr must be above 0, got {args.lr}")
    if args.seeds < 1:
        p.error(f"--seeds must be at least 1, got {args.seeds}")
    if not 0 <= args.seed <= args.seed + args.seeds - 1 < 2**32:
        p.error(f"--seed must be from 0 to 2^32 - 1, got {args.seed}")


def missing(args: argparse.Namespace) -> str | None:
    """What a run needs and this machine lacks; asked before anything of an earlier run goes."""
    if (problem := devices.wrong(args.device)) is not None:
        return problem
    if importlib.util.find_spec("matplotlib") is None:
        return "the plot needs matplotlib: pip install matplotlib"
    try:
        data.files_of(args.text)
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(args.out, os.W_OK) else f"--out {args.out} cannot be written to"


def train_one(script: Script, args: argparse.Namespace, mode: str) -> int:
    """Run `mode` in this process, every seed, and write its record; the exit status. Ctrl-C ends
    the run after the current step."""
    interrupted = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    fresh = not args.resume

    def after_step(done: int) -> bool:
        nonlocal fresh
        if done == 1 and fresh:  # this run works: it replaces an earlier one
            if script.first:
                forget(args, mode)
            fresh = False
        return script.agree(interrupted)

    for signum in stopping.SIGNALS:
        signal.signal(signum, stop)
    records: list[dict] = []
    for name, one in seeds.each(script.settings(args, mode), args.seeds):
        checkpoint = args.out / f"{name}.pt"
        if args.resume and not checkpoint.exists():
            print(f"{checkpoint} is not there: starting from the beginning", file=sys.stderr)
        try:
            record = train.run(
                one,
                checkpoint,
                resume=args.resume,
                save_every=args.save_every,
                should_stop=after_step,
                make=script.trainer,
                quiet=not script.first,
            )
        except train.CheckpointError as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        if record["finished"] or not records:
            records.append(record)
        if records[-1] is record and script.first:
            (args.out / f"{mode}.json").write_text(json.dumps(seeds.mean(records)) + "\n")
        if not record["finished"]:
            return STOPPED
        if script.agree(interrupted) and len(records) < args.seeds:
            return STOPPED
    return 0


def forget(args: argparse.Namespace, mode: str) -> None:
    """Remove what an earlier run left, so that neither --resume nor the table takes it for this
    one's. The first of two runs does it for both."""
    both = args.child and mode != "mxfp8"
    for old in (mode, "mxfp8") if both else (mode,):
        for path in (
            args.out / f"{old}.json", args.out / f"{old}.pt", *args.out.glob(f"{old}-seed*.pt")
        ):  # fmt: skip
            path.unlink(missing_ok=True)


def train_in_children(script: Script, modes: list[str]) -> tuple[int, list[str]]:
    """Every mode in a process of its own: (exit status, the modes that wrote a record)."""
    child: subprocess.Popen | None = None
    stopped_by = 0

    def forward(signum: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        stopped_by = signum
        if child is not None:  # a terminal's Ctrl-C reaches it by itself; a second does no harm
            child.send_signal(signum)

    for signum in stopping.SIGNALS:
        signal.signal(signum, forward)
    done: list[str] = []
    for mode in modes:
        child = subprocess.Popen(script.command(mode))
        if stopped_by:  # before there was a child
            child.send_signal(stopped_by)
        code = child.wait()
        if code in (0, STOPPED):
            done.append(mode)
        elif stopped_by and code == -stopped_by:
            print(f"the {mode} run was stopped before its first step", file=sys.stderr)
        elif code < 0:
            print(
                f"the {mode} run was killed by {signal.Signals(-code).name} (out of memory?); "
                "--resume goes on from its last checkpoint, if there is one",
                file=sys.stderr,
            )
        else:
            print(f"the {mode} run failed", file=sys.stderr)
        if code != 0:
            return (code if code > 0 else 128 - code), done
        if stopped_by and mode != modes[-1]:
            return STOPPED, done
    return 0, done


def deterministic(args: argparse.Namespace) -> None:
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True)


def show(args: argparse.Namespace, modes: list[str]) -> None:
    runs = {mode: json.loads((args.out / f"{mode}.json").read_text()) for mode in modes}
    if runs:
        report.write(runs, args.out)
        print(f"\n{report.table(runs)}\n\nplot and record: {args.out}/loss.png, run.json")


def main(script: Script, args: argparse.Namespace) -> int:
    lacks = None if args.child else missing(args) or script.lacks(args)
    if lacks is not None:
        print(f"error: {lacks}", file=sys.stderr)
        return WRONG_USE
    if args.threads:
        torch.set_num_threads(args.threads)
    deterministic(args)
    if args.only or script.together:
        done, code = [], 0
        for mode in [args.only] if args.only else [args.dtype, "mxfp8"]:
            code = code or train_one(script, args, mode)
            done += [mode] if code in (0, STOPPED) and (args.out / f"{mode}.json").exists() else []
    else:
        code, done = train_in_children(script, [args.dtype, "mxfp8"])
    if not args.child and script.first:
        show(args, done)
        if code == STOPPED and done:
            how = "the same command with --resume goes on" if args.save_every else "no checkpoint"
            print(f"stopped early; {how}", file=sys.stderr)
        if code == 0:
            print(script.then)
    return code
