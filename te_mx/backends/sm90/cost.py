"""What a linear layer costs on Hopper GPUs, for te_mx/dispatch/cost.py. Fitted to the rows "linear
fwd+bwd" and "graph fwd+bwd" of benchmarks/results, H200 and H100 together: times of large layers
within 5 %, of the small one within 8. Host times are those of its H200 row; hosts differ by a half.
"""

from te_mx.dispatch.cost import Costs, register_costs

register_costs(
    "sm90_adaptive",
    Costs(
        bf16_rate=685e12,
        rate=1300e12,
        quantize_rate=3.2e12,
        tile=128,
        units=132,
        bf16_step=14e-6,
        step=18e-6,
        bf16_host=0.190e-3,
        host=0.280e-3,
    ),
)
