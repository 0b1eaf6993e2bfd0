"""The quantizer of te_mx._sm90 that reads a matrix in parts, in plain torch (fake_sm90.py)."""

from __future__ import annotations

import torch
from fake_sm90_factors import is_blockwise

_UNSUPPORTED, _MOST = 2, 4


def quantize_joined(args, xs, rows) -> int:
    from fake_sm90 import _quantize, read_matrix

    if is_blockwise(args.to) or len(xs) > _MOST or any(count % 128 for count in rows[:-1]):
        return _UNSUPPORTED
    assert sum(rows) == args.x_rows and not args.to.col_sum
    parts = [read_matrix(args.x.copy(rows=n), address) for address, n in zip(xs, rows, strict=True)]
    return _quantize(args.to, torch.cat(parts))
