"""Which rows belong to which group: the forms that users have (offs, index, masked_m, as
te_mx.grouped_gemm explains them) as the end offsets that ops take; and checks of what the grouped
functions are given, before anything runs.

What the host cannot read without waiting is never read: it is arithmetic on the device then, and
what is out of range there is cut off. So nothing breaks a CUDA graph, and no address leaves the
tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.autograd import weight_parts
from te_mx.context import region
from te_mx.dispatch.calls import FLOAT_DTYPES, Groups
from te_mx.dispatch.groups import INDEX_DTYPES, host_bounds, readable
from te_mx.layouts.operand import Stack
from te_mx.recipe import Settings, resolve_recipe
from te_mx.recipes.resolve import DEFAULT_SETTINGS
from te_mx.runtime.arguments import (
    check_address,
    check_dense,
    check_memory,
    check_place,
    check_size,
    shown,
)


@dataclass(frozen=True)
class Grouping:
    """What a call was given; `owner` is its name in errors."""

    owner: str
    offs: Tensor | None
    index: Tensor | None
    masked_m: Tensor | None
    alignment: int = 1

    def checked(self) -> "Grouping":
        """Raise ValueError or TypeError unless one way is chosen; with the alignment as an int."""
        given = {"offs": self.offs, "index": self.index, "masked_m": self.masked_m}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) != 1:
            raise ValueError(
                f"{self.owner}: pass one of offs, index and masked_m, got {chosen or 'none'}"
            )
        alignment = check_size(f"{self.owner}: alignment", self.alignment, 1)
        if alignment != 1 and self.offs is None:
            raise ValueError(
                f"{self.owner}: alignment={alignment} says where groups of offs start; leave it "
                f"away with {chosen[0]}"
            )
        return replace(self, alignment=alignment)


class Rows(NamedTuple):
    """Groups as ops take them.

    order: the rows that are gathered for them, if not all as they lie. back [R]: where the result
    of each row is then, or `room`: the rows of the result, of which those of `order` are written.
    real [R]: False for rows between groups that lie inside of `groups` all the same."""

    groups: Groups
    order: Tensor | None = None
    back: Tensor | None = None
    room: int = 0
    real: Tensor | None = None

    def taken(self, tokens: Tensor) -> Tensor:
        """Tokens [R, .] as the groups have them. What lies between groups is left out, or zeros:
        it reaches nothing, NaN included."""
        if self.real is not None:
            return torch.where(self.real.unsqueeze(1), tokens, 0)
        return tokens if self.order is None else tokens.index_select(0, self.order)

    def put_back(self, result: Tensor, has_bias: bool, zeros: bool = True) -> Tensor:
        """Results [R, .] in the order of the tokens, 0 for rows of no group; without `zeros`
        whatever costs least."""
        if self.real is not None:  # products of zeros are zeros, but a bias is added to them
            return torch.where(self.real.unsqueeze(1), result, 0) if has_bias and zeros else result
        if self.order is None:
            return result
        if self.back is not None:
            return result.index_select(0, self.back)
        shape = self.room, result.shape[1]
        room = result.new_zeros(shape) if zeros else result.new_empty(shape)
        return room.index_copy(0, self.order, result)


def settings_of(recipe: Any, forward: bool) -> Settings:
    """The settings of a recipe argument; `forward`: of a call that a backward pass may repeat.

    Raises ValueError where a CustomRecipe leaves what has no name in high precision."""
    if recipe is not None:
        active: Any = resolve_recipe(recipe).chosen
    else:
        # A forward that is recomputed has a graph, what is part of a backward pass itself has none.
        active = region.current_settings(certain=forward and torch.is_grad_enabled())
    if active is None:
        return DEFAULT_SETTINGS
    made = region.resolved(active, ("",), "grouped_linear")
    if not isinstance(made, Settings):
        raise ValueError(
            "the CustomRecipe in force returns None for grouped_linear of no name, and functions "
            "of groups have no high precision: pass recipe=, or have it return a format for name ''"
        )
    return made


def rows_of(form: Grouping, tokens: Any, groups: int, most: int) -> Rows:
    """The rows of every group among tokens [R, .], of which masked_m has `most` a group.

    Raises ValueError or TypeError for an index that does not fit, as far as the host can see it."""
    owner, offs, index, masked_m = form.owner, form.offs, form.index, form.masked_m
    if offs is not None:
        check_index(offs, "offs", (groups,), tokens, owner)
        return aligned(offs, form.alignment, tokens, owner)
    if masked_m is not None:
        check_index(masked_m, "masked_m", (groups,), tokens, owner)
        if readable(masked_m) and any(not 0 <= m <= most for m in masked_m.tolist()):
            got = masked_m.tolist()
            raise ValueError(f"{owner}: masked_m must be 0 to M_max = {most}, got {got}")
        starts = torch.arange(len(masked_m), device=masked_m.device) * most
        return Rows(Groups(starts + masked_m.clamp(0, most), most))
    assert index is not None
    check_index(index, "index", (tokens.shape[0],), tokens, owner)
    if readable(index) and len(index):
        least, most_of = int(index.min()), int(index.max())
        if least < -1 or most_of >= groups:
            raise ValueError(
                f"{owner}: index must be below the {groups} groups of weight (or -1), got "
                f"{most_of if most_of >= groups else least}"
            )
    return _indexed(index.to(tokens.device), groups)


def _indexed(index: Tensor, groups: int) -> Rows:
    group = torch.where((index < 0) | (index >= groups), groups, index).long()
    counts = torch.zeros(groups + 1, dtype=torch.int64, device=index.device)
    counts = counts.scatter_add(0, group, torch.ones_like(group))
    made = Groups(counts[:groups].cumsum(0))
    order = torch.argsort(group, stable=True)
    position = torch.arange(order.shape[0], device=index.device)
    if readable(order) and torch.equal(order, position):
        return Rows(made)
    return Rows(made, order, torch.empty_like(order).scatter(0, order, position))


def aligned(offs: Tensor, alignment: int, tokens: Tensor, owner: str, gather: bool = True) -> Rows:
    """End offsets of groups that start at multiples of `alignment`.

    Rows between groups are left out where the host knows them. Where it does not, or without
    `gather`, a group goes on to the start of the next one, with zeros for its last rows. Raises
    ValueError for a group that would end in front of its start, where the host sees it; an empty
    one may end where the one before it did."""
    if alignment == 1 or len(offs) == 0:
        return Rows(Groups(offs))
    rows = tokens.shape[0]
    ends = offs.long().clamp(0, rows).cummax(0).values
    upper = ((ends + alignment - 1) // alignment * alignment).clamp(max=rows)
    if readable(offs):
        starts = torch.nn.functional.pad(upper[:-1], (1, 0))
        before = torch.nn.functional.pad(ends[:-1], (1, 0))
        wrong = ((ends < starts) & (ends > before)).nonzero()
        if len(wrong):
            g = int(wrong[0])
            raise ValueError(
                f"{owner}: with alignment={alignment} group {g} starts at row {int(starts[g])}, "
                f"but offs has its end at {int(ends[g])}; an end offset counts the rows in front "
                f"of the group's start, got {offs.tolist()}"
            )
        counts = (ends - starts).clamp(min=0)
        if torch.equal(counts.cumsum(0), ends):  # no gaps
            return Rows(Groups(ends))
    if readable(offs) and gather:
        bounds = zip(starts.tolist(), counts.tolist(), strict=True)
        where = offs.device
        order = torch.cat([torch.arange(s, s + count, device=where) for s, count in bounds])
        return Rows(Groups(counts.cumsum(0)), order.to(tokens.device), room=rows)
    # Behind the last group nothing starts.
    upper = torch.cat([upper[:-1], ends[-1:]]).cummax(0).values
    own_ends, own_upper = ends.to(tokens.device), upper.to(tokens.device)
    row = torch.arange(rows, device=tokens.device)
    group = torch.searchsorted(own_upper, row, right=True)
    real = (group < len(ends)) & (row < own_ends[group.clamp(max=len(ends) - 1)])
    return Rows(Groups(upper), real=real)


def check_floats(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a dense tensor in fp32, bf16 or fp16."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(value)}")
    check_dense(name, value)
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} must be float32, bfloat16 or float16, got {value.dtype}; convert it"
        )
    check_address(name, value)


def bias_of(name: str, value: Any, weight: Stack, of: str = "inp") -> Tensor | None:
    """A bias [G, N] of all groups as ops take it, or None. Raises TypeError or ValueError unless it
    fits weights that are on the device of what is called `of`."""
    if value is None:
        return None
    check_floats(name, value)
    check_place(name, value, weight.codes.device, of)
    if value.shape != (weight.groups, weight.rows):
        raise ValueError(
            f"{name} must be [{weight.groups}, {weight.rows}], got {tuple(value.shape)}"
        )
    return value.detach().resolve_neg()


def check_out(
    owner: str, out: Tensor | None, out_dtype: torch.dtype | None, shape: tuple[int, ...],
    inp: Tensor, accumulate: bool, of: str = "inp",
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless a result of this shape, in the dtype that was asked for
    if one was, can be written to `out`, or there is none and nothing to add to."""
    if out is None:
        if accumulate:
            raise ValueError(f"{owner}: accumulate=True adds to out; pass the tensor as out=")
        return
    check_floats(f"{owner}: out", out)
    check_place(f"{owner}: out", out, inp.device, of)
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(
            f"{owner}: out must be contiguous {shape}, got {tuple(out.shape)} with strides "
            f"{out.stride()}"
        )
    if out_dtype not in (None, out.dtype):
        raise ValueError(
            f"{owner}: out is {out.dtype} but out_dtype is {out_dtype}; leave out_dtype away"
        )


