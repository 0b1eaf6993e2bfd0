"""te_mx.quantize and te_mx.gemm: the public functions on MXTensors. Gradients do not flow through
either: the modules of te_mx.nn are what trains.

Of two tensors that stand still, after a few calls of the same kind, the plan of their kernel and
the packed operands are known, and te_mx.gemm looks only at what may have changed: the codes
(torch counts writes to them), the stream, a graph that is being captured, and who watches the
dispatcher. Then the long way is taken, which says what is wrong."""

import math
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx import _ops as ops
from te_mx import formats
from te_mx._ops import FLOAT_DTYPES, Mode
from te_mx._ops.gemm import empty
from te_mx._ops.library import is_direct
from te_mx.api import blas, mixed_gemm
from te_mx.api.tensor import MXTensor, _make, check_copies, name_of
from te_mx.autograd import node
from te_mx.dispatch.calls import Product
from te_mx.dispatch.kernels import Plan, derived
from te_mx.dispatch.problem import ENCODED, INVARIANT
from te_mx.dispatch.registry import planned
from te_mx.dispatch.run import REFERENCE
from te_mx.formats import Format
from te_mx.formats.nvfp4 import TensorScaledFormat
from te_mx.formats.scaling import STOCHASTIC
from te_mx.recipe import MAX_SPREAD, check_precision
from te_mx.runtime import streams
from te_mx.runtime.arguments import check_dense, check_flag, is_one_of, parts_of, shown
from te_mx.runtime.kernel_log import note_written


class Call(NamedTuple):
    """What te_mx.gemm was asked for, beside its tensors: no epilogue, a new result."""

    layout: str
    out_dtype: torch.dtype
    precision: str
    spread: int
    split_k: bool


_TYPES = (str, torch.dtype, str, int, bool)
_DEFAULTS = (None, False, None, None, False, None)
_PLAIN = ops.Epilogue()
_compiling = torch.compiler.is_dynamo_compiling


class _Known(NamedTuple):
    """What calls of one kind share, and the plan of their product."""

    device: torch.device
    shape: tuple[int, int]
    a_key: tuple[Any, ...]  # of MXTensor's packed forms
    b_key: tuple[Any, ...]
    mode: Mode
    plan: Plan


def run(A: Any, B: Any, call: Call, out: Any, *rest: Any) -> Tensor | None:
    """The product, perhaps in `out`, or None where the long way is to be taken: with arguments of a
    wrong type too, which may be equal to right ones. rest: all that is to be at its default."""
    if (
        _compiling()
        # One by one: tensors and arrays do not compare to a bool, and 0 is equal to False.
        or any(map(is_not, rest, _DEFAULTS))
        or not (type(A) is type(B) and hasattr(A, "_packs"))
        or tuple(map(type, call)) != _TYPES
        or node.active()
    ):
        return None
    known = derived().get((A.device, A._fmt, A._shape, B._fmt, B._shape, call))
    if known is None or A._uncounted or B._uncounted or B.device != known.device:
        return None
    device = known.device
    stream = streams.current(device)
    a, b = A._packs.get((*known.a_key, stream)), B._packs.get((*known.b_key, stream))
    if a is None or b is None:
        return None
    (a_now, rhs), (b_now, lhs) = a, b
    if (
        rhs is None
        or lhs is None
        or a_now != A._versions(known.a_key[0])
        or b_now != B._versions(known.b_key[0])
        or not is_direct(lhs.codes, out)
        or streams.capturing(device)
    ):
        return None
    given = out
    if out is None:
        out = empty(lhs.codes, known.shape, call.out_dtype)
    elif not _takes(out, known, call, A, B):
        return None
    if known.plan(Product(lhs, rhs, _PLAIN, out, None, known.mode)) is None:
        return None
    if given is not None:
        note_written(given)
    return out


def _takes(out: Tensor, plan: _Known, call: Call, A: MXTensor, B: MXTensor) -> bool:
    """Whether a plain tensor can be written as te_mx.gemm promises, looking at no message."""
    if (
        out.layout is not torch.strided
        or out.is_nested
        or out.shape != plan.shape
        or out.dtype != call.out_dtype
        or out.device != plan.device
        or out.requires_grad
        or not out.is_contiguous()
    ):
        return False
    start = out.data_ptr()
    end = start + out.nbytes
    for tensor in (A, B):
        for part in tensor._parts():
            if part is not None:
                first = part.data_ptr()
                if first < end and start < first + part.nbytes:
                    return False
    return True


