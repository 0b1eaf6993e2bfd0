"""The runner: `python -m benchmarks --help`."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import bench_gemm, bench_linear, bench_overhead, bench_quantize, machine
from benchmarks.context import Context
from benchmarks.row import HEADERS, Row, line, markdown, markdown_header
from benchmarks.timing import Effort

BENCHMARKS: dict[str, Callable[[Context], Iterator[Row]]] = {
    "gemm": bench_gemm.gemm,
    "backward_gemm": bench_gemm.backward_gemm,
    "linear": bench_linear.linear,
    "decode": bench_linear.decode,
    "quantize": bench_quantize.quantize,
    "overhead": bench_overhead.overhead,
    "import": bench_overhead.import_time,
    "workspace": bench_overhead.workspace,
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure te_mx against its peers, in turns. See benchmarks/README.md.",
    )
    p.add_argument(
        "which",
        nargs="*",
        default=["all"],
        metavar="which",
        help=f"{', '.join(BENCHMARKS)}, or all",
    )
    p.add_argument("--quick", action="store_true", help="tiny sizes, for a test that it runs")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seconds", type=float, default=Effort.seconds, help="time for each row")
    p.add_argument("--markdown", action="store_true", help="print rows of a markdown table")
    p.add_argument("--json", type=Path, metavar="FILE", help="also write machine and rows there")
    p.add_argument(
        "--check", action="store_true", help="exit with 1 when a row misses what it must reach"
    )
    args = p.parse_args(argv)
    unknown = sorted(set(args.which) - {*BENCHMARKS, "all"})
    if unknown:
        p.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}, all")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    effort = Effort.quick() if args.quick else Effort(seconds=args.seconds)
    context = Context(machine.describe(args.quick), effort, args.quick)
    show = markdown if args.markdown else line
    print("\n".join(context.machine.lines()), end="\n\n")
    print(markdown_header() if args.markdown else line(HEADERS), flush=True)
    rows = []
    for name, benchmark in BENCHMARKS.items():
        if name in args.which or "all" in args.which:
            for row in benchmark(context):
                rows.append(row)
                print(show(row.cells()), flush=True)
    if args.json:
        record = {"machine": context.machine.to_dict(), "rows": [row.to_dict() for row in rows]}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    short = [row for row in rows if row.target and row.target.verdict(row.value) == "SHORT"]
    return 1 if args.check and short else 0


if __name__ == "__main__":
    sys.exit(main())
