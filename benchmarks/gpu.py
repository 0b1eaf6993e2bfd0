"""What the CUDA benchmarks get: the GPU, its limits, clocks for work that runs later."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

import torch
from torch import Tensor

import te_mx
from benchmarks.context import Sizes
from benchmarks.timing import WALL, Call, Clock, Effort, interleaved
from te_mx.backends.sm90 import binding

FP8_TFLOPS = 1979  # H100 and H200 SXM by their data sheet: dense FP8 on tensor cores
DEVICE = torch.device("cuda", 0)


def missing() -> str | None:
    """Why the CUDA benchmarks do not run here; None when they do."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU, torch sees no CUDA device"
    return binding.problem(DEVICE.index)


@dataclass(frozen=True)
class Gpu:
    name: str
    torch: str
    cuda: str
    te_mx: str
    date: str
    copy_gbs: float  # bytes read and written a second by a large device copy

    def lines(self) -> list[str]:
        return [
            f"{self.date}  {self.name}: torch {self.torch}, CUDA {self.cuda}, te_mx {self.te_mx}",
            f"measured limit: device copy {self.copy_gbs:,.0f} GB/s (read + write); "
            f"data sheet: FP8 {FP8_TFLOPS:,} TFLOP/s",
        ]

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class GpuContext(Sizes):
    """On a GPU. Tests give the CPU as device, to run the same code without one."""

    gpu: Gpu
    device: torch.device = DEVICE
    rows: tuple[str, ...] = ()  # of the whole models; all if none are named
    recipes: tuple[str, ...] = ()  # that these run under, by name; the default if none are named
    profile: bool = False  # also print which kernels a step of theirs spends its time in

    @property
    def clock(self) -> Clock:
        return clock_of(self.device)

    @property
    def host_clock(self) -> Clock:
        """Time until the calls return, on a device that had nothing to do."""
        return Clock(_host_seconds) if self.device.type == "cuda" else WALL

    def compute(self, flops: float, seconds: float) -> tuple[str, float]:
        """(rate, percent of the FP8 peak)."""
        tflops = flops / seconds / 1e12
        return f"{tflops:,.0f} TFLOP/s", 100 * tflops / FP8_TFLOPS

    def bandwidth(self, nbytes: float, seconds: float) -> tuple[str, float]:
        """(rate, percent of a large device copy)."""
        gbs = nbytes / seconds / 1e9
        return f"{gbs:,.0f} GB/s", 100 * gbs / self.gpu.copy_gbs

    def randn(self, *shape: int, seed: int, kind: str = "gaussian") -> Tensor:
        """bf16 normal numbers; see KINDS for what else."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(shape, generator=generator, device=self.device)
        return KINDS[kind](x, generator).bfloat16()


def effort(seconds: float | None, quick: bool) -> Effort:
    """For a GPU, where a round takes little time and a call is short."""
    if quick:
        return Effort.quick()
    return Effort(seconds=seconds or 2.0, min_rounds=7, max_rounds=60, min_batch_ms=8.0)


def describe(quick: bool) -> Gpu:
    """Measure the limits of the GPU."""
    size = 1 << (20 if quick else 30)
    source = torch.ones(size // 2, dtype=torch.bfloat16, device=DEVICE)
    target = torch.zeros_like(source)
    times = interleaved(
        {"copy": lambda i: target.copy_(source)}, effort(1.0, quick), clock=clock_of(DEVICE)
    )
    return Gpu(
        name=torch.cuda.get_device_name(DEVICE),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        te_mx=te_mx.__version__,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        copy_gbs=2 * size / times.best("copy") / 1e9,
    )


# ------------------------------------------------------------------------------------------- clocks
def clock_of(device: torch.device) -> Clock:
    """CUDA events on a GPU. Two calls lead in, because the first one waits for its launch."""
    return Clock(_device_seconds, lead_in=2) if device.type == "cuda" else WALL


def _device_seconds(work: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _host_seconds(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --------------------------------------------------------------------------------------------- data
def _random_powers(shape: tuple[int, ...], low: int, high: int, g: torch.Generator) -> Tensor:
    return torch.exp2(torch.randint(low, high + 1, shape, generator=g, device=g.device).float())


def _rows(x: Tensor, g: torch.Generator) -> Tensor:
    return x * _random_powers((x.shape[0], 1), -5, 5, g)


def _outliers(x: Tensor, g: torch.Generator) -> Tensor:
    chosen = torch.rand(x.shape[1], generator=g, device=g.device) < 0.01
    return torch.where(chosen, x * 100, x)


def _spread(x: Tensor, g: torch.Generator) -> Tensor:
    powers = _random_powers((x.shape[0], -(-x.shape[1] // 32)), -15, 15, g)
    return x * powers.repeat_interleave(32, 1)[:, : x.shape[1]]


KINDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "gaussian": lambda x, g: x,
    "row scales 2^10": _rows,  # a power of two for every row, over 2^10
    "outliers": _outliers,  # 1 % of the columns times 100
    "spread": _spread,  # a power of two for every block of 32, over 2^30
}


def warm_up(call: Call, count: int) -> None:
    """Calls on a stream of their own, as what is captured next wants them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(count):
            call(i)
    torch.cuda.current_stream().wait_stream(side)


def captured(call: Call, sets: int, device: torch.device, each: int = 1) -> Call:
    """The calls 0 to sets - 1 as CUDA graphs of `each`, one after the other; themselves without a
    GPU. Operands and results live as long as the graphs: a capture unmaps what is free."""
    if device.type != "cuda":
        return call
    warm_up(call, sets)
    graphs, held = [], []
    for first in range(0, max(sets, each), each):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            held.append([call((first + i) % sets) for i in range(each)])
    return lambda i, held=(call, held): graphs[i % len(graphs)].replay()