def remember(A: MXTensor, B: MXTensor, call: Call, usages: tuple[str, str]) -> None:
    """Plan later calls of this kind, after one that ran on packed operands."""
    device, packing = A.device, Mode(call.precision, call.spread)
    key = device, A._fmt, A._shape, B._fmt, B._shape, call
    if key in derived() or (device.type == "cuda" and device.index is None):
        return
    stream = streams.current(device)
    a_key, b_key = (usages[0], "rhs", packing), (usages[1], "lhs", packing)
    rhs, lhs = (one._packs.get((*of, stream), (0, None))[1] for one, of in ((A, a_key), (B, b_key)))
    if rhs is None or lhs is None:
        return
    mode = packing._replace(split_k=call.split_k)
    sizes = lhs.rows, rhs.rows, lhs.k
    kernel, plan = planned("gemm", device, lhs.spec, rhs.spec, sizes, call.out_dtype, *mode)
    if kernel.name != REFERENCE and 0 not in sizes:
        derived()[key] = _Known(device, sizes[:2], a_key, b_key, mode, plan)


ROUNDINGS = ("nearest", "stochastic")


class GemmOutput(NamedTuple):
    """Result of `te_mx.gemm`.

    out: D [n, m]. aux: the value before GELU [n, m], or None. bias_grad: [m] or [n], or None."""

    out: Tensor
    aux: Tensor | None
    bias_grad: Tensor | None


def quantize(
    x: Tensor,
    fmt: str = "e4m3",
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_transposed: bool | None = None,
    scale_rule: str | None = None,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    packed: bool = False,
) -> MXTensor:
    """Quantize x: blocks of elements that share a scale.

    MX formats have a power-of-two scale for every 32 elements. In fp32, for every block: ``amax =
    max |x|``; ``byte`` is the biased exponent of ``amax / max(fmt)`` rounded up to a power of two
    (rceil; nothing saturates), of ``2^floor(log2 amax) / 2^emax`` (floor, the rule of the OCP
    paper; the largest elements may saturate), or that of amax rounded to one mantissa bit first
    (even, compressed-tensors' rule for MXFP4); ``code = round_to_nearest_even(x * 2^(127 -
    byte))``, clamped to the largest code. A block of zeros has byte 0. A block with NaN or Inf has
    byte 255 and is NaN throughout.

    Blockwise FP8 ("fp8_e4m3_1x128", ..) has an fp32 scale for every 128 elements, or for 128 x 128:
    ``scale = 1 / factor`` and ``code = round_to_nearest_even(x * factor)`` with ``factor =
    max(fmt) / amax``, whose mantissa the rule "pow2" cuts off. A block of zeros has scale 1, a
    block with NaN or Inf the scale NaN.

    NVFP4 ("nvfp4", "nvfp4_16x16") has an E4M3 scale for every 16 elements, or for 16 x 16, and an
    fp32 scale for the whole tensor ("nvfp4_rows": for every row): te_mx.formats.nvfp4 has the
    formulas, those of Transformer Engine, torchao, ModelOpt and compressed-tensors. Plain torch
    makes it, and te_mx.gemm takes it.

    Args:
        x: [..., cols] float32, bfloat16 or float16; any strides. A single dimension is one row.
        fmt: "e4m3" (max 448) or "e5m2" (max 57344), which are MXFP8, or a name of
            te_mx.formats.names(), "nvfp4", "nvfp4_16x16" or "nvfp4_rows".
        rowwise: blocks along the last dimension.
        columnwise: blocks along the flattened leading dimensions. Both come from one read of x.
        columnwise_transposed: store the columnwise copy as [cols, rows]. None takes the form that
            the device's GEMM reads best. Values do not depend on it.
        scale_rule: "rceil", "floor" or "even" for MX formats; "pow2" or "fp32" for blockwise FP8,
            with the smallest amax behind a colon if wanted ("fp32:1e-12"); "te", "torchao",
            "modelopt" or "compressed_tensors" for NVFP4, and "te_4over6", of two scales a block the
            better one, with "_mse" and "_448" behind it if wanted. None for the first one, or for
            the one behind the format ("nvfp4+modelopt").
        rounding: "nearest" (to even), or "stochastic" for MX formats and NVFP4: up or down with a
            mean of what is rounded, by random bits that depend on the seed and the place.
        seed: of stochastic rounding: an int of 64 bits, or an int64 tensor [1] on the device of x,
            which a CUDA graph may change between replays.
        packed: what `prepack` does with the result.

    A format may carry a random Hadamard transform, "mxfp4+rht32:0x1234abcd": every 32 (or 16)
    elements along the blocks are rotated, with signs from a mask of 32 bits, before they are
    quantized. A product does not change when both sides are rotated alike, and te_mx.gemm
    multiplies no others. Of NVFP4 one copy then: each direction has a tensor scale of its own.

    Returns:
        An MXTensor with the asked copies. Sizes need not divide by the block: the last is shorter.

    Raises:
        TypeError: x is not a tensor of such a dtype.
        ValueError: x has no dimension, no copy is asked for, a word is unknown, or seed and
            rounding do not belong together.
        NotImplementedError: forward-mode AD or a transform of torch.func follows x.
        RuntimeError: packed, while a CUDA graph is captured.
    """
    check_flag("packed", packed)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"x must be float32, bfloat16 or float16, got {x.dtype}; convert it, e.g. x.float()"
        )
    check_dense("x", x)
    if x.dim() == 0:
        raise ValueError("x must have one dimension or more, got a scalar; use x.reshape(1)")
    if isinstance(fmt, str) and scale_rule is None and "+" in fmt:  # "nvfp4+modelopt"
        name, _, last = fmt.rpartition("+")
        if last in formats.get(name).scaling.rules:
            fmt, scale_rule = name, last
    known = formats.get(fmt)
    rule = known.scaling.rules[0] if scale_rule is None else scale_rule
    if not known.scaling.knows(rule):
        raise ValueError(
            f"scale_rule must be one of {known.scaling.shown_rules} for {known.name}, got "
            f"{shown(scale_rule)}"
        )
    seed = _seed_of(rounding, seed, known, x.device)
    check_flag("rowwise", rowwise)
    check_flag("columnwise", columnwise)
    if columnwise_transposed is not None:
        check_flag("columnwise_transposed", columnwise_transposed)
    if not rowwise and not columnwise:
        raise ValueError("nothing to do: pass rowwise=True, columnwise=True or both")
    if columnwise_transposed is not None and not columnwise:
        raise ValueError(
            f"columnwise_transposed={columnwise_transposed} needs columnwise=True; pass both"
        )
    transposed = columnwise_transposed
    if columnwise and transposed is None:
        transposed = known.element.bits < 8 or ops.operand_layouts(
            x.device, known.name, known.name, "exact", MAX_SPREAD
        ).col.endswith("@rows")
    if node.active():
        node.refuse("te_mx.quantize", (x,), node.FUNCTION, grad=True)
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if isinstance(known, TensorScaledFormat):
        check_copies(known, rowwise, columnwise)
    row, col = ops.quantize_2d(
        flat, f"{known.name}@rows" if rowwise else "",
        f"{known.name}@{'rows' if transposed else 'cols'}" if columnwise else "",
        rule=rule if seed is None else rule + STOCHASTIC, seed=seed,
    )[:2]  # fmt: skip
    parts = (None,) * 2 if row is None else row[:2], (None,) * 2 if col is None else col[:2]
    held = *parts[0], *parts[1]
    whole = next(one.tensor_scale for one in (row, col) if one is not None)
    made = _make(x.shape, name_of(known), held, bool(columnwise and transposed), whole)
    return prepack(made) if packed else made


