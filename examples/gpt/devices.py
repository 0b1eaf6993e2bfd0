"""What --device may be."""

import torch


def wrong(name: str) -> str | None:
    """What is wrong with a device, or None."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return f"--device must be cpu, cuda, cuda:1, ..., got {name}"
    if device.type not in ("cpu", "cuda"):
        return f"--device must be cpu or cuda, got {name}"
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return f"--device {name}: torch finds {torch.cuda.device_count()} CUDA devices here"
    return None
