"""What is known of sizes in code that is traced for more than one."""

from __future__ import annotations

from typing import Any

import torch


def surely(condition: Any) -> bool:
    """A condition on sizes; in code that is traced or exported, whether it holds for every size
    that the trace is for. Asking does not narrow these down, as `if` does."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    # Sympy comes with it: not before somebody compiles.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)
