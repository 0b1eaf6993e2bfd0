"""The NVFP4 quantizer of te_mx._sm90 in plain torch, on addresses of CPU memory, as fake_sm90."""

from __future__ import annotations

import torch

from te_mx import formats


class Nvfp4QuantizeArgs:
    """The fields of the native record."""

    def __init__(self, **fields):
        self.row_codes = self.row_scales = self.col_codes = self.col_scales = 0
        self.__dict__.update(fields)

    def copy(self, **fields):
        return Nvfp4QuantizeArgs(**self.__dict__ | fields)


def nvfp4_quantize(args) -> int:
    from fake_sm90 import _DTYPES, at

    (rows, cols), stride = (args.x_rows, args.x_cols), args.x_row_stride
    x = at(args.x_data, ((rows - 1) * stride + cols,), _DTYPES[args.x_dtype])
    x = x.as_strided((rows, cols), (stride, 1))
    fmt = formats.get("nvfp4_16x16" if args.square else "nvfp4")
    for side, of_side in (("row", x), ("col", x.t().contiguous())):
        if place := getattr(args, f"{side}_codes"):
            codes, scales, whole = fmt.quantize(of_side, "te")
            at(place, tuple(codes.shape)).copy_(codes)
            at(getattr(args, f"{side}_scales"), tuple(scales.shape)).copy_(scales)
            at(args.scale, (), torch.float32).copy_(whole)
    return 0
