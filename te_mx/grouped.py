"""te_mx.grouped_linear and te_mx.grouped_wgrad: grouped products for mixtures of experts that keep
their own parameters and their own token layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx import context
from te_mx.arguments import check_flag
from te_mx.autograd import grouped as autograd
from te_mx.autograd import transforms
from te_mx.autograd.steps import mode_of, new_seed
from te_mx.autograd.steps_grouped import GroupForms
from te_mx.dispatch.grouped_calls import Groups
from te_mx.epilogue import check_dtype
from te_mx.grouped_arguments import (
    check_floats,
    check_index,
    check_place,
    parts,
    readable,
    wgrad_shape,
)
from te_mx.nn.linear import output_dtype
from te_mx.ops import Operand
from te_mx.ops.grouped_gemm import gemm_k, on_device
from te_mx.ops.grouped_quantize import quantize_grouped
from te_mx.recipe import Settings, get_default_recipe, resolve_recipe
from te_mx.written import check_written


def grouped_linear(
    inp: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    offs: Tensor | None = None,
    index: Tensor | None = None,
    masked_m: Tensor | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    recipe: Any = None,
) -> Tensor:
    """``y[r] = inp[r] @ weight[g].T + bias[g]`` for the rows r of every group g, in MXFP8,
    differentiable.

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
            ``weight.transpose(-2, -1)``.
        offs, index, masked_m: int32 or int64; exactly one.
        bias: [G, N], or G tensors [N].
        recipe: None means the active recipe, or the default one outside of te_mx.autocast.

    Returns:
        [R, N], or [G, M_max, N] with masked_m. The dtype is torch.autocast's where that is on, else
        that of inp.

    Raises:
        TypeError, ValueError: what does not fit, with what was expected.
        RuntimeError: a backward pass recomputes it and cannot know the recipe, see te_mx.autocast.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    settings = _settings(recipe, forward=True)
    given = {"offs": offs, "index": index, "masked_m": masked_m}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise ValueError(
            f"grouped_linear: pass one of offs, index and masked_m, got {chosen or 'none'}"
        )
    held, groups_count = parts(inp, weight, bias, 3 if masked_m is not None else 2)
    if transforms.active():
        transforms.refuse("grouped_linear", (inp, *held))
    dtype = output_dtype(inp)

    def run(x: Tensor, groups: Groups) -> Tensor:
        call = autograd.GroupedCall(groups.capacity, settings, dtype, bias is not None)
        return autograd.grouped_linear(x, groups.offs, held, call)

    if offs is not None:
        check_index(offs, "offs", (groups_count,), inp)
        return run(inp, Groups(offs))
    if masked_m is not None:
        check_index(masked_m, "masked_m", (groups_count,), inp)
        if inp.shape[0] != groups_count:
            raise ValueError(
                f"grouped_linear: inp must be [G, M_max, K] with G = {groups_count} as in weight, "
                f"got {tuple(inp.shape)}"
            )
        return _masked(inp, masked_m, run)
    assert index is not None
    check_index(index, "index", (inp.shape[0],), inp)
    return _indexed(inp, index, groups_count, run)


def _masked(inp: Tensor, masked_m: Tensor, run: Any) -> Tensor:
    groups, most, k = inp.shape
    if readable(masked_m) and any(not 0 <= m <= most for m in masked_m.tolist()):
        raise ValueError(
            f"grouped_linear: masked_m must be 0 to M_max = {most}, got {masked_m.tolist()}"
        )
    starts = torch.arange(groups, device=masked_m.device) * most
    offs = starts + masked_m.clamp(0, most)
    out = run(inp.reshape(groups * most, k), Groups(offs, most))
    return out.view(groups, most, out.shape[1])


def _indexed(inp: Tensor, index: Tensor, groups: int, run: Any) -> Tensor:
    if readable(index) and len(index) and int(index.max()) >= groups:
        raise ValueError(
            f"grouped_linear: index must be below the {groups} groups of weight (or -1), got "
            f"{int(index.max())}"
        )
    index = index.to(inp.device)
    group = torch.where((index < 0) | (index >= groups), groups, index).long()
    counts = torch.zeros(groups + 1, dtype=torch.int64, device=inp.device)
    counts = counts.scatter_add(0, group, torch.ones_like(group))
    offs = counts[:groups].cumsum(0)
    order = torch.argsort(group, stable=True)
    position = torch.arange(len(order), device=inp.device)
    if readable(order) and torch.equal(order, position):
        return run(inp, Groups(offs))
    back = torch.empty_like(order).scatter(0, order, position)
    return run(inp.index_select(0, order), Groups(offs)).index_select(0, back)


def grouped_wgrad(
    grad: Tensor,
    inp: Tensor,
    offs: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    recipe: Any = None,
) -> Tensor:
    """``D[g] = grad[rows of g].T @ inp[rows of g]`` in MXFP8: weight gradients of all groups, whose
    reduction runs over the rows of each group.

    Args:
        grad: [R, N], quantized in the recipe's backward format.
        inp: [R, K], quantized in its forward format.
        offs: end offsets int [G]; rows behind the last belong to no group.
        out: contiguous [G, N, K], written in place. It shares no memory with grad and inp, and
            while autograd records it does not require grad.
        out_dtype: that of out, else that of inp by default.
        accumulate: add to out.
        recipe: None means the active recipe, or the default one outside of te_mx.autocast.

    Returns:
        [G, N, K], zeros for a group without rows. Gradients do not flow through this function.

    Raises:
        TypeError, ValueError: what does not fit, with what was expected.
        RuntimeError: out requires grad while autograd records.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    settings = _settings(recipe, forward=False)
    check_flag("grouped_wgrad: accumulate", accumulate)
    for name, value in (("grad", grad), ("inp", inp), ("out", out)):
        if name != "out" or value is not None:
            check_floats(f"grouped_wgrad: {name}", value)
    if transforms.active():
        transforms.refuse("grouped_wgrad", (grad, inp, out), transforms.FUNCTION, grad=True)
    shape = wgrad_shape(grad, inp, offs)
    if out is None and accumulate:
        raise ValueError("grouped_wgrad: accumulate=True adds to out; pass the tensor as out=")
    if out_dtype is not None:
        check_dtype(out_dtype, "grouped_wgrad: out_dtype")
    if out is not None:
        check_place("grouped_wgrad: out", out, inp)
        if out.shape != shape or not out.is_contiguous():
            raise ValueError(
                f"grouped_wgrad: out must be contiguous {shape}, got {tuple(out.shape)} with "
                f"strides {out.stride()}"
            )
        if out_dtype not in (None, out.dtype):
            raise ValueError(
                f"grouped_wgrad: out is {out.dtype} but out_dtype is {out_dtype}; leave out_dtype "
                "away"
            )
        check_written(out, "out", (("grad", grad), ("inp", inp), ("offs", offs)))
    with torch.no_grad():
        return _wgrad(grad, inp, offs, out, out_dtype or inp.dtype, accumulate, settings)


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


def _settings(recipe: Any, forward: bool) -> Settings:
    if recipe is not None:
        return resolve_recipe(recipe).settings
    # A forward that is recomputed has a graph, what is part of a backward pass itself has none.
    active = context.current_settings(certain=forward and torch.is_grad_enabled())
    return active or get_default_recipe().settings
