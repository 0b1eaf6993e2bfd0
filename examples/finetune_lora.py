#!/usr/bin/env python
"""Train LoRA adapters on a model whose weights are codes: bf16, MXFP8 and MXFP4 beside each other.

    python examples/finetune_lora.py                       # a small Llama, a minute on two cores
    python examples/finetune_lora.py --dora --only mxfp4
    python examples/finetune_lora.py --activations mxfp8   # inputs of those layers quantized too
    python examples/finetune_lora.py --device cuda --config path/to/model
    python examples/finetune_lora.py --resume              # go on after Ctrl-C

A folder's model is adapted as it is; a shape by name first learns the text, so that there is
something to adapt. Nothing is downloaded. All runs start from the same weights and see the same
data. Needs peft. --out gets loss.png, run.json, the adapters and the checkpoints.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from gpt import stopping

if __name__ == "__main__":
    stopping.at_start()  # the next lines take seconds

from gpt import data, precision, report, script
from gpt.options import Help
from gpt.train import CheckpointError, run
from llama import lora, models, train


def parse(argv: list[str] | None) -> argparse.Namespace:
    d = lora.LoraSettings()
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=Help)
    p.add_argument("--config", default="small", help="a shape of train_llama.py, or a folder")
    p.add_argument(
        "--base-steps", type=int, default=80, help="pretraining of a base that has no weights"
    )
    p.add_argument("--steps", type=int, default=60, help="steps of each adapter")
    p.add_argument("--batch", type=int, default=8, help="sequences a step")
    p.add_argument("--seq", type=int, default=64, help="bytes a sequence")
    p.add_argument("--lr", type=float, default=4e-3, help="highest learning rate of the adapters")
    p.add_argument("--rank", type=int, default=d.rank, help="rank of the adapters")
    p.add_argument("--dora", action="store_true", help="DoRA in place of LoRA")
    p.add_argument(
        "--activations", choices=["bf16", "mxfp8"], default=d.activations,
        help="inputs of layers of codes",
    )  # fmt: skip
    p.add_argument("--only", choices=lora.MODES, help="one of the three")
    p.add_argument("--device", default=d.device, help="cpu, cuda, cuda:1, ...")
    p.add_argument(
        "--dtype", choices=precision.DTYPES, default=argparse.SUPPRESS,
        help="activations (default: bf16; fp32 on a CPU without bf16 instructions)",
    )  # fmt: skip
    p.add_argument("--seed", type=int, default=d.seed, help="of the weights and the data")
    p.add_argument(
        "--save-every", type=int, default=50, metavar="STEPS", help="0 writes no checkpoint"
    )
    p.add_argument("--eval-every", type=int, default=20, metavar="STEPS", help="0: at the end only")
    p.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    p.set_defaults(text="")  # the standard library's
    p.add_argument("--out", type=Path, default=Path("runs/lora"), help="folder of what is written")
    args = p.parse_args(argv)
    args.dtype = getattr(args, "dtype", precision.usual_dtype(args.device))
    for name in ("base_steps", "steps", "batch", "seq", "rank"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.save_every < 1 or args.eval_every < 0:
        p.error("--save-every must be at least 1 and --eval-every 0 or more")
    if not args.lr > 0:
        p.error(f"--lr must be above 0, got {args.lr}")
    return args


def shared(args: argparse.Namespace) -> dict:
    return {
        "preset": args.config, "batch": args.batch, "seed": args.seed, "device": args.device,
        "dtype": args.dtype, "sequence": args.seq, "eval_every": args.eval_every, "fuse": False,
        "final_eval_batches": 8,
    }  # fmt: skip


def base_settings(args: argparse.Namespace) -> train.LlamaSettings:
    return train.LlamaSettings(mode="bf16", steps=args.base_steps, lr=2e-3, **shared(args))


def settings(args: argparse.Namespace, mode: str) -> lora.LoraSettings:
    base = "" if models.has_weights(args.config) else str(args.out / "base.pt")
    return lora.LoraSettings(
        mode=mode, steps=args.steps, lr=args.lr, base=base, rank=args.rank, dora=args.dora,
        activations=args.activations, **shared(args),
    )  # fmt: skip


def lacks(args: argparse.Namespace) -> str | None:
    """What a run needs and does not find."""
    try:
        settings(args, "bf16").config()
        lora.peft_and_register()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return script.missing(args)


def adapt(args: argparse.Namespace, stop: list[bool]) -> dict[str, dict]:
    """The records of all runs, the last one perhaps stopped early."""
    text, how = data.load(), {"save_every": args.save_every}
    how |= {"resume": args.resume, "should_stop": lambda done: stop[0]}
    if settings(args, "bf16").base:
        path = args.out / "base.pt"
        base = run(base_settings(args), path, make=train.LlamaTrainer, text=text, **how)
        if not base["finished"]:
            return {}
    runs: dict[str, dict] = {}
    for mode in [args.only] if args.only else lora.MODES:
        made: list[lora.LoraTrainer] = []

        def make(chosen: lora.LoraSettings, text: data.Text, made=made) -> lora.LoraTrainer:
            made.append(lora.LoraTrainer(chosen, text))
            return made[0]

        capitals = lora.in_capitals(text)
        record = run(settings(args, mode), args.out / f"{mode}.pt", make=make, text=capitals, **how)
        runs[mode] = record | {"base_bytes": made[0].bytes}
        made[0].model.save_pretrained(args.out / f"{mode}-adapters")
        if stop[0]:
            break
    return runs


def main(argv: list[str] | None = None) -> int:
    args, stop = parse(argv), [False]
    if (problem := lacks(args)) is not None:
        print(f"error: {problem}", file=sys.stderr)
        return script.WRONG_USE
    for signum in stopping.SIGNALS:
        signal.signal(signum, lambda signum, frame: stop.__setitem__(0, True))
    try:
        runs = adapt(args, stop)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return script.FAILED
    if runs:
        record = {"machine": report.machine(), "runs": runs}
        (args.out / "run.json").write_text(json.dumps(record, indent=1) + "\n")
        lora.plot(runs, args.out / "loss.png")
        print(f"\n{lora.table(runs)}\n\nplot and record: {args.out}/loss.png, run.json")
    if stop[0]:
        print("stopped early; the same command with --resume goes on", file=sys.stderr)
        return script.STOPPED
    print("next: your own model and trainer (docs/integrations.md)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
