#!/usr/bin/env python
"""Train the same Transformers model twice, in bf16 and converted by te_mx, and compare the two.

    python examples/train_llama.py                          # a tiny Llama, seconds on two CPU cores
    python examples/train_llama.py --device cuda            # a 400 M Llama
    python examples/train_llama.py --device cuda --config 8b-layers --layers 8 --compile
    python examples/train_llama.py --config path/to/config.json
    python examples/train_llama.py --resume                 # go on after Ctrl-C
    python examples/train_llama.py --device cuda --steps 1000 --seeds 4 --recipes again,all
    torchrun --nproc-per-node 2 examples/train_llama.py --device cuda --parallel fsdp    # or tp

The model has random weights in the shape that --config names, or those of a folder; nothing is
downloaded. Its tokens are bytes. Both runs start from the same weights and see the same data in the
same order, each in a process of its own. Parameters are bf16, or fp32 under torch.autocast with
--fp32-params. --out gets loss.png, run.json and the checkpoints.

With --recipes it is a study of losses: every recipe over all seeds, on all GPUs side by side, and a
table of means, standard deviations and differences from bf16 (study.json). What was cut short goes
on with the same command.
"""

import argparse
import functools
import sys

from gpt import stopping

if __name__ == "__main__":
    stopping.at_start()  # the next lines take seconds

from dataclasses import replace

import torch
from gpt import precision, script
from gpt.options import Help
from llama import models, parallel, recipes, study, train


