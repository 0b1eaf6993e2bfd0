"""Formats: what an element, its scale and their bytes are, as plain torch on every device.

    fmt = te_mx.formats.get("mxfp8_e4m3")
    codes, scales = fmt.quantize(x, "rceil")  # x [rows, k]
    values = fmt.dequantize(codes, scales, k, torch.float32)

`convert` goes from the elements of OCP to those of AMD's MI300 and back, `te_mx.formats.blockwise`
has the quantizers of torchao, `te_mx.formats.mxfp4_checkpoints` reads and writes MXFP4 as
compressed-tensors, gpt-oss, DeepGEMM and ggml store it, `te_mx.formats.nvfp4_checkpoints` NVFP4.

A format is one file in this folder: every module here is imported, and registers what it defines.
"""

from importlib import import_module as _import_module
from pkgutil import iter_modules as _iter_modules

from te_mx.formats.element import Element
from te_mx.formats.fnuz import convert
from te_mx.formats.format import Format, get, names, register
from te_mx.formats.scaling import NAN_SCALE, Scaling

for _module in _iter_modules(__path__):
    _import_module(f"{__name__}.{_module.name}")

__all__ = ["NAN_SCALE", "Element", "Format", "Scaling", "convert", "get", "names", "register"]
