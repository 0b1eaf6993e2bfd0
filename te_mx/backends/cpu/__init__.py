"""The CPU backend: kernels over the native module te_mx._native, chosen by the instruction-set
level of the machine."""

from te_mx.backends.cpu.binding import (
    ISA_LEVELS,
    KERNELS,
    WIDE_SPREAD,
    available_isa,
    isa,
    kernel_available,
    missing_reason,
    native,
    set_isa,
)

__all__ = [
    "ISA_LEVELS",
    "KERNELS",
    "WIDE_SPREAD",
    "available_isa",
    "isa",
    "kernel_available",
    "missing_reason",
    "native",
    "set_isa",
]
