#!/usr/bin/env python
"""Decode the same Llama in bf16, with MXFP8 and with MXFP4 weights, and compare the three.

    python examples/generate.py                         # a small Llama, seconds on two CPU cores
    python examples/generate.py --device cuda           # 1 G parameters in layers of Llama-3 8B
    python examples/generate.py --device cuda --batches 1,8,32,128 --prefill 512,2048
    python examples/generate.py --device cuda --config 1b-deep --drop-master
    python examples/generate.py --config path/to/config.json --layers 4

The model has random weights in the shape that --config names, or those of a folder; nothing is
downloaded. It is a Llama made for decoding (examples/llama/decoder.py): the cache has a fixed size,
and on a GPU each token is one replay of a CUDA graph, in which a Triton kernel each is what stands
between the products, the same ones in every precision but for MLPs that te_mx fused, where those
are faster. te_mx.freeze_weights quantizes the weights once; inputs are quantized to MXFP8 at every
step. Each precision runs in a process of its own. The token that a precision chooses is compared
with that of bf16 behind the same tokens. --out gets run.json and generate.png.
"""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch
from gpt import devices
from gpt.options import Help
from llama import decode_report, decoding, models

FAILED, WRONG_USE, STOPPED = 1, 2, 130


def parse(argv: list[str] | None) -> argparse.Namespace:
    d = decoding.DecodeSettings("bf16")
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=Help)
    p.add_argument(
        "--config", default=argparse.SUPPRESS,
        help=f"{', '.join(models.SHAPES)}, a config.json, or a folder with one; its weights are "
        "used where it has some (default: small, 1b on a GPU)",
    )  # fmt: skip
    p.add_argument("--layers", type=int, help="in place of the config's number")
    p.add_argument("--prompt", type=int, default=d.prompt, help="tokens before those generated")
    p.add_argument(
        "--tokens",
        type=int,
        default=argparse.SUPPRESS,
        help="tokens to generate (default: 64, 256 on a GPU)",
    )
    p.add_argument(
        "--batches", type=sizes, default=d.batches, metavar="N,..",
        help="sequences at a time, one after the other",
    )  # fmt: skip
    p.add_argument(
        "--prefill", type=sizes, default=d.prefill, metavar="N,..",
        help="also time the reading of prompts of so many tokens",
    )  # fmt: skip
    p.add_argument("--device", default=d.device, help="cpu, cuda, cuda:1, ...")
    p.add_argument("--seed", type=int, default=d.seed, help="of random weights and the prompt")
    p.add_argument("--repeats", type=int, default=d.repeats, help="runs of each; the median counts")
    p.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=d.graph,
        help="a CUDA graph of the step",
    )  # fmt: skip
    p.add_argument(
        "--compile", action="store_true",
        help="torch.compile what stands between the products instead, in every precision",
    )  # fmt: skip
    p.add_argument(
        "--drop-master", action="store_true", help="keep the codes alone, without the bf16 weights"
    )
    p.add_argument(
        "--head", action="store_true",
        help="quantize the head over the vocabulary too: without masters, 1b on an H200 takes 0.57 "
        "(MXFP8) and 0.35 (MXFP4) of the memory of bf16 then, where it takes 0.64 and 0.45; where "
        "a config ties it to the embedding, that keeps its weight, and more is needed",
    )  # fmt: skip
    p.add_argument("--only", choices=decoding.MODES, help="one of the three runs")
    p.add_argument("--threads", type=int, help="CPU threads; torch decides if not given")
    p.add_argument(
        "--out", type=Path, default=Path("runs/generate"), help="folder of what is written"
    )
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # the parent reports
    args = p.parse_args(argv)
    small = args.device == "cpu"
    args.config = getattr(args, "config", "small" if small else "1b")
    args.tokens = getattr(args, "tokens", 64 if small else 256)
    for name in ("layers", "prompt", "repeats", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            p.error(f"--{name} must be at least 1, got {value}")
    least = 2 if small or not args.graph else 5  # a graph is warmed up on some
    if args.tokens < least:
        p.error(f"--tokens must be at least {least}, got {args.tokens}")
    if not 0 <= args.seed < 2**32:
        p.error(f"--seed must be from 0 to 2^32 - 1, got {args.seed}")
    return args


def sizes(words: str) -> tuple[int, ...]:
    numbers = tuple(int(word) if word.isdigit() else 0 for word in words.split(","))
    if min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"different numbers from 1 on, as in 1,8, got {words!r}")
    return numbers


def settings(args: argparse.Namespace, mode: str) -> decoding.DecodeSettings:
    names = [field.name for field in fields(decoding.DecodeSettings) if field.name != "mode"]
    return decoding.DecodeSettings(mode, **{name: getattr(args, name) for name in names})


def lacks(args: argparse.Namespace) -> str | None:
    """What a run needs and does not find here."""
    if (problem := devices.wrong(args.device)) is not None:
        return problem
    for package in ("matplotlib", "tqdm"):
        if importlib.util.find_spec(package) is None:
            return f"this example needs {package}: pip install {package}"
    try:
        decoding.build_on_meta(settings(args, "bf16"))
        args.out.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, ValueError, OSError) as error:
        return str(error)
    return None if os.access(args.out, os.W_OK) else f"--out {args.out} cannot be written to"


def decode_one(args: argparse.Namespace, mode: str) -> None:
    """Run one precision in this process and write its record."""
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    chosen, plain = settings(args, mode), args.out / "bf16.json"
    expected = None
    if mode != "bf16" and plain.exists():
        record = json.loads(plain.read_text())
        if record["settings"] == json.loads(json.dumps(decoding.asdict(settings(args, "bf16")))):
            expected = record["tokens"]
    tqdm = importlib.import_module("tqdm").tqdm
    steps = len(chosen.batches) * chosen.repeats * (chosen.tokens - 1)
    total = steps + len(chosen.prefill) * decoding.PREFILLS
    with tqdm(total=total, desc=mode, unit="step", leave=False) as bar:
        record = decoding.run(chosen, expected, bar)
    (args.out / f"{mode}.json").write_text(json.dumps(record) + "\n")


def decode_in_children(args: argparse.Namespace, argv: list[str]) -> int:
    """Every precision in a process of its own, bf16 first, whose tokens the others are held to."""
    for mode in decoding.MODES:
        command = [sys.executable, __file__, *argv, "--only", mode, "--child"]
        code = subprocess.call(command)
        if code:
            print(f"the {mode} run failed with status {code}", file=sys.stderr)
            return FAILED
    return 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.child:
        decode_one(args, args.only)
        return 0
    missing = lacks(args)
    if missing is not None:
        print(f"error: {missing}", file=sys.stderr)
        return WRONG_USE
    modes = [args.only] if args.only else list(decoding.MODES)
    for mode in modes:
        (args.out / f"{mode}.json").unlink(missing_ok=True)
    try:
        code = decode_in_children(args, argv) if not args.only else decode_one(args, args.only)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = STOPPED
    runs = {
        mode: json.loads((args.out / f"{mode}.json").read_text())
        for mode in modes
        if (args.out / f"{mode}.json").exists()
    }
    if runs:
        decode_report.write(runs, args.out)
        print(f"{decode_report.table(runs)}\n\nplot and record: {args.out}/generate.png, run.json")
    if not code:
        print("next: load a checkpoint of your own (docs/inference.md)")
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
