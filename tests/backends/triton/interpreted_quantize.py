"""What test_triton.py runs in a process of its own: quantizers and fused steps in Triton's
interpreter, or where TRITON_INTERPRET is not set on a GPU, beside plain torch on the CPU.
usage: python interpreted_quantize.py <case>[/<part>/<parts>] .."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import ptx
import torch

sys.path.append(str(Path(sys.prefix, "aside_triton")))

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

import te_mx
from te_mx import formats
from te_mx.backends.triton import binding
from te_mx.backends.triton import quantize as quantizers
from te_mx.backends.triton.kernels import e2m1
from te_mx.conformance import cases
from te_mx.dispatch import run
from te_mx.dispatch.calls import ActGroups, Groups, Quantize, QuantizeGroups
from te_mx.dispatch.fused import ACTIVATIONS, Activation, ActStep, Norm, NormStep, Target
from te_mx.dispatch.kernels import Kernel, kernels
from te_mx.dispatch.problem import Place, Problem
from te_mx.dispatch.run import reference
from te_mx.formats import get
from te_mx.layouts.operand import Quantized

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SEED = torch.tensor([-0x123456789ABCDEF])
# The columns of each input, and every so many of its rows of 96, from one on.
PARTS = {"exponents": (96, 37, 3), "ties": (384, 35, 1), "spread": (288, 41, 0),
         "special": (96, 9, 3)}  # fmt: skip


def triton_of(op: str) -> Kernel:
    return next(one for one in kernels(op) if one.name == "triton")


def sample(dtype: str, *names: str) -> torch.Tensor:
    """Rows of inputs of the conformance set, whose blocks of 32 stay whole."""
    rows = []
    for name in names or cases.INPUTS:
        width, step, first = PARTS[name]
        rows.append(cases.make(name, dtype)[:, :width].reshape(-1, 96)[first::step])
    return torch.cat(rows)[:-1, :93]


_share = [0, 1, 0]  # part and parts of a case, and calls so far


def skipped() -> bool:
    """Whether the next call of a case is of another part."""
    _share[2] += 1
    return _share[2] % _share[1] != _share[0]


def same(what: Quantize, *outs: torch.dtype) -> None:
    """The bytes of a call are those of plain torch, and so are the values in some dtypes."""
    if skipped():
        return
    there = what._replace(x=what.x.to(DEVICE), seed=on_device(what.seed))
    both = triton_of("quantize").run(there), reference("quantize").run(what)
    for side in ("row", "col"):
        mine, other = (getattr(one, side) for one in both)
        assert (mine is None) == (other is None)
        if mine is None:
            continue
        for part in ("codes", "scales", "tensor_scale"):
            parts = getattr(mine, part), getattr(other, part)
            if parts[1] is not None:
                assert parts[0].shape == parts[1].shape
                assert torch.equal(*(one.cpu().nan_to_num(7) for one in parts)), (what[1:5], part)
        for out in outs:
            values = triton_of("dequantize").run(mine, out), other.values(out)
            assert torch.equal(*(one.cpu().nan_to_num(7) for one in values)), (what[1:5], out)


def on_device(part: Any) -> Any:
    """Tensors of a step, where kernels run."""
    if isinstance(part, Target):
        return part._replace(seed=on_device(part.seed))
    return part.to(DEVICE) if isinstance(part, torch.Tensor) else part


def ways(fmt: str, i: int) -> tuple[str, torch.dtype]:
    """Where columns lie, and what values are rounded to, in turns."""
    return f"{fmt}@{('rows', 'cols')[i % 2]}", (torch.float32, torch.bfloat16)[i // 2 % 2]


def test_bytes() -> None:
    formats = "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"
    x = {dtype: sample(dtype) for dtype in cases.DTYPES}
    for fmt, dtype in itertools.product(formats, cases.DTYPES):
        for i, rule in enumerate(get(fmt).scaling.rules):
            col, out = ways(fmt, i + (dtype == "bf16"))
            same(Quantize(x[dtype], f"{fmt}@rows", col, rule, True), out)
            if i == 0:  # one row, which is compiled for itself
                same(Quantize(x[dtype][4:5], f"{fmt}@rows", "", rule), out)
    wide = [cases.make(name, "fp32")[2::13, -161:] for name in ("spread", "special")]
    formats = "fp8_e4m3_1x128", "fp8_e5m2_128x128", "fp8_e4m3fnuz_1x128", "fp8_e5m2fnuz_128x128"
    for fmt, one in itertools.product(formats, (*wide, x["bf16"])):
        for i, rule in enumerate(get(fmt).scaling.rules):
            col, out = ways(fmt, i)
            same(Quantize(one, f"{fmt}@rows", col, rule), out)


def test_units() -> None:
    """Both directions by units of 8 x 8 numbers, in whole tiles and others; an operand that does
    not start where words do."""
    ways = [("mxfp4", rule) for rule in ("rceil", "floor", "even")] + [("nvfp4", "te")]
    ways += [("mxfp8_e4m3", "rceil"), ("fp8_e4m3_1x128", "pow2"), ("fp8_e4m3_1x128", "fp32:1e-12")]
    for i, (fmt, rule) in enumerate((*ways, ways[3])):
        given = sample(tuple(cases.DTYPES)[i % 2])
        x = torch.cat([given, given.flip(0), given])[:256, :72].repeat(1, 2)[:, :136]
        for one in (x[:, :128], x[:136, 8:], x[8:, 8:][:80, 1:97]):
            same(Quantize(one, f"{fmt}@rows", f"{fmt}@rows", rule))
    finite = torch.where(x.isfinite(), x, 1.0)[:, :128].to(torch.bfloat16)
    finite = finite.float().clamp(-(2.0**13), 2.0**13)  # NVFP4: where nothing is NaN, far and near
    for power in (0, 113, -113):
        one = (finite * 2.0**power).to(torch.bfloat16)
        same(Quantize(one, "nvfp4@rows", "nvfp4@rows", "te"))


def test_words() -> None:
    """What NVIDIA's instructions make of numbers near the ends of a code, far ones and NaN."""
    ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 8.0]).view(torch.int32)
    near = (ends[:, None] + torch.arange(-3, 4, dtype=torch.int32)).flatten().view(torch.float32)
    torch.manual_seed(0)
    far = torch.randn(8, 4000) * torch.exp2(torch.randint(-9, 9, (8, 4000)))
    far[:, : len(near)] = near * torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    far[:, -3:] = torch.tensor([torch.inf, -1e38, 0.0])
    factors = torch.where(torch.arange(4000) < 1000, 1.0, torch.rand(2, 4000) * 3)

    def word(x: torch.Tensor, factor: torch.Tensor) -> np.ndarray:
        v = x * factor
        ups = [v.abs() >= end if i % 2 else v.abs() > end for i, end in enumerate(near[3:-7:7])]
        codes = torch.stack(ups).sum(0) | (v.signbit().long() << 3)
        return (codes << 4 * torch.arange(8)[:, None]).sum(0).numpy().astype(np.uint32)

    def words(x: torch.Tensor) -> list[np.ndarray]:
        return list(x.contiguous().view(torch.int32).numpy().view(np.uint32))

    (made,) = ptx.run(e2m1.VALUES.value, 1, *words(far), *words(factors[:1]))
    assert (made == word(far, factors[0])).all()
    halves = torch.stack([far, far.flip(1)], 2).to(torch.bfloat16)
    low, high = halves.float().unbind(2)
    packed = words(halves.reshape(8, -1).view(torch.int32))
    (made,) = ptx.run(e2m1.ROW.value, 1, *packed[:4], *words(factors[:1] / 8))
    assert (made == word(torch.stack([low, high], 1)[:4].flatten(0, 1), factors[0])).all()
    left, right = ptx.run(e2m1.COLUMNS.value, 2, *packed, *words(factors / 8))
    assert (left == word(low, factors[0])).all() and (right == word(high, factors[1])).all()


