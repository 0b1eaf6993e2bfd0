"""The quantizer in plain torch, on every device: the specification of every format and layout."""

import torch
from torch import Tensor

from te_mx.backends.reference import Reference
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.linear import RestKernel
from te_mx.dispatch.registry import register
from te_mx.formats.stochastic import random_bits
from te_mx.layouts import spec_of
from te_mx.layouts.base import Parts
from te_mx.layouts.operand import Operand, Quantized, Stack


@torch.no_grad()
def quantize(what: Quantize) -> Quantized:
    """Both directions of x, each as its spec says."""
    x = what.x.detach()
    rows, cols = x.shape
    random = None if what.seed is None else random_bits(what.seed, rows, cols, what.first)
    row = _operand(x, what.row, what.rule, random) if what.row else None
    across = None if random is None else random.t()
    col = _operand(x.t(), what.col, what.rule, across) if what.col else None
    sums = x.sum(0, dtype=torch.float32).to(what.sum_dtype) if what.col_sum else None
    return Quantized(row, col, sums)


def _operand(x: Tensor, spec: str, rule: str, random: Tensor | None) -> Operand:
    fmt, layout = spec_of(spec)
    rows, k = x.shape
    codes, scales, *whole = fmt.quantize(x, rule, random)
    return Operand(*layout.pack(fmt, codes, scales, k), spec, rows, k, None, *whole)


class ReferenceQuantize(Reference):
    op, run = "quantize", staticmethod(quantize)


class ReferenceDequantize(Reference):
    op = "dequantize"

    @torch.no_grad()
    def run(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        return operand.values(dtype)


class ReferenceConvert(Reference):
    op = "convert"

    def run(self, operand: Operand, spec: str) -> Operand:
        fmt, layout = spec_of(operand.spec)
        rows = layout.plain(fmt, operand, operand.k)
        codes, scales = spec_of(spec).layout.pack(fmt, *rows, operand.k)
        return operand._replace(codes=codes, scales=scales, spec=spec, packed=None)


class ReferenceRest(Reference, RestKernel):
    """By rows, and read from whatever layout they lie in."""

    def rest(self, row: Operand | Stack) -> Operand | Stack:
        return row

    def plain(self, held: Operand | Stack) -> Parts:
        return held.layout.plain(held.format, held, held.k)


register(ReferenceConvert())
register(ReferenceQuantize())
register(ReferenceDequantize())
register(ReferenceRest())
