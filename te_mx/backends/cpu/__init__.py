"""The CPU backend: kernels over the native module te_mx._native, chosen by the instruction-set
level of the machine."""
