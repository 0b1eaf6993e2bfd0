"""What every benchmark gets: the machine, the effort, and the sizes to measure."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.machine import Machine
from benchmarks.row import NOT_SLOWER, Target
from benchmarks.timing import Effort

MAX_SETS = 8


@dataclass(frozen=True)
class Sizes:
    """How long to measure, and on how much data."""

    effort: Effort
    quick: bool

    def pick(self, full: list, quick: list) -> list:
        return quick if self.quick else full

    def sets(self, nbytes: int) -> int:
        """How many copies of the data to rotate through, to defeat caches: 256 MB, at most 8."""
        return 2 if self.quick else max(2, min(MAX_SETS, (256 << 20) // max(nbytes, 1)))


@dataclass(frozen=True)
class Context(Sizes):
    """On the CPU."""

    machine: Machine

    def compute(self, flops: float, seconds: float) -> tuple[str, float]:
        """(rate, percent of the measured multiply peak)."""
        gflops = flops / seconds / 1e9
        return f"{gflops:,.0f} GFLOP/s", 100 * gflops / self.machine.peak_gflops

    def bandwidth(self, nbytes: float, seconds: float, limit: float) -> tuple[str, float]:
        """(rate, percent of a measured bandwidth in GB/s)."""
        gbs = nbytes / seconds / 1e9
        return f"{gbs:.1f} GB/s", 100 * gbs / limit

    def against_bf16(self, must: float, aim: float) -> Target | None:
        """The target against a bf16 layer: asked for where the CPU has AMX."""
        return Target(must, aim) if self.machine.amx else None

    def against_dequantize(self) -> Target | None:
        """Without AMX the bar is dequantize + F.linear."""
        return None if self.machine.amx else NOT_SLOWER


def randn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers whose rows differ in scale by up to 2^8, as rows of real data do."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    spread = torch.exp2(torch.randint(-4, 5, (shape[0], 1), generator=generator).float())
    return (x * spread).to(dtype)
