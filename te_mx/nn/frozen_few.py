"""Weights of frozen modules as kernels for few rows see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx import layouts
from te_mx._ops import Operand, Stack
from te_mx._ops.library import is_direct
from te_mx.autograd import few_rows
from te_mx.autograd.few_rows import Ready
from te_mx.autograd.steps import at_rest
from te_mx.context import is_tracing
from te_mx.nn.frozen_weight import Freezable
from te_mx.recipes.settings import Settings


def weight_of(
    module: Freezable, key: str, kept: Any, size: tuple[int, int], groups: int = 0
) -> few_rows.Weight:
    """A weight of a frozen module, of this size. kept: what is kept of its master (a KeptWeight or
    KeptWeights); of a module without masters it does not matter."""
    frozen = module._frozen
    assert frozen is not None
    given: Operand | Stack
    if frozen.dropped:
        given = module._dropped_operand(key)
        made_of, fmt = few_rows.state(*module._stored(key)), given.format.name
    else:
        given, made_of, fmt = kept.row, (kept,), kept.settings.w
        if getattr(module, "_gathered", None) is not None:  # for this forward alone
            made_of = ()

    def row() -> Operand | Stack:
        if given.layout is layouts.ROWS:
            return given
        codes, scales = module._plain_codes(key, kept.settings)
        return given._replace(codes=codes, scales=scales, spec=at_rest(fmt), packed=None)

    lies = "any" if given.layout is layouts.ROWS else given.layout.name
    return few_rows.Weight(frozen.few_rows, key, *size, fmt, made_of, row, groups, lies)


def ready_of(layer: Any, x: Tensor, settings: Settings) -> Ready | None:
    """What multiplies as many rows as x has, in its dtype and quantized, with the weight of a
    frozen te_mx.Linear; None where nothing does, or where the layer has something to say first."""
    if layer._tokens is not None:
        return None
    size, kept = (layer.out_features, layer.in_features), None
    if layer._is_dropped():
        layer._refuse_given()
        layer._check_codes(layer._weight_keys, x.device)
    else:
        weight, bias = layer._weight_and_bias()
        for value, shape in ((weight, size), (bias, size[:1])):
            if value is not None and (value.shape != shape or value.device != x.device):
                return None
        kept = layer._kept_weight("weight", None, settings, x.device, False)
    return ready(layer, "weight", kept, size, x, x.dtype, settings)


def ready(
    module: Freezable, key: str, kept: Any, size: tuple[int, int], x: Tensor, dtype: torch.dtype,
    settings: Settings | None,
) -> Ready | None:  # fmt: skip
    """What multiplies few rows of a step inside of a frozen module, as many as x has, in a dtype,
    with a weight of it; None where nothing does. Compiled code cannot look whether a weight
    changed."""
    frozen = module._frozen
    if frozen is None or (kept is None and not frozen.dropped) or is_tracing():
        return None
    if not few_rows.is_few(x, x.shape[-1]) or not is_direct(x):
        return None
    found = few_rows.ready(x, dtype, weight_of(module, key, kept, size), settings)
    # In front of the GEMM's own kernel a normalization or an activation quantizes in its own read.
    return found if found is not None and found.kernel.multiplies else None
