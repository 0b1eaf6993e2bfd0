"""Say which kernel a product runs on, and why the others decline."""

from __future__ import annotations

import argparse

import te_mx
from te_mx.commands.shapes import parse_shape


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("shape", metavar="MxNxK", help="tokens x out features x in features")
    p.add_argument("--device", default="cpu")
    p.add_argument("--formats", default="", metavar="X:W", help="of inputs and weights")
    p.add_argument("--experts", type=int, help="of a mixture, in place of a GEMM; needs --top-k")
    p.add_argument("--top-k", type=int, help="experts of a token")
    p.add_argument("--precision", default="adaptive", choices=("adaptive", "exact"))


def run(args: argparse.Namespace) -> int:
    m, n, k = parse_shape(args.shape)
    recipe = None
    if args.formats:
        x, _, w = args.formats.partition(":")
        recipe = te_mx.recipe.BlockScaling(x=x, w=w or x, g="mxfp8_e4m3")
    print(
        te_mx.explain(
            m=n, n=m, k=k, device=args.device, precision=args.precision, recipe=recipe,
            experts=args.experts, top_k=args.top_k,
        )
    )  # fmt: skip
    return 0
