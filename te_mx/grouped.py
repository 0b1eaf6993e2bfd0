"""te_mx.grouped_linear and te_mx.grouped_wgrad: grouped products for mixtures of experts that keep
their own parameters and their own token layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx import context
from te_mx.arguments import shown
from te_mx.autograd import grouped as autograd
from te_mx.autograd import joining, transforms
from te_mx.autograd.grouped_operands import Groups, Packing
from te_mx.autograd.linear import mode_of
from te_mx.backends.base import FLOAT_DTYPES
from te_mx.backends.grouped import INDEX_DTYPES, host_bounds, known_to_host
from te_mx.engine.written import check_written
from te_mx.nn.linear import output_dtype
from te_mx.ops import Operand
from te_mx.ops.grouped_quantize import quantize_grouped
from te_mx.ops.grouped_wgrad import gemm_k
from te_mx.recipe import Settings, get_default_recipe, resolve_recipe


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
    """
    settings = _settings(recipe)
    parts, groups_count = _parts(inp, weight, bias, 3 if masked_m is not None else 2)
    if transforms.active():
        transforms.refuse("grouped_linear", (inp, *parts))
    given = {"offs": offs, "index": index, "masked_m": masked_m}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise ValueError(
            f"grouped_linear: pass one of offs, index and masked_m, got {chosen or 'none'}"
        )
    dtype = output_dtype(inp)

    def run(x: Tensor, groups: Groups) -> Tensor:
        return autograd.grouped_linear(
            x, groups, parts, bias is not None, None, settings, dtype
        )  # fmt: skip

    if offs is not None:
        _check_index(offs, "offs", (groups_count,), inp)
        return run(inp, Groups(offs))
    if masked_m is not None:
        _check_index(masked_m, "masked_m", (groups_count,), inp)
        if inp.shape[0] != groups_count:
            raise ValueError(
                f"grouped_linear: inp must be [G, M_max, K] with G = {groups_count} as in weight, "
                f"got {tuple(inp.shape)}"
            )
        return _masked(inp, masked_m, run)
    assert index is not None
    _check_index(index, "index", (inp.shape[0],), inp)
    return _indexed(inp, index, groups_count, run)


def _masked(inp: Tensor, masked_m: Tensor, run: Any) -> Tensor:
    groups, most, k = inp.shape
    if _readable(masked_m) and any(not 0 <= m <= most for m in masked_m.tolist()):
        raise ValueError(
            f"grouped_linear: masked_m must be 0 to M_max = {most}, got {masked_m.tolist()}"
        )
    starts = torch.arange(groups, device=masked_m.device) * most
    offs = starts + masked_m.clamp(0, most)
    out = run(inp.reshape(groups * most, k), Groups(offs, most))
    return out.view(groups, most, out.shape[1])


