"""What a result was measured on, and the limits that it is held against."""

import platform
import socket
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

import te_mx
from benchmarks.timing import Effort, interleaved
from te_mx.backends.cpu import binding as cpu


@dataclass(frozen=True)
class Machine:
    name: str
    cpu: str
    level: str  # te_mx's instruction-set level
    threads: int
    torch: str
    te_mx: str
    date: str
    copy_gbs: float  # bytes read and written a second by a large memcpy
    read_gbs: float  # bytes read a second by a large sum
    peak_gflops: float  # of the level's fastest multiply instruction, operands in registers

    @property
    def amx(self) -> bool:
        return self.level == "amx"

    def lines(self) -> list[str]:
        return [
            f"{self.date}  {self.name}: {self.cpu}, level {self.level}, {self.threads} threads, "
            f"torch {self.torch}, te_mx {self.te_mx}",
            f"measured limits: multiply {self.peak_gflops:,.0f} GFLOP/s, "
            f"memcpy {self.copy_gbs:.1f} GB/s (read + write), read {self.read_gbs:.1f} GB/s",
        ]

    def to_dict(self) -> dict:
        return asdict(self)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    fields = {}
    for line in info.read_text().split("\n\n")[0].splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return (
        f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')})"
    )


def describe(quick: bool) -> Machine:
    """Measure the limits of this machine. Raises RuntimeError without the native module."""
    level, native = cpu.isa(), cpu.native()
    if native is None:
        raise RuntimeError(f"nothing to measure: {cpu.missing_reason()}")
    effort = Effort.quick() if quick else Effort(seconds=3)
    size = 1 << (20 if quick else 28)  # 256 MB lies behind every cache worth fearing
    source = torch.ones(size // 4, dtype=torch.float32)
    target = torch.zeros_like(source)
    times = interleaved(
        {"copy": lambda i: target.copy_(source), "read": lambda i: source.sum()}, effort
    )
    return Machine(
        name=socket.gethostname(),
        cpu=cpu_name(),
        level=cpu.ISA_LEVELS[level],
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        te_mx=te_mx.__version__,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        copy_gbs=2 * size / times.best("copy") / 1e9,
        read_gbs=size / times.best("read") / 1e9,
        peak_gflops=native.peak_gflops(torch.get_num_threads()),
    )