def parts(
    inp: Tensor,
    weight: Tensor | Iterable[Tensor],
    bias: Tensor | Iterable[Tensor] | None,
    dims: int,
) -> tuple[tuple[Tensor, ...], int]:
    """(weights and biases as the autograd function takes them, number of groups)."""
    check_floats("grouped_linear: inp", inp)
    stacked = isinstance(weight, Tensor)
    weights = _tensors("weight", weight, inp)
    if not weights or weights[0].dim() != (3 if stacked else 2):
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
    _check_tokens(inp, dims, n, k)
    return weights + _biases(bias, inp, groups, n, stacked), groups


def quantized_parts(
    inp: Tensor, weight: Stack, bias: Tensor | Iterable[Tensor] | None, dims: int
) -> tuple[Tensor, ...]:
    """The biases [G, N] beside weights that are quantized, or nothing. Raises as `parts`, and
    RuntimeError where a gradient is asked for."""
    check_floats("grouped_linear: inp", inp)
    groups, n, k = weight.groups, weight.rows, weight.k
    check_place("grouped_linear: weight", weight.codes, inp.device)
    _check_tokens(inp, dims, n, k)
    biases = _biases(bias, inp, groups, n, True)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (inp, *biases)):
        raise RuntimeError(
            "grouped_linear: gradients do not flow where weights are MXTensors; call it under "
            "torch.no_grad(), or pass weights in high precision"
        )
    return biases


