"""Say which kernel a product runs on, and why the others decline."""

import argparse

import te_mx
from te_mx.commands.candidates import parse_shape
from te_mx.commands.tune import recipe_of
from te_mx.recipes.values import PRECISIONS


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("shape", metavar="MxNxK", help="tokens x out features x in features")
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, .. (default: cpu)")
    p.add_argument(
        "--fmt", default="", metavar="W or X:W",
        help="formats of weights, or of inputs and weights; inputs are MXFP8 otherwise (default: "
        "mxfp8_e4m3)",
    )  # fmt: skip
    p.add_argument(
        "--experts", type=int, help="explain a mixture of so many experts; needs --top-k"
    )
    p.add_argument("--top-k", type=int, help="how many experts a token has, with --experts")
    p.add_argument(
        "--precision", default="adaptive", choices=PRECISIONS,
        help="how GPUs multiply (default: adaptive)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    m, n, k = parse_shape(args.shape)
    recipe = recipe_of(args.fmt) if args.fmt else None
    print(
        te_mx.explain(
            m=n, n=m, k=k, device=args.device, precision=args.precision, recipe=recipe,
            experts=args.experts, top_k=args.top_k,
        )
    )  # fmt: skip
    return 0
