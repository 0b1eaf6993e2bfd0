"""The quantizer: against a memcpy of as many bytes, and against torchao's eager one."""

import importlib.util
import logging
from collections.abc import Iterator

import torch

import te_mx
from benchmarks.context import Context, randn
from benchmarks.row import Row, Target
from benchmarks.timing import interleaved

SIZE = (4096, 4096)


def quantize(context: Context) -> Iterator[Row]:
    for rows, cols in context.pick([SIZE], [(64, 96)]):
        yield from _against_memcpy(context, rows, cols)
        yield from _against_torchao(context, rows, cols)


def _against_memcpy(context: Context, rows: int, cols: int) -> Iterator[Row]:
    sets = context.sets(2 * rows * cols)
    xs = [randn((rows, cols), i) for i in range(sets)]
    both = te_mx.quantize(xs[0], rowwise=True, columnwise=True)
    moved = xs[0].nbytes + both.nbytes  # read once, written once
    source = torch.zeros(moved // 2, dtype=torch.uint8)  # a copy reads and writes its size
    target = torch.zeros_like(source)
    times = interleaved(
        {
            "ours": lambda i: te_mx.quantize(xs[i % sets], rowwise=True, columnwise=True),
            "memcpy": lambda i: target.copy_(source),
        },
        context.effort,
    )
    seconds = times.seconds("ours")
    rate, of_peak = context.bandwidth(moved, seconds, context.machine.copy_gbs)
    yield Row(
        "quantize both", f"{rows} {cols}", context.machine.level, seconds * 1e6, rate, of_peak,
        "memcpy of as many bytes", times.ratio("memcpy", "ours"),
        Target(0.6, 0.9) if context.machine.amx else None,
    )  # fmt: skip


def _against_torchao(context: Context, rows: int, cols: int) -> Iterator[Row]:
    if importlib.util.find_spec("torchao") is None:
        print("not run: quantize against torchao (torchao is not installed: pip install torchao)")
        return
    logging.disable(logging.WARNING)  # its import reports missing CUDA extensions and deprecations
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    logging.disable(logging.NOTSET)
    sets = context.sets(2 * rows * cols)
    xs = [randn((rows, cols), i) for i in range(sets)]

    def torchao(i: int) -> object:
        return to_mx(xs[i % sets], torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)

    times = interleaved(
        {"ours": lambda i: te_mx.quantize(xs[i % sets]), "torchao": torchao}, context.effort
    )
    seconds = times.seconds("ours")
    moved = xs[0].nbytes + te_mx.quantize(xs[0]).nbytes
    rate, of_peak = context.bandwidth(moved, seconds, context.machine.copy_gbs)
    yield Row(
        "quantize row", f"{rows} {cols}", context.machine.level, seconds * 1e6, rate, of_peak,
        "torchao eager to_mx", times.ratio("torchao", "ours"),
        Target(10, 50) if context.machine.amx else None,
    )  # fmt: skip
