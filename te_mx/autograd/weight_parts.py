"""Weights that are several parameters, one behind the other: gate and up of an MLP block, q, k
and v of an attention; each part may be there as codes alone.

Kernels read the parts where they lie. Joined weights are never saved: backward joins again.

torch.cat and torch.stack of parameters, whatever torch.autocast thinks of their dtypes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import Operand, dequantize_joined_2d, plain, quantize_joined_2d
from te_mx.autograd import linear_recipe
from te_mx.autograd.linear_recipe import QuantizedWeight
from te_mx.autograd.saved import SavedOperand
from te_mx.recipes.settings import Settings


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, differentiable."""
    return _joined(torch.cat if dim == 0 else partial(torch.cat, dim=dim), tensors)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """torch.stack, differentiable."""
    return _joined(torch.stack, tensors)


def _joined(join: Callable[[list[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    tensors = list(tensors)
    device = getattr(tensors[0], "device", None)
    for tensor in tensors:
        if tensor is None or tensor.device != device:
            places = ["None" if t is None else str(t.device) for t in tensors]
            raise ValueError(
                f"te_mx: parameters that make one must be on one device, got {', '.join(places)}"
            )
    dtypes = {tensor.dtype for tensor in tensors}
    if not all(dtype.is_floating_point for dtype in dtypes):  # torch would promote integers
        raise TypeError(f"te_mx: parameters that make one must be floats, got {dtypes}")
    assert device is not None
    kind = device.type
    if (
        kind != "meta"
        and torch.is_autocast_enabled(kind)
        # torch.autocast promotes what these two are given, and refuses fp16 where it makes bf16.
        and not dtypes <= {torch.float32, torch.get_autocast_dtype(kind)}
    ):
        with torch.autocast(kind, enabled=False):
            return join(tensors)
    return join(tensors)


Codes = Sequence[
    QuantizedWeight
]  # of every part of w1 of a block, and of w2; empty where values are


def joined(parts: Sequence[Any]) -> Any:
    """One tensor of parts along their first dimension; None of None."""
    return parts[0] if len(parts) == 1 or parts[0] is None else cat(parts)


def _joined_codes(parts: Sequence[Operand], settings: Settings) -> QuantizedWeight:
    """One weight of parts that are rowwise codes."""
    made = parts[0].layout.joined(parts) if len(parts) > 1 else parts[0]
    if made is None:
        parts = [plain(one) for one in parts]
        codes, scales = (torch.cat(both) for both in zip(*[one[:2] for one in parts], strict=True))
        rows = sum(one.rows for one in parts)
        made = parts[0]._replace(codes=codes, scales=scales, rows=rows, packed=None)
        wholes = [(one.tensor_scale, one.rows) for one in parts]
        each = [whole.expand(n, 1) for whole, n in wholes if whole is not None]
        made = made._replace(tensor_scale=torch.cat(each) if each else None)
    return QuantizedWeight(settings, made, None)


def of_codes(
    codes: Codes, settings: Settings
) -> tuple[QuantizedWeight | None, QuantizedWeight | None]:
    """What stands in for w1 and for w2; None where there are values."""
    if not codes:
        return None, None
    return _joined_codes([one.row for one in codes[:-1]], settings), codes[-1]


def operands(
    kept: QuantizedWeight | None, parts: Sequence[Any], settings: Settings, need_dx: bool
) -> tuple[Operand, Operand | None]:
    """steps.weight_operands of a weight that is one parameter or several, which nobody joins."""
    if kept is not None or len(parts) == 1:
        return linear_recipe.weight_operands(kept, parts[0], settings, need_dx)
    columns = linear_recipe.needs_columns(settings, need_dx) and settings.keep_columns
    row, col, rule = linear_recipe.plan_weight(parts[0].device, settings, columns)[:3]
    q = quantize_joined_2d(parts, row, col, rule=rule)
    assert q.row is not None
    return q.row, q.col


def kept_of(
    weight: tuple[Operand, Operand | None], parts: Sequence[Tensor], settings: Settings,
    need: bool, codes: Codes = (),
) -> tuple[SavedOperand, Sequence[Tensor]]:  # fmt: skip
    """What dgrad needs of a weight: something quantized, or itself; and what it is joined of if
    that is to be joined again: parameters, or their codes, whose memory FSDP2 frees, and fills
    again for backward."""
    if codes and need and len(parts) > 1:
        return SavedOperand(), [t for one in codes[:-1] for t in one.row[:2]]
    kept = linear_recipe.kept_for_dgrad(*weight, parts[0], settings, need)
    return (kept, ()) if kept.spec or not need or len(parts) == 1 else (SavedOperand(), parts)


def kept_again(own: Sequence[Any], codes: Codes, settings: Settings) -> SavedOperand:
    """A joined weight, of its parts; of codes their values, where dgrad starts from those."""
    if codes:
        pairs = zip(codes, own[::2], own[1::2], strict=False)
        parts = [kept.row._replace(codes=one, scales=scales) for kept, one, scales in pairs]
        fmt = parts[0].format
        is_turned = fmt.is_square and fmt.name == settings.w_columns
        if settings.one_copy and settings.backward is None and not is_turned:
            return SavedOperand.itself(dequantize_joined_2d(parts, fmt.exact_dtype))
        return SavedOperand.operand(_joined_codes(parts, settings).row)
    if linear_recipe.needs_columns(settings, True):
        form = linear_recipe.roles(own[0].device, settings).w
        made = quantize_joined_2d(
            own, col=form.col, rule=settings.w_rule or settings.scale_rule
        ).col
        assert made is not None
        return SavedOperand.operand(made)
    # torch.compile would take a join of the same dimension for forward's, and keep that.
    return SavedOperand.itself(cat(own, -2))


def split_gradients(
    rows: Sequence[int], dw: Tensor | None, db: Tensor | None, need: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of weight and bias of every part, as far as they are needed."""
    if len(rows) == 1:
        return [dw, db]
    nothing: list[Tensor | None] = [None] * len(rows)
    weights = nothing if dw is None else list(dw.split(list(rows)))
    biases = nothing if db is None else list(db.split(list(rows)))
    both = [t for pair in zip(weights, biases, strict=True) for t in pair]
    return [t if wanted else None for t, wanted in zip(both, need, strict=True)]
