"""te_mx.grouped_linear and te_mx.grouped_wgrad: grouped products for mixtures of experts that keep
their own parameters and their own token layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import Operand
from te_mx._ops.grouped_gemm import gemm_k, on_device
from te_mx._ops.grouped_quantize import quantize_grouped
from te_mx.arguments import check_flag, check_size
from te_mx.autograd import grouped as autograd
from te_mx.autograd import transforms
from te_mx.autograd.steps import mode_of, new_seed
from te_mx.autograd.steps_grouped import GroupForms
from te_mx.context import output_dtype
from te_mx.dispatch.grouped_calls import Groups
from te_mx.epilogue import check_dtype
from te_mx.grouped_arguments import check_floats, check_out, parts, quantized_parts, wgrad_shape
from te_mx.grouped_columns import columns_of, grouped_columns
from te_mx.grouped_gemm import is_quantized, stack_of
from te_mx.grouped_rows import Form, aligned, rows_of, settings_of
from te_mx.recipe import Settings
from te_mx.tensor import MXTensor
from te_mx.written import check_written, parts_of


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

    One of three says which rows belong to which of the G groups; rows of no group are 0 in the
    result and get no gradient:

    ============  ===============  ===============================================================
    argument      inp              meaning
    ============  ===============  ===============================================================
    offs [G]      [R, K]           end offsets, group after group (as of torch's grouped_mm)
    index [R]     [R, K]           the group of each row in any order, -1 for none (as DeepGEMM's
                                   m_indices); rows are gathered and put back
    masked_m [G]  [G, M_max, K]    the first masked_m[g] rows of inp[g] count
    ============  ===============  ===============================================================

    Nothing needs padding. Index tensors may lie on the device of inp, and are then not read by the
    host: what is out of range is cut off instead of refused.

    Args:
        inp: fp32, bf16 or fp16.
        weight: [G, N, K], or G tensors [N, K]. For torch's layout [G, K, N] pass
            ``weight.transpose(-2, -1)``. Or weights that are quantized: an MXTensor [G, N, K], or G
            of them [N, K] that are stacked in every call, as for `te_mx.grouped_gemm`; nothing is
            differentiable then.
        offs, index, masked_m: int32 or int64; exactly one.
        bias: [G, N], or G tensors [N].
        recipe: None means the active recipe, or the default one outside of te_mx.autocast.
        alignment: group g of `offs` starts at the next multiple of it behind the end of group
            g - 1; 128 is DeepGEMM's psum layout. Rows between groups are of no group.

    Returns:
        [R, N], or [G, M_max, N] with masked_m. The dtype is torch.autocast's where that is on, else
        that of inp.

    Raises:
        TypeError, ValueError: what does not fit, with what was expected.
        RuntimeError: a gradient is asked where the weights are MXTensors; or a backward pass
            recomputes it and cannot know the recipe, see te_mx.autocast.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    settings = settings_of(recipe, forward=True)
    form = Form("grouped_linear", offs, index, masked_m, alignment).checked()
    dims = 2 if masked_m is None else 3
    stack = stack_of(weight, form.owner) if is_quantized(weight) else None
    if stack is not None:
        held = quantized_parts(inp, stack, bias, dims)
        groups, settings = stack.groups, settings._replace(w=stack.format.name)
    else:
        held, groups = parts(inp, weight, bias, dims)  # type: ignore[arg-type]
    if transforms.active():
        transforms.refuse("grouped_linear", (inp, *held))
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
    if isinstance(grad, MXTensor) or isinstance(inp, MXTensor):
        sides = {"grad": columns_of("grad", grad), "inp": columns_of("inp", inp)}
        return _wgrad_of_codes(sides, offs, out, out_dtype, accumulate, settings, alignment)
    for name, value in (("grad", grad), ("inp", inp), ("out", out)):
        if name != "out" or value is not None:
            check_floats(f"grouped_wgrad: {name}", value)
    if transforms.active():
        transforms.refuse("grouped_wgrad", (grad, inp, out), transforms.FUNCTION, grad=True)
    shape = wgrad_shape(grad, inp, offs)
    alignment = check_size("grouped_wgrad: alignment", alignment, 1)
    if out_dtype is not None:
        check_dtype(out_dtype, "grouped_wgrad: out_dtype")
    check_out("grouped_wgrad", out, out_dtype, shape, inp, accumulate)
    if out is not None:
        check_written(out, "out", (("grad", grad), ("inp", inp), ("offs", offs)))
    with torch.no_grad():
        rows = aligned(offs, alignment, inp, "grouped_wgrad")
        grad, inp, offs = rows.taken(grad), rows.taken(inp), rows.groups.offs
        return _wgrad(grad, inp, offs, out, out_dtype or inp.dtype, accumulate, settings)


def _wgrad_of_codes(
    sides: dict[str, Operand], offs: Tensor, out: Tensor | None, out_dtype: torch.dtype | None,
    accumulate: bool, settings: Settings, alignment: int,
) -> Tensor:  # fmt: skip
    grad, inp = sides.values()
    if out is not None:
        check_floats("grouped_wgrad: out", out)
    if transforms.active():
        transforms.refuse("grouped_wgrad", (out,), transforms.FUNCTION, grad=True)
    shape = wgrad_shape(grad.codes, inp.codes, offs)
    alignment = check_size("grouped_wgrad: alignment", alignment, 1)
    if out_dtype is not None:
        check_dtype(out_dtype, "grouped_wgrad: out_dtype")
    check_out("grouped_wgrad", out, out_dtype, shape, inp.codes, accumulate)
    if out is not None:
        check_written(out, "out", (*parts_of("grad", grad), *parts_of("inp", inp), ("offs", offs)))
    with torch.no_grad():
        (lhs, rhs), groups = grouped_columns(sides, offs, alignment)
        return gemm_k(
            lhs, rhs, groups, out=out, out_dtype=out_dtype or torch.bfloat16,
            accumulate=accumulate, mode=mode_of(settings),
        )  # fmt: skip


def _wgrad(
    grad: Tensor, inp: Tensor, offs: Tensor, out: Tensor | None, out_dtype: torch.dtype,
    accumulate: bool, settings: Settings,
) -> Tensor:  # fmt: skip
    form = GroupForms.of(inp, grad, settings)
    groups = Groups(on_device(offs, form.x.col, inp))

    def columns(x: Tensor, spec: str, rule: str) -> Operand:
        seed = new_seed(x.device, rule)
        made = quantize_grouped(x, groups, col=spec, rule=rule, seed=seed).col
        assert made is not None
        return made

    lhs = columns(grad, form.g.col, form.g_rule)
    rhs = columns(inp, form.x.col, form.rule)
    return gemm_k(
        lhs, rhs, groups, out=out, out_dtype=out_dtype, accumulate=accumulate,
        mode=mode_of(settings),
    )  # fmt: skip
