"""Tiles of products, a table a target, and into how many parts k is cut.

On sm_90 they were timed; elsewhere they fit shared memory (tests/backends/triton/targets.py)."""

from functools import lru_cache
from typing import NamedTuple

import torch

from te_mx.backends.triton.binding import cdiv, is_interpreted


class Tile(NamedTuple):
    """Rows, columns and k of a tile, warps, and stages of the loop over k."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """What kernels and Triton ask."""
        return {
            "BM": self.m, "BN": self.n, "BK": self.k, "num_warps": self.warps,
            "num_stages": self.stages,
        }  # fmt: skip


# By (MX, few rows).
_TIMED = {
    (True, True): Tile(16, 64, 128, 4, 4), (True, False): Tile(128, 128, 64, 4, 3),
    (False, True): Tile(64, 64, 128, 4, 4), (False, False): Tile(64, 128, 128, 4, 4),
}  # fmt: skip
# Matrix cores of AMD have waves of 64, and less memory beside them.
_AMD = {
    (True, True): Tile(16, 64, 128, 4, 2), (True, False): Tile(128, 128, 128, 8, 2),
    (False, True): Tile(32, 64, 128, 4, 2), (False, False): Tile(64, 128, 128, 4, 2),
}  # fmt: skip
TILES = {
    "sm_80": _TIMED,
    "sm_89": _TIMED | {(True, False): Tile(128, 128, 64, 8, 3)},
    "sm_90": _TIMED,
    # Tensor cores that take block scales take 128 rows.
    "sm_100": _TIMED | {
        (True, True): Tile(128, 64, 128, 4, 4), (True, False): Tile(128, 128, 128, 4, 4),
        (False, False): Tile(128, 128, 128, 8, 4),
    },
    "sm_120": _TIMED | {
        (True, False): Tile(128, 128, 128, 8, 2), (False, False): Tile(64, 128, 128, 4, 3)
    },
    "gfx942": _AMD | {(True, False): Tile(128, 128, 64, 8, 2)},
    "gfx950": _AMD,
    "gfx1250": _AMD,
}  # fmt: skip
# Of blockwise FP8 whose tiles the memory finds itself, and programs a multiprocessor.
BY_TMA = {"sm_90": (Tile(64, 128, 128, 4, 4), 2)}
# Of MX formats that are multiplied in bf16, where larger tiles leave half of a GPU idle.
_MIDDLE = dict.fromkeys(("sm_80", "sm_89", "sm_90"), Tile(64, 64, 64, 4, 4))
FEW_ROWS = 32  # up to which a product has tiles of few
_MOST_PARTS, _LEAST_STEPS = 16, 4  # of k, and steps of a part
_INTERPRETED = 8  # multiprocessors of none


def kind(capability: tuple[int, int]) -> str:
    """The target of TILES whose shared memory and tensor cores a GPU of NVIDIA has."""
    major, minor = capability
    if major == 8:
        return "sm_80" if minor in (0, 7) else "sm_89"
    return "sm_90" if major == 9 else "sm_100" if major in (10, 11) else "sm_120"


def target(index: int) -> tuple[str, int]:
    """The target of a GPU, and its multiprocessors; something, where there is none to ask."""
    if is_interpreted() or not torch.cuda.is_available():
        return "sm_90", _INTERPRETED
    return _target(index)


@lru_cache(maxsize=64)
def _target(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        name = kind(torch.cuda.get_device_capability(index))
    else:
        arch = properties.gcnArchName
        name = "gfx1250" if "gfx125" in arch else "gfx950" if "gfx95" in arch else "gfx942"
    return name, int(properties.multi_processor_count)


def tile(index: int, mx: bool, m: int, n: int) -> Tile:
    """The tile of a product [m, n] on a GPU."""
    kind, processors = target(index)
    one = TILES[kind][mx, m <= FEW_ROWS]
    if mx and m > FEW_ROWS and 2 * cdiv(m, one.m) * cdiv(n, one.n) <= processors:
        return _MIDDLE.get(kind, one)
    return one


def parts(index: int, mx: bool, m: int, n: int, k: int) -> int:
    """Into how many parts k is cut, where tiles leave more than half of a GPU idle: by sizes and
    the GPU alone, so that sums have one order."""
    one = tile(index, mx, m, n)
    idle = target(index)[1] // (cdiv(m, one.m) * cdiv(n, one.n))
    most = min(idle, cdiv(k, one.k) // _LEAST_STEPS, _MOST_PARTS)
    each = cdiv(cdiv(k, one.k), max(most, 1))
    return cdiv(cdiv(k, one.k), each)
