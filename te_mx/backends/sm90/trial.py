"""Kernels that are compiled, and tested on stand-ins, but have not run on a GPU in the form that
they have here. None of them runs unless it is asked for."""

from __future__ import annotations

import os

VARIABLE = "TE_MX_TRIAL_KERNELS"


def why_not() -> str | None:
    """Why a kernel on trial does not run, None where it may."""
    if os.environ.get(VARIABLE) == "1":
        return None
    return f"has not run on a GPU in this form; {VARIABLE}=1 in the environment takes it"
