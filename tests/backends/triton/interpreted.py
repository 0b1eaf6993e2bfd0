"""What test_triton.py and compiled.py run in processes of their own: the kernels in Triton's
interpreter, on CPU tensors, in place of native code. usage: python interpreted.py <case>"""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path

import torch

sys.path.append(str(Path(sys.prefix, "aside_triton")))

import te_mx
from te_mx.backends.sm90.layouts.nvfp4 import SM90_VALUES
from te_mx.backends.triton import gemm as _gemm  # noqa: F401  (kernels are registered)
from te_mx.conformance import cases
from te_mx.dispatch.calls import (
    Epilogue,
    GroupedK,
    GroupedRows,
    Groups,
    Mode,
    Product,
    Quantize,
    QuantizeGroups,
    QuantizeWeights,
)
from te_mx.dispatch.kernels import Kernel, kernels
from te_mx.dispatch.moe import Align, RoutedGemm, Routing
from te_mx.dispatch.problem import Place, Problem
from te_mx.dispatch.run import reference
from te_mx.formats import get

E = Epilogue
CPU, SEED = torch.device("cpu"), torch.tensor([-0x123456789ABCDEF])


def triton_of(op: str) -> Kernel:
    return next(one for one in kernels(op) if one.name == "triton")


def test_products():
    for shape, epilogues in (((33, 40, 161), slice(None)), ((19, 40, 1152), slice(2, 4))):
        products_of(*shape, epilogues)
    for off in cases.products(CPU):
        assert off.right and off.kernel == "triton", off


def products_of(m, n, k, some):
    """Every epilogue; k in parts where it is long."""
    torch.manual_seed(0)
    x, w = torch.randn(m, k), torch.randn(n, k)
    side, bias = torch.randn(m, n), torch.randn(n)
    epilogues = (
        E(bias, "tanh"), E(None, "erf"), E(None, "tanh", side, "result"), E(accumulate=True),
        E(None, "erf", side, "operand"), E(bias, accumulate=True, bias_grad="result"),
    )[some]  # fmt: skip
    for a, b in (
        ("mxfp8_e4m3@cols", "mxfp8_e5m2@rows"), ("mxfp4@cols", "mxfp8_e4m3@cols"),
        ("fp8_e4m3_1x128@cols", "fp8_e5m2_128x128@cols"),
        ("fp8_e4m3fnuz_1x128@rows", "fp8_e4m3fnuz_128x128@rows"), ("mxfp4@rows", "mxfp4@cols"),
    ):  # fmt: skip
        sides = []
        for spec, one in ((a, x), (b, w)):
            rule = get(spec.split("@")[0]).scaling.rules[0]
            sides.append(reference("quantize").run(Quantize(one, spec, "", rule)).row)
        problem = Problem("gemm", Place("cpu"), sides[0].spec, sides[1].spec, m, n, k)
        assert (triton_of("gemm").parts(problem) > 1) == (k > 1000)
        for epilogue, dtype in itertools.product(epilogues, (torch.float32, torch.bfloat16)):
            results = []
            for kernel in (triton_of("gemm"), reference("gemm")):
                out = side.to(dtype).clone()
                with_aux = epilogue.gelu and epilogue.gelu_in is None
                aux = torch.empty(m, n, dtype=dtype) if with_aux else None
                ran = kernel.run(Product(*sides, epilogue, out, aux, Mode(split_k=True)))
                results.append((out, aux, ran.bias_grad))
            for mine, other in zip(*results, strict=True):
                assert (mine is None) == (other is None)
                if mine is not None:
                    error = (mine.double() - other.double()).norm() / other.double().norm()
                    assert error < (2e-6 if mine.dtype == torch.float32 else 4e-3), (a, b, epilogue)


def test_routed():
    """Rows that lists route, listed and not, some of no expert, and what stays as it was."""
    torch.manual_seed(0)
    tokens, top_k, experts, n, k = 9, 2, 3, 40, 96
    topk = torch.randint(-1, experts, (tokens * top_k,), dtype=torch.int32)
    for i, (a, b) in enumerate((
        ("mxfp8_e4m3", "mxfp4"), ("fp8_e4m3_1x128", "fp8_e4m3_128x128"), ("nvfp4_rows", "nvfp4"),
    )):  # fmt: skip
        rules = [get(one).scaling.rules[0] for one in (a, b)]
        w = QuantizeWeights(torch.randn(experts, n, k), f"{b}@rows", "", rules[1])
        stack = reference("quantize_weights").run(w)[0]
        for block_m, a_div in ((0, 1), (4, 2), (40, 1)):
            rows = tokens * top_k // a_div
            x = torch.randn(rows, k)
            lhs = reference("quantize").run(Quantize(x, f"{a}@rows", "", rules[0])).row
            if block_m:
                local = torch.tensor([2, -1, 0], dtype=torch.int32) if i else None
                asked = Align(topk, block_m, experts, local)
                lists = triton_of("moe_align").run(asked)
                for mine, other in zip(lists, reference("moe_align").run(asked), strict=True):
                    assert torch.equal(mine, other) and mine.dtype == other.dtype
            else:
                lists = None, topk, torch.tensor([len(topk)], dtype=torch.int32)
            routing = Routing(*lists, max(block_m, 1), a_div, top_k)
            bias = torch.randn(experts, n) if block_m else None
            weights = torch.rand(len(topk)) if i else None
            both = []
            for kernel in (triton_of("moe_gemm"), reference("moe_gemm")):
                out = torch.full((len(topk), n), 7.0)
                kernel.run(RoutedGemm(lhs, stack, routing, bias, weights, out, Mode()))
                both.append(out)
            assert torch.allclose(*both, rtol=1e-5, atol=1e-5), (a, b, block_m)
            none = topk < 0
            assert torch.equal(both[0][none], torch.full_like(both[0][none], 7.0))


