"""MXFP6: 6-bit elements, one E8M0 scale for 32 of them."""

from te_mx.formats.element import Element
from te_mx.formats.format import Format, register
from te_mx.formats.scaling import Scaling

E2M3 = Element("e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max=7.5)
E3M2 = Element("e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max=28.0)

mxfp6_e2m3 = register(Format("mxfp6_e2m3", E2M3, Scaling()))
mxfp6_e3m2 = register(Format("mxfp6_e3m2", E3M2, Scaling()))
