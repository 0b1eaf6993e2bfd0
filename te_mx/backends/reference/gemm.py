"""The GEMM kernels that run anywhere: the reference, and the epilogue of empty problems."""

import torch
from torch import Tensor

from te_mx.backends.cpu.binding import missing_reason
from te_mx.backends.reference import Reference
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue, Product, Quantize, Ran
from te_mx.dispatch.kernels import Kernel, PreferredLayouts
from te_mx.dispatch.operand_layouts import operand_layouts
from te_mx.dispatch.problem import ENCODED, Problem
from te_mx.dispatch.registry import pick_problem, register
from te_mx.dispatch.run import ZERO_SIZE
from te_mx.formats.scaling import power_of_two
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand

# -------------------------------------------------------------------------------------- torch gemm
# GEMMs in plain torch, on every device, for every format and layout: the specification.
_F32 = torch.float32
_NAN_SCALE = 255
_WIDE = 128  # of k, for one fp32 scale


@torch.no_grad()
def gemm(
    lhs: Operand, rhs: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None
) -> Tensor | None:
    """out [m, n] = epilogue(lhs [m, k] @ rhs [n, k]^T); writes out and aux, returns bias_grad.

    On the CPU products are exact and sums are double, rounded once to fp32; operands with fp32
    scales multiply so everywhere, 128 of k at a time. Elsewhere (fp64 is slow
    or missing there) the operands are fp32 values relative to the largest scale of their row,
    multiplied by torch.mm without TF32; numbers more than 2^100 below the largest of their row may
    then be lost."""
    bias_grad = None
    if epilogue.bias_grad == "operand":
        bias_grad = _values(lhs).sum(1).to(_F32)
    return finish(matmul(lhs, rhs), bias_grad, epilogue, out, aux)


@torch.no_grad()
def finish(
    value: Tensor, bias_grad: Tensor | None, epilogue: Epilogue, out: Tensor, aux: Tensor | None
) -> Tensor | None:
    """The epilogue of fp32 sums `value` [m, n]; bias_grad is the one of the operand, if asked."""
    if epilogue.bias is not None:
        value = value + epilogue.bias.to(_F32)
    if aux is not None:
        aux.copy_(value)
    approximate = "tanh" if epilogue.gelu == "tanh" else "none"
    if epilogue.gelu_in is not None:
        gelu_in = epilogue.gelu_in.to(_F32).contiguous()  # or strides change the last bits
        value = torch.ops.aten.gelu_backward(value, gelu_in, approximate=approximate)
    elif epilogue.gelu is not None:
        value = torch.nn.functional.gelu(value, approximate=approximate)
    if epilogue.bias_grad == "result":
        bias_grad = value.sum(0)
    if epilogue.accumulate:
        value = value + out.to(_F32)
    out.copy_(value)
    return bias_grad


def matmul(lhs: Operand, rhs: Operand) -> Tensor:
    """fp32 lhs @ rhs^T, without an epilogue. Tensor scales, multiplied by each other in fp32,
    multiply the sums of what they leave, in fp32."""
    sums = _matmul(lhs, rhs)
    if lhs.tensor_scale is None and rhs.tensor_scale is None:
        return sums
    return sums * whole_of(lhs, rhs)


def whole_of(lhs: Operand, rhs: Operand) -> Tensor:
    """What multiplies their sums: the tensor scales that there are, of which at least one is."""
    of_lhs, of_rhs = lhs.tensor_scale, rhs.tensor_scale
    if of_lhs is None or of_rhs is None:
        made = of_lhs if of_rhs is None else of_rhs.t()
        assert made is not None
        return made
    return of_lhs * of_rhs.t()


def _matmul(lhs: Operand, rhs: Operand) -> Tensor:
    if _has_factors(lhs) and _has_factors(rhs):
        return _factored_matmul(lhs, rhs)
    if lhs.codes.is_cuda and (lhs.tensor_scale is not None or rhs.tensor_scale is not None):
        return _narrow_matmul(lhs, rhs)
    if lhs.codes.device.type == "cpu" or not (_relates(lhs) and _relates(rhs)):
        return torch.mm(_unscaled(lhs).double(), _unscaled(rhs).double().t()).to(_F32)
    return relative_matmul(lhs, rhs)


