"""MXFP4: 4-bit elements, one E8M0 scale for 32 of them."""

import torch

from te_mx.formats.element import Element
from te_mx.formats.format import Format, register
from te_mx.formats.scaling import Scaling

E2M1 = Element(
    "e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0, torch_dtype=torch.float4_e2m1fn_x2
)

mxfp4 = register(Format("mxfp4", E2M1, Scaling()))
