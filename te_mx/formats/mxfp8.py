"""MXFP8: 8-bit elements, one E8M0 scale for 32 of them."""

import torch

from te_mx.formats.element import Element
from te_mx.formats.format import Format, register
from te_mx.formats.scaling import Scaling

E4M3 = Element("e4m3", 4, 3, bias=7, max=448.0, torch_dtype=torch.float8_e4m3fn)
E5M2 = Element("e5m2", 5, 2, bias=15, max=57344.0, has_inf=True, torch_dtype=torch.float8_e5m2)

mxfp8_e4m3 = register(Format("mxfp8_e4m3", E4M3, Scaling(), short_names=("e4m3", "mxfp8")))
mxfp8_e5m2 = register(Format("mxfp8_e5m2", E5M2, Scaling(), short_names=("e5m2",)))
