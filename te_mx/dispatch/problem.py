"""What a choice of kernel may depend on, and nothing else."""

from collections.abc import Callable
from typing import NamedTuple

import torch

STREAM_ROWS = 16  # M up to which decode kernels take a problem
FEW_ROWS = 1 << 9  # M up to which kernels that unpack weights in their main loop take one
FROZEN_ROWS = 64  # and up to which most of those of weights that stand still do
GROUP_ROWS = 8  # or so many for each group
MANY_ROWS = 1 << 14  # and M up to which some are (frozen_rows)
MOST = (1 << 31) - 257  # of any size that GPU kernels count
INVARIANT = "invariant"  # the precision under which a row has the same bits beside any others
NOT_ASKED = "another backend is what "  # how kernels decline that TE_MX_BACKEND leaves out
ENCODED = "fp8"  # and that under which NVFP4 is encoded anew in MXFP8, which rounds


def whole_vectors(k: int) -> bool:
    """Whether rows of k codes of 4 bits are whole 16 bytes."""
    return -k % 32 < 2


class Place(NamedTuple):
    """Where a problem runs: torch.device.type, the index of a GPU (-1 elsewhere) and the CPU's
    instruction-set level (-1 elsewhere)."""

    device: str
    index: int = -1  # type: ignore[assignment]  # tuple.index is of no use here
    level: int = -1


def frozen_rows(groups: int, many: bool = False) -> int:
    """The most rows for which kernels of weights that stand still are asked; 0 groups: of one
    weight. many: rows are not quantized, or the layout of the weight has kernels for any number."""
    return max(MANY_ROWS if many else FEW_ROWS, GROUP_ROWS * groups)


_places: dict[tuple[str, int | None, int], Place] = {}
_levels: dict[str, Callable[[], int]] = {}
_level_names: dict[str, tuple[str, ...]] = {}
_missing: dict[str, Callable[[], str | None]] = {}


def register_level(
    device: str, level: Callable[[], int], names: tuple[str, ...],
    missing: Callable[[], str | None],
) -> None:  # fmt: skip
    """Let a backend say at which level its device runs now, what levels are called, and why nothing
    native runs there, if so."""
    _levels[device], _level_names[device], _missing[device] = level, names, missing


def why_missing(place: Place) -> str | None:
    """Why nothing native runs at a place; None where something may."""
    missing = _missing.get(place.device)
    return None if missing is None else missing()


def level_name(place: Place) -> str:
    """What the level of a place is called."""
    return _level_names[place.device][place.level]


def place_of(device: torch.device) -> Place:
    """Where tensors of a device are computed with, at the level in use now."""
    kind = device.type
    level = _levels.get(kind)
    key = (kind, device.index, -1 if level is None else level())
    place = _places.get(key)
    if place is None:
        index = device.index
        if kind == "cuda" and index is None:
            index = torch.cuda.current_device()
        place = Place(kind, -1 if index is None or kind == "cpu" else index, key[2])
        if not (kind == "cuda" and device.index is None):  # which may be another one later
            _places[key] = place
    return place


class Problem(NamedTuple):
    """One call of an op.

    Args:
        op: the op's name.
        place: where it runs.
        lhs, rhs: specs ("<format>@<layout>") of the operands of a GEMM; of what a quantizer makes,
            rowwise and columnwise; empty where there is none.
        m, n, k: D[m, n] = lhs[m, k] @ rhs[n, k]^T. Of other ops: m rows, n columns.
        groups: of a grouped problem; 0 otherwise.
        precision: "adaptive" or "exact": how GPUs without block-scaled tensor cores multiply;
            "invariant": so that a row of D depends on its row of lhs and on rhs alone; "fp8":
            NVFP4 is encoded anew in MXFP8.
        ends: where the ends of groups are known: "host", "device", or "" without groups.
        dtype: of what is quantized, or of the result.
        spread: the alignment spread of precision "adaptive".
        rule: how scales are chosen, of a quantizer.
        grad: of a whole linear layer, the spec of output gradients.
        split_k: whether k may be cut into parts.
        top_k: of a mixture of experts, how many a token is sent to; 0 otherwise.
    """

    op: str
    place: Place
    lhs: str = ""
    rhs: str = ""
    m: int = 1
    n: int = 1
    k: int = 1
    groups: int = 0
    precision: str = "adaptive"
    ends: str = ""
    dtype: torch.dtype = torch.float32
    spread: int = 8
    rule: str = "rceil"
    grad: str = ""
    split_k: bool = False
    top_k: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.m == 0 or self.n == 0 or self.k == 0
