"""Measures the table of docs/numerics.md: what aligning scales costs, beside what MX itself costs.

usage: python tests/gpu/alignment_errors.py

Errors are relative and over the whole result: |D - R| / |R| in the Frobenius norm, R the fp64
product of the MX values; "MX itself" compares R with the fp64 product of what was quantized.
"""

from __future__ import annotations

import sm90_bounds as bounds
import torch

import te_mx
from te_mx.backends.sm90.layouts import tiles as sm90_tiles

M, N, K = 2048, 2048, 4096
KINDS = (*bounds.KINDS, "rows", "spread")
SPREADS = (8, 6, 4, 2, 0)
COLUMNS = (
    "data",
    "MX itself",
    "bf16 out",
    "exact",
    *(f"adaptive, S = {spread}" for spread in SPREADS),
    "moved, S = 8",
    "tiles of A and B, S = 8",
    "S = 4",
)


def error(got: torch.Tensor, want: torch.Tensor) -> str:
    return f"{((got.double() - want).norm() / want.norm()).item():.1e}"


def shares(sides, spread: int) -> str:
    """Percent of the tiles: shared, row-shared, spread."""
    packs = [bounds.packed(side, spread) for side in sides]
    found = torch.cat([sm90_tiles.classes(packed).flatten() for packed in packs]).int()
    counts = torch.bincount(found, minlength=4).double() / found.numel() * 100
    return " / ".join(f"{share:.0f}" for share in (counts[0], counts[1], counts[2] + counts[3]))


def row(kind: str) -> list[str]:
    a, b = bounds.pair(kind, M, N, K)
    A, B = te_mx.quantize(a), te_mx.quantize(b)
    sides = A.operand("rowwise"), B.operand("rowwise")
    va, vb = map(bounds.mx_values, sides)
    mx = vb @ va.t()
    aligned_a, aligned_b = (bounds.aligned_values(side, 8) for side in sides)

    def run(**options) -> str:
        return error(te_mx.gemm(A, B, out_dtype=torch.float32, **options).out, mx)

    return [
        kind,
        error(mx, b.double() @ a.double().t()),
        error(mx.to(torch.bfloat16), mx),
        run(precision="exact"),
        *(run(alignment_spread=spread) for spread in SPREADS),
        error(aligned_b @ aligned_a.t(), mx),
        shares(sides, 8),
        shares(sides, 4),
    ]


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, m {M}, n {N}, k {K}, E4M3 both, fp32 out")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for kind in KINDS:
        print("| " + " | ".join(row(kind)) + " |", flush=True)


if __name__ == "__main__":
    main()
