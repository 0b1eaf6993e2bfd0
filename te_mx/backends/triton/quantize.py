"""The quantizer and the way back, in Triton."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_mx import formats
from te_mx.backends.base import why_not_dtype
from te_mx.backends.reference.fused import inverse
from te_mx.backends.triton import binding
from te_mx.backends.triton.binding import NAME, RANK, cdiv
from te_mx.dispatch import run
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.fused import ActParts, ActStep, NormParts, NormStep, Target
from te_mx.dispatch.groups import scale_rows
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats import Format
from te_mx.formats.element import BIAS, IMPLICIT_BIT, MANTISSA
from te_mx.formats.fp8_blockwise import LARGEST_FACTOR, bits_of
from te_mx.formats.mxfp8 import E4M3
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized

_TILE = 64, 128  # rows and columns a program reads, of the way back
AMAX_TILE = 32, 256  # and of the largest magnitude
TILES = {8: (32, 128), 6: (32, 64), 4: (32, 64)}  # and of quantizers by the bits of a code
_NOT_AMAX = {"RULE", "FOUR", "SQUARE", "BOUND", "HEIGHT", "RANDOM", "seed", "first_of_all", "out"}
# Rows and columns of a program of 8 x 8 units, by family and whether columns lie turned, and the
# registers of a thread, which let NVIDIA's GPUs run another program beside it.
UNITS = {
    ("mx", True): (128, 64), ("mx", False): (32, 128), ("nvfp4", True): (64, 64),
    ("nvfp4", False): (64, 64), ("blockwise", True): (128, 128), ("blockwise", False): (128, 128),
}  # fmt: skip
WORDS = 64, 128  # and of whole tiles of bf16 to 4 bits
AMAX_WORDS = 2048, 32  # words of a row, and rows, of a program for their largest magnitude
_REGISTERS = 128
_VALUES = "mxfp8_e4m3", "rceil"  # of whose kernel steps are that make values alone


def empty_operand(spec: str, rows: int, k: int, device: torch.device) -> Operand:
    """An operand to write."""
    fmt, layout = spec_of(spec)
    codes, scales = layout.shapes(fmt, rows, k)
    whole = None
    if fmt.tensor_scaled:
        whole = torch.empty(fmt.tensor_scale_shape(rows), dtype=torch.float32, device=device)
    return Operand(
        torch.empty(codes, dtype=torch.uint8, device=device),
        torch.empty(scales, dtype=fmt.scaling.storage, device=device), spec, rows, k, None, whole,
    )  # fmt: skip


def of_rule(fmt: Format, rule: str) -> dict[str, Any]:
    """What the kernel of a family asks of a format and a rule."""
    element, (name, epsilon) = fmt.element, split_rule(rule)
    if fmt.tensor_scaled:
        four = name.startswith("te_4over6")
        return {
            "RULE": "te" if four else name, "FOUR": four, "SQUARE": "_mse" in name,
            "BOUND": 1536.0 if four and not name.endswith("_448") else 2688.0,
            "BY_ROWS": bool(fmt.tensor_scale_shape(1)), "HEIGHT": fmt.scaling.block[0],
        }  # fmt: skip
    words: dict[str, Any] = dict(binding.element_of(element))
    if fmt.scaling.scale == "fp32":
        return words | {
            "ZERO_SIGN": element.has_negative_zero, "EPSILON": bits_of(epsilon),
            "TINY": bits_of(element.max / LARGEST_FACTOR), "POW2": name == "pow2",
            "SQUARE": fmt.scaling.block[0] > 1,
        }  # fmt: skip
    up_from = {"floor": IMPLICIT_BIT, "even": 0x600000}.get(name, (element.max_bits & MANTISSA) + 1)
    least = element.max_bits - BIAS * IMPLICIT_BIT + 1 if name == "rceil" else -1
    return words | {"EMAX": element.emax, "UP_FROM": up_from, "LEAST": least}


def random_of(what: Quantize) -> dict[str, Any]:
    """What is random: rounding, and the transform of each direction."""
    words: dict[str, Any] = {"RANDOM": what.seed is not None}
    if what.seed is not None:
        words |= {"seed": what.seed, "first_of_all": what.first}
    for side, spec in (("ROW", what.row), ("COL", what.col)):
        transform = spec_of(spec).format.transform if spec else None
        if transform is not None:
            words |= {f"{side}_SIZE": transform.size, f"{side}_SIGNS": transform.signs}
    return words


class TritonQuantize(Kernel):
    """Both directions from one read; of NVFP4 after one for the largest magnitude."""

    op, name, rank = "quantize", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        if not (problem.lhs or problem.rhs):
            return "makes codes"
        return why_not(problem) or why_not_dtype(problem)

    def run(self, what: Quantize) -> Quantized:
        x = rows_of(what.x)
        step = {"x": x, "stride": x.stride(0)}
        made = launch(what, x.shape, x.dtype, step)
        sums = x.sum(0, dtype=torch.float32).to(what.sum_dtype) if what.col_sum else None
        return Quantized(*made, sums)


def why_not(problem: Problem) -> str | None:
    """Why no kernel quantizes to the specs of a problem; None when one does."""
    row, col = (spec_of(spec) if spec else None for spec in (problem.lhs, problem.rhs))
    reason = binding.why_not(problem)
    if reason is not None:
        return reason
    if row and row.layout.k_first:
        return "makes rowwise copies that lie by rows"
    if row and col and row.format.untransformed is not col.format.untransformed:
        return "makes both directions in one format"
    if problem.dtype == torch.float16 and split_rule(problem.rule)[0] == "compressed_tensors":
        return "does not take float16 for compressed_tensors"
    return None


def rows_of(x: Tensor) -> Tensor:
    """x with adjacent elements in each row."""
    x = x.detach().resolve_neg()
    return x if x.stride(1) == 1 else x.contiguous()


def in_groups(spec: str, rows: int, k: int, groups: int, device: torch.device) -> Operand:
    """An operand of tokens in groups to write: what belongs to none is 0, tensor scales are 1."""
    fmt, layout = spec_of(spec)
    codes, scales = layout.grouped_empty(fmt, rows, k, groups, device)
    whole = torch.ones(groups, device=device) if fmt.tensor_scaled else None
    return Operand(codes.zero_(), scales.zero_(), spec, rows, k, None, whole)


def launch(
    what: Quantize, shape: Sequence[int], dtype: torch.dtype, step: dict[str, Any],
    bounds: tuple[Tensor, Tensor] | None = None,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    """Both directions of a matrix [rows, cols] of a dtype, whose tiles are those of x or of a step
    by these words (kernels/steps.py); perhaps none. bounds: starts and ends of groups of rows."""
    (rows, cols), x, device = shape, step["x"], step["x"].device
    count, make = 0, empty_operand
    if bounds is not None:
        count = len(bounds[0])
        step = step | {
            "starts": bounds[0], "ends": bounds[1], "groups": count,
            "GROUPS": 1 << max(count - 1, 1).bit_length(),
        }  # fmt: skip
        make = partial(in_groups, groups=count)
    row = make(what.row, rows, cols, device=device) if what.row else None
    col = make(what.col, cols, rows, device=device) if what.col else None
    fmt, rule = spec_of(what.row or what.col).format if row or col else None, what.rule
    if fmt is None:
        fmt, rule = formats.get(_VALUES[0]), _VALUES[1]
    words = step | of_rule(fmt, rule) | {"rows": rows, "cols": cols, "enable_fp_fusion": False}
    words["TO"] = binding.dtype_of(dtype)
    (height, width), warps = TILES[fmt.element.bits], 2
    family = {"e8m0": "mx", "e4m3": "nvfp4", "fp32": "blockwise"}[fmt.scaling.scale]
    turned, casts = what.col.endswith("@rows"), binding.casts(fmt.element, device)
    if family == "blockwise":
        height = 128 if col or words["SQUARE"] or count else 32
        width = 128 if row or words["SQUARE"] else 32
        warps = 8 if height == width else 4
    else:
        words |= random_of(what)
    both = row is not None and col is not None and not count
    both = both and _in_units(fmt, rule, words, turned)
    by_words = both and _in_words(fmt, words)
    if family == "nvfp4":
        words |= {} if by_words else _largest(words, row, col)
        words["row_whole"] = x if row is None else row.tensor_scale
        words["col_whole"] = x if col is None else col.tensor_scale
    else:
        words["HARDWARE"] = casts and not words.get("RANDOM")
    for side, one in (("row", row), ("col", col)):
        # What is not written is something that is not touched.
        words[f"{side}_codes"] = x if one is None else one.codes
        words[f"{side}_scales"] = x if one is None else one.scales
    if both:
        _words(family, words) if by_words else _units(fmt, family, words, turned)
        return row, col
    module = binding.kernels("nvfp4" if family == "nvfp4" else "quantize")
    kernel = getattr(module, f"quantize_{family}")
    kernel[cdiv(cols, width), scale_rows(rows, count, height) if count else cdiv(rows, height)](
        **words, ROW=row is not None, COL=col is not None, TURNED=turned, R=height, C=width,
        num_warps=warps,
    )  # fmt: skip
    return row, col


def _words(family: str, words: dict[str, Any]) -> None:
    """Both directions, 4 bits, of whole tiles of bf16."""
    module, (height, width), x = binding.kernels("nibbles"), WORDS, words["x"]
    kernel, (rows, cols) = module.quantize_words, (words["rows"], words["cols"])
    if family == "nvfp4":
        each, turns = AMAX_WORDS
        grid = cdiv(cols, 2 * each), rows // turns
        parts = torch.empty(2 * grid[0] * grid[1], dtype=torch.int32, device=x.device)
        found = words["found"] = torch.empty(4, dtype=torch.float32, device=x.device)
        module.amax_words[grid](x, parts, cols, words["stride"], each, turns, num_warps=8)
        module.scale_tensor[1,](
            parts,
            len(parts) // 2,
            found,
            words["row_whole"],
            words["col_whole"],
            512,
            enable_fp_fusion=False,
        )
    words = {name: word for name, word in words.items() if name in kernel.arg_names}
    kernel[cols // width, rows // height](
        **words, FAMILY=family, R=height, C=width, enable_fp_fusion=False,
        num_warps=height * width // 2048, maxnreg=_REGISTERS,
    )  # fmt: skip


def _units(fmt: Format, family: str, words: dict[str, Any], turned: bool) -> None:
    kernel, (height, width) = binding.kernels("units").quantize_units, UNITS[family, turned]
    x, rows, cols = words["x"], words["rows"], words["cols"]
    ptx, element = binding.takes_ptx(x.device), fmt.element
    even = not (rows % height or cols % width)
    packed = even and x.dtype == torch.bfloat16 and ptx >= 9
    packed = packed and not (x.data_ptr() % 4 or words["stride"] % 2)
    words = {name: word for name, word in words.items() if name in kernel.arg_names} | {
        "FAMILY": family, "BITS": element.bits, "ASM": bool(ptx), "EVEN": even, "PACKED": packed,
        # Of fp32 Triton 3.6's ptxas stores other codes than it casts: it reads a register too soon.
        "CASTS": binding.casts(E4M3 if family == "nvfp4" else element, x.device)
        and not (family == "nvfp4" and x.dtype == torch.float32),
        "TURNED": turned, "R": height, "C": width, "enable_fp_fusion": False,
        "num_warps": height * width // (64 * binding.lanes(x.device)),
    }  # fmt: skip
    if ptx:
        words["maxnreg"] = _REGISTERS
    kernel[cdiv(cols, width), cdiv(rows, height)](**words)


def _in_units(fmt: Format, rule: str, words: dict[str, Any], turned: bool) -> bool:
    """Whether both directions of a matrix are quantized 8 x 8 numbers a thread."""
    if not {"STEP", "seed", "ROW_SIZE", "COL_SIZE"}.isdisjoint(words) or fmt.element.bits == 6:
        return False
    if fmt.element.bits == 4 and (words["rows"] % 8 or words["cols"] % 8 or not turned):
        return False
    if fmt.tensor_scaled:
        return rule == "te" and fmt.name == "nvfp4"
    return fmt.scaling.block[0] == 1


def _in_words(fmt: Format, words: dict[str, Any]) -> bool:
    """Whether those of them are, two a word: bf16 in whole tiles, on GPUs of NVIDIA."""
    x, (height, width) = words["x"], WORDS
    whole = not (words["rows"] % height or words["cols"] % width or words["stride"] % 8)
    whole = whole and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0
    return whole and fmt.element.bits == 4 and binding.takes_ptx(x.device) >= 9


def _largest(words: dict[str, Any], row: Operand | None, col: Operand | None) -> dict[str, Any]:
    """The largest magnitudes of both directions, for the quantizer of NVFP4; of one for both where
    they are the same."""
    x, by_rows = words["x"], words["BY_ROWS"]
    apart = by_rows or any(f"{side}_SIZE" in words for side in ("ROW", "COL"))
    count = words.get("groups", 0)
    names = ("rows", "cols") if apart else ("rows",)
    sizes = [words[name] if by_rows else count or 1 for name in names]
    found = [torch.zeros(size, dtype=torch.int32, device=x.device) for size in sizes]
    height, width = AMAX_TILE
    asked = {name: word for name, word in words.items() if name not in _NOT_AMAX}
    down = scale_rows(words["rows"], count, height) if count else cdiv(words["rows"], height)
    binding.kernels("nvfp4").amax[cdiv(words["cols"], width), down](
        row_amax=found[0], col_amax=found[-1], ROW=not apart or row is not None,
        COL=apart and col is not None, R=height, C=width, **asked,
    )  # fmt: skip
    return {"row_amax": found[0], "col_amax": found[-1]}


class TritonDequantize(Kernel):
    op, name, rank = "dequantize", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        return binding.why_not(problem) or why_not_dtype(problem, "writes")

    def run(self, operand: Operand, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
        fmt, layout = spec_of(operand.spec)
        rows, k, element, whole = operand.rows, operand.k, fmt.element, operand.tensor_scale
        out = into
        if out is None or not out.is_contiguous():
            out = torch.empty((rows, k), dtype=dtype, device=operand.codes.device)
        codes, scales = operand.codes.contiguous(), operand.scales.contiguous()
        kernel = binding.kernels("quantize").dequantize
        height, width = _TILE
        kernel[cdiv(k, width), cdiv(rows, height)](
            codes, scales, out, rows, k, codes.stride(0), scales.shape[1],
            BITS=element.bits, MANTISSA_BITS=element.mantissa_bits, BIAS=element.bias,
            MAX_CODE=element.max_code, HAS_INF=element.has_inf,
            ZERO_SIGN=element.has_negative_zero, SCALE=fmt.scaling.scale,
            HEIGHT=fmt.scaling.block[0], BLOCK=fmt.block, K_FIRST=layout.k_first, R=height,
            C=width, whole=None if whole is None else whole.contiguous(),
            BY_ROWS=whole is not None and whole.dim() > 0,
        )  # fmt: skip
        return out if into is None or out is into else into.copy_(out)


register(TritonQuantize())
register(TritonDequantize())


# ------------------------------------------------------------------------------------- fused steps
# The fused steps in Triton: quantizers whose tiles are those of a normalization or an activation,
# after one read of x for the sums of a normalization.
_F32 = torch.float32
_SUM_ROWS = 4  # of x, a program
_SUMS, _SHARES = (16, 256), 16  # rows and columns that are added at once, in so many shares of rows


class _Fused(Kernel):
    name, rank = NAME, RANK

    def __init__(self, op: str, planner: type | None = None) -> None:
        self.op, self.planner = op, planner

    def accepts(self, problem: Problem) -> str | None:
        values = problem._replace(lhs="", rhs="", rule="rceil")
        return binding.why_not(values) or why_not_dtype(problem)


class _Ends:
    """In what the steps of a problem end: the operands of its specs where a quantizer makes these,
    else values that `dispatch.run` quantizes."""

    def __init__(self, p: Problem) -> None:
        # Of float16, which one rule does not take.
        self.known = why_not(p._replace(op="quantize", dtype=torch.float16)) is None

    def ended(
        self, shape: tuple[int, int], dtype: torch.dtype, keep: bool, target: Target,
        step: dict[str, Any],
    ) -> tuple[Tensor | None, Quantized]:  # fmt: skip
        """Values, if they are kept, and the same quantized, of a step by its words."""
        row, col, rule, col_sum, seed = target
        x, out = step["x"], None
        if keep or col_sum or not self.known:
            out = torch.empty(shape, dtype=dtype, device=x.device)
        asked = Quantize(x, row, col, rule, seed=seed)
        if not self.known:
            asked = Quantize(x, "", "", rule)
        if out is not None or target.codes:
            made = Quantized(*launch(asked, shape, dtype, step | {"out": out}))
        else:
            made = Quantized()
        if not self.known and out is not None:
            made = run.quantized(out, target)
        elif col_sum and out is not None:
            made = made._replace(col_sum=out.sum(0, dtype=_F32))
        return out if keep else None, made


class Norms(_Ends):
    """Normalizations of matrices of one size."""

    def __call__(self, s: NormStep) -> NormParts:
        x, (rows, cols), layer = rows_of(s.x), s.x.shape, s.norm.kind == "LayerNorm"
        mean = torch.empty(rows, dtype=_F32, device=x.device) if layer else None
        rstd = torch.empty(rows, dtype=_F32, device=x.device)
        binding.kernels("steps").norm_sums[(cdiv(rows, _SUM_ROWS),)](
            x, mean, rstd, rows, cols, x.stride(0), inverse(cols), s.norm.eps, R=_SUM_ROWS,
            enable_fp_fusion=False,
        )  # fmt: skip
        step = {
            "x": x, "stride": x.stride(0), "STEP": "norm", "mean": mean, "rstd": rstd,
            "weight": s.weight.contiguous(),
            "bias": None if s.bias is None else s.bias.contiguous(),
        }  # fmt: skip
        return NormParts(mean, rstd, *self.ended((rows, cols), s.dtype, s.keep, s.target, step))


class TritonNormBackward(_Fused):
    def run(
        self, dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dz, x, (rows, cols) = rows_of(dz), rows_of(x), x.shape
        dx = torch.empty((rows, cols), dtype=dtype, device=x.device)
        (height, width), share = _SUMS, cdiv(rows, _SHARES)
        shares = cdiv(rows, share)
        sums = torch.empty((2, shares, cols), dtype=_F32, device=x.device)
        mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
        kernels, ends = binding.kernels("steps"), (rows, cols, dz.stride(0), x.stride(0))
        kernels.norm_backward[(rows,)](
            dz, x, weight.contiguous(), mean, rstd, dx, *ends, inverse(cols), R=1,
            enable_fp_fusion=False,
        )  # fmt: skip
        kernels.norm_weights[cdiv(cols, width), shares](
            dz, x, mean, rstd, *sums, *ends, share, R=height, C=width, enable_fp_fusion=False
        )
        return dx, *sums.sum(1)


def activation(s: ActStep) -> tuple[tuple[int, int], dict[str, Any]]:
    """The shape of what an activation or its gradient makes, and what kernels ask of it."""
    h, act = rows_of(s.h), s.act
    rows, width = h.shape
    return (rows, width // 2 if act.gated and s.grad is None else width), {
        "x": h, "stride": h.stride(0), "STEP": "act" if s.grad is None else "dact",
        "grad": None if s.grad is None else s.grad.detach().resolve_neg().contiguous(),
        "ACT": act.base, "GATED": act.gated, "LIMIT": act.limit, "ALPHA": act.alpha,
        "OFFSET": act.offset,
    }  # fmt: skip


class Activations(_Ends):
    """Activations of matrices of one size, and their gradients."""

    def __call__(self, s: ActStep) -> ActParts:
        shape, step = activation(s)
        return ActParts(*self.ended(shape, s.dtype, s.keep, s.target, step))


register(_Fused("norm_quantize", Norms))
register(TritonNormBackward("norm_backward"))
register(_Fused("act_quantize", Activations))
