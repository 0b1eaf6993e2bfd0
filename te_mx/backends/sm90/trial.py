"""Kernels that were measured on a GPU and are slower than what runs in their place on most of what
they take. None of them runs unless it is asked for."""

from __future__ import annotations

import os

VARIABLE = "TE_MX_TRIAL_KERNELS"


def why_not() -> str | None:
    """Why a kernel on trial does not run, None where it may."""
    if os.environ.get(VARIABLE) == "1":
        return None
    return f"is slower on most problems; {VARIABLE}=1 in the environment takes it"
