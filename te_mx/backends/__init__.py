"""Backends: a folder a device, a file a kernel or two. Importing this package registers them all,
in every process, whatever the machine: whether a kernel runs is what its envelope says.
"""

from te_mx.backends import device_names as _device_names
from te_mx.backends.cpu import ISA_LEVELS
from te_mx.backends.cpu import cost as _cpu_cost
from te_mx.backends.cpu import frozen as _cpu_frozen
from te_mx.backends.cpu import fused as _cpu_fused
from te_mx.backends.cpu import gemm as _cpu_gemm
from te_mx.backends.cpu import grouped as _cpu_grouped
from te_mx.backends.cpu import isa as _isa
from te_mx.backends.cpu import linear as _cpu_linear
from te_mx.backends.cpu import missing_reason as _missing_reason
from te_mx.backends.cpu import moe as _cpu_moe
from te_mx.backends.cpu import quantize as _cpu_quantize
from te_mx.backends.reference import fused as _fused
from te_mx.backends.reference import gemm as _gemm
from te_mx.backends.reference import grouped as _grouped
from te_mx.backends.reference import moe as _moe
from te_mx.backends.reference import moe_align as _moe_align
from te_mx.backends.reference import quantize as _quantize
from te_mx.backends.sm90 import blockwise as _sm90_blockwise
from te_mx.backends.sm90 import codes as _sm90_codes
from te_mx.backends.sm90 import cost as _sm90_cost
from te_mx.backends.sm90 import decode as _sm90_decode
from te_mx.backends.sm90 import experts as _sm90_experts
from te_mx.backends.sm90 import fused as _sm90_fused
from te_mx.backends.sm90 import gemm as _sm90_gemm
from te_mx.backends.sm90 import grouped as _sm90_grouped
from te_mx.backends.sm90 import grouped_apart as _sm90_grouped_apart
from te_mx.backends.sm90 import grouped_blockwise as _sm90_grouped_blockwise
from te_mx.backends.sm90 import grouped_fused as _sm90_grouped_fused
from te_mx.backends.sm90 import grouped_tokens as _sm90_grouped_tokens
from te_mx.backends.sm90 import layer as _sm90_layer
from te_mx.backends.sm90 import linear as _sm90_linear
from te_mx.backends.sm90 import moe as _sm90_moe
from te_mx.backends.sm90 import quantize as _sm90_quantize
from te_mx.backends.sm90 import rest as _sm90_rest
from te_mx.dispatch.problem import register_level

register_level("cpu", _isa, ISA_LEVELS, _missing_reason)

KERNEL_FILES = (
    _cpu_frozen, _cpu_fused, _cpu_gemm, _cpu_grouped, _cpu_linear, _cpu_moe, _cpu_quantize,
    _fused, _gemm, _grouped, _moe, _moe_align, _quantize,
    _sm90_blockwise, _sm90_codes, _sm90_decode, _sm90_experts, _sm90_fused, _sm90_gemm,
    _sm90_grouped, _sm90_grouped_apart, _sm90_grouped_blockwise, _sm90_grouped_fused,
    _sm90_grouped_tokens, _sm90_layer, _sm90_linear, _sm90_moe, _sm90_quantize, _sm90_rest,
)  # fmt: skip
COST_FILES = _cpu_cost, _sm90_cost
NAME_FILES = (_device_names,)
