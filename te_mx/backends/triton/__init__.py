"""The Triton backend: every CUDA or HIP GPU that has no native one.

Triton is imported when the first kernel runs: `kernels/` needs it, nothing else does."""
