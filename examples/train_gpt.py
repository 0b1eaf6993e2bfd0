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
import sys

from gpt import stopping

if __name__ == "__main__":
    stopping.at_start()  # the next lines take seconds

from gpt import precision, script, train
from gpt.options import Help


def parse(argv: list[str], about: str = __doc__.splitlines()[0]) -> argparse.Namespace:
    d = train.Settings()
    mixture = "--mixture" in argv
    p = argparse.ArgumentParser(description=about, formatter_class=Help)
    small, large = ("moe", "moe-large") if mixture else (d.preset, "large")
    presets = [name for name in train.PRESETS if name.startswith("moe") or not mixture]
    p.add_argument(
        "--steps", type=int, default=argparse.SUPPRESS,
        help=f"how many (default: {d.steps}; half of it on a CPU without bf16 instructions)",
    )  # fmt: skip
    p.add_argument(
        "--preset", choices=presets, default=argparse.SUPPRESS,
        help=f"size of the model (default: {small}, {large} on a GPU)",
    )  # fmt: skip
    p.add_argument("--mixture", action="store_true", help=argparse.SUPPRESS)  # train_moe.py
    script.add_options(p, d, "runs/moe" if mixture else "runs/gpt")
    args = p.parse_args(argv)
    if "preset" not in args:
        args.preset = small if args.device == "cpu" else large
    usual = precision.usual_dtype(args.device)
    args.dtype = getattr(args, "dtype", usual)
    # Without bf16 instructions a step takes a second or two.
    args.steps = getattr(args, "steps", d.steps if usual == "bf16" else d.steps // 2)
    preset = train.PRESETS[args.preset]
    args.batch = getattr(args, "batch", preset.batch)
    args.lr = getattr(args, "lr", preset.lr)
    script.check_options(p, args)
    return args


def settings(args: argparse.Namespace, mode: str) -> train.Settings:
    return train.Settings(
        mode=mode, preset=args.preset, steps=args.steps, batch=args.batch, lr=args.lr,
        seed=args.seed, device=args.device, dtype=args.dtype, recipe=args.recipe, text=args.text,
        eval_every=args.eval_every,
    )  # fmt: skip


def then(args: argparse.Namespace) -> str:
    if args.mixture:
        return "next: your own experts by te_mx.GroupedLinear (docs/grouped.md)"
    return "next: python examples/train_moe.py, or your own model (docs/training.md)"


def command(argv: list[str], mode: str) -> list[str]:
    return [sys.executable, __file__, *argv, "--only", mode, "--child"]


def main(argv: list[str] | None = None, about: str = __doc__.splitlines()[0]) -> int:
    """about: what --help says."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv, about)
    return script.main(
        script.Script(settings, lambda mode: command(argv, mode), then=then(args)), args
    )


if __name__ == "__main__":
    sys.exit(main())
