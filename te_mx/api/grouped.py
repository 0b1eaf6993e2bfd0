"""te_mx.grouped_linear and te_mx.grouped_wgrad: grouped products for mixtures of experts that keep
their own parameters and their own token layout; te_mx.grouped_gemm: the products of all groups on
operands that are quantized already, or of tokens as they are."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import Operand, Stack
from te_mx._ops.grouped_gemm import gemm_k, gemm_rows, on_device
from te_mx._ops.grouped_quantize import quantize_grouped
from te_mx.api import mixed_gemm
from te_mx.api.blas import check_dtype
from te_mx.api.groups import (
    Grouping,
    Rows,
    aligned,
    bias_of,
    check_floats,
    check_out,
    parts,
    quantized_parts,
    readable,
    rows_of,
    settings_of,
    wgrad_shape,
)
from te_mx.api.tensor import MXTensor
from te_mx.autograd import grouped as autograd
from te_mx.autograd import node
from te_mx.autograd.grouped import GroupLayouts
from te_mx.autograd.linear_recipe import mode_of, new_seed
from te_mx.context.region import output_dtype
from te_mx.dispatch.calls import Groups
from te_mx.dispatch.groups import scale_rows
from te_mx.formats import Format
from te_mx.layouts.operand import stacked
from te_mx.layouts.plain import COLS, GROUPED_COLS
from te_mx.recipe import Settings
from te_mx.runtime.arguments import (
    check_flag,
    check_place,
    check_size,
    check_written,
    parts_of,
    shown,
)

WGRAD = "grouped_wgrad"


def columns_of(name: str, tensor: Any) -> Operand:
    """The columnwise copy of an MXTensor [R, .], logical [., R] in layout "cols".

    Raises:
        TypeError: it is no MXTensor.
        ValueError: it is no matrix, has no columnwise copy, or blocks that hold several columns.
    """
    if not isinstance(tensor, MXTensor):
        raise TypeError(
            f"{WGRAD}: grad and inp must both be tensors or both MXTensors, got {name} of "
            f"{shown(tensor)}"
        )
    if len(tensor.shape) != 2:
        raise ValueError(f"{WGRAD}: {name} must be a matrix, got shape {tuple(tensor.shape)}")
    operand = tensor.operand("columnwise")
    if operand is None:
        raise ValueError(
            f"{WGRAD}: {name} has no columnwise copy, whose blocks run along the rows that are "
            "summed; quantize with columnwise=True"
        )
    fmt = operand.format
    if not GROUPED_COLS.takes(fmt):
        raise ValueError(
            f"{WGRAD}: {name} is {fmt.name}, whose blocks hold several columns; quantize it in "
            "blocks of one row"
        )
    if fmt.transform is not None:
        raise ValueError(
            f"{WGRAD}: {name} is {fmt.name}, whose transform mixes the rows of a block, also those "
            f"of no group; quantize it as {fmt.untransformed.name!r}"
        )
    if operand.layout.name != COLS.name:
        codes, scales = COLS.pack(fmt, operand.codes, operand.scales, operand.k)
        operand = operand._replace(codes=codes, scales=scales, spec=f"{fmt.name}@{COLS.name}")
    return operand


def grouped_columns(
    sides: dict[str, Operand], offs: Tensor, alignment: int
) -> tuple[list[Operand], Groups]:
    """Operands in layout "cols", by name, as `gemm_k` reads them, and their groups.

    Raises:
        ValueError: a group starts inside of a block, or may do so where the host cannot look.
    """
    tokens = next(iter(sides.values())).codes
    rows = aligned(offs, alignment, tokens, WGRAD, gather=False)
    ends = rows.groups.offs
    for name, side in sides.items():
        block = side.format.block
        if alignment % block == 0 or len(ends) < 2:
            continue
        remedy = f"let groups start at multiples of {block}, with alignment={block}"
        if not readable(ends):
            raise ValueError(
                f"{WGRAD}: {name} is quantized in blocks of {block} rows, and where offs is on a "
                f"device nobody can see whether groups start at blocks; {remedy}"
            )
        bounds = ends.tolist()
        for g, (start, end) in enumerate(itertools.pairwise(bounds), 1):
            if start % block and end > start:
                raise ValueError(
                    f"{WGRAD}: group {g} starts at row {start}, inside of one of the blocks of "
                    f"{block} rows in which {name} is quantized; {remedy}"
                )
    made = []
    for side in sides.values():
        codes = rows.taken(side.codes)
        scales = _grouped_scales(side, ends.to(codes.device))
        spec = side.spec.replace(f"@{COLS.name}", f"@{GROUPED_COLS.name}")
        made.append(side._replace(codes=codes, scales=scales, spec=spec))
    return made, rows.groups


def _grouped_scales(side: Operand, ends: Tensor) -> Tensor:
    """Scales [blocks, columns] with the row for each group that layout "grouped_cols" has room for:
    those of group i lie i rows later."""
    block, scales = side.format.block, side.scales
    made = scales.new_zeros(scale_rows(side.k, len(ends), block), scales.shape[1])
    if not len(ends):
        return made
    at = torch.arange(len(scales), device=scales.device)
    last = (ends.long().clamp(0, side.k).cummax(0).values + block - 1) // block
    group = torch.searchsorted(last, at, right=True).clamp(max=len(ends) - 1)
    return made.index_copy(0, at + group, scales)


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
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    form = Grouping(OWNER, offs, index, masked_m, alignment).checked()
    check_flag(f"{OWNER}: zero_padding", zero_padding)
    check_flag(f"{OWNER}: accumulate", accumulate)
    check_dtype(out_dtype, f"{OWNER}: out_dtype")
    settings = settings_of(recipe, forward=False)
    rhs = stack_of(weight, OWNER)
    plain = isinstance(inp, Tensor) and inp.dtype in mixed_gemm.DTYPES
    lhs = mixed_gemm.check(inp, rhs, OWNER) if plain else tokens_of(inp)  # type: ignore[arg-type]
    first = lhs if isinstance(lhs, Tensor) else lhs.codes
    most = _check_sizes(tuple(inp.shape), first, rhs, masked_m is not None)
    if isinstance(lhs, Tensor):
        lhs = first = lhs.reshape(lhs.shape[:-1].numel(), rhs.k)
    added = bias_of(f"{OWNER}: bias", bias, rhs)
    if node.active():
        followed = [t for t in (inp, bias, out) if isinstance(t, Tensor)]
        node.refuse(f"te_mx.{OWNER}", followed, node.FUNCTION, grad=True)
    shape = (rhs.groups, most, rhs.rows) if masked_m is not None else (len(first), rhs.rows)
    asked = None if out_dtype == torch.bfloat16 else out_dtype  # the default: nothing was asked
    check_out(OWNER, out, asked, shape, first, accumulate)
    if out is not None:
        lists = (("offs", offs), ("index", index), ("masked_m", masked_m))
        read = (*parts_of("inp", lhs), *parts_of("weight", rhs), *lists, ("bias", bias))
        check_written(out, "out", read)
        out_dtype = torch.float32 if accumulate else out.dtype
    rows = rows_of(form, first, rhs.groups, most)
    with torch.no_grad():
        if isinstance(lhs, Tensor):
            made = mixed_gemm.run_grouped(rows.taken(lhs), rows.groups, rhs, added, out_dtype)
        else:
            made = gemm_rows(
                _taken(lhs, rows), rhs, rows.groups, bias=added, out_dtype=out_dtype,
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

    Raises TypeError or ValueError for what is no MXTensor [G, N, K], or a sequence of [N, K]."""
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
        whole = operand.tensor_scale
        if whole is not None:  # one for all experts, or one a row
            shape = groups, *fmt.tensor_scale_shape(n)
            whole = whole.view(shape) if whole.dim() else whole.expand(shape).contiguous()
        return Stack(codes, scales, operand.spec, groups, n, k, None, whole)
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
    return stacked(held)


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
    check_place(f"{OWNER}: weight", rhs.codes, first.device)
    return shape[1] if masked else 0