def prepack(q: MXTensor) -> MXTensor:
    """Pack a tensor that stands still, such as a weight, for all calls of te_mx.gemm that come.

    Without this, te_mx.gemm packs operands inside of every call, keeps what it packed from the
    second call on, and in a CUDA graph packs again at every replay, because their codes may be
    written in between. Of a prepacked tensor they may not: graphs read what is packed here, which
    lives as long as the tensor does, so keep that as long as the graph.

    Every copy of q is packed as the device's kernel for precision "adaptive" and the default
    alignment_spread reads it on either side, in about a byte an element beside the codes; others
    read q as it is. On CPUs, and of formats that the kernel reads as they are, nothing is packed
    before the call that asks for it. Copies on other devices and those from pickles are to be
    prepacked again. Compiled code reads q as it is.

    Args:
        q: an MXTensor whose codes and scales nobody writes any more. te_mx.gemm raises a
            RuntimeError when it sees that somebody did.

    Returns:
        q itself.

    Raises:
        TypeError: q is no MXTensor.
        RuntimeError: a CUDA graph is being captured: pack before.
    """
    if not isinstance(q, MXTensor):
        raise TypeError(f"q must be an MXTensor, got {type(q).__name__}; see te_mx.quantize")
    if torch.compiler.is_compiling():
        return q
    if streams.capturing(q.device):
        raise RuntimeError(
            "te_mx.prepack: a CUDA graph is being captured, which would pack at every replay; pack "
            "before the capture"
        )
    q._stand()
    return q


