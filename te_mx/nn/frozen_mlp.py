"""A gated MLP block of frozen layers on few rows, as when text is generated: the activation and its
gate have no kernel of their own. The last product computes them as it reads its input.

Each product is that of its layer, and what is rounded where is as in autograd/layer.py:
act(gate) * up is computed in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx._ops.fused import act_quantize_2d
from te_mx.autograd.activation import activation
from te_mx.autograd.node import needs_gradient
from te_mx.context.region import output_dtype
from te_mx.dispatch.fused import Activation, ActStep
from te_mx.dispatch.linear import Gate
from te_mx.nn.linear import Linear
from te_mx.recipes.settings import Settings
from te_mx.weights.decode import Ready
from te_mx.weights.traced import Traced


def run_few(act: Activation, layers: list[Linear], x: Tensor, settings: Settings) -> Tensor | None:
    """The block of these layers, the last one behind the activation; None where no kernel for few
    rows takes it, and the block's own forward is to run."""
    *first, last = layers
    if not act.gated or output_dtype(x) != x.dtype or x.shape[-1:] != (first[0].in_features,):
        return None
    if not all(one._source.decodes for one in layers):
        return None
    bias = last.whole_bias()
    held = [x, bias, *(one._parameters.get("weight") for one in layers)]
    if needs_gradient(*held):
        return None
    found = last._source.ready(last, x, settings)
    if found is None or act.base not in found.kernel.gates:
        return None
    return run_gated(found, [one(x) for one in first], act, bias, last._tag_now())


def run_gated(
    found: Ready | Traced, h: list[Tensor], act: Activation, bias: Tensor | None, tag: int
) -> Tensor | None:
    """act(h[0]) * h[1] times a weight, in the dtype of h; of one h, its halves. None where native
    code does not take it. Compiled code has the activation as an op of its own: the same bits."""
    x, values = h if len(h) == 2 else h[0].chunk(2, -1)
    dtype, shape = x.dtype, x.shape
    if isinstance(found, Ready) and act.base in found.kernel.gates:
        gate = Gate(values, act.base)
        made = found.run(x, bias, dtype, tag, gate=gate)
        if made is not None:
            return made
    rows: Any = h[0] if len(h) == 1 else torch.cat(h, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    target = found.target(x.device) if isinstance(found, Traced) else None
    if target is None:
        return found.run(activation(rows, act).view(shape), bias, dtype, tag)
    parts = act_quantize_2d(ActStep(rows, None, act, dtype, True, target))
    assert isinstance(found, Traced) and parts.out is not None
    return found.run(parts.out.view(shape), bias, dtype, tag, row=parts.quantized.row)
