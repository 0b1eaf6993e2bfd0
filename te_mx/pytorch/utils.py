"""Functions of ``transformer_engine.pytorch.utils`` that scripts import."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from te_mx.backends.device_names import capability
from te_mx.pytorch.absent import reader
from te_mx.runtime.arguments import check_number, check_size

__all__ = ["get_device_compute_capability", "init_method_normal", "scaled_init_method_normal"]

__getattr__ = reader(__name__)


def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of the current GPU.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "get_device_compute_capability: there is no GPU; te_mx runs on CPUs too, ask "
            "te_mx.pytorch.is_mxfp8_available() what can run"
        )
    return capability()


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """An `init_method`: normal numbers of mean 0 and standard deviation `sigma`.

    Raises:
        TypeError, ValueError: sigma is no number of 0 or more.
    """
    return _normal(check_number("init_method_normal: sigma", sigma, 0))


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[Tensor], Tensor]:
    """An `init_method`: normal numbers of standard deviation ``sigma / sqrt(2 num_layers)``, for
    the layers that a residual stream adds up.

    Raises:
        TypeError, ValueError: sigma is no number of 0 or more, num_layers no int of 1 or more.
    """
    owner = "scaled_init_method_normal"
    layers = check_size(f"{owner}: num_layers", num_layers, 1)
    return _normal(check_number(f"{owner}: sigma", sigma, 0) / math.sqrt(2.0 * layers))


def _normal(deviation: float) -> Callable[[Tensor], Tensor]:
    def init(tensor: Tensor) -> Tensor:
        return nn.init.normal_(tensor, 0.0, deviation)

    return init
