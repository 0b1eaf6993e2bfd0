"""The ways of the adaptive GEMM of Hopper that a table may choose between: the blocks of D that it
computes ("tile 64x128"), or the parts that it cuts K into ("parts 4"). Without a table both follow
cost models (csrc/sm90/gemm/gemm_choice.cpp)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from te_mx.backends.cpu import binding as cpu


class Way(NamedTuple):
    """tile: a configuration of the native GEMM, -1 where it chooses. full: it has GELU, aux and
    bias gradients too. parts: of K, 0 where the cost model chooses."""

    tile: int = -1
    full: bool = True
    parts: int = 0


@lru_cache(maxsize=1)
def _tiles() -> dict[str, Way]:
    native = cpu.native()
    if native is None:
        return {}
    found = native.sm90_gemm_tiles()
    names = (tile["name"].partition(",")[0] for tile in found)
    return {
        f"tile {name}": Way(i, bool(tile["full"]), 1)
        for i, (name, tile) in enumerate(zip(names, found, strict=True))
    }


def configurations(k: int, split_k: bool) -> tuple[str, ...]:
    """All of them for products over k, those in parts where K may be cut."""
    native = cpu.native()
    if native is None:
        return ()
    most = min(native.SM90_MOST_PARTS, -(-k // native.SM90_STEP_K)) if split_k else 1
    return (*_tiles(), *(f"parts {parts}" for parts in range(2, most + 1)))


@lru_cache(maxsize=64)
def way_of(configuration: str) -> Way:
    """What a configuration says; "" leaves everything to the cost models."""
    if not configuration:
        return Way()
    word, _, number = configuration.partition(" ")
    return Way(parts=int(number)) if word == "parts" else _tiles()[configuration]