def test_groups():
    """Groups whose ends lie on the device against the loop over them, with an empty group, and rows
    of none."""
    torch.manual_seed(0)
    n, k = 72, 96
    for fmt, weights, across in (
        ("mxfp8_e4m3", "mxfp8_e4m3", ""), ("mxfp4", "mxfp4", "+rht32:0x9abcdef1"),
        ("fp8_e4m3_1x128", "fp8_e4m3_128x128", ""), ("nvfp4", "nvfp4", "+rht16:0x1234abcd"),
    ):  # fmt: skip
        rule, quantizer = get(fmt).scaling.rules[0], triton_of("quantize_grouped")
        drawn = "+sr" if across else ""
        for groups in (
            Groups(torch.tensor([40, 40, 190])),
            Groups(torch.tensor([40, 64, 190]), 64),
        ):
            rows = 200
            x, g = torch.randn(rows, k), torch.randn(rows, n)
            asked = [
                QuantizeGroups(
                    one, groups, f"{fmt}@rows", f"{fmt}{across}@grouped_cols", rule + kind, True,
                    SEED if kind else None,
                )
                for one, kind in ((x, ""), (g, drawn))
            ]  # fmt: skip
            made = [quantizer.run(one) for one in asked]
            for mine, one in zip(made, asked, strict=True):
                other = reference("quantize_grouped").run(one)
                for side, part in itertools.product(("row", "col"), (0, 1, -1)):
                    a, b = (getattr(parts, side)[part] for parts in (mine, other))
                    assert (a is None and b is None) or torch.equal(a, b), (fmt, side, part)
                assert torch.allclose(mine.col_sum, other.col_sum, atol=1e-4)
            w = QuantizeWeights(torch.randn(3, n, k), f"{weights}@rows", f"{weights}@cols", rule)
            stacks = reference("quantize_weights").run(w)
            bias = torch.randn(3, n)
            pairs = [(made[0].row, stacks[0]), (made[1].row, stacks[1])]
            sides = [(made[1].col, made[0].col)]
            if fmt == "nvfp4":  # as Hopper's quantizers write what is multiplied at once
                rows_of, cols_of = (f"{{}}@{one.name}" for one in SM90_VALUES)
                given = [
                    reference("quantize_grouped").run(one._replace(
                        row=rows_of.format(fmt), col=cols_of.format(fmt + across), col_sum=False
                    ))
                    for one in asked
                ]  # fmt: skip
                held = reference("quantize_weights").run(
                    w._replace(row=rows_of.format(weights), col=cols_of.format(weights))
                )
                pairs += [(given[0].row, held[0]), (given[1].row, held[1])]
                sides += [(given[1].col, made[0].col), (given[1].col, given[0].col)]
            for tokens, stack in pairs:
                both = []
                for kernel in (triton_of("gemm_rows"), reference("gemm_rows")):
                    out = torch.full((rows, stack.rows), 7.0)
                    more = bias if stack.rows == n else None
                    kernel.run(GroupedRows(tokens, stack, groups, more, out, Mode()))
                    both.append(out)
                assert torch.allclose(*both, rtol=1e-5, atol=1e-5), fmt
            for lhs, rhs in sides:
                both = []
                for kernel in (triton_of("gemm_k"), reference("gemm_k")):
                    out = torch.ones(3, n, k)
                    kernel.run(GroupedK(lhs, rhs, groups, out, True, Mode()))
                    both.append(out)
                assert torch.allclose(*both, rtol=1e-5, atol=1e-5), fmt


def test_modules():
    """Whatever is above the backends, on Triton alone."""
    for recipe in ("mxfp8", "mxfp4", "float8_block", "deepseek_v3"):
        torch.manual_seed(0)
        layer, x = te_mx.Linear(64, 96), torch.randn(32, 64, requires_grad=True)
        with te_mx.autocast(recipe=recipe):
            y = layer(x)
        y.pow(2).sum().backward()
        audit = te_mx.audit(layer).layers[0]
        assert (audit.fprop, audit.dgrad, audit.wgrad) == ("triton",) * 3
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert (y - expected).norm() / expected.norm() < (0.2 if recipe == "mxfp4" else 0.05)
    layers = te_mx.LayerNormMLP(64, 96), te_mx.GroupedLinear(2, 64, 96)
    for layer, more in zip(layers, ((), ([30, 34],)), strict=True):
        x = torch.randn(64, 64, requires_grad=True)
        with te_mx.autocast():
            layer(x, *more).sum().backward()
        assert te_mx.audit(layer).layers[0].wgrad == "triton" and x.grad.isfinite().all()
    frozen = te_mx.Linear(64, 96)
    te_mx.freeze_weights(frozen)
    with torch.no_grad(), te_mx.autocast():
        frozen(torch.randn(3, 64))
    assert te_mx.audit(frozen).layers[0].fprop == "triton"


warnings.simplefilter("ignore")
globals()[f"test_{sys.argv[1]}"]()
