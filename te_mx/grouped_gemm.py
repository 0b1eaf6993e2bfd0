"""te_mx.grouped_gemm: the products of all groups on operands that are quantized already, or of
tokens as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx import mixed_grouped
from te_mx._ops import Operand, Stack
from te_mx._ops.grouped_gemm import gemm_rows
from te_mx.arguments import check_flag, shown
from te_mx.autograd import transforms
from te_mx.autograd.steps import mode_of
from te_mx.epilogue import check_dtype
from te_mx.formats import Format
from te_mx.grouped_arguments import check_floats, check_out, check_place
from te_mx.grouped_rows import Form, Rows, rows_of, settings_of
from te_mx.tensor import MXTensor
from te_mx.written import check_written, parts_of

OWNER = "grouped_gemm"


def grouped_gemm(
    inp: MXTensor | Tensor,
    weight: MXTensor | Sequence[MXTensor],
    *,
    offs: Tensor | None = None,
    index: Tensor | None = None,
    masked_m: Tensor | None = None,
    alignment: int = 1,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    accumulate: bool = False,
    zero_padding: bool = True,
    recipe: Any = None,
) -> Tensor:
    """``D[r] = inp[r] @ weight[g].T + bias[g]`` for the rows r of every group g, on MXTensors of
    any two formats. Each group has the bits of `te_mx.gemm` on its rows with ``split_k=False``; on
    Hopper, where only the device knows the groups, it is inside the bound of that precision.

    One of three says which rows belong to which of the G groups:

    ===========  ===============  ================================================================
    argument     inp              meaning
    ===========  ===============  ================================================================
    offs [G]     [R, K]           end offsets, group after group
    index [R]    [R, K]           the group of each row in any order, -1 for padding (DeepGEMM's
                                  m_indices); rows are gathered and put back
    masked_m     [G, M_max, K]    the first masked_m[g] rows of inp[g] count
    ===========  ===============  ================================================================

    Index tensors may lie on the device of inp, and are then not read by the host: what is out of
    range is cut off instead of refused, and nothing waits, so that a CUDA graph may hold the call.

    Args:
        inp: tokens with a rowwise copy, in blocks of one row. Or a plain tensor in bf16 or fp16
            (weight only: bf16 times MXFP4). It is not quantized: the codes of the weights are
            decoded for the time of the product, as by `te_mx.gemm`.
        weight: [G, N, K] with a rowwise copy, or G of them [N, K], which are stacked in every call.
            Where blocks hold several rows (128 x 128), those of a stack must divide N.
        offs, index, masked_m: int32 or int64; exactly one.
        alignment: group g of `offs` starts at the next multiple of it behind the end of group
            g - 1: 128 is DeepGEMM's psum layout. Rows between groups are read as zeros.
        bias: [G, N], fp32, bf16 or fp16.
        out_dtype: float32, bfloat16 or float16; that of `out` where it is given.
        out: contiguous, of the shape of the result, which is written there. It shares no memory
            with what is read.
        accumulate: add D to what `out` holds, in fp32, rounded once; rows of no group stay.
        zero_padding: rows of no group are 0 in the result. False leaves open what they hold, where
            zeros would be another write.
        recipe: its precision and alignment_spread count, which matter on Hopper GPUs; None means
            the active recipe, or the default one outside of te_mx.autocast.

    Returns:
        [R, N], or [G, M_max, N] with masked_m. Gradients do not flow through this function.

    Raises:
        TypeError, ValueError: what does not fit, with what was expected, before anything runs.
        RuntimeError: out requires grad while autograd records.
        NotImplementedError: forward-mode AD or a transform of torch.func follows bias
            or inp.
    """
    form = Form(OWNER, offs, index, masked_m, alignment).checked()
    check_flag(f"{OWNER}: zero_padding", zero_padding)
    check_flag(f"{OWNER}: accumulate", accumulate)
    check_dtype(out_dtype, f"{OWNER}: out_dtype")
    settings = settings_of(recipe, forward=False)
    rhs = stack_of(weight, OWNER)
    plain = isinstance(inp, Tensor) and inp.dtype in mixed_grouped.DTYPES
    lhs = mixed_grouped.check(inp, rhs, OWNER) if plain else tokens_of(inp)  # type: ignore[arg-type]
    first = lhs if isinstance(lhs, Tensor) else lhs.codes
    most = _check_sizes(tuple(inp.shape), first, rhs, masked_m is not None)
    if isinstance(lhs, Tensor):
        lhs = first = lhs.reshape(lhs.shape[:-1].numel(), rhs.k)
    if bias is not None:
        check_floats(f"{OWNER}: bias", bias)
        check_place(f"{OWNER}: bias", bias, first)
        if bias.shape != (rhs.groups, rhs.rows):
            raise ValueError(
                f"{OWNER}: bias must be [{rhs.groups}, {rhs.rows}], got {tuple(bias.shape)}"
            )
    if transforms.active():
        followed = [t for t in (inp, bias, out) if isinstance(t, Tensor)]
        transforms.refuse(f"te_mx.{OWNER}", followed, transforms.FUNCTION, grad=True)
    shape = (rhs.groups, most, rhs.rows) if masked_m is not None else (len(first), rhs.rows)
    asked = None if out_dtype == torch.bfloat16 else out_dtype  # the default: nothing was asked
    check_out(OWNER, out, asked, shape, first, accumulate)
    if out is not None:
        lists = (("offs", offs), ("index", index), ("masked_m", masked_m))
        read = (*parts_of("inp", lhs), *parts_of("weight", rhs), *lists, ("bias", bias))
        check_written(out, "out", read)
        out_dtype = torch.float32 if accumulate else out.dtype
    bias = None if bias is None else bias.detach().resolve_neg()
    rows = rows_of(form, first, rhs.groups, most)
    with torch.no_grad():
        if isinstance(lhs, Tensor):
            made = mixed_grouped.run(rows.taken(lhs), rows.groups, rhs, bias, out_dtype)
        else:
            made = gemm_rows(
                _taken(lhs, rows), rhs, rows.groups, bias=bias, out_dtype=out_dtype,
                mode=mode_of(settings),
            )  # fmt: skip
        made = rows.put_back(made, bias is not None, zero_padding or accumulate).view(shape)
        if out is None:
            return made
        return out.copy_(out.to(made.dtype) + made if accumulate else made)


def tokens_of(inp: Any, name: str = f"{OWNER}: inp") -> Operand:
    """Tokens as ops take them, [rows, k] in plain rows."""
    operand = _rowwise(inp, *name.split(": ")[::-1])
    if operand.format.scaling.block[0] != 1:
        raise ValueError(
            f"{name} is {operand.format.name}, whose blocks hold several rows, which may "
            "belong to several groups; quantize tokens in blocks of one row"
        )
    return operand


def is_quantized(weight: Any) -> bool:
    """Whether weights are MXTensors, as far as one look says."""
    if isinstance(weight, Sequence) and not isinstance(weight, str) and len(weight):
        return isinstance(weight[0], MXTensor)
    return isinstance(weight, MXTensor)


def stack_of(weight: Any, owner: str, name: str = "weight") -> Stack:
    """The weights of all groups as one operand.

    Raises TypeError or ValueError for what is no MXTensor [G, N, K], or a sequence of [N, K].
    """
    if isinstance(weight, MXTensor):
        operand = _rowwise(weight, name, owner)
        if len(weight.shape) != 3 or 0 in weight.shape[:1]:
            raise ValueError(
                f"{owner}: {name} must be [G, N, K] with one group or more, or a sequence of "
                f"[N, K], got {tuple(weight.shape)}"
            )
        groups, n, k = weight.shape
        fmt: Format = operand.format
        if n % fmt.scaling.block[0]:
            raise ValueError(
                f"{owner}: {name} [{groups}, {n}, {k}] in {fmt.name} has blocks of "
                f"{fmt.scaling.block[0]} rows that reach into the next group; pass a list of one "
                "MXTensor for each group"
            )
        codes = operand.codes.view(groups, *fmt.codes_shape(n, k))
        scales = operand.scales.view(groups, *fmt.scales_shape(n, k))
        return Stack(codes, scales, operand.spec, groups, n, k)
    if isinstance(weight, str | Tensor) or not isinstance(weight, Sequence):
        raise TypeError(
            f"{owner}: {name} must be an MXTensor or a sequence of MXTensors, got {shown(weight)}"
        )
    held = [_rowwise(each, f"{name}[{i}]", owner) for i, each in enumerate(weight)]
    kinds = {(tuple(each.shape), each.fmt, str(each.device)) for each in weight}
    if len(kinds) != 1 or len(weight[0].shape) != 2:
        raise ValueError(
            f"{owner}: {name} must hold one matrix [N, K] or more, all of one shape and format on "
            f"one device, got {len(weight)}: {', '.join(map(str, sorted(kinds))) or 'none'}"
        )
    first = held[0]
    codes, scales = (torch.stack([getattr(one, part) for one in held]) for part in _PARTS)
    return Stack(codes, scales, first.spec, len(held), first.rows, first.k)


_PARTS = ("codes", "scales")


def _rowwise(tensor: Any, name: str, owner: str) -> Operand:
    if not isinstance(tensor, MXTensor):
        raise TypeError(
            f"{owner}: {name} must be an MXTensor, got {shown(tensor)}; use te_mx.quantize"
        )
    operand = tensor.operand("rowwise")
    if operand is None:
        raise ValueError(
            f"{owner}: {name} has no rowwise copy, which this reads; quantize with rowwise=True"
        )
    return operand


def _check_sizes(shape: tuple[int, ...], first: Tensor, rhs: Stack, masked: bool) -> int:
    """M_max of tokens [G, M_max, K]; raises ValueError for tokens of another shape."""
    expected = f"[{f'{rhs.groups}, M_max' if masked else 'R'}, {rhs.k}]"
    if len(shape) != 2 + masked or shape[-1] != rhs.k or (masked and shape[0] != rhs.groups):
        raise ValueError(
            f"{OWNER}: inp must be {expected} for weight [{rhs.groups}, {rhs.rows}, {rhs.k}], got "
            f"{shape}"
        )
    check_place(f"{OWNER}: weight", rhs.codes, first)
    return shape[1] if masked else 0


def _taken(lhs: Operand, rows: Rows) -> Operand:
    codes, scales = rows.taken(lhs.codes), rows.taken(lhs.scales)
    return lhs._replace(codes=codes, scales=scales, rows=codes.shape[0])