def _taken(lhs: Operand, rows: Rows) -> Operand:
    codes, scales = rows.taken(lhs.codes), rows.taken(lhs.scales)
    return lhs._replace(codes=codes, scales=scales, rows=codes.shape[0])


def grouped_linear(
    inp: Tensor,
    weight: Tensor | Sequence[Tensor] | MXTensor | Sequence[MXTensor],
    *,
    offs: Tensor | None = None,
    index: Tensor | None = None,
    masked_m: Tensor | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    recipe: Any = None,
    alignment: int = 1,
) -> Tensor:
    """``y[r] = inp[r] @ weight[g].T + bias[g]`` for the rows r of every group g, in the formats of
    a recipe (MXFP8 by default), differentiable.

    One of offs (as of torch's grouped_mm), index and masked_m says which rows belong to which of
    the G groups, as for `te_mx.grouped_gemm`; rows of no group are 0 in the result and get no
    gradient. Nothing needs padding.

    Args:
        inp: fp32, bf16 or fp16, [R, K], or [G, M_max, K] with masked_m.
        weight: [G, N, K], or G tensors [N, K]. For torch's layout [G, K, N] pass
            ``weight.transpose(-2, -1)``. Or weights that are quantized: an MXTensor [G, N, K], or G
            of them [N, K] that are stacked in every call, as for `te_mx.grouped_gemm`; nothing is
            differentiable then.
        offs, index, masked_m: int32 or int64 [G], [R], [G]; exactly one.
        bias: [G, N], or G tensors [N].
        recipe: None means the active recipe, or the default one outside of te_mx.autocast.
        alignment: group g of `offs` starts at the next multiple of it behind the end of group
            g - 1; 128 is DeepGEMM's psum layout. Rows between groups are of no group.

    Returns:
        [R, N], or [G, M_max, N] with masked_m. The dtype is torch.autocast's or that of inp.

    Raises:
        TypeError, ValueError: what does not fit, with what was expected.
        RuntimeError: a gradient is asked where the weights are MXTensors; or a backward pass
            recomputes it and cannot know the recipe, see te_mx.autocast.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    settings = settings_of(recipe, forward=True)
    form = Grouping("grouped_linear", offs, index, masked_m, alignment).checked()
    dims = 2 if masked_m is None else 3
    stack = stack_of(weight, form.owner) if is_quantized(weight) else None
    if stack is not None:
        held = quantized_parts(inp, stack, bias, dims)
        groups, settings = stack.groups, settings._replace(w=stack.format.name)
    else:
        held, groups = parts(inp, weight, bias, dims)  # type: ignore[arg-type]
    if node.active():
        node.refuse("grouped_linear", (inp, *held))
    if masked_m is not None and inp.shape[0] != groups:
        raise ValueError(
            f"grouped_linear: inp must be [G, M_max, K] with G = {groups} as in weight, got "
            f"{tuple(inp.shape)}"
        )
    most = inp.shape[-2]
    x = inp if masked_m is None else inp.reshape(groups * most, inp.shape[2])
    rows = rows_of(form, x, groups, most)
    x, bounds = rows.taken(x), rows.groups
    call = autograd.GroupedCall(bounds.capacity, settings, output_dtype(inp), bias is not None)
    if stack is None:
        y = autograd.grouped_linear(x, bounds.offs, held, call)
    else:
        y = autograd.infer(x, bounds.offs, stack, held[0] if held else None, call)
    y = rows.put_back(y, bias is not None)
    return y if masked_m is None else y.view(groups, most, y.shape[1])


def grouped_wgrad(
    grad: Tensor | MXTensor,
    inp: Tensor | MXTensor,
    offs: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    recipe: Any = None,
    alignment: int = 1,
) -> Tensor:
    """``D[g] = grad[rows of g].T @ inp[rows of g]`` in the formats of a recipe (MXFP8 by default):
    weight gradients of all groups, whose reduction runs over the rows of each group.

    Both sides are always quantized: ``backward_override`` and ``wgrad_with_hp`` of the recipe,
    which make the weight gradients of modules in high precision, change nothing here. Or both are
    MXTensors of any two formats with a columnwise copy, and are multiplied as they are (DeepGEMM's
    k-grouped GEMM): each group has the bits of ``te_mx.gemm(inp, grad, "NT")`` on its rows. Their
    blocks of 32 rows (128 in blockwise FP8) must hold rows of one group: groups start at blocks,
    which ``alignment=32`` (128) has them do. It is needed where the host cannot see offs; without
    it other starts are refused.

    Args:
        grad: [R, N], quantized as the recipe quantizes output gradients for wgrad.
        inp: [R, K], quantized as it quantizes inputs for wgrad.
        offs: end offsets int [G]; rows behind the last belong to no group.
        out: contiguous [G, N, K], written in place. It shares no memory with grad and inp, and
            while autograd records it does not require grad.
        out_dtype: that of out, else that of inp by default (bfloat16 of MXTensors).
        accumulate: add to out.
        recipe: None means the active recipe, or the default one outside of te_mx.autocast.
        alignment: as for `te_mx.grouped_linear`. Rows between groups add nothing; of MXTensors they
            must be finite, as they share blocks with rows of a group.

    Returns:
        [G, N, K], zeros for a group without rows. Gradients do not flow through this function.

    Raises:
        TypeError, ValueError: what does not fit, with what was expected.
        RuntimeError: out requires grad while autograd records.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    settings = settings_of(recipe, forward=False)
    check_flag("grouped_wgrad: accumulate", accumulate)
    sides: dict[str, Operand] = {}
    if isinstance(grad, MXTensor) or isinstance(inp, MXTensor):
        sides = {"grad": columns_of("grad", grad), "inp": columns_of("inp", inp)}
        g, x = (side.codes for side in sides.values())
    else:
        check_floats("grouped_wgrad: grad", grad)
        check_floats("grouped_wgrad: inp", inp)
        g, x = grad, inp
    if out is not None:
        check_floats("grouped_wgrad: out", out)
    if node.active():
        node.refuse("grouped_wgrad", (out,) if sides else (g, x, out), node.FUNCTION, grad=True)
    shape = wgrad_shape(g, x, offs)
    alignment = check_size("grouped_wgrad: alignment", alignment, 1)
    if out_dtype is not None:
        check_dtype(out_dtype, "grouped_wgrad: out_dtype")
    check_out("grouped_wgrad", out, out_dtype, shape, x, accumulate)
    if out is not None:
        read = *parts_of("grad", sides.get("grad", g)), *parts_of("inp", sides.get("inp", x))
        check_written(out, "out", (*read, ("offs", offs)))
    with torch.no_grad():
        if sides:
            (lhs, rhs), groups = grouped_columns(sides, offs, alignment)
        else:
            rows = aligned(offs, alignment, x, "grouped_wgrad")
            lhs, rhs, groups = _quantized(rows.taken(g), rows.taken(x), rows.groups.offs, settings)
        return gemm_k(
            lhs, rhs, groups, out=out, accumulate=accumulate,
            mode=mode_of(settings, backward=True),
            out_dtype=out_dtype or (torch.bfloat16 if sides else x.dtype),
        )  # fmt: skip


def _quantized(
    grad: Tensor, inp: Tensor, offs: Tensor, settings: Settings
) -> tuple[Operand, Operand, Groups]:
    """The columns of both sides of grouped_wgrad, and their groups."""
    form = GroupLayouts.of(inp, grad, settings)
    groups = Groups(on_device(offs, form.x.col, inp))

    def columns(x: Tensor, spec: str, rule: str) -> Operand:
        seed = new_seed(x.device, rule)
        made = quantize_grouped(x, groups, col=spec, rule=rule, seed=seed).col
        assert made is not None
        return made

    lhs, rhs = columns(grad, form.g.col, form.g_rule), columns(inp, form.x.col, form.rule)
    return lhs, rhs, groups
