"""Peak memory of this process or its GPU. A process trains one model, so the peak is its own."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

MB = 1e6


def _status_mb(field: str) -> float | None:
    """A field of /proc/self/status in MB. Linux starts ru_maxrss at the parent's size."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / MB
    return None


def peak_mb(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / MB
    measured = _status_mb("VmHWM")
    if measured is not None:
        return measured
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MB


def resident_mb() -> float:
    """What this process holds now; its peak where the system does not say."""
    measured = _status_mb("VmRSS")
    return peak_mb("cpu") if measured is None else measured


def saved_for_backward_mb(forward: Callable[[], Tensor], model: nn.Module) -> float:
    """What one forward pass keeps for the backward pass: each storage once, without parameters; on
    several ranks what this one keeps, with what it gathered."""

    def address_of(tensor: Tensor) -> int:
        return _here(tensor).untyped_storage().data_ptr()

    known = {address_of(p) for p in model.parameters()}
    kept: dict[
        int, Tensor
    ] = {}  # holds the tensors: a freed address could come back as another tensor's

    def pack(tensor: Tensor) -> Tensor:
        address = address_of(tensor)
        if address not in known:
            kept[address] = _here(tensor).detach()
        # An output that is saved as it is holds the node that saves it, for good.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    del loss
    return sum(t.untyped_storage().nbytes() for t in kept.values()) / MB


def _here(tensor: Tensor) -> Tensor:
    """The part of a tensor that is spread over ranks which this one has."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()
