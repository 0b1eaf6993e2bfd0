"""What else multiplies in FP8 on a Hopper GPU, for D[M, N] = lhs[M, K] @ rhs[N, K]^T in bf16.

Only Triton's dot_scaled computes MXFP8 (a scale for every 32 of K on both sides); the others show
what coarser scales allow. Of weights that stand still humming-kernels reads the same codes, with
inputs in bf16 as they are.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import te_mx
from benchmarks.gpu import clock_of
from benchmarks.timing import Call

Pair = tuple[Tensor, Tensor]  # (lhs, rhs)
MXPair = tuple[te_mx.MXTensor, te_mx.MXTensor]
E4M3_MAX = 448.0
# FP8 of these scales is 4 % off the bf16 product; a scale in a wrong place is off by far more.
MAX_ERROR = 0.2
# Weights as humming-kernels names them: pip install humming-kernels, which vLLM prefers on Hopper.
HUMMING = {
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "mxfp8"},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "nvfp4"},
}


def _quantize(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """FP8 codes [rows, k] and fp32 scales [rows, k / block]."""
    blocks = x.float().unflatten(1, (-1, block))
    scale = blocks.abs().amax(2).clamp(min=1e-12) / E4M3_MAX
    return (blocks / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale


def rowwise(plain: list[Pair], quantized: list[MXPair]) -> Call:
    """torch._scaled_mm, one scale a row of each operand, fast accumulation."""
    sides = [tuple(_quantize(x, x.shape[1]) for x in pair) for pair in plain]

    def call(i: int) -> Tensor:
        (lhs, lhs_scale), (rhs, rhs_scale) = sides[i % len(sides)]
        return torch._scaled_mm(
            lhs, rhs.t(), lhs_scale, rhs_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return call


def blockwise(plain: list[Pair], quantized: list[MXPair]) -> Call:
    """torch._scaled_mm, one scale for every 128 of K; scales lie with the rows innermost."""
    sides = []
    for pair in plain:
        codes, scales = zip(*(_quantize(x, 128) for x in pair), strict=True)
        sides.append((*codes, *(scale.t().contiguous() for scale in scales)))

    def call(i: int) -> Tensor:
        lhs, rhs, lhs_scale, rhs_scale = sides[i % len(sides)]
        return torch._scaled_mm(lhs, rhs.t(), lhs_scale.t(), rhs_scale, out_dtype=torch.bfloat16)

    return call


def dot_scaled(plain: list[Pair], quantized: list[MXPair]) -> Call:
    """A Triton kernel around tl.dot_scaled, with the fastest of its configurations."""
    from benchmarks import triton_mxfp8

    def parts(x: te_mx.MXTensor) -> tuple[Tensor, Tensor]:
        operand = x.operand("rowwise")
        assert operand is not None
        return operand.codes, operand.scales

    sides = [(*parts(lhs), *parts(rhs)) for lhs, rhs in quantized]
    clock = clock_of(plain[0][0].device)
    best, seconds = None, float("inf")
    shape = (len(sides[0][0]), len(sides[0][2]), sides[0][0].shape[1])
    for config in triton_mxfp8.CONFIGS:
        if any(size % tile for size, tile in zip(shape, config, strict=False)):
            continue

        def call(i: int, config: triton_mxfp8.Config = config) -> Tensor:
            return triton_mxfp8.gemm(*sides[i % len(sides)], config)

        try:
            call(0)
        except triton_mxfp8.DOES_NOT_FIT:
            continue
        for _ in range(2):
            taken = clock.seconds(lambda call=call: call(1))
            if taken < seconds:
                best, seconds = call, taken
    if best is None:
        raise RuntimeError("no configuration fits these sizes and this GPU")
    return best


def humming(
    fmt: str, rhs: te_mx.MXTensor, rows: Sequence[int], sets: int
) -> Callable[[int, Tensor], Tensor] | None:
    """(i, x [M, K] in bf16) -> x times copy i of a weight [N, K] of HUMMING, by humming-kernels as
    they choose for M, one of `rows`; None where they are not installed or do not take it. Their
    kernels are compiled here, several at a time."""
    if rhs.device.type != "cuda":
        return None
    try:
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        (n, k), row = rhs.shape, rhs.operand("rowwise")
        assert row is not None
        layer = HummingLayer(
            shape_n=n, shape_k=k, weight_config=dict(HUMMING[fmt]), pad_n_to_multiple=128,
            torch_dtype=torch.bfloat16,
        ).to(rhs.device)  # fmt: skip
        given = {"weight": row.codes, "weight_scale": row.scales}
        if row.tensor_scale is not None:
            given["weight_scale_2"] = row.tensor_scale.float()
        for name, value in given.items():
            held = getattr(layer, name)
            held.data = value.view(held.dtype).reshape(held.shape).clone()
        layer.transform()
        ways = get_heuristics_config(layer.humming_config)  # (from, to, configuration)
        chosen = json.dumps([way for way in ways if any(way[0] < m <= way[1] for m in rows)])
        x = torch.ones((rows[0], k), dtype=torch.bfloat16, device=rhs.device)
        expected = rhs.dequantize(torch.float32).sum(1)
        error = float((layer(x, tuning_config=chosen)[0].float() - expected).norm())
    except (ImportError, RuntimeError, ValueError, AssertionError) as failure:
        print(f"not run: humming {fmt} ({str(failure).strip() or type(failure).__name__})")
        return None
    if not error < MAX_ERROR / 20 * float(expected.norm()):
        print(f"not run: humming {fmt} (its result is off by {error:.3g})")
        return None
    copies = [copy.copy(layer) for _ in range(sets)]
    for one in copies:
        one._parameters = {name: value.clone() for name, value in layer._parameters.items()}
    return lambda i, x: copies[i % sets](x, tuning_config=chosen)


PEERS: dict[str, Callable[[list[Pair], list[MXPair]], Call]] = {
    "torch FP8 rowwise scales": rowwise,
    "torch FP8 1x128 scales": blockwise,
    "Triton dot_scaled MXFP8": dot_scaled,
}


def working(plain: list[Pair], quantized: list[MXPair]) -> Iterator[tuple[str, Call]]:
    """The peers that run here and compute the product; a line says why another one does not."""
    expected = plain[0][0].float() @ plain[0][1].float().t()
    for name, make in PEERS.items():
        try:
            call = make(plain, quantized)
            error = float((call(0).float() - expected).norm() / expected.norm())
        except (ImportError, RuntimeError, NotImplementedError, ValueError) as failure:
            print(f"not run: {name} ({str(failure).strip().splitlines()[0]})")
            continue
        if not error < MAX_ERROR:
            print(f"not run: {name} (its result is off by {error:.3g})")
            continue
        yield name, call
