"""Every Hopper kernel under compute-sanitizer, on shapes with tails: memcheck, then racecheck.

usage: python tests/gpu/sanitize.py [tool ...] [part ...]

Each part is a process, and in it each tensor an allocation of its own, so a kernel that leaves one
is seen.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

TOOLS = ("memcheck", "racecheck")
INSIDE = "--inside"
FORMATS = ("e4m3", "e5m2")
# torch.mm alone ends the same way: "The Sanitizer failed to handle a hardware exception".
NOT_RUN = {("racecheck", "exact"): "racecheck does not survive the kernels of cuBLAS"}


def main(words: list[str]) -> int:
    program = shutil.which("compute-sanitizer")
    if program is None:
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
        return 1
    tools = [word for word in words if word not in PARTS] or TOOLS
    parts = [word for word in words if word in PARTS] or PARTS
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status = 0
    for tool, part in itertools.product(tools, parts):
        if (tool, part) in NOT_RUN:
            print(f"{tool} {part}: not run, {NOT_RUN[tool, part]}")
            continue
        started = time.time()
        command = [program, "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=te_mx"]
        command += [sys.executable, __file__, INSIDE, part]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        spent = time.time() - started
        print(f"{tool} {part}: exit status {done.returncode}, {spent:.0f} s", flush=True)
        if done.returncode:
            print(done.stdout + done.stderr, flush=True)
        status |= done.returncode
    return status


def inside(part: str) -> int:
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # what tests share
    import torch

    from te_mx.backends.sm90 import binding

    # Without native kernels the ops would run in plain torch, and nothing be checked.
    reason = binding.problem(0) if torch.cuda.is_available() else "there is no GPU"
    if reason is not None:
        print(f"needs a Hopper GPU and the kernels for it: {reason}")
        return 1
    count = PARTS[part]()
    torch.cuda.synchronize()
    print(f"{count} calls")
    return 0


def quantize() -> int:
    import sm90_calls as calls
    import torch

    from te_mx import _ops as ops

    count = 0
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    shapes = ((130, 200), (33, 71), (256, 128), (1, 1))
    forms = (  # rows, columns
        ("rows", ""), ("", "cols"), ("rows", "cols"), ("", "rows"), ("rows", "rows"),
        ("sm90:8", ""), ("", "sm90:8"), ("sm90:8", "sm90:8"),
    )  # fmt: skip
    for shape, dtype, fmt in itertools.product(shapes, dtypes, FORMATS):
        x = calls.data(*shape, "mixed", dtype)
        for form in forms:
            row, col = (layout and f"mxfp8_{fmt}@{layout}" for layout in form)
            ops.quantize_2d(x, row, col, col_sum=bool(col))
            count += 1
    ops.quantize_2d(x[:, ::2], "mxfp8_e4m3@rows", "mxfp8_e4m3@cols", rule="floor")
    for dtype, cols in itertools.product(dtypes, (200, 71)):
        parts = [calls.data(rows, cols, "mixed", dtype) for rows in (256, 128, 33)]
        ops.quantize_joined_2d(parts, "mxfp8_e4m3@sm90:8", "mxfp8_e4m3@sm90:8")
        count += 1
    return count


def pack_and_dequantize() -> int:
    import sm90_calls as calls
    import torch

    from te_mx import _ops as ops

    count = 0
    for shape, fmt in itertools.product(((130, 200), (33, 71), (256, 128)), FORMATS):
        for kind in ("gaussian", "rows", "spread", "huge", "nan"):
            x = calls.data(*shape, kind, torch.float32)
            for side in ops.quantize_2d(x, f"mxfp8_{fmt}@rows", f"mxfp8_{fmt}@cols")[:2]:
                ops.kept_form(side, "rhs", ops.Mode())
                for dtype in (torch.bfloat16, torch.float32, torch.float16):
                    ops.dequantize_2d(side, dtype)
                count += 4
    return count


def fused() -> int:
    """Steps that end in the quantizer, with every form of what they make."""
    import sm90_calls as calls
    import torch

    from te_mx._ops import fused
    from te_mx.dispatch.fused import Activation, ActStep, Norm, NormStep, Target

    count = 0
    targets = (
        Target("mxfp8_e4m3@sm90:8", "mxfp8_e4m3@sm90:8", "rceil"),
        Target("mxfp8_e5m2@rows", "mxfp8_e5m2@cols", "rceil"),
    )
    shapes = ((130, 200), (33, 71), (256, 384), (300, 2600))  # the last in several bands
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for shape, dtype, target in itertools.product(shapes, dtypes, targets):
        x = calls.data(*shape, "gaussian", dtype)
        weight = torch.ones(shape[1], device="cuda")
        for kind, z in (("LayerNorm", torch.bfloat16), ("RMSNorm", dtype)):
            step = NormStep(x, weight, None, Norm(kind, 1e-5), z, True, target)
            made = fused.norm_quantize_2d(step)
            fused.norm_backward_2d(made.z, x, weight, made.mean, made.rstd, dtype)
            count += 2
        for name, h in (("silu", x), ("swiglu", torch.cat([x, x], 1))):
            act = ActStep(h, None, Activation(name), dtype, True, target)
            fused.act_quantize_2d(act)
            fused.act_quantize_2d(act._replace(grad=x, target=target._replace(col_sum=True)))
            count += 2
    weight = torch.ones(8448, device="cuda")
    for rows, cols in ((16, 2048), (1544, 2304), (72, 4352), (72, 8448)):  # by clusters
        x = calls.data(rows, cols, "gaussian", torch.bfloat16)
        for mean in (None, torch.zeros(rows, device="cuda")):
            rstd = torch.ones(rows, device="cuda")
            fused.norm_backward_2d(x, x, weight[:cols], mean, rstd, torch.bfloat16)
            count += 1
    return count


def gemm(config: int) -> int:
    """One configuration with every class of tiles and every epilogue."""
    import sm90_calls as calls
    import torch

    if config >= calls.native().config_count():
        return 0
    count = 0
    kinds = ("gaussian", "rows", "spread", "mixed", "huge")
    for shape in ((130, 201, 1100), (320, 264, 896)):  # more steps of k than a ring has stages
        m, n, k = shape
        sides = [
            {kind: calls.operand(calls.data(r, k, kind, torch.float32), "e4m3") for kind in kinds}
            for r in (m, n)
        ]
        bias = torch.randn(n, device="cuda")
        pairs = [("gaussian", kind) for kind in kinds] + [(kind, kind) for kind in kinds[1:]]
        pairs += [("rows", "gaussian"), ("spread", "gaussian")]
        for one, two in pairs:
            calls.gemm(sides[0][one], sides[1][two], shape, config=config)
            count += 1
        pair = sides[0]["gaussian"], sides[1]["gaussian"]
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            square = torch.randn(m, n, device="cuda").to(dtype)
            rest = [
                {"bias": bias.to(dtype)},
                {"out": square.clone(), "accumulate": True},
                {"out": torch.empty(m, n + 24, device="cuda", dtype=dtype)[:, :n]},
            ]
            gelu = [
                {"bias_grad": torch.empty_like(bias), "gelu": "tanh", "gelu_in": square},
                {"gelu": "erf", "gelu_in": square},
                {"bias": bias, "gelu": "tanh", "aux": torch.empty_like(square)},
                {"bias": bias, "gelu": "erf", "aux": torch.empty_like(square)},
            ]
            for epilogue in rest + (gelu if calls.native().config_full(config) else []):
                if "out" not in epilogue:
                    epilogue["out_dtype"] = dtype
                calls.gemm(*pair, shape, config=config, **epilogue)
                count += 1
        for formats in itertools.product(FORMATS, ("e4m3",)):
            packed = [
                calls.operand(calls.data(r, k, "gaussian", torch.float32), fmt)
                for r, fmt in zip((m, n), formats, strict=True)
            ]
            calls.gemm(*packed, shape, formats, config=config)
            count += 1
    return count


def split() -> int:
    """K in parts: both kinds of blocks, every class of tiles, every epilogue."""
    import sm90_calls as calls
    import torch

    count = 0
    kinds = ("gaussian", "rows", "spread", "mixed", "huge")
    for shape, parts in (((130, 201, 1100), 3), ((60, 264, 1900), 2), ((300, 75, 896), 7)):
        m, n, k = shape
        sides = [
            {kind: calls.operand(calls.data(r, k, kind, torch.float32), "e4m3") for kind in kinds}
            for r in (m, n)
        ]
        pairs = [(kind, other) for kind in kinds for other in ("gaussian", kind)]
        for one, two in [*pairs, ("gaussian", "rows"), ("gaussian", "spread")]:
            calls.gemm(sides[0][one], sides[1][two], shape, parts=parts)
            count += 1
        pair = sides[0]["gaussian"], sides[1]["gaussian"]
        bias = torch.randn(n, device="cuda")
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            square = torch.randn(m, n, device="cuda").to(dtype)
            sums = torch.empty_like(bias)
            for epilogue in (
                {"out_dtype": dtype, "bias": bias.to(dtype)},
                {"out": square.clone(), "accumulate": True},
                {"out": torch.empty(m, n + 3, device="cuda", dtype=dtype)[:, 1 : n + 1]},
                {"out_dtype": dtype, "bias_grad": sums, "gelu": "tanh", "gelu_in": square},
                {"out_dtype": dtype, "gelu": "erf", "aux": torch.empty_like(square)},
            ):
                calls.gemm(*pair, shape, parts=parts, **epilogue)
                count += 1
    for formats in itertools.product(FORMATS, ("e4m3",)):
        packed = [
            calls.operand(calls.data(r, 512, "gaussian", torch.float32), fmt)
            for r, fmt in zip((130, 70), formats, strict=True)
        ]
        calls.gemm(*packed, (130, 70, 512), formats, parts=2)
        count += 1
    return count


def grouped() -> int:
    """Both kinds of groups in both configurations, and what makes their operands: the tests."""
    import test_sm90_grouped as tests
    import test_sm90_grouped_plain as plain
    import torch

    count = 0
    splits = tests.SPLITS[1], tests.SPLITS[3], tests.SPLITS[6]
    for case, number in itertools.product(splits, range(len(tests.KINDS))):
        for config in (0, 1):
            case_of_kind, capacity = (number, case), number % 2 == 0
            tests.test_products_have_the_bits_of_single_ones(case_of_kind, capacity, config)
            count += 1
        tests.test_quantizer_gives_the_bytes_of_each_group_alone(case, tests.KINDS[number], False)
        count += 1
    for size, kind in itertools.product(((100, 129), (130, 256)), plain.KINDS):
        plain.test_pack_gives_the_bytes_of_each_weight(size, kind, "e4m3")
        plain.test_columns_have_the_bytes_of_two_steps(size, kind)
        count += 2
    for config, accumulate in itertools.product((0, 1), (False, True)):
        plain.test_products_go_where_they_belong(config, torch.bfloat16, (100, 129), accumulate)
        count += 1
    return count


def blockwise() -> int:
    """fp32 scales: quantizers, products and groups, as their tests call them."""
    import test_sm90_blockwise as tests
    import test_sm90_blockwise_grouped as grouped

    count = 0
    for shape, kind in itertools.product(((129, 200), (300, 133)), ("gaussian", "wild")):
        for block in ("1x128", "128x128"):
            tests.test_quantizer_writes_the_bytes_of_the_format(shape, block, kind)
            count += 1
        tests.test_aligned_columns_have_the_bytes_of_the_layout(shape, kind)
        count += 1
    for (block, config), shape in itertools.product(tests.CONFIGS, tests.PRODUCTS[2:4]):
        tests.test_products_of_quantized_matrices(shape, block, config)
        count += 1
    for number, columns in itertools.product((1, 3, 6), grouped.COLUMNS):
        case = number, grouped.SPLITS[number]
        grouped.test_quantizer_gives_the_bytes_of_each_group_alone(case, number == 6, columns)
        for block in ("1x128", "128x128"):
            grouped.test_products_of_rows_have_the_bits_of_single_ones(case, number == 6, block)
        grouped.test_products_of_k_have_the_bits_of_single_ones(case, number == 6, columns)
        count += 4
    return count


def decode() -> int:
    """Few rows times weights as they lie, as their tests call them."""
    import test_sm90_decode as tests
    import torch

    count = 0
    for shape, w_fmt in itertools.product(((17, 130, 100), (5, 257, 1000)), tests.ELEMENTS):
        exact = shape[0] == 5
        for lies in ("rows", "packed"):
            tests.test_products_are_within_the_bound_of_the_contract(shape, exact, lies, w_fmt)
        tests.test_inputs_as_they_are_are_within_the_bound(shape, torch.bfloat16, w_fmt)
        count += 3
    return count


def frozen() -> int:
    """Weights that stand still to tiles and back, as their tests call them."""
    import test_sm90_frozen as tests

    count = 0
    for kind, size in itertools.product(tests.KINDS, ((1, 16), (130, 96), (257, 432))):
        tests.test_the_kernels_write_the_layout_and_read_it(kind, size, 0.3)
        count += 2
    return count


def invariant() -> int:
    """Few rows that have the bits of many, as their test calls them."""
    import test_sm90_invariant as tests
    import torch

    import te_mx

    count = 0
    formats = "mxfp8", "fp8"
    for fmt, (m, n, k) in itertools.product(formats, ((17, 136, 1040), (50, 130, 640))):
        tests.test_few_rows_of_frozen_weights_are_those_of_many(fmt, m, n, k, torch.bfloat16)
        count += 1
    # dealt_kernel; warpgroups of whole_kernel that take turns
    for fmt, (m, n, k) in itertools.product(formats, ((5, 4232, 320), (64, 2304, 640))):
        layer = te_mx.Linear(k, n, params_dtype=torch.bfloat16, device="cuda")
        with te_mx.autocast(recipe=tests.RECIPES[fmt]), torch.no_grad():
            te_mx.freeze_weights(layer, drop_master=True, recipe=tests.RECIPES[fmt])
            layer(torch.randn(m, k, dtype=torch.bfloat16, device="cuda"))
        count += 1
    return count


def moe() -> int:
    """Routed rows, as their tests call them."""
    import test_sm90_moe as tests

    count = 0
    for routing in ("many tokens", "some experts elsewhere", "no power of two"):
        tests.test_lists(routing)
        for fmt, (n, k) in itertools.product(tests.FORMATS, ((40, 96), (130, 2880), (16, 32))):
            tests.test_products(routing, fmt, n, k)
            count += 1
    import test_sm90_moe_tiles as tiles

    tiles.test_lists_of_many_slots(7, 4200, 8)
    for fmt in tests.FORMATS:
        with pytest.MonkeyPatch.context() as patch:
            tiles.test_mixtures(150, 3, 5, 136, 40, "gpt-oss", fmt, patch)
        tiles.test_products(300, 24, 70, fmt)
        count += 2
    tiles.test_packed_experts(160, 48, 20)
    return count + 2


def whole_gemms(precision: str) -> int:
    """Through te_mx.gemm and te_mx.Linear: packing in the call, few tiles with a long k."""
    import torch

    import te_mx

    for m, n, k in ((128, 128, 4096), (16, 200, 2080), (300, 40, 64)):
        a, b = (te_mx.quantize(torch.randn(r, k, device="cuda")) for r in (m, n))
        te_mx.gemm(a, b, precision=precision, gelu="erf", bias=torch.randn(m, device="cuda"))
        te_mx.gemm(a, b, precision=precision, grad=True, bias=True)
    linear = te_mx.Linear(200, 136, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(130, 200, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with te_mx.autocast(recipe=te_mx.recipe.MXFP8BlockScaling(precision=precision)):
        linear(x).sum().backward()
    return 9


def random() -> int:
    """Transforms and random rounding, both directions from one read, as their tests call them."""
    import test_sm90_mxfp4 as tests

    count = 0
    for (row, col, rule), shape in itertools.product(tests.RANDOM, ((129, 257), (77, 1001))):
        for layouts in (("sm90:8", "sm90:8"), ("rows", "cols")):
            with warnings.catch_warnings(record=True) as warned:
                tests.test_random_quantizer_of_every_backend_is_one(
                    shape, row, col, rule, layouts, warned
                )
            count += 1
    return count


def layers() -> int:
    """Steps of whole layers, each one native call each way: tiles whose place is known at run time,
    normalizations and activations that end in every recipe's format."""
    import test_sm90_layer_one_call as tests
    import torch
    from one_call import RECIPES, passes

    count = 0
    trained = ({}, {"fuse_wgrad_accumulation": True})
    for make, recipe, more in itertools.product(tests.LAYERS.values(), RECIPES, trained):
        layer = make(dtype=torch.bfloat16, device="cuda", **more)
        x = torch.randn(67, 320, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        passes(layer, x, recipe)
        count += 1
    return count


PARTS = {
    "quantize": quantize,
    "random": random,
    "layers": layers,
    "pack": pack_and_dequantize,
    "fused": fused,
    **{f"gemm{config}": functools.partial(gemm, config) for config in range(6)},
    "split": split,
    "grouped": grouped,
    "blockwise": blockwise,
    "decode": decode,
    "frozen": frozen,
    "invariant": invariant,
    "moe": moe,
    "adaptive": functools.partial(whole_gemms, "adaptive"),
    "exact": functools.partial(whole_gemms, "exact"),
}

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(inside(arguments[1]) if INSIDE in arguments else main(arguments))