def _seed_of(
    rounding: str, seed: int | Tensor | None, fmt: Format, device: torch.device
) -> Tensor | None:
    """The seed of stochastic rounding as ops take it, int64 [1]; None for rounding to nearest."""
    if not is_one_of(rounding, ROUNDINGS) or (seed is None) != (rounding == "nearest"):
        raise ValueError(
            'rounding must be "nearest", or "stochastic" with a seed, got '
            f"rounding={shown(rounding)} and seed={shown(seed)}"
        )
    if seed is None:
        return None
    if fmt.scaling.scale == "fp32":
        raise ValueError(f'rounding="stochastic" is for MX formats and NVFP4, got {fmt.name}')
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.shape != (1,) or seed.device != device:
            raise ValueError(f"seed must be an int64 tensor [1] on {device}, got {shown(seed)}")
        return seed
    if type(seed) is not int or not -(1 << 63) <= seed < 1 << 63:
        raise TypeError(f"seed must be an int of 64 bits or an int64 tensor, got {shown(seed)}")
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def gemm(
    A: MXTensor | Tensor,
    B: MXTensor | Tensor,
    layout: str = "TN",
    *,
    bias: Tensor | bool | None = None,
    gelu: str | None = None,
    gelu_in: Tensor | None = None,
    grad: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    aux_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    precision: str = "adaptive",
    alignment_spread: int = MAX_SPREAD,
    split_k: bool = True,
) -> GemmOutput:
    """Multiply two MXTensors, or one and a plain tensor, with what belongs to a layer behind it.

    Layouts are those of BLAS and Transformer Engine. Shapes are row-major and flattened:

    ====== ======= ======= ========= ==================== ============================
    layout A       B       D [n, m]  reads                te_mx.Linear: A, B
    ====== ======= ======= ========= ==================== ============================
    TN     [m, k]  [n, k]  B @ A.T   A and B rowwise      weight, input -> output
    NN     [k, m]  [n, k]  B @ A     A columnwise, B row  weight, output grad -> input grad
    NT     [k, m]  [k, n]  B.T @ A   A and B columnwise   input, output grad -> weight grad
    ====== ======= ======= ========= ==================== ============================

    Forward (grad=False), in fp32: ``v = sum_k a * b``; ``+ bias[m]``; with gelu, v is stored as aux
    and ``v = gelu(v)``; ``+ out`` if accumulate; rounded once. Backward (grad=True): with gelu_in,
    ``v *= gelu'(gelu_in)``; bias asks for the bias gradient instead of being added. Products are
    exact, sums are fp32. Bits depend neither on the layout nor on the number of threads; on Hopper,
    where K may be cut into parts (split_k), they depend on the sizes and the GPU.

    Args:
        A, B: MXTensors on one device, each with the copy that the layout reads; formats may differ.
            Codes of NVFP4 are decoded for the time of the product, code * scale exactly, which is
            torch's with fp32 sums; these are multiplied by the tensor scales.
            One may be a plain tensor in bf16 or fp16 (weight only: bf16 times MXFP4). It is not
            quantized: the codes of the other are decoded for the time of the product, which is
            torch's, in bf16 if both sides are such numbers, else in fp32.
        layout: "TN", "NN" or "NT".
        bias: grad=False: [m]. grad=True: a tensor or True asks for the bias gradient, [m] (sums of
            D over n) with gelu_in, [n] (sums of B over k) without, where B has no Hadamard
            transform; it has the dtype of the tensor, or fp32 for True.
        gelu: None, "tanh" or "erf". With gelu_in, that of the forward; "tanh" if left away.
        gelu_in: [n, m], the aux of the forward; needs grad=True.
        grad: this is a backward GEMM.
        out: contiguous [n, m], written in place; its dtype replaces out_dtype. It shares no memory
            with what the call reads, and while autograd records it does not require grad.
        out_dtype: float32, bfloat16 or float16.
        aux_dtype: dtype of aux; that of the result by default.
        accumulate: add to out.
        precision: "adaptive" and "exact" matter on Hopper GPUs, whose tensor cores know no block
            scales; CPUs are always exact. "adaptive" aligns neighbouring scales and multiplies in
            FP8; "exact" multiplies the exact values in bf16 at about bf16's speed;
            docs/numerics.md has the errors. "invariant": a row of D has the same bits beside any
            others (docs/invariance.md). "fp8": operands in NVFP4, at least one, are encoded anew
            in mxfp8_e4m3, which moves an element by at most 1/16 of itself, 3 % in the mean of
            squares, and multiplied as "adaptive" does, with MX formats or NVFP4. Neither goes with
            grad or accumulate.
        alignment_spread: for "adaptive", 0 to 8: scales that differ by at most 2^alignment_spread
            are aligned; an element moves by at most 2^(alignment_spread - 17.8) of the largest of
            its block (E4M3).
        split_k: for "adaptive" on Hopper GPUs: cut K into parts that are computed at the same time,
            where D has too few tiles to fill the chip, and add their fp32 sums up in order.
            `te_mx.explain` says how many. False sums K in one piece, as te_mx's modules do. No
            effect elsewhere.

    Returns:
        GemmOutput(out, aux, bias_grad). Sizes may be 0; with k = 0 the product is zeros.

    Raises:
        TypeError, ValueError: whatever does not fit, before anything runs.
        RuntimeError: out requires grad while autograd records.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.

    Gradients do not flow through this function.
    """
    if is_one_of(precision, (INVARIANT, ENCODED)) and (grad is True or accumulate is True):
        raise ValueError(
            f"precision {precision!r} is about rows of forward products, got "
            f"{'grad' if grad is True else 'accumulate'}=True; leave one of them away"
        )
    call = None
    if bias is None and gelu_in is None:
        dtype = out.dtype if type(out) is Tensor and out_dtype is torch.bfloat16 else out_dtype
        call = Call(layout, dtype, precision, alignment_spread, split_k)
        result = run(A, B, call, out, gelu, grad, bias, gelu_in, accumulate, aux_dtype)
        if result is not None:
            return GemmOutput(result, None, None)
    if node.active():
        tensors = [t for t in (A, B, bias, gelu_in, out) if isinstance(t, Tensor)]
        node.refuse("te_mx.gemm", tensors, node.FUNCTION, grad=True)
    mixed = mixed_gemm.sides_of(A, B, layout)
    if mixed is None:
        a, b = blas.operands(A, B, layout)
        n, m, device = b.rows, a.rows, a.codes.device
        read: list[tuple[str, Tensor | None]] = [*parts_of("A", a), *parts_of("B", b)]
    else:
        n, m, device, read = mixed.n, mixed.m, A.device, [*mixed.parts]
    epilogue = blas.resolve(n, m, device, bias, gelu, gelu_in, grad, accumulate)
    if epilogue.bias_grad == "operand" and mixed is None and b.format.transform is not None:
        raise ValueError(
            f"bias asks for the sums of B over k, but B is {b.format.name}, whose codes are those "
            "of transformed values; leave bias away and sum the tensor that was quantized"
        )
    read += [("bias", epilogue.bias), ("gelu_in", epilogue.gelu_in)]
    blas.check_out(out, n, m, device, out_dtype, accumulate, read)
    if aux_dtype is not None:
        blas.check_dtype(aux_dtype, "aux_dtype")
    check_precision(precision, alignment_spread)
    check_flag("split_k", split_k)
    if mixed is not None and precision in (INVARIANT, ENCODED):
        of = "at least one to NVFP4" if precision == ENCODED else "to MX formats, or blockwise FP8"
        raise ValueError(
            f"precision {precision!r} multiplies codes with codes, and got one side that torch is "
            f"to multiply; quantize both, {of}"
        )
    if mixed is not None:
        made = mixed_gemm.run(mixed, epilogue, out, out_dtype, aux_dtype)
    else:
        assert not isinstance(A, Tensor) and not isinstance(B, Tensor)
        mode = ops.Mode(precision, alignment_spread, split_k)
        if not torch.compiler.is_compiling() and ops.worth_packing(b, a, mode):
            usage_a, usage_b = blas.USAGES[layout]
            kept_as = ops.Mode(precision, alignment_spread)
            specs = a.spec, b.spec
            a = A.kept_operand(usage_a, "rhs", kept_as, specs[1]) or a
            if epilogue.bias_grad != "operand":  # which sums the values that were quantized
                b = B.kept_operand(usage_b, "lhs", kept_as, specs[0]) or b
            if call is not None:
                remember(A, B, call, (usage_a, usage_b))
        made = ops.gemm_2d(
            b, a, epilogue, out=out, out_dtype=out_dtype, aux_dtype=aux_dtype, mode=mode
        )
    bias_grad = made.bias_grad
    if bias_grad is not None and isinstance(bias, Tensor):
        bias_grad = bias_grad.to(bias.dtype)
    return GemmOutput(made.out, made.aux, bias_grad)
