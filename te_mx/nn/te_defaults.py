"""Transformer Engine's defaults, where they are others than te_mx's own."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """Where modules are made that name no device: on the GPU where there is one, as there. A device
    that is torch's default (``with torch.device("meta")``) goes before, but for the CPU."""
    device = torch.get_default_device()
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
