"""The Hopper backend: kernels over the native module te_mx._sm90 (csrc/sm90)."""

from te_mx.backends.sm90 import layouts

__all__ = ["layouts"]
