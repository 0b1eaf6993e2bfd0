"""A weight that compiled code looks for when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Operand


class Sought(NamedTuple):
    """In the place of a rowwise operand of a weight: `times` (x, bias, gelu, dtype) is the product,
    with GELU ("tanh" or "erf") inside unless that is "". There are no gradients."""

    times: Callable[[Operand, Tensor | None, str, torch.dtype], Tensor]
