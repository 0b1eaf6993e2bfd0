"""The CPU backend: kernels over te_mx._native, chosen by the machine's instruction-set level."""