def parse(argv: list[str] | None) -> argparse.Namespace:
    d = train.LlamaSettings()
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=Help)
    p.add_argument(
        "--config", default=argparse.SUPPRESS,
        help=f"{', '.join(models.SHAPES)}, a config.json, or a folder with one; its weights are "
        "used where it has some (default: small, 400m on a GPU)",
    )  # fmt: skip
    p.add_argument("--layers", type=int, help="in place of the config's number")
    p.add_argument(
        "--steps", type=int, default=argparse.SUPPRESS, help="(default: 60, 300 of a large model)"
    )
    p.add_argument("--seq", type=int, default=argparse.SUPPRESS, help="bytes a sequence")
    p.add_argument(
        "--attn", choices=["auto", "sdpa", "eager"], default=d.attention,
        help="Transformers' attention; auto is sdpa where the model has it",
    )  # fmt: skip
    p.add_argument("--compile", action="store_true", help="torch.compile both models")
    p.add_argument(
        "--fuse", action=argparse.BooleanOptionalAction, default=d.fuse,
        help="te_mx.convert_model(fuse=...)",
    )  # fmt: skip
    p.add_argument(
        "--fp32-params", action="store_true", help="fp32 parameters, activations by torch.autocast"
    )
    p.add_argument(
        "--parallel", choices=parallel.KINDS, default="",
        help="under torchrun: weights sharded by FSDP2, or layers split between the ranks",
    )  # fmt: skip
    p.add_argument(
        "--gather-codes", action=argparse.BooleanOptionalAction, default=d.gather_codes,
        help="under FSDP2 in MXFP8 the ranks send codes, 1.03 bytes a parameter",
    )  # fmt: skip
    p.add_argument(
        "--recipes", type=chosen_recipes, metavar="LIST",
        help=f"compare these with bf16, over --seeds: all ({', '.join(recipes.NAMED)}), cures "
        f"({', '.join(recipes.CURES)}), {recipes.AGAIN} (bf16 from weights a rounding off: what "
        "chance does), or names, with commas between",
    )  # fmt: skip
    p.add_argument(
        "--time-limit", type=float, metavar="MINUTES",
        help="of --recipes: stop in time, with checkpoints; the same command goes on",
    )  # fmt: skip
    p.add_argument(
        "--begin", type=int, metavar="STEPS", default=0,
        help="of --recipes: all runs go on from as many steps in bf16, made once",
    )  # fmt: skip
    p.add_argument(
        "--gpus", type=int, metavar="N", help="of --recipes: side by side; all that torch finds"
    )
    script.add_options(p, d, "runs/llama", recipes.ALL)
    args = p.parse_args(argv)
    args.config = getattr(args, "config", "small" if args.device == "cpu" else "400m")
    args.dtype = getattr(args, "dtype", precision.usual_dtype(args.device))
    preset = preset_of(args)
    args.steps = getattr(args, "steps", preset.steps)
    args.batch = getattr(args, "batch", preset.batch)
    args.seq = getattr(args, "seq", preset.context)
    args.lr = getattr(args, "lr", preset.lr)
    for name in ("seq", "layers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            p.error(f"--{name} must be at least 1, got {value}")
    script.check_options(p, args)
    if args.recipes is None and (args.time_limit, args.gpus, args.begin) != (None, None, 0):
        p.error("--time-limit, --gpus and --begin go with --recipes")
    if args.begin < 0:
        p.error(f"--begin must be at least 0, got {args.begin}")
    if args.time_limit is not None and not args.time_limit > 0:
        p.error(f"--time-limit must be above 0, got {args.time_limit}")
    found = torch.cuda.device_count() if args.device == "cuda" else 1
    if args.gpus is not None and not 1 <= args.gpus <= found:
        p.error(f"--gpus must be 1 to {found}, got {args.gpus}")
    args.gpus = args.gpus or found
    if args.recipes and (args.parallel or args.only):
        p.error("--recipes goes without --parallel and --only")
    if bool(args.parallel) != parallel.launched():
        p.error("--parallel and torchrun go together: torchrun --nproc-per-node 2 " + __file__)
    return args


def chosen_recipes(words: str) -> list[str]:
    try:
        return recipes.chosen(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def preset_of(args: argparse.Namespace) -> train.Preset:
    return train.PRESETS.get(args.config, train.LARGE)


def settings(args: argparse.Namespace, mode: str) -> train.LlamaSettings:
    return train.LlamaSettings(
        mode=mode, preset=args.config, steps=args.steps, batch=args.batch, lr=args.lr,
        seed=args.seed, device=args.device, dtype=args.dtype, recipe=args.recipe, text=args.text,
        eval_every=args.eval_every, layers=args.layers, sequence=args.seq, attention=args.attn,
        compile=args.compile, fuse=args.fuse and args.parallel != "tp",
        fp32_params=args.fp32_params, parallel=args.parallel, gather_codes=args.gather_codes,
        final_eval_batches=preset_of(args).final_eval_batches,
    )  # fmt: skip


def lacks(args: argparse.Namespace) -> str | None:
    """Why this model cannot be trained here; asked before anything of an earlier run goes."""
    try:
        chosen = settings(args, "mxfp8")
        with torch.device("meta"):
            models.build(chosen.config(), attention=chosen.attention)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    if args.parallel:
        return parallel.why_not(chosen, torch.distributed.get_world_size())
    return None


def command(argv: list[str], mode: str) -> list[str]:
    return [sys.executable, __file__, *argv, "--only", mode, "--child"]


def compare(args: argparse.Namespace) -> int:
    """The study of --recipes."""
    if (problem := script.missing(args) or lacks(args)) is not None:
        print(f"error: {problem}", file=sys.stderr)
        return script.WRONG_USE
    if args.threads:
        torch.set_num_threads(args.threads)
    script.deterministic(args)
    of_mode = functools.partial(settings, args)
    return study.main(
        of_mode, args.recipes, args.seeds, args.out, args.gpus, args.time_limit, args.begin
    )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    parts = script.Script(
        settings, lambda mode: command(argv, mode), trainer=train.LlamaTrainer, lacks=lacks,
        then="next: python examples/generate.py decodes; --recipes all compares recipes",
    )  # fmt: skip
    if args.recipes:
        return compare(args)
    if not args.parallel:
        return script.main(parts, args)
    args.device = parallel.start(args.device)
    together = replace(
        parts, trainer=parallel.ParallelTrainer, together=True, agree=parallel.any_of,
        first=torch.distributed.get_rank() == 0,
    )  # fmt: skip
    try:
        return script.main(together, args)
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