def test_executed() -> None:
    """Quantizers of 4 bits as on GPUs of NVIDIA, with the instructions in them: whole tiles of
    bf16, two numbers a word, and others; of NVFP4 also what is not finite, or far from usual."""
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.exp2(torch.randint(-9, 9, (64, 1)).float())
    x[3, :40], x[5] = 0.0, -0.0
    nan = x.clone()
    nan[:, 7], nan[9] = torch.nan, -torch.inf
    before, binding.takes_ptx = binding.takes_ptx, lambda device: 9
    with ptx.interpreted(tl, TensorHandle):
        for one in (x, nan, x * 2.0**115, x * 2.0**-115, x[:, :72]):
            same(Quantize(one.bfloat16(), "nvfp4@rows", "nvfp4@rows", "te"))
        same(Quantize(x[:, :72], "nvfp4@rows", "nvfp4@rows", "te"))
        for one, rule in ((nan, "rceil"), (x, "even"), (x * 2.0**-115, "floor")):
            same(Quantize(one.bfloat16(), "mxfp4@rows", "mxfp4@rows", rule))
    binding.takes_ptx = before
    assert "te_mx.backends.triton.kernels.nibbles" in sys.modules


def test_many() -> None:
    """10^7 values of every format and rule, in their directions, beside plain torch where the
    kernels run; in the interpreter by larger tiles, of which the numbers do not know: some
    minutes of a core."""
    if DEVICE == "cpu":
        quantizers.TILES.update(dict.fromkeys(quantizers.TILES, (1024, 1024)))
        quantizers.AMAX_TILE = 1024, 1024
        quantizers.UNITS.update(dict.fromkeys(quantizers.UNITS, (1024, 1024)))
    torch.manual_seed(0)
    shape = 2048, 4992
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, (shape[0], 1)).float())
    x[::10] = torch.randint(0, 2**15, shape, dtype=torch.int16).view(torch.bfloat16).float()[::10]
    x[5, 7], x[9, 3], x[11] = torch.inf, torch.nan, 0.0
    x = x.to(DEVICE)
    names = [name for name in formats.names() if not name.endswith("_128x1")]
    names += ["nvfp4", "nvfp4_16x16", "nvfp4_rows"]
    asked = [(name, rule) for name in names for rule in get(name).scaling.rules]
    asked += [(name, "rceil+sr") for name in names if name.startswith("mx")] + [("nvfp4", "te+sr")]
    asked += [("nvfp4", "te")] * 2  # of finite numbers
    for i, (name, rule) in enumerate(asked):
        if skipped():
            continue
        random = rule.endswith("+sr")
        col = f"{name}+rht16:0x1234abcd@rows" if random and "4" in name[-2:] else f"{name}@rows"
        given = x.nan_to_num(0.5).clamp(-1e20, 1e20) if i >= len(asked) - 2 else x
        what = Quantize(
            given.to((torch.bfloat16, torch.float32)[i % 2]), f"{name}@rows",
            "" if name == "nvfp4_rows" else col, rule, seed=SEED.to(DEVICE) if random else None,
        )  # fmt: skip
        both = triton_of("quantize").run(what), reference("quantize").run(what)
        for mine, other in zip(*map(parts_of, both), strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                assert torch.equal(mine.nan_to_num(7), other.nan_to_num(7)), what[1:4]
        print(f"{x.numel():,} values of {' '.join(what[1:4])}: the same bytes", flush=True)


def test_nvfp4() -> None:
    """All writers' rules, of blocks of a row and of 16 rows, with a scale of the tensor and of each
    row; the largest magnitudes of inputs are far apart, so each is a matrix."""
    halves = ("ties", "spread"), ("exponents", "special")
    x = [sample(dtype, *half) for dtype, half in itertools.product(cases.DTYPES, halves)]
    for i, rule in enumerate(get("nvfp4").scaling.rules):
        for one in (x[i % 4], x[3 - i % 4]):
            col, out = ways("nvfp4", i)
            same(Quantize(one, "nvfp4@rows", col, rule), out)
    for i, (fmt, rule) in enumerate(
        itertools.product(("nvfp4_16x16", "nvfp4_rows"), ("te", "te_4over6", "te_4over6_mse_448"))
    ):
        col, out = ways(fmt, i)
        same(Quantize(x[i % 4], f"{fmt}@rows", col, rule), out)


def test_random() -> None:
    """Stochastic rounding and transforms, each direction with its own."""
    torch.manual_seed(0)
    x = torch.randn(33, 97) * torch.exp2(torch.randint(-9, 9, (33, 97)).float())
    x[3, 40:80] = 0.0
    x[7, 5] = torch.inf
    for i, (fmt, row, col, rule) in enumerate((
        ("mxfp8_e4m3", "", "", "rceil+sr"), ("mxfp8_e5m2", "", "", "floor+sr"),
        ("mxfp4", "", "+rht32:0x9abcdef1", "rceil+sr"), ("mxfp6_e3m2", "", "", "even+sr"),
        ("mxfp4", "+rht16:0x1234abcd", "+rht32:0xffff0001", "floor"),
        ("nvfp4", "", "+rht16:0x1234abcd", "te+sr"), ("nvfp4_16x16", "", "", "te+sr"),
        ("nvfp4", "+rht32:0x9abcdef1", "+rht16:0xffff0001", "torchao"),
        ("nvfp4", "+rht16:0x1234abcd", "", "compressed_tensors"),
    )):  # fmt: skip
        one = x.to((torch.bfloat16, torch.float32)[i % 2])
        what = Quantize(one, f"{fmt}{row}@rows", f"{fmt}{col}@{('rows', 'cols')[i % 2]}", rule)
        same(what._replace(seed=SEED, first=11) if rule.endswith("+sr") else what)
    same(Quantize(x.half(), "", "nvfp4+rht16:0x1234abcd@rows", "te"), torch.float16)


def problem_of(op: str, x: torch.Tensor, target: Target, groups: int = 0) -> Problem:
    return Problem(
        op, Place(DEVICE, 0 if DEVICE == "cuda" else -1), target.row, target.col, *x.shape,
        groups=groups, ends="device" if groups else "", dtype=x.dtype, rule=target.rule,
    )  # fmt: skip


def plan_of(op: str, x: torch.Tensor, target: Target) -> Any:
    problem = problem_of(op, x, target)
    assert triton_of(op).accepts(problem) is None
    return triton_of(op).plan(problem)


def parts_of(made: Quantized) -> list[torch.Tensor | None]:
    sides = [(None,) * 3 if one is None else (*one[:2], one.tensor_scale) for one in made[:2]]
    return at_home(*sides[0], *sides[1], made.col_sum)


def at_home(*parts: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if one is None else one.cpu() for one in parts]


TARGETS = (
    Target("mxfp8_e4m3@rows", "mxfp8_e4m3@cols", "rceil"),
    Target("nvfp4@rows", "nvfp4+rht16:0x1234abcd@rows", "te"),
    Target("fp8_e4m3_1x128@rows", "fp8_e4m3_1x128@cols", "pow2", True),
    Target("mxfp4@rows", "", "even+sr", False, SEED), Target("", "", "rceil", True),
    Target("mxfp8_e4m3@rows", "mxfp8_e5m2@cols", "rceil"),  # not in one read
)  # fmt: skip


def test_norms() -> None:
    """The bits of plain torch."""
    torch.manual_seed(0)
    for i, target in enumerate((*TARGETS, TARGETS[0])):
        if skipped():
            continue
        kind = ("LayerNorm", "RMSNorm")[i % 2]
        dtype = (torch.float32, torch.bfloat16)[i // 2 % 2]
        x, dz = (torch.randn(17, 300).to(dtype) * 3 + 1 for _ in range(2))
        x[5, 7] = torch.inf if i % 3 == 0 else 0.0
        weight, bias = torch.randn(300), torch.randn(300) if kind == "LayerNorm" else None
        step = NormStep(x, weight, bias, Norm(kind, 1e-5), torch.bfloat16, i % 2 == 0, target)
        made = plan_of("norm_quantize", x, target)(NormStep(*map(on_device, step)))
        expected = reference("norm_quantize").run(step)
        parts = [at_home(*one[:3]) + parts_of(one.quantized) for one in (made, expected)]
        back = dz, x, weight, expected.mean, expected.rstd, dtype
        parts[0] += at_home(*triton_of("norm_backward").run(*map(on_device, back)))
        parts[1] += reference("norm_backward").run(*back)
        for j, (mine, other) in enumerate(zip(*parts, strict=True)):
            assert (mine is None) == (other is None), (step.norm, target, j)
            if j in (9, 11, 12):  # sums over rows, in another order
                mine, other = (None if one is None else one.nan_to_num(0) for one in (mine, other))
                assert mine is None or torch.allclose(mine, other, rtol=1e-5, atol=1e-5), j
            elif mine is not None:
                assert torch.equal(mine.nan_to_num(7), other.nan_to_num(7)), (kind, target, j)


def test_activations() -> None:
    """Values near those of plain torch, the same where nothing is transcendental, and their
    bytes."""
    torch.manual_seed(0)
    names = [name for name in ACTIVATIONS if Activation(name).gated] + ["gelu_erf", "srelu"]
    cases = itertools.product(names, (False, True))
    for i, (name, backward) in enumerate(cases):
        if skipped():
            continue
        target, act = TARGETS[i % len(TARGETS)], Activation(name, 2.0)
        h = torch.randn(19, 42 * (2 if act.gated else 1)) * 3
        grad = torch.randn(19, 42) if backward else None
        step = ActStep(h, grad, act, torch.bfloat16, True, target)
        made = plan_of("act_quantize", h, target)(ActStep(*map(on_device, step)))
        expected = reference("act_quantize").run(step)
        far = 0.0 if act.base in ("relu", "srelu") else 0.01
        assert torch.allclose(made.out.cpu(), expected.out, rtol=far, atol=5e-3 * far), (
            name,
            backward,
        )
        again = run.quantized(made.out.cpu(), target)
        for mine, other in zip(parts_of(made.quantized), parts_of(again), strict=True):
            assert (mine is None) == (other is None)
            if target.col_sum and mine is not None and mine.dtype == torch.float32:
                assert torch.allclose(mine, other, rtol=1e-5, atol=1e-4)
            else:
                assert mine is None or torch.equal(mine, other), (name, backward, target)
        groups = Groups(torch.tensor([7, 7, 17]))
        col = target.col.replace("@cols", "@grouped_cols").replace("@rows", "@grouped_cols")
        target = target._replace(col=col)
        asked = QuantizeGroups(made.out.cpu(), groups, *target)
        problem = problem_of("act_quantize_grouped", h, target, 3)
        if triton_of("act_quantize_grouped").accepts(problem) is None:
            kept = ActStep(*map(on_device, step._replace(keep=False, target=target)))
            there = ActGroups(kept, Groups(groups.offs.to(DEVICE)))
            parts = triton_of("act_quantize_grouped").run(there)
            other = reference("quantize_grouped").run(asked)
            for a, b in zip(parts_of(parts)[:6], parts_of(other)[:6], strict=True):
                assert (a is None and b is None) or torch.equal(a, b), (name, backward, target)


def test_layers() -> None:
    """Layers of every recipe that Triton serves, forwards and backwards, and nothing else runs."""
    warnings.simplefilter("error", te_mx.FallbackWarning)
    recipes = {"mxfp8": 0.1, "mxfp4": 0.5, "float8_block": 0.1, "deepseek_v3": 0.1, "nvfp4": 0.5}
    for recipe, far in recipes.items():
        if skipped():
            continue
        torch.manual_seed(0)
        layers = te_mx.LayerNormMLP(64, 96, activation="swiglu"), te_mx.LayerNormLinear(64, 64)
        for layer in layers:
            x = torch.randn(32, 64, requires_grad=True)
            expected = torch.autograd.grad(layer(x).pow(2).sum(), (x, *layer.parameters()))
            layer.to(DEVICE)
            there = x.detach().to(DEVICE).requires_grad_()
            with te_mx.autocast(recipe=recipe):
                y = layer(there)
            made = torch.autograd.grad(y.pow(2).sum(), (there, *layer.parameters()))
            for mine, other in zip(made, expected, strict=True):
                assert (mine.cpu() - other).norm() <= far * other.norm(), recipe
            ran = te_mx.audit(layer).layers[0]
            assert (ran.fprop, ran.dgrad, ran.wgrad) == ("triton",) * 3, (recipe, ran)


def test_reasons() -> None:
    """A fallback names why Triton declines, not that others were not asked for."""
    x = te_mx.quantize(torch.ones(4, 32, device=DEVICE), "mxfp6_e3m2")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        te_mx.gemm(x, x)
    said = [str(one.message) for one in seen if one.category is te_mx.FallbackWarning]
    assert len(said) == 1 and "TE_MX_BACKEND" not in said[0], said
    assert "is slow: takes mxfp8_e4m3, " in said[0] and "not mxfp6_e3m2" in said[0], said


def run_case(case: str) -> None:
    """A case, or a part of it."""
    name, *part = case.split("/")
    _share[:] = [*map(int, part or (0, 1)), 0]
    globals()[f"test_{name}"]()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for one in sys.argv[1:]:
        run_case(one)
