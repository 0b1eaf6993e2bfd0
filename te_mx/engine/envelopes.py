"""Which kernel runs a GEMM: a table of kernels in order of preference, each with the problems it
takes.

Choosing is cheap: a dict look-up keyed by what the table looks at. `declines` gives the reasons
that `explain` prints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from te_mx.backends import cpu, sm90

STREAM_MAX_ROWS = 16
REFERENCE, ZERO_SIZE = "reference", "zero_size"


class Problem(NamedTuple):
    """What the choice depends on: D[n, m] = b[n, k] @ a[m, k]^T."""

    device: str  # torch.device.type
    isa: int  # cpu.isa() on the CPU, -1 elsewhere
    n: int
    m: int
    k: int
    precision: str = "adaptive"
    gpu: int = -1  # index of the CUDA device


class Kernel(NamedTuple):
    name: str
    device: str
    declines: Callable[
        [Problem], str | None
    ]  # the reason, or None when the kernel takes the problem


def _panel(name: str, level: str) -> Kernel:
    """A kernel that packs both operands: any shape, any order."""
    return Kernel(name, "cpu", lambda problem: _cpu(problem) or _level(name, level, problem))


def _stream(name: str, level: str) -> Kernel:
    """A kernel for few rows of b; it reads rows of a, turned first where the codes lie by k."""

    def declines(problem: Problem) -> str | None:
        reason = _cpu(problem) or _level(name, level, problem)
        if reason is None and problem.n > STREAM_MAX_ROWS:
            reason = f"takes at most {STREAM_MAX_ROWS} rows of B, this has {problem.n}"
        return reason

    return Kernel(name, "cpu", declines)


def _cpu(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"runs on the CPU, the operands are on {problem.device}"
    return None if problem.isa >= 0 else "needs the native module"


def _hopper(name: str, precision: str) -> Kernel:
    """A Hopper kernel: any shape, any order, one precision."""

    def declines(problem: Problem) -> str | None:
        if problem.device != "cuda":
            return f"runs on CUDA, the operands are on {problem.device}"
        reason = sm90.problem(problem.gpu)
        if reason is None and problem.precision != precision:
            reason = f"is for precision {precision!r}, this asks for {problem.precision!r}"
        return reason

    return Kernel(name, "cuda", declines)


def _level(name: str, level: str, problem: Problem) -> str | None:
    if cpu.kernel_available(name):
        return None
    if cpu.ISA_LEVELS.index(level) <= problem.isa:
        return "is not in this build of te_mx"
    return f"needs the CPU level {level}, this process runs at {cpu.ISA_LEVELS[problem.isa]}"


# NOTE: a stream kernel stands before the panel kernel of its level: for few rows the codes (1.03
# bytes an element) are the cheapest thing to read, cheaper than a packed weight.
KERNELS: tuple[Kernel, ...] = (
    _stream("amx_stream", "amx"),
    _panel("amx_bf16", "amx"),
    _stream("avx512_bf16_stream", "avx512_bf16"),
    _panel("avx512_bf16", "avx512_bf16"),
    _stream("avx512_stream", "avx512"),
    _panel("avx512_f32", "avx512"),
    _stream("avx2_stream", "avx2"),
    _panel("avx2_f32", "avx2"),
    _stream("portable_stream", "portable"),
    _panel("portable_f32", "portable"),
    _hopper(sm90.ADAPTIVE, "adaptive"),
    _hopper(sm90.EXACT, "exact"),
)

_chosen: dict[tuple[str, int, bool], str] = {}
_chosen_gpu: dict[tuple[int, str], str] = {}


def problem(
    device: torch.device | str, n: int, m: int, k: int, precision: str = "adaptive"
) -> Problem:
    """The problem at the level in use now."""
    device = torch.device(device)
    kind, index = device.type, device.index
    if kind == "cuda" and index is None:
        index = torch.cuda.current_device()
    isa = cpu.isa() if kind == "cpu" else -1
    return Problem(kind, isa, n, m, k, precision, -1 if index is None else index)


def select(device: str, n: int, m: int, k: int) -> str:
    """Name of the kernel for a problem: the first of the table that takes it, else "reference"."""
    if n == 0 or m == 0 or k == 0:
        return ZERO_SIZE
    isa = cpu.isa() if device == "cpu" else -1
    key = (device, isa, n <= STREAM_MAX_ROWS)
    name = _chosen.get(key)
    if name is None:
        name = choose(Problem(device, isa, n, m, k))[0]
        _chosen[key] = name
    return name


def select_gpu(index: int, n: int, m: int, k: int, precision: str) -> str:
    """As `select`, on a CUDA device."""
    if n == 0 or m == 0 or k == 0:
        return ZERO_SIZE
    key = (index, precision)
    name = _chosen_gpu.get(key)
    if name is None:
        name = choose(Problem("cuda", -1, n, m, k, precision, index))[0]
        _chosen_gpu[key] = name
    return name


def select_for(problem: Problem) -> str:
    """Name of the kernel of a problem on any device."""
    _, _, n, m, k, precision, gpu = problem
    if problem.device == "cuda":
        return select_gpu(gpu, n, m, k, precision)
    return select(problem.device, n, m, k)


def choose(problem: Problem) -> tuple[str, list[tuple[str, str]]]:
    """(kernel, [(declined kernel, why), ...]): the kernels before the chosen one in the table."""
    declined: list[tuple[str, str]] = []
    for kernel in KERNELS:
        reason = kernel.declines(problem)
        if reason is None:
            return kernel.name, declined
        declined.append((kernel.name, reason))
    return REFERENCE, declined


def panel_kernel(device: str) -> str:
    """The kernel that operands are packed for on a device: the one that large problems run on."""
    return select(device, STREAM_MAX_ROWS + 1, 1, 1)


def packing_kernel(device: torch.device) -> str:
    """The kernel of a device that gains from operands packed before: "" without one."""
    if device.type == "cpu":
        return panel_kernel("cpu")
    return sm90.ADAPTIVE if device.type == "cuda" else ""
