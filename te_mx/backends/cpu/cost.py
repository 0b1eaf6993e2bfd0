"""What a linear layer costs on CPUs (dispatch/cost.py). Fitted to the rows "linear fwd+bwd" of
benchmarks/results, on two threads; the steps are those of its "tiny, grad". What quantizing costs
includes packing and fresh memory, which is why it is far below the quantizer's rate."""

from te_mx.dispatch.cost import Costs, register_costs

register_costs(
    "amx_bf16",
    Costs(
        bf16_rate=1815e9, rate=3400e9, quantize_rate=8.7e9, bf16_step=18e-6, step=51e-6, threads=2
    ),
)
register_costs(
    "avx512_bf16",
    Costs(
        bf16_rate=159.5e9, rate=163e9, quantize_rate=8.7e9, bf16_step=18e-6, step=51e-6, threads=2
    ),
)
