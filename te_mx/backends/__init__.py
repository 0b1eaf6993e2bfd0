"""Backends: where quantize, dequantize and gemm really run.

`reference` is plain torch and the specification; `cpu` is the native CPU code. Imports go down
only: nothing here imports `te_mx.engine`, `te_mx.ops` or anything above them.
"""
