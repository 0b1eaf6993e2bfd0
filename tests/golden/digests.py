"""Digests of the golden cases, and the files that hold them.

usage: python tests/golden/digests.py            every CPU level that this machine has
       python tests/golden/digests.py cuda       the Hopper kernels

It writes a file a level. Run it before a change that must not change any bit, never after.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import OF_CUBLAS, Case, all_cases  # noqa: E402

from te_mx.backends.cpu import binding as cpu  # noqa: E402

# Not amx_emulated: what is beside its tiles runs at the best level of the machine.
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")


def path_of(level: str) -> Path:
    return HERE / f"{level}.json"


def digest(tensors: list[torch.Tensor | None]) -> str:
    """Of dtypes, shapes and bytes."""
    made = hashlib.sha256()
    for t in tensors:
        if t is None:
            made.update(b"none")
            continue
        made.update(f"{t.dtype} {tuple(t.shape)}".encode())
        flat = t.detach().cpu().contiguous().reshape(-1)
        if t.dtype.is_floating_point:  # which NaN it is means nothing
            flat = torch.where(flat.isnan(), torch.full_like(flat, float("nan")), flat)
        made.update(flat.view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


def cases_of(device: str) -> dict[str, Case]:
    """Those whose bits are te_mx's own on a device."""
    cases = all_cases()
    if device == "cpu":
        return cases
    return {name: run for name, run in cases.items() if OF_CUBLAS not in name}


def digests(device: str) -> dict[str, str]:
    where = torch.device(device)
    return {name: digest(run(where)) for name, run in cases_of(device).items()}


def write(level: str, made: dict[str, str]) -> None:
    path_of(level).write_text(json.dumps(made, indent=0) + "\n")
    print(f"{path_of(level).name}: {len(made)} digests")


def main() -> None:
    if sys.argv[1:] == ["cuda"]:
        write("sm90", digests("cuda"))
        return
    for level in LEVELS:
        if level in cpu.available_isa():
            cpu.set_isa(level)
            write(level, digests("cpu"))


if __name__ == "__main__":
    main()
