"""What selective activation checkpointing may save of te_mx layers."""

from __future__ import annotations

from torch._ops import OpOverload

from te_mx._ops.gemm import GEMM
from te_mx._ops.grouped_gemm import GEMM_ROWS


def checkpoint_ops() -> list[OpOverload]:
    """The ops of te_mx that are dear to run again: the GEMMs of forward passes, those of groups
    included. For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, alone or beside
    ops of torch::

        context = functools.partial(
            create_selective_checkpoint_contexts, te_mx.checkpoint_ops()
        )
        y = checkpoint(block, x, use_reentrant=False, context_fn=context)

    Backward then quantizes, normalizes and activates again, and multiplies nothing again. What a
    GEMM returns is saved: its result, and inside te_mx.LayerNormMLP what GELU reads.
    """
    return [GEMM, GEMM_ROWS]
