"""Floating-point operations of the GEMM ops, for torch.utils.flop_counter.FlopCounterMode: 2 m n k,
as it counts those of torch. Groups count all rows, whichever belong to one: shapes say no more."""

from typing import Any

from torch.utils.flop_counter import register_flop_formula

from te_mx._ops.gemm import GEMM, GEMM_OUT
from te_mx._ops.grouped_gemm import GEMM_K, GEMM_ROWS
from te_mx._ops.moe import MOE_GEMM


@register_flop_formula([GEMM.overloadpacket, GEMM_OUT.overloadpacket])
def _gemm(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    (m, k), n = args[4:6], args[10]  # as in the schema: codes, scales, packed, spec, rows, k
    return 2 * m * n * k


@register_flop_formula(GEMM_ROWS.overloadpacket)
def _gemm_rows(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    rows, k, n = args[3], args[4], args[10]
    return 2 * rows * n * k


@register_flop_formula(MOE_GEMM.overloadpacket)
def _moe_gemm(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    k, (routed, n) = args[4], args[19]
    return 2 * routed * n * k


@register_flop_formula(GEMM_K.overloadpacket)
def _gemm_k(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    m, n, k = args[3], args[7], args[8]
    return 2 * m * n * k
