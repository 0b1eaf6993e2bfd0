"""One product on a device, held against fp64 and timed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import te_mx

# m, n, k, the format of the weight. The last result takes 4 MiB: on CPUs such lie in memory that is
# used again (runtime/cpu_memory.py).
GEMMS = (
    (4, 384, 1024, "mxfp8_e4m3"), (256, 384, 1024, "mxfp8_e4m3"), (4, 384, 1024, "mxfp4"),
    (256, 384, 1024, "mxfp4"), (1024, 1024, 64, "mxfp8_e4m3"),
)  # fmt: skip
# Of the norm of the result. FP8 tensor cores keep 13 bits of their sums (docs/numerics.md).
_MOST = {"cpu": 1e-5, "cuda": 5e-3}
_TIMES = 20


@dataclass(frozen=True)
class Checked:
    """What ran, how far it is off, and how long it took."""

    sizes: str
    kernel: str
    error: float
    most: float
    us: float

    @property
    def right(self) -> bool:
        """Whether the result is what the codes stand for, NaN being wrong."""
        return self.error <= self.most

    def __str__(self) -> str:
        off = f"off by {self.error:.1e} of the norm, at most {self.most:.0e}"
        return f"{self.sizes} on {self.kernel}: {off}; {self.us:.0f} us a call"


def checked(device: torch.device, m: int, n: int, k: int, w: str) -> Checked:
    """The product of m rows in MXFP8 with a weight [n, k] in format w."""
    generator = torch.Generator().manual_seed(m)
    x, weight = (torch.randn(rows, k, generator=generator).to(device) for rows in (m, n))
    b, a = te_mx.quantize(x), te_mx.quantize(weight, fmt=w)
    lhs, rhs = b.operand("rowwise"), a.operand("rowwise")
    assert lhs is not None and rhs is not None
    expected = lhs.values(torch.float64) @ rhs.values(torch.float64).T
    got = te_mx.gemm(A=a, B=b, out_dtype=torch.float32).out
    error = ((got.double() - expected).norm() / expected.norm()).item()
    kernel = te_mx.explain(a, b).kernel
    took = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        te_mx.gemm(A=a, B=b, out_dtype=torch.float32)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    sizes = f"[{m}, {k}] mxfp8_e4m3 x [{n}, {k}] {w}"
    return Checked(sizes, kernel, error, _MOST[device.type], 1e6 * sorted(took)[_TIMES // 2])