def _narrow_matmul(lhs: Operand, rhs: Operand) -> Tensor:
    """lhs @ rhs^T on a GPU, without tensor scales: products in bf16 where both sides are exact
    there, else in fp32, and fp32 sums."""
    narrow = all(side.unscaled_dtype == torch.bfloat16 for side in (lhs, rhs))
    dtype = torch.bfloat16 if narrow else _F32
    left, right = (side.unscaled(dtype).contiguous() for side in (lhs, rhs))
    if narrow:
        return torch.mm(left, right.t(), out_dtype=_F32)
    return mm_without_tf32(left, right.t())


def relative_matmul(lhs: Operand, rhs: Operand) -> Tensor:
    """lhs @ rhs^T in fp32, relative to each row's largest scale, for devices without fast fp64."""
    lhs_values, lhs_exponent = _relative(lhs)
    rhs_values, rhs_exponent = _relative(rhs)
    value = mm_without_tf32(lhs_values, rhs_values.t())
    exponent = (lhs_exponent + rhs_exponent.t()).clamp(-300, 300)
    # Three factors: 2^exponent itself may be out of fp32's range while the result is not.
    third = exponent // 3
    return value * power_of_two(third) * power_of_two(third) * power_of_two(exponent - 2 * third)


def _has_factors(operand: Operand) -> bool:
    """Whether every 128 of k have fp32 scales, one for a row or for 128 of them."""
    fmt, layout = spec_of(operand.spec)
    return layout.exact and fmt.scaling.scale == "fp32" and fmt.block == _WIDE


def _factored_matmul(lhs: Operand, rhs: Operand) -> Tensor:
    """lhs @ rhs^T in fp32: sums of 128 products of codes, exact but for the widest of E5M2, times
    both scales, added up in order. Products of values are not exact in fp64, so that their sums
    would depend on the order of torch.mm, and that on shapes and addresses."""
    (a, a_scales), (b, b_scales) = _codes_and_factors(lhs), _codes_and_factors(rhs)
    total = a.new_zeros(len(a), len(b), dtype=torch.float64)
    for i in range(a_scales.shape[1]):
        at = slice(i * _WIDE, (i + 1) * _WIDE)
        sums = torch.mm(a[:, at].double(), b[:, at].double().t())
        total += sums * (a_scales[:, i, None] * b_scales[:, i])
    return total.to(_F32)


def _codes_and_factors(operand: Operand) -> tuple[Tensor, Tensor]:
    """The values of codes without scales, fp32 [rows, k], and the scales, fp64 [rows, blocks]."""
    fmt, layout = spec_of(operand.spec)
    codes, scales = layout.unpack(fmt, operand.codes, operand.scales, operand.k)
    scales = scales.double().repeat_interleave(fmt.scaling.block[0], 0)[: operand.rows]
    return fmt.decode(codes, operand.k), scales


def _values(operand: Operand) -> Tensor:
    """Exact values [rows, k]: fp64, but fp32 on devices without fast fp64."""
    return operand.values(_wide(operand))


def _unscaled(operand: Operand) -> Tensor:
    """The same without the tensor scale, contiguous: every layout runs the same torch.mm."""
    return operand.unscaled(_wide(operand)).contiguous()


def _wide(operand: Operand) -> torch.dtype:
    wide = operand.codes.device.type == "cpu" or not operand.layout.exact
    return torch.float64 if wide else _F32


def _relates(operand: Operand) -> bool:
    """Whether the operand has power-of-two scales that can be told from its codes."""
    fmt, layout = spec_of(operand.spec)
    return layout.exact and fmt.scaling.scale == "e8m0"


def _relative(operand: Operand) -> tuple[Tensor, Tensor]:
    """fp32 values [rows, k] divided by 2^exponent [rows, 1], the largest scale of each row."""
    fmt, layout = spec_of(operand.spec)
    codes, scales = layout.unpack(fmt, operand.codes, operand.scales, operand.k)
    scales = scales.contiguous().int()
    finite = torch.where(scales == _NAN_SCALE, 0, scales)
    top = finite.amax(1, keepdim=True) if finite.numel() else finite.new_zeros(len(finite), 1)
    factors = power_of_two((finite - top).clamp(min=-100))
    factors = torch.where(scales == _NAN_SCALE, torch.nan, factors)
    return fmt.decode(codes, operand.k, factors), top - 127


