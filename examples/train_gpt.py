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
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from gpt import precision, report, train

STOPPED = 130  # what a shell reports after Ctrl-C


def parse(argv: list[str] | None) -> argparse.Namespace:
    d = train.Settings()
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--steps", type=int, default=d.steps)
    p.add_argument(
        "--preset", choices=train.PRESETS, default=argparse.SUPPRESS,
        help=f"size of the model (default: {d.preset}, large on a GPU)",
    )  # fmt: skip
    p.add_argument("--mixture", action="store_true", help=argparse.SUPPRESS)  # train_moe.py
    p.add_argument("--batch", type=int, default=argparse.SUPPRESS, help="sequences a step")
    p.add_argument("--lr", type=float, default=argparse.SUPPRESS, help="highest learning rate")
    p.add_argument("--device", default=d.device, help="cpu, cuda, cuda:1, ...")
    p.add_argument("--dtype", choices=precision.DTYPES, default=d.dtype, help="activations")
    p.add_argument("--recipe", choices=precision.RECIPES, default=d.recipe)
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument("--only", choices=[*precision.DTYPES, "mxfp8"], help="one of the two runs")
    p.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    p.add_argument(
        "--save-every", type=int, default=50, metavar="STEPS", help="0 writes no checkpoint"
    )
    p.add_argument("--eval-every", type=int, default=d.eval_every, metavar="STEPS")
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
    preset = train.PRESETS[args.preset]
    args.batch = getattr(args, "batch", preset.batch)
    args.lr = getattr(args, "lr", preset.lr)
    if args.only not in (None, "mxfp8", args.dtype):
        p.error(f"--only {args.only} needs --dtype {args.only}, got --dtype {args.dtype}")
    if args.steps < 1 or args.batch < 1:
        p.error(f"--steps and --batch must be at least 1, got {args.steps} and {args.batch}")
    if args.save_every < 0:
        p.error(f"--save-every must be 0 or more, got {args.save_every}")
    return args


def settings(args: argparse.Namespace, mode: str) -> train.Settings:
    return train.Settings(
        mode=mode, preset=args.preset, steps=args.steps, batch=args.batch, lr=args.lr,
        seed=args.seed, device=args.device, dtype=args.dtype, recipe=args.recipe,
        eval_every=args.eval_every,
    )  # fmt: skip


def train_one(args: argparse.Namespace, mode: str) -> bool:
    """Run `mode` in this process and write its record. Ctrl-C ends it after the current step."""
    interrupted = False

    def stop(signum: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    record = train.run(
        settings(args, mode),
        args.out / f"{mode}.pt",
        resume=args.resume,
        save_every=args.save_every,
        should_stop=lambda done: interrupted,
    )
    (args.out / f"{mode}.json").write_text(json.dumps(record) + "\n")
    return record["finished"]


def train_in_child(argv: list[str], mode: str) -> int:
    child = subprocess.Popen([sys.executable, __file__, *argv, "--only", mode, "--child"])

    def forward(signum: int, frame: object) -> None:
        # A terminal's Ctrl-C reaches the child by itself; a second one does no harm.
        child.send_signal(signum)

    before = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
        return STOPPED if code == -signal.SIGINT else code
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def show(args: argparse.Namespace, modes: list[str]) -> None:
    files = {mode: args.out / f"{mode}.json" for mode in modes}
    runs = {mode: json.loads(file.read_text()) for mode, file in files.items() if file.exists()}
    if runs:
        report.write(runs, args.out)
        print(f"\n{report.table(runs)}\n\nplot and record: {args.out}/loss.png, run.json")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True)
    if args.only:
        finished = train_one(args, args.only)
        if not args.child:
            show(args, [args.only])
        return 0 if finished else STOPPED

    modes = [args.dtype, "mxfp8"]
    if not args.resume:
        for mode in modes:  # records of an earlier run must not end up in this run's table
            for kind in ("json", "pt"):
                (args.out / f"{mode}.{kind}").unlink(missing_ok=True)
    code = 0
    for mode in modes:
        code = train_in_child(argv, mode)
        if code != 0:
            break
    show(args, modes)
    if code == STOPPED:
        print("stopped early; the same command with --resume goes on", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
