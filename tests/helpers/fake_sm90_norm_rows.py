"""The normalization of few rows of te_mx._sm90 in plain torch, on addresses of CPU memory, as
fake_sm90."""

from __future__ import annotations

import torch

from te_mx.backends.reference import fused
from te_mx.dispatch.fused import Norm

CALLS: list[torch.Size] = []  # shapes of x of the calls


class NormRowsArgs:
    """The fields of the native record."""

    def __init__(self, **fields):
        self.bias = 0
        self.__dict__.update(fields)


def normalize_rows(args) -> int:
    from fake_sm90 import _DTYPES, at, read_matrix

    x = read_matrix(args.x)
    cols, dtype = x.shape[1], _DTYPES[args.weight_dtype]
    assert args.inverse == fused.inverse(cols)
    weight = at(args.weight, (cols,), dtype).float() + args.zero_centered
    bias = at(args.bias, (cols,), dtype).float() if args.bias else None
    kind = Norm("RMSNorm" if args.rms else "LayerNorm", args.eps)
    z = fused.normalize(x, weight, bias, kind, _DTYPES[args.z_dtype])[2]
    at(args.z, z.shape, z.dtype).copy_(z)
    CALLS.append(x.shape)
    return 0
