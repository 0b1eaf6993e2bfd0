"""Work that meets its kernels for the first time while a CUDA graph is captured.

usage: python tests/gpu/first_use.py CASE     one case, in a process that has run nothing before

Nothing of te_mx has run on the device when the capture begins: no kernel is loaded, no attribute
set, nothing cached. What the graph computes is compared with the same calls outside of a graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import te_mx
from te_mx.recipe import Format, MXFP8BlockScaling

M, K, N = 208, 320, 264
SPLITS = [64, 0, 101, 43]


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def train(make: Callable[[], torch.nn.Module], recipe=None, dtype=torch.bfloat16, **kwargs):
    """Forward and backward of a module, whose parameters get their gradients anew."""
    module = make()
    x = rand(M, K, dtype=dtype).requires_grad_()

    def run() -> list[Tensor]:
        with te_mx.autocast(recipe=recipe):
            y = module(x, **kwargs)
        grads = torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))
        return [y.detach(), *grads]

    return run


def linear(dtype=torch.bfloat16, **kwargs):
    return lambda: te_mx.Linear(K, N, device="cuda", dtype=dtype, **kwargs)


def gemm(fmts=("e4m3", "e4m3"), size=(M, N, K), layout="TN", **kwargs):
    n, m, k = size
    x, w = rand(n, k), rand(m, k)

    def run() -> list[Tensor]:
        a = te_mx.quantize(w, fmt=fmts[0], columnwise=True)
        b = te_mx.quantize(x, fmt=fmts[1], columnwise=True)
        if layout == "NN":
            a = te_mx.quantize(w.t(), fmt=fmts[0], rowwise=False, columnwise=True)
        made = te_mx.gemm(a, b, layout, **kwargs)
        return [part for part in made if part is not None]

    return run


def gelu(backward: bool, size=(M, N, K)):
    n, m, k = size
    x, w, side, bias = rand(n, k), rand(m, k), rand(n, m), rand(m)
    more = (
        {"grad": True, "gelu_in": side, "gelu": "tanh", "bias": True}
        if backward
        else {"gelu": "erf", "bias": bias}
    )

    def run() -> list[Tensor]:
        made = te_mx.gemm(te_mx.quantize(w), te_mx.quantize(x), **more)
        return [part for part in made if part is not None]

    return run


def dequantize():
    x = rand(M, K)
    return lambda: [
        te_mx.quantize(x, columnwise=True).dequantize(torch.bfloat16, usage)
        for usage in ("rowwise", "columnwise")
    ]


def grouped(on_device: bool, stacked: bool, dtype=torch.bfloat16, recipe=None):
    splits = torch.tensor(SPLITS, device="cuda") if on_device else SPLITS

    def make():
        return te_mx.GroupedLinear(
            len(SPLITS), K, N, device="cuda", dtype=dtype, single_grouped_weight=stacked
        )

    return train(make, recipe, dtype, m_splits=splits)


def grouped_wgrad():
    x, g = rand(M, K), rand(M, N)
    offs = torch.tensor([64, 64, 165, 208], device="cuda")
    return lambda: [te_mx.grouped_wgrad(g, x, offs, out_dtype=torch.float32)]


def main_grad():
    module = linear(fuse_wgrad_accumulation=True)()
    module.weight.main_grad = torch.zeros_like(module.weight, dtype=torch.float32)
    x = rand(M, K).requires_grad_()

    def run() -> list[Tensor]:
        module.weight.main_grad.zero_()
        with te_mx.autocast():
            y = module(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), allow_unused=True)
        return [y.detach(), dx, module.weight.main_grad.clone()]

    return run


def frozen(drop: bool):
    module = linear()()
    te_mx.freeze_weights(module, drop_master=drop)
    x = rand(M, K)

    def run() -> list[Tensor]:
        with torch.no_grad(), te_mx.autocast():
            return [module(x)]

    return run


def norm_linear(**kwargs):
    return train(lambda: te_mx.LayerNormLinear(K, N, device="cuda", dtype=torch.bfloat16, **kwargs))


def mlp(**kwargs):
    return train(lambda: te_mx.LayerNormMLP(K, N, device="cuda", dtype=torch.bfloat16, **kwargs))


_R = MXFP8BlockScaling
_F16, _F32 = torch.float16, torch.float32
# One case a kernel family, and one a dtype or form that has instances of its own.
CASES: dict[str, Callable[[], Callable[[], list[Tensor]]]] = {
    "linear_bf16": partial(train, linear()),
    "linear_fp16": partial(train, linear(_F16), dtype=_F16),
    "linear_fp32": partial(train, linear(_F32), dtype=_F32),
    "linear_kept": partial(train, linear(_F16), dtype=_F16, is_first_microbatch=True),
    "linear_kept_later": partial(train, linear(_F16), dtype=_F16, is_first_microbatch=False),
    "linear_hybrid": partial(train, linear(), _R(fp8_format=Format.HYBRID)),
    "linear_exact": partial(train, linear(), _R(precision="exact")),
    "linear_one_copy": partial(train, linear(), _R(one_copy_weights=True)),
    "linear_dequantized": partial(train, linear(), _R(backward_override="dequantized")),
    "linear_split_k": partial(train, linear(), _R(split_k=True)),
    "main_grad": main_grad,
    "frozen": partial(frozen, False),
    "frozen_dropped": partial(frozen, True),
    "gemm": gemm,
    "gemm_nn": partial(gemm, layout="NN"),
    "gemm_e5m2": partial(gemm, ("e4m3", "e5m2"), out_dtype=_F32),
    "gemm_large": partial(gemm, size=(4096, 4096, 256), split_k=False),
    "gemm_larger": partial(gemm, size=(8192, 8192, 256), split_k=False),
    "gemm_small": partial(gemm, size=(16, 128, 256), split_k=False),
    "gemm_split": partial(gemm, size=(64, 256, 8192)),
    "gemm_split_tall": partial(gemm, size=(256, 256, 8192)),
    "gemm_exact": partial(gemm, precision="exact"),
    "gemm_operand_sums": partial(gemm, grad=True, bias=True),
    "gelu": partial(gelu, False),
    "gelu_large": partial(gelu, False, (4096, 4096, 256)),
    "dgelu": partial(gelu, True),
    "dgelu_large": partial(gelu, True, (4096, 4096, 256)),
    "dequantize": dequantize,
    "grouped_list": partial(grouped, False, False),
    "grouped_device": partial(grouped, True, True),
    "grouped_fp32": partial(grouped, True, False, _F32),
    "grouped_one_copy": partial(grouped, True, True, recipe=_R(one_copy_weights=True)),
    "grouped_exact": partial(grouped, True, True, recipe=_R(precision="exact")),
    "grouped_wgrad": grouped_wgrad,
    "layernorm_linear": norm_linear,
    "rmsnorm_linear": partial(norm_linear, normalization="RMSNorm", return_layernorm_output=False),
    "mlp_gelu": mlp,
    "mlp_swiglu": partial(mlp, activation="swiglu", normalization="RMSNorm"),
    "mlp_srelu": partial(mlp, activation="srelu"),
}


def torch_first() -> None:
    """What torch needs before a capture: cuBLAS of this thread and of autograd's."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        torch.autograd.grad((y @ y).sum(), y)


def main(name: str) -> None:
    torch.manual_seed(0)
    torch_first()
    run = CASES[name]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    got = [t.clone() for t in results]
    want = run()
    same = [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
    if not all(same):
        sys.exit(f"{name}: results of the graph differ: {same}")
    print(f"{name}: ok")


if __name__ == "__main__":
    main(sys.argv[1])
