"""Random operands of native GEMM kernels, and calls of a kernel by name.

Operands are random codes and scale bytes, not quantized numbers, so every combination that a file
could hold occurs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import oracles
import torch
from hypothesis import strategies as st
from native_words import GemmCall, Operand, house
from torch import Tensor

from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import grouped as cpu_grouped
from te_mx.dispatch.calls import Epilogue
from te_mx.runtime import workspace

LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 0x7}  # finite codes
SIGN = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 0x8}
FORMATS = st.sampled_from(list(LARGEST))
LEVEL_KERNELS = {
    "portable": ("wide_f64", "portable_f32", "portable_stream"),
    "avx2": ("avx2_f32", "avx2_stream"),
    "avx512": ("avx512_f32", "avx512_stream"),
    "avx512_bf16": ("avx512_bf16", "avx512_bf16_stream"),
    "amx": ("amx_bf16", "amx_stream"),
    "amx_emulated": ("amx_bf16", "amx_stream"),
}
AVAILABLE = cpu.available_isa()
KERNELS = [(level, kernel) for level in AVAILABLE for kernel in LEVEL_KERNELS[level]]
PANELS = [pair for pair in KERNELS if "stream" not in pair[1] and pair[1] != "wide_f64"]
ORDERS = st.sampled_from(["k_last", "k_first"])
# Tile edges (16, 32), cache blocks of the emulated tiles (64 rows, 96 k), a line (64), primes.
K_SIZES = st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 95, 97, 127, 129, 200, 257, 521])
N_SIZES = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 65, 97, 101, 130])
M_SIZES = st.sampled_from([1, 2, 3, 4, 5, 8, 13, 16, 17, 31, 32, 33, 65, 97])
STREAM_M = st.integers(1, 16)


def at_level(level: str, name: str):
    before = cpu.ISA_LEVELS[cpu.isa()]
    cpu.set_isa(level)
    yield name
    cpu.set_isa(before)


class Side(NamedTuple):
    """Codes [rows, k], one a byte, and scales [rows, ceil(k/32)] with the format, before an order
    is chosen."""

    codes: np.ndarray
    scales: np.ndarray
    fmt: str

    def values(self) -> np.ndarray:
        return oracles.values(self.codes, self.scales, self.fmt)

    def operand(self, order: str = "k_last") -> Operand:
        codes, scales = torch.from_numpy(self.codes), torch.from_numpy(self.scales)
        if order == "k_first":
            codes, scales = codes.t().contiguous(), scales.t().contiguous()
        elif self.fmt == "e2m1":
            codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return Operand(codes, scales, self.fmt, order, None, self.codes.shape[1])


def random_side(
    rng: np.random.Generator, rows: int, k: int, fmt: str, low: int = 112, high: int = 142
) -> Side:
    """Finite codes, scale bytes in [low, high); an eighth of the blocks is +-0 with byte 0."""
    codes = rng.integers(0, LARGEST[fmt] + 1, (rows, k)) | rng.choice([0, SIGN[fmt]], (rows, k))
    scales = rng.integers(low, high, (rows, -(-k // 32)))
    empty = rng.random(scales.shape) < 0.125
    scales[empty] = 0
    codes[np.repeat(empty, 32, axis=1)[:, :k]] &= SIGN[fmt]
    return Side(codes.astype(np.uint8), scales.astype(np.uint8), fmt)


def packed(operand: Operand, name: str, role: str) -> Operand:
    """The operand with its packed form; as it is when the kernel reads plain codes."""
    nbytes = cpu.packed_bytes(name, role, operand.rows, operand.k, operand.fmt)
    if nbytes == 0:
        return operand
    room = torch.full((nbytes + 128,), 0xA5, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    assert cpu.pack(house(operand), name, role, room[start : start + nbytes])
    assert bool((room[start + nbytes :] == 0xA5).all()), "pack wrote behind packed_bytes"
    return operand._replace(packed=room[start : start + nbytes])


def drawn(data: st.DataObject, kernel: str, a: Any, b: Any) -> tuple[Operand, Operand]:
    """Two sides as operands in any order, packed or not."""
    made = [side.operand(data.draw(ORDERS)) for side in (a, b)]
    for i, role in enumerate("ab"):
        made[i] = packed(made[i], kernel, role) if data.draw(st.booleans()) else made[i]
    return made[0], made[1]


def run_groups(call: cpu_grouped.GroupedGemmCall) -> None:
    nbytes = call.workspace_bytes()
    with workspace.guarded():
        scratch = workspace.acquire(torch.device("cpu"), nbytes)
        assert call.run(scratch, nbytes)
        workspace.release(scratch, nbytes)


def run(
    name: str, a: Operand, b: Operand, out: Tensor | None = None, aux: Tensor | None = None,
    epilogue: Epilogue | None = None, expect: str | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out [n, m], poisoned unless given, and the bias gradient; the workspace is guarded."""
    epilogue = epilogue or Epilogue()
    if out is None:
        out = torch.full((b.rows, a.rows), torch.nan)
    call = GemmCall(name, a, b, epilogue, out, aux)
    nbytes = call.workspace_bytes()
    with workspace.guarded():
        scratch = workspace.acquire(torch.device("cpu"), nbytes)
        ran = call.run(scratch, nbytes)
        workspace.release(scratch, nbytes)
    assert ran == (expect or name)
    return out, call.bias_grad


def shapes(data: st.DataObject, name: str) -> tuple[int, int, int]:
    """m (rows of a), n (rows of b) and k in the kernel's envelope."""
    rows = STREAM_M if "stream" in name else M_SIZES
    return data.draw(N_SIZES), data.draw(rows), data.draw(K_SIZES)
