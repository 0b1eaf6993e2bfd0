"""What a linear layer costs, forward and backward, in bf16 and quantized: a model with a few
constants, which each backend gives for its GEMM kernels as they were measured.

    time = max(host, step + GEMMs + bytes(x, w, g) / quantize_rate)        (bf16: without the bytes)
    GEMM = ceil(tiles / units) * units * 2 * tile^2 * k / rate             (so the last wave counts)

The three GEMMs are [M, K] x [K, N], [M, N] x [N, K] and [N, M] x [M, K].
tests/dispatch/test_cost.py holds it to the rows of benchmarks/results."""

from typing import NamedTuple

# Bytes that quantizing an element both ways reads and writes: bf16, two codes, two scales for 32.
BYTES = 2 + 2 + 2 / 32


class Costs(NamedTuple):
    """Constants of a kernel on one kind of device.

    bf16_rate, rate: FLOP/s of GEMMs that fill the device. quantize_rate: bytes/s of all that is
    done to an operand before its GEMM. tile, units: a GEMM is cut into squares of this many rows,
    so many at a time; units 0 where the last wave is of no account. bf16_step, step: seconds of a
    step whatever its size, on the device. bf16_host, host: seconds that the host takes, beside a
    device that works by itself; 0 where both are one. threads: that the rates were measured with;
    0 where they do not depend on threads."""

    bf16_rate: float
    rate: float
    quantize_rate: float
    tile: int = 128
    units: int = 0
    bf16_step: float = 0.0
    step: float = 0.0
    bf16_host: float = 0.0
    host: float = 0.0
    threads: int = 0


class Prediction(NamedTuple):
    """Seconds of a forward and backward pass of a linear layer."""

    bf16: float
    quantized: float

    @property
    def ratio(self) -> float:
        """How many times faster the quantized layer is than bf16."""
        return self.bf16 / self.quantized


_costs: dict[str, Costs] = {}


def register_costs(kernel: str, costs: Costs) -> None:
    """Give the constants of the GEMM kernel of this name."""
    if kernel in _costs:
        raise ValueError(f"the kernel {kernel!r} has costs already")
    _costs[kernel] = costs


def costs_of(kernel: str) -> Costs | None:
    """The constants of a GEMM kernel; None where nothing was measured."""
    return _costs.get(kernel)


def predict(costs: Costs, tokens: int, n: int, k: int, threads: int = 0) -> Prediction:
    """The times of a linear layer from k to n features on so many tokens.

    threads: that there are now. Rates are taken to grow with them, which flatters both sides alike.
    """
    scale = threads / costs.threads if costs.threads and threads else 1.0
    gemms = sum(
        _work(costs, rows, cols, depth)
        for rows, cols, depth in ((tokens, n, k), (tokens, k, n), (n, k, tokens))
    )
    moved = BYTES * (tokens * k + n * k + tokens * n) / costs.quantize_rate
    bf16 = costs.bf16_step + gemms / costs.bf16_rate / scale
    quantized = costs.step + (gemms / costs.rate + moved) / scale
    return Prediction(max(costs.bf16_host, bf16), max(costs.host, quantized))


def _work(costs: Costs, m: int, n: int, k: int) -> int:
    """The FLOPs of a product [m, n] over k, with those that idle units might have done."""
    if not costs.units:
        return 2 * m * n * k
    tiles = -(-m // costs.tile) * -(-n // costs.tile)
    waves = -(-tiles // costs.units)
    return 2 * waves * costs.units * costs.tile**2 * k