def _check_tokens(inp: Tensor, dims: int, n: int, k: int) -> None:
    if inp.dim() != dims or inp.shape[-1] != k:
        raise ValueError(
            f"grouped_linear: inp must be {'[R, ' if dims == 2 else '[G, M_max, '}{k}] for weight "
            f"[{n}, {k}] of every group, got {tuple(inp.shape)}"
        )


def _biases(
    bias: Tensor | Iterable[Tensor] | None, inp: Tensor, groups: int, n: int, stacked: bool
) -> tuple[Tensor, ...]:
    """The biases of all groups, [G, N] where they are to be `stacked`; nothing for None."""
    if bias is None:
        return ()
    found, whole = _tensors("bias", bias, inp), isinstance(bias, Tensor)
    shape = (groups, n) if whole else (n,)
    if any(b.shape != shape for b in found) or (not whole and len(found) != groups):
        raise ValueError(
            f"grouped_linear: bias must be [{groups}, {n}] or {groups} tensors [{n}], got "
            f"{[tuple(b.shape) for b in found]}"
        )
    if whole == stacked:
        return found
    return (weight_parts.stack(found),) if stacked else found[0].unbind(0)


def _tensors(name: str, value: Any, inp: Tensor) -> tuple[Tensor, ...]:
    """The tensor, or those of a sequence: dense, floating, on the device of inp."""
    whole = isinstance(value, Tensor)
    if not whole and (isinstance(value, str | Mapping) or not isinstance(value, Iterable)):
        raise TypeError(
            f"grouped_linear: {name} must be a tensor or a sequence of tensors, got {shown(value)}"
        )
    found = (value,) if whole else tuple(value)
    for i, tensor in enumerate(found):
        label = f"grouped_linear: {name}" if whole else f"grouped_linear: {name}[{i}]"
        check_floats(label, tensor)
        check_place(label, tensor, inp.device)
    return found


def check_index(
    tensor: Tensor, name: str, shape: tuple[int, ...] | None, inp: Tensor,
    owner: str = "grouped_linear",
) -> None:  # fmt: skip
    """Raise unless a tensor holds offsets, counts or group numbers for the rows of inp."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{owner}: {name} must be an int32 or int64 tensor, got {shown(tensor)}")
    check_memory(f"{owner}: {name}", tensor)
    if tensor.dim() != 1 or (shape is not None and tuple(tensor.shape) != shape):
        expected = f"have shape {shape}" if shape is not None else "be a vector"
        raise ValueError(f"{owner}: {name} must {expected}, got {tuple(tensor.shape)}")
    if tensor.device != inp.device and tensor.device.type != "cpu":
        raise ValueError(
            f"{owner}: inp is on {inp.device} and {name} on {tensor.device}; move {name} there or "
            "to the CPU"
        )
    if name == "offs" and readable(tensor):
        host_bounds(tensor, 0, inp.shape[0])


def wgrad_shape(grad: Tensor, inp: Tensor, offs: Tensor) -> tuple[int, int, int]:
    """The shape of the result of te_mx.grouped_wgrad; raises for tensors that do not fit."""
    for name, value in (("grad", grad), ("inp", inp)):
        if value.dim() != 2:
            raise ValueError(
                f"grouped_wgrad: {name} must be a matrix, got shape {tuple(value.shape)}"
            )
    check_place("grouped_wgrad: grad", grad, inp.device)
    if grad.shape[0] != inp.shape[0]:
        raise ValueError(
            f"grouped_wgrad: grad and inp must have the same rows, got {grad.shape[0]} and "
            f"{inp.shape[0]}"
        )
    check_index(offs, "offs", None, inp, "grouped_wgrad")
    return len(offs), grad.shape[1], inp.shape[1]
