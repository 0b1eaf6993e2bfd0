"""torch's own scaled GEMMs, where torch says that they run: cuBLAS behind
torch.nn.functional.scaled_mm."""

from te_mx.backends.vendor.gemm import SWIZZLED
from te_mx.layouts import register

register(SWIZZLED)
