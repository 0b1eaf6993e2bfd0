"""The Hopper backend: kernels over the native module te_mx._sm90 (csrc/sm90)."""
