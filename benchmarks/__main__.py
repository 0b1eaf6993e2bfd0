"""The runner: `python -m benchmarks --help`."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import te_mx
from benchmarks import (
    bench_blockwise,
    bench_blockwise_cuda,
    bench_decode_cuda,
    bench_fp4,
    bench_frozen_cuda,
    bench_fused_cuda,
    bench_gemm,
    bench_gemm_cuda,
    bench_grouped,
    bench_grouped_cuda,
    bench_grouped_plain_cuda,
    bench_host_cuda,
    bench_invariant_cuda,
    bench_layernorm,
    bench_linear,
    bench_linear_cuda,
    bench_models_cuda,
    bench_moe,
    bench_moe_cuda,
    bench_mxfp4_cuda,
    bench_overhead,
    bench_quantize,
    bench_split_cuda,
    bench_triton_cuda,
    gpu,
    machine,
    results,
)
from benchmarks.context import Context
from benchmarks.gpu import GpuContext
from benchmarks.row import HEADERS, Row, line, markdown, markdown_header
from benchmarks.timing import Effort

BENCHMARKS: dict[str, Callable[[Context], Iterator[Row]]] = {
    "gemm": bench_gemm.gemm,
    "backward_gemm": bench_gemm.backward_gemm,
    "linear": bench_linear.linear,
    "thin": bench_linear.thin,
    "gemm_blockwise": bench_blockwise.gemm,
    "linear_blockwise": bench_blockwise.linear,
    "gemm_mxfp4": bench_fp4.gemm,
    "linear_mxfp4": bench_fp4.linear,
    "layernorm_mlp": bench_layernorm.layernorm_mlp,
    "fused_steps": bench_layernorm.fused_steps,
    "decode": bench_linear.decode,
    "weights_only": bench_linear.weights_only,
    "grouped": bench_grouped.grouped,
    "moe_decode": bench_moe.decode,
    "quantize": bench_quantize.quantize,
    "overhead": bench_overhead.overhead,
    "import": bench_overhead.import_time,
    "workspace": bench_overhead.workspace,
}
CUDA_BENCHMARKS: dict[str, Callable[[GpuContext], Iterator[Row]]] = {
    "gemm_cuda": bench_gemm_cuda.gemm,
    "blockwise_cuda": bench_blockwise_cuda.blockwise,
    "mxfp4_cuda": bench_mxfp4_cuda.mxfp4,
    "quantize_mxfp4_cuda": bench_mxfp4_cuda.quantize,
    "decode_cuda": bench_decode_cuda.decode,
    "frozen_cuda": bench_frozen_cuda.frozen,
    "scales_cuda": bench_gemm_cuda.scales,
    "epilogue_cuda": bench_gemm_cuda.epilogue,
    "split_cuda": bench_split_cuda.split,
    "quantize_cuda": bench_linear_cuda.quantize,
    "fused_cuda": bench_fused_cuda.steps,
    "layernorm_mlp_cuda": bench_fused_cuda.layernorm_mlp,
    "linear_cuda": bench_linear_cuda.linear,
    "grouped_cuda": bench_grouped_cuda.grouped,
    "moe_decode_cuda": bench_moe_cuda.decode,
    "mixtures_cuda": bench_moe_cuda.mixtures,
    "grouped_plain_cuda": bench_grouped_plain_cuda.plain,
    "linear_kept_cuda": bench_linear_cuda.kept,
    "overhead_cuda": bench_linear_cuda.host,
    "overhead_gemm_cuda": bench_linear_cuda.host_gemm,
    "overhead_modes_cuda": bench_host_cuda.modes,
    "graph_cuda": bench_linear_cuda.graph,
    "workspace_cuda": bench_linear_cuda.workspace,
}
# By name only: whole models need Transformers, and minutes; the others tell who works on the decode
# kernel, asks what "invariant" costs, or what Triton's kernels reach.
MODEL_BENCHMARKS = {
    "models_cuda": bench_models_cuda.whole,
    "invariant_cuda": bench_invariant_cuda.invariant,
    "decode_splits_cuda": bench_decode_cuda.splits,
    "decode_groups_cuda": bench_decode_cuda.groups,
    "triton_cuda": bench_triton_cuda.triton,
}
GROUPS = {
    "cpu": list(BENCHMARKS),
    "cuda": list(CUDA_BENCHMARKS),
    "all": [*BENCHMARKS, *CUDA_BENCHMARKS],
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure te_mx against its peers, in turns. See benchmarks/README.md.",
    )
    names = ", ".join([*GROUPS["all"], *MODEL_BENCHMARKS, *GROUPS])
    p.add_argument("which", nargs="*", default=["all"], metavar="which", help=names)
    p.add_argument("--quick", action="store_true", help="tiny sizes, for a test that it runs")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument(
        "--seconds", type=float, help="time for each row; 6 on the CPU and 2 on a GPU if not given"
    )
    p.add_argument("--markdown", action="store_true", help="print rows of a markdown table")
    p.add_argument("--json", type=Path, metavar="FILE", help="also write machine and rows there")
    p.add_argument(
        "--save", action="store_true",
        help="add the rows to benchmarks/results, of which pages are made (benchmarks.tables)",
    )  # fmt: skip
    p.add_argument(
        "--check", action="store_true", help="exit with 1 when a row misses what it must reach"
    )
    p.add_argument(
        "--rows", default="", metavar="NAME,..",
        help=f"of models_cuda, only these: {', '.join(bench_models_cuda.NAMES)}",
    )  # fmt: skip
    p.add_argument(
        "--recipe", default="", metavar="NAME,..",
        help=f"of models_cuda, under these recipes: {', '.join(te_mx.recipe.NAMED)}",
    )  # fmt: skip
    p.add_argument(
        "--profile", action="store_true", help="of models_cuda, also the kernels of a step"
    )
    args = p.parse_args(argv)
    args.rows = tuple(filter(None, args.rows.split(",")))
    strangers = [name for name in args.rows if name not in bench_models_cuda.NAMES]
    if strangers:
        p.error(f"no rows {', '.join(strangers)}; there are {', '.join(bench_models_cuda.NAMES)}")
    args.recipe = tuple(filter(None, args.recipe.split(",")))
    strangers = [name for name in args.recipe if name not in te_mx.recipe.NAMED]
    if strangers:
        p.error(f"no recipe {', '.join(strangers)}; there are {', '.join(te_mx.recipe.NAMED)}")
    if (args.rows or args.recipe or args.profile) and "models_cuda" not in args.which:
        p.error("--rows, --recipe and --profile are of models_cuda: name it")
    unknown = sorted(set(args.which) - {*GROUPS["all"], *MODEL_BENCHMARKS, *GROUPS})
    if unknown:
        p.error(f"no benchmark named {', '.join(unknown)}; there are {names}")
    if args.save and args.quick:
        p.error("--quick measures nothing that could be saved: leave one of the two out")
    words = [word for word in (argv or sys.argv[1:]) if word not in ("--save", "--markdown")]
    args.command = " ".join(["python -m benchmarks", *words])
    args.which = {name for asked in args.which for name in GROUPS.get(asked, [asked])}
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    for_gpu = {**CUDA_BENCHMARKS, **MODEL_BENCHMARKS}
    on_cpu, on_gpu = (
        [name for name in group if name in args.which] for group in (BENCHMARKS, for_gpu)
    )
    described: dict[str, dict] = {}
    on_cpu_rows: list[Row] = []
    on_gpu_rows: list[Row] = []
    if on_cpu:
        effort = Effort.quick() if args.quick else Effort(seconds=args.seconds or Effort.seconds)
        context = Context(effort, args.quick, machine.describe(args.quick))
        described["machine"] = context.machine.to_dict()
        start_table(context.machine.lines(), args.markdown)
        for name in progress(on_cpu):
            made = list(shown(BENCHMARKS[name](context), args.markdown))
            on_cpu_rows += made
            if args.save:
                results.save(described["machine"], made, args.command)
    missing = gpu.missing() if on_gpu else None
    if missing:
        print(f"not run: {', '.join(on_gpu)} ({missing})")
    elif on_gpu:
        effort = gpu.effort(args.seconds, args.quick)
        gpu_context = GpuContext(
            effort,
            args.quick,
            gpu.describe(args.quick),
            rows=args.rows,
            recipes=args.recipe,
            profile=args.profile,
        )
        described["gpu"] = gpu_context.gpu.to_dict()
        start_table(gpu_context.gpu.lines(), args.markdown)
        for name in progress(on_gpu):
            made = list(shown(for_gpu[name](gpu_context), args.markdown))
            on_gpu_rows += made
            if args.save:
                results.save(described["gpu"], made, args.command)
    rows = on_cpu_rows + on_gpu_rows
    if args.json:
        record = {**described, "rows": [row.to_dict() for row in rows]}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    short = [row for row in rows if row.target and row.target.verdict(row.value) == "SHORT"]
    return 1 if args.check and short else 0


def progress(names: list[str]) -> Iterator[str]:
    """The names, and on a terminal, or in a log, which of them runs and how long the rest may take.

    The guess is that what follows takes as long each as what was done.
    """
    started = time.monotonic()
    for done, name in enumerate(names):
        spent = time.monotonic() - started
        left = f", about {spent / done * (len(names) - done) / 60:.0f} min left" if done else ""
        print(f"[{done + 1}/{len(names)}] {name}{left}", file=sys.stderr, flush=True)
        yield name


def start_table(machine_lines: list[str], as_markdown: bool) -> None:
    print("\n".join(machine_lines), end="\n\n")
    print(markdown_header() if as_markdown else line(HEADERS), flush=True)


def shown(rows: Iterator[Row], as_markdown: bool) -> Iterator[Row]:
    """The same rows, each printed as it comes."""
    show = markdown if as_markdown else line
    for row in rows:
        print(show(row.cells()), flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main())
