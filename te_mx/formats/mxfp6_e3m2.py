"""MXFP6: 6-bit elements, one E8M0 scale for 32 of them."""

from te_mx.formats.element import Element
from te_mx.formats.format import Format
from te_mx.formats.registry import register
from te_mx.formats.scaling import Scaling

E3M2 = Element("e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max=28.0)

mxfp6_e3m2 = register(Format("mxfp6_e3m2", E3M2, Scaling()))