def _indexed(inp: Tensor, index: Tensor, groups: int, run: Any) -> Tensor:
    if _readable(index) and len(index) and int(index.max()) >= groups:
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
    if _readable(order) and torch.equal(order, position):
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
    """
    settings = _settings(recipe)
    for name, value in (("grad", grad), ("inp", inp)):
        if value.dim() != 2 or value.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"grouped_wgrad: {name} must be a matrix in float32, bfloat16 or float16, got "
                f"{value.dtype} {tuple(value.shape)}"
            )
    if transforms.active():
        transforms.refuse("grouped_wgrad", (grad, inp, out), transforms.FUNCTION, grad=True)
    if len(grad) != len(inp):
        raise ValueError(
            f"grouped_wgrad: grad and inp must have the same rows, got {len(grad)} and {len(inp)}"
        )
    _check_index(offs, "offs", None, inp, "grouped_wgrad")
    shape = (len(offs), grad.shape[1], inp.shape[1])
    if out is None and accumulate:
        raise ValueError("grouped_wgrad: accumulate=True adds to out; pass the tensor as out=")
    if out is not None and (out.shape != shape or not out.is_contiguous()):
        raise ValueError(
            f"grouped_wgrad: out must be contiguous {shape}, got {tuple(out.shape)} with strides "
            f"{out.stride()}"
        )
    if out is not None:
        if out_dtype not in (None, out.dtype):
            raise ValueError(
                f"grouped_wgrad: out is {out.dtype} but out_dtype is {shown(out_dtype)}; leave "
                "out_dtype away"
            )
        check_written(out, "out", (("grad", grad), ("inp", inp), ("offs", offs)))
    with torch.no_grad():
        return _wgrad(grad, inp, offs, out, out_dtype or inp.dtype, accumulate, settings)


def _wgrad(
    grad: Tensor, inp: Tensor, offs: Tensor, out: Tensor | None, out_dtype: torch.dtype,
    accumulate: bool, settings: Settings,
) -> Tensor:  # fmt: skip
    packing = Packing.of(inp, offs, grad, settings)

    def columns(x: Tensor, fmt: str) -> Operand:
        q = quantize_grouped(
            x, packing.offs, fmt, rowwise=False, columnwise=True, scale_rule=settings.scale_rule,
            spread=packing.spread,
        )  # fmt: skip
        return packing.columns(q, fmt)

    a, b = columns(inp, settings.fwd_fmt), columns(grad, settings.bwd_fmt)
    return gemm_k(
        a, b, packing.offs, out=out, out_dtype=out_dtype, accumulate=accumulate, rows=len(inp),
        mode=mode_of(settings),
    )  # fmt: skip


def _settings(recipe: Any) -> Settings:
    if recipe is not None:
        return resolve_recipe(recipe).settings
    return context.current_settings() or get_default_recipe().settings


def _parts(
    inp: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None,
    dims: int,
) -> tuple[tuple[Tensor, ...], int]:
    """(weights and biases as the autograd function takes them, number of groups)."""
    stacked = isinstance(weight, Tensor)
    weights = (weight,) if isinstance(weight, Tensor) else tuple(weight)
    if stacked != (weights[0].dim() == 3) if weights else True:
        raise ValueError(
            "grouped_linear: weight must be [G, N, K] or a sequence of [N, K], got "
            f"{[tuple(w.shape) for w in weights]}"
        )
    groups = len(weights[0]) if stacked else len(weights)
    n, k = weights[0].shape[-2:]
    if groups == 0 or any(w.shape != weights[0].shape for w in weights):
        raise ValueError(
            "grouped_linear: weight must hold one group or more, all of one shape, got "
            f"{[tuple(w.shape) for w in weights]}"
        )
    if inp.dim() != dims or inp.shape[-1] != k:
        raise ValueError(
            f"grouped_linear: inp must be {'[R, ' if dims == 2 else '[G, M_max, '}{k}] for weights "
            f"[{n}, {k}], got {tuple(inp.shape)}"
        )
    dtypes = {inp.dtype, *(w.dtype for w in weights)}
    if not dtypes <= FLOAT_DTYPES.keys():
        raise TypeError(
            f"grouped_linear: MXFP8 takes float32, bfloat16 and float16, got {dtypes}; convert them"
        )
    if bias is None:
        return weights, groups
    if isinstance(bias, Tensor) != stacked:  # both as weight is
        bias = bias.unbind(0) if isinstance(bias, Tensor) else joining.stack(bias)
    biases = (bias,) if isinstance(bias, Tensor) else tuple(bias)
    shape = (groups, n) if stacked else (n,)
    if len(biases) != len(weights) or any(b.shape != shape for b in biases):
        raise ValueError(
            f"grouped_linear: bias must be [{groups}, {n}] or {groups} tensors [{n}], got "
            f"{[tuple(b.shape) for b in biases]}"
        )
    return weights + biases, groups


def _readable(tensor: Tensor) -> bool:
    """Whether looking at values waits for nothing and breaks no graph."""
    return known_to_host(tensor) and not torch.compiler.is_compiling()


def _check_index(
    tensor: Tensor, name: str, shape: tuple[int, ...] | None, inp: Tensor,
    owner: str = "grouped_linear",
) -> None:  # fmt: skip
    if not isinstance(tensor, Tensor) or tensor.dtype not in INDEX_DTYPES:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{owner}: {name} must be an int32 or int64 tensor, got {got}")
    if tensor.dim() != 1 or (shape is not None and tuple(tensor.shape) != shape):
        expected = f"have shape {shape}" if shape is not None else "be a vector"
        raise ValueError(f"{owner}: {name} must {expected}, got {tuple(tensor.shape)}")
    if tensor.device != inp.device and tensor.device.type != "cpu":
        raise ValueError(
            f"{owner}: inp is on {inp.device} and {name} on {tensor.device}; move {name} there or "
            "to the CPU"
        )
    if name == "offs" and _readable(tensor):
        host_bounds(tensor, 0, len(inp))
