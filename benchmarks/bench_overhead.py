"""Fixed costs: a tiny layer, the import, and scratch memory, cached or allocated."""

import statistics
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import nn

import te_mx
from benchmarks.context import Context, randn
from benchmarks.row import Row, Target
from benchmarks.timing import Call, interleaved
from te_mx import _ops as ops

TINY_ROWS, TINY_FEATURES = 8, 64
IMPORT = "import time, torch; t = time.perf_counter(); import te_mx; print(time.perf_counter() - t)"


def overhead(context: Context) -> Iterator[Row]:
    """Forward of a 64 x 64 layer on 8 rows: time added to nn.Linear, without and with autograd."""
    plain = nn.Linear(TINY_FEATURES, TINY_FEATURES, dtype=torch.bfloat16)
    ours = te_mx.Linear(TINY_FEATURES, TINY_FEATURES, dtype=torch.bfloat16)
    x = randn((TINY_ROWS, TINY_FEATURES), 0)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), te_mx.autocast():
            times = interleaved(
                {"ours": lambda i: ours(x), "plain": lambda i: plain(x)}, context.effort
            )
        added = times.difference("ours", "plain") * 1e6
        yield Row(
            "tiny, grad" if grad else "tiny, no_grad",
            f"{TINY_ROWS} {TINY_FEATURES} {TINY_FEATURES}",
            te_mx.audit(ours)["(root)"].fprop, times.seconds("ours") * 1e6, "", None,
            "added to nn.Linear bf16", added, Target(40, 15, "us", lower_is_better=True),
        )  # fmt: skip


def import_time(context: Context) -> Iterator[Row]:
    """`import te_mx` in a fresh process that has imported torch."""
    runs = 1 if context.quick else 9
    command = [sys.executable, "-c", IMPORT]
    seconds = statistics.median(
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(runs)
    )
    target = Target(0.3, 0.1, "s", lower_is_better=True)
    yield Row("import", "", "", seconds * 1e6, "", None, "after import torch", seconds, target)


def workspace(context: Context) -> Iterator[Row]:
    """A GEMM that packs into scratch memory: the cached buffer against a new one for every call."""
    device = torch.device("cpu")
    for size in context.pick([256, 1024, 2048], [64]):
        # Plain operands: an MXTensor would keep its packed form and need no scratch from then on.
        sides = [te_mx.quantize(randn((size, size), seed)).operand("rowwise") for seed in (0, 1)]

        def call(i: int, sides: list = sides) -> object:
            return ops.gemm_2d(*sides, out_dtype=torch.bfloat16).out

        def plain(i: int, call: Call = call) -> object:
            te_mx.workspace.reset(device)
            return call(i)

        times = interleaved({"ours": call, "plain": plain}, context.effort)
        seconds = times.seconds("ours")
        rate, of_peak = context.compute(2 * size**3, seconds)
        yield Row(
            "workspace", f"{size} {size} {size}", te_mx.explain(m=size, n=size, k=size).kernel,
            seconds * 1e6, rate, of_peak, "allocation per call", times.ratio("plain", "ours"),
        )  # fmt: skip