def mm_without_tf32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of fp32 matrices, on GPUs too."""
    if left.device.type != "cuda":
        return torch.mm(left, right)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return torch.mm(left, right)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class ReferenceGemm(Reference):
    """Every format, layout and device."""

    op = "gemm"

    def note(self, problem: Problem) -> str:
        return (missing_reason() or "") if problem.place.device == "cpu" else ""

    def run(self, p: Product) -> Ran:
        return Ran(self.name, gemm(p.lhs, p.rhs, p.epilogue, p.out, p.aux))


class DecodedGemm(Kernel):
    """Operands with a tensor scale on GPUs: torch's product of what bf16 holds of both sides, with
    fp32 sums that the tensor scales multiply."""

    op, name, rank = "gemm", "decoded", 900

    def accepts(self, problem: Problem) -> str | None:
        if problem.place.device != "cuda":
            return f"runs on CUDA, the operands are on {problem.place.device}"
        sides = [spec_of(spec).format for spec in (problem.lhs, problem.rhs)]
        if not any(fmt.tensor_scaled for fmt in sides):
            return "decodes formats with a tensor scale and what they are multiplied with"
        if not all(fmt.tensor_scaled or fmt.exact_dtype == torch.bfloat16 for fmt in sides):
            return f"multiplies what bf16 holds, not {sides[0]} with {sides[1]}"
        return None

    def run(self, p: Product) -> Ran:
        return Ran(self.name, gemm(p.lhs, p.rhs, p.epilogue, p.out, p.aux))


class ZeroSize(ReferenceGemm):
    """Nothing to multiply: the epilogue of zeros."""

    name, rank = ZERO_SIZE, -1

    def accepts(self, problem: Problem) -> str | None:
        return None if problem.empty else "runs problems in which a size is 0"


_ENCODED = "mxfp8_e4m3"


class EncodedGemm(Kernel):
    """Precision "fp8": operands in NVFP4 are decoded to bf16, tensor scale included, and encoded in
    mxfp8_e4m3, for the product of their device at precision "adaptive"."""

    op, name, rank, encodes = "gemm", ENCODED, 901, True

    def accepts(self, problem: Problem) -> str | None:
        if problem.precision != ENCODED:
            return "encodes NVFP4 anew in MXFP8, which rounds, at precision 'fp8'"
        sides = [spec_of(spec).format for spec in (problem.lhs, problem.rhs)]
        if not any(fmt.tensor_scaled for fmt in sides):
            return "encodes NVFP4, of which this has none"
        if not all(fmt.tensor_scaled or fmt.scaling.scale == "e8m0" for fmt in sides):
            return f"multiplies NVFP4 with MX formats and NVFP4, not {sides[0]} with {sides[1]}"
        return None

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        inner = self._inner(problem)
        row, col, right_col, right_row = pick_problem(inner).preferred_layouts(inner)
        left = (row, col) if inner.lhs == problem.lhs else PreferredLayouts()
        if inner.rhs != problem.rhs:
            right_row, right_col = PreferredLayouts()[:2]
        return PreferredLayouts(*left[:2], right_col or col, right_row or row)

    def prepares(self, m: int, n: int, k: int) -> bool:
        return False

    def note(self, problem: Problem) -> str:
        return f"as mxfp8_e4m3, then {pick_problem(self._inner(problem)).name}"

    @staticmethod
    def _inner(problem: Problem) -> Problem:
        lhs, rhs = (
            f"{_ENCODED}@any" if spec_of(spec).format.tensor_scaled else spec
            for spec in (problem.lhs, problem.rhs)
        )
        return problem._replace(lhs=lhs, rhs=rhs, precision="adaptive")

    def run(self, p: Product) -> Ran:
        mode = p.mode._replace(precision="adaptive")
        lhs, rhs = (
            _encoded(p.lhs, p.rhs, False, mode.spread),
            _encoded(p.rhs, p.lhs, True, mode.spread),
        )
        return run.gemm(lhs, rhs, p.epilogue, p.out, p.aux, mode)._replace(name=self.name)


def _encoded(side: Operand, other: Operand, right: bool, spread: int) -> Operand:
    """NVFP4 as MXFP8, as the kernel of its device reads it beside another operand."""
    if not side.format.tensor_scaled:
        return side
    beside = _ENCODED if other.format.tensor_scaled else other.format.name
    device = side.codes.device
    spec = operand_layouts(device, _ENCODED, beside, "adaptive", spread, right=right).row
    made = run.quantize(Quantize(run.dequantize(side, torch.bfloat16), spec, "", "rceil")).row
    assert made is not None
    return made


register(ReferenceGemm())
register(EncodedGemm())
register(DecodedGemm())
register(ZeroSize())
