"""What the tables of measured choices call a device: a CPU by its level, a GPU by its name."""

import re
from functools import lru_cache

import torch

from te_mx.dispatch.problem import Place, level_name
from te_mx.dispatch.tuned.tables import register_device_names


def _gpu(place: Place) -> str:
    # Problems may be asked about on machines without the GPU: nothing was measured there.
    there = place.index < torch.cuda.device_count()
    return short_name(_full_name(place.index)) if there else ""


def capability() -> tuple[int, int]:
    """(major, minor) of the current GPU."""
    return torch.cuda.get_device_capability()


@lru_cache(maxsize=64)
def _full_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def short_name(name: str) -> str:
    """ "NVIDIA H200" is h200, "NVIDIA H100 80GB HBM3" is h100_80gb_hbm3."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "_".join(word for word in words if word != "nvidia")


register_device_names("cpu", lambda p: "" if p.level < 0 else f"cpu_{level_name(p)}")
register_device_names("cuda", _gpu)
