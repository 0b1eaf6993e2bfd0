"""Layouts: how the bytes of quantized matrices lie in memory. `plain` has those that every device
reads; a backend registers those of its own.

A *spec* is what travels through ops beside codes and scales: "<format>@<layout>", such as
"mxfp8_e4m3@rows". `spec_of` turns one into the objects."""

from te_mx.layouts.base import Layout
from te_mx.layouts.plain import COLS, GROUPED_COLS, ROWS
from te_mx.layouts.registry import Spec, aligning, get, names, register, register_family, spec_of

__all__ = [
    "COLS", "GROUPED_COLS", "ROWS", "Layout", "Spec", "aligning", "get", "names", "register",
    "register_family", "spec_of",
]  # fmt: skip
