#!/usr/bin/env python
"""Train the same byte-level GPT twice, with bf16 nn.Linear and with MXFP8, and compare the two.

    python examples/train_gpt.py                 # both runs, a few minutes on two CPU cores
    python examples/train_gpt.py --device cuda   # a larger model, that fills a GPU
    python examples/train_gpt.py --only mxfp8 --steps 1000 --preset medium
    python examples/train_gpt.py --resume        # go on after Ctrl-C

Both runs start from the same weights and see the same data in the same order. The plain run is what
people do today: fp32 parameters and torch.autocast to bf16. Each run has a process of its own, so
that its peak memory is its own. --out gets loss.png, run.json and the checkpoints.
"""

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from gpt import stopping

if __name__ == "__main__":
    stopping.at_start()  # the next lines take seconds

import torch
from gpt import data, precision, report, train

FAILED, WRONG_USE = 1, 2
STOPPED = 130  # what a shell reports after Ctrl-C


def parse(argv: list[str] | None) -> argparse.Namespace:
    d = train.Settings()
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument(
        "--steps", type=int, default=argparse.SUPPRESS,
        help=f"(default: {d.steps}; half of it on a CPU without bf16 instructions)",
    )  # fmt: skip
    p.add_argument(
        "--preset", choices=train.PRESETS, default=argparse.SUPPRESS,
        help=f"size of the model (default: {d.preset}, large on a GPU)",
    )  # fmt: skip
    p.add_argument("--mixture", action="store_true", help=argparse.SUPPRESS)  # train_moe.py
    p.add_argument("--batch", type=int, default=argparse.SUPPRESS, help="sequences a step")
    p.add_argument("--lr", type=float, default=argparse.SUPPRESS, help="highest learning rate")
    p.add_argument("--device", default=d.device, help="cpu, cuda, cuda:1, ...")
    p.add_argument(
        "--dtype", choices=precision.DTYPES, default=argparse.SUPPRESS,
        help="activations (default: bf16; fp32 on a CPU without bf16 instructions, where torch's "
        "bf16 takes a minute a step)",
    )  # fmt: skip
    p.add_argument("--recipe", choices=precision.RECIPES, default=d.recipe)
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument("--only", choices=[*precision.DTYPES, "mxfp8"], help="one of the two runs")
    p.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    p.add_argument(
        "--save-every", type=int, default=50, metavar="STEPS", help="0 writes no checkpoint"
    )
    p.add_argument(
        "--eval-every", type=int, default=d.eval_every, metavar="STEPS", help="0: at the end only"
    )
    p.add_argument("--threads", type=int, help="CPU threads; torch decides if not given")
    p.add_argument(
        "--deterministic", action="store_true",
        help="the same bits in every run on a GPU too, where attention adds in any order otherwise",
    )  # fmt: skip
    p.add_argument("--out", type=Path, default=Path("runs/gpt"))
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # the parent reports
    args = p.parse_args(argv)
    if "preset" not in args:
        small, large = ("moe", "moe-large") if args.mixture else (d.preset, "large")
        args.preset = small if args.device == "cpu" else large
    usual = precision.usual_dtype(args.device)
    args.dtype = getattr(args, "dtype", usual)
    # Without bf16 instructions a step takes a second or two.
    args.steps = getattr(args, "steps", d.steps if usual == "bf16" else d.steps // 2)
    preset = train.PRESETS[args.preset]
    args.batch = getattr(args, "batch", preset.batch)
    args.lr = getattr(args, "lr", preset.lr)
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
    if not 0 <= args.seed < 2**32:
        p.error(f"--seed must be from 0 to 2^32 - 1, got {args.seed}")
    return args


def missing(args: argparse.Namespace) -> str | None:
    """What a run needs and this machine lacks; asked before anything of an earlier run goes."""
    try:
        device = torch.device(args.device)
    except RuntimeError:
        return f"--device must be cpu, cuda, cuda:1, ..., got {args.device}"
    if device.type not in ("cpu", "cuda"):
        return f"--device must be cpu or cuda, got {args.device}"
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return f"--device {args.device}: torch finds {torch.cuda.device_count()} CUDA devices here"
    if importlib.util.find_spec("matplotlib") is None:
        return "the plot needs matplotlib: pip install matplotlib"
    try:
        data.stdlib_files()
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(args.out, os.W_OK) else f"--out {args.out} cannot be written to"


def settings(args: argparse.Namespace, mode: str) -> train.Settings:
    return train.Settings(
        mode=mode, preset=args.preset, steps=args.steps, batch=args.batch, lr=args.lr,
        seed=args.seed, device=args.device, dtype=args.dtype, recipe=args.recipe,
        eval_every=args.eval_every,
    )  # fmt: skip


def train_one(args: argparse.Namespace, mode: str) -> int:
    """Run `mode` in this process and write its record; the exit status. Ctrl-C ends the run after
    the current step."""
    interrupted = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    def after_step(done: int) -> bool:
        if done == 1 and not args.resume:  # this run works: it replaces an earlier one
            forget(args, mode)
        return interrupted

    for signum in stopping.SIGNALS:
        signal.signal(signum, stop)
    checkpoint = args.out / f"{mode}.pt"
    if args.resume and not checkpoint.exists():
        print(f"{checkpoint} is not there: starting from the beginning", file=sys.stderr)
    try:
        record = train.run(
            settings(args, mode),
            checkpoint,
            resume=args.resume,
            save_every=args.save_every,
            should_stop=after_step,
        )
    except train.CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    (args.out / f"{mode}.json").write_text(json.dumps(record) + "\n")
    return 0 if record["finished"] else STOPPED


def forget(args: argparse.Namespace, mode: str) -> None:
    """Remove what an earlier run left, so that neither --resume nor the table takes it for this
    one's. The first of two runs does it for both."""
    both = args.child and mode != "mxfp8"
    for old in (mode, "mxfp8") if both else (mode,):
        for kind in ("json", "pt"):
            (args.out / f"{old}.{kind}").unlink(missing_ok=True)


def command(argv: list[str], mode: str) -> list[str]:
    return [sys.executable, __file__, *argv, "--only", mode, "--child"]


def train_in_children(argv: list[str], modes: list[str]) -> tuple[int, list[str]]:
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
        child = subprocess.Popen(command(argv, mode))
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


def show(args: argparse.Namespace, modes: list[str]) -> None:
    runs = {mode: json.loads((args.out / f"{mode}.json").read_text()) for mode in modes}
    if runs:
        report.write(runs, args.out)
        print(f"\n{report.table(runs)}\n\nplot and record: {args.out}/loss.png, run.json")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    lacks = None if args.child else missing(args)
    if lacks is not None:
        print(f"error: {lacks}", file=sys.stderr)
        return WRONG_USE
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True)
    if args.only:
        code = train_one(args, args.only)
        done = [args.only] if code in (0, STOPPED) else []
    else:
        code, done = train_in_children(argv, [args.dtype, "mxfp8"])
    if not args.child:
        show(args, done)
        if code == STOPPED and done:
            how = "the same command with --resume goes on" if args.save_every else "no checkpoint"
            print(f"stopped early; {how}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
