"""Elements against ml_dtypes: every code, every edge of rounding, at every power of two."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from blockwise_oracle import DTYPES as BLOCKWISE
from format_oracle import DTYPES, encode

from te_mx import formats
from te_mx.formats import Element

CASES = [(formats.get(name).element, dtype) for name, dtype in DTYPES.items()]
CASES += [
    (formats.get(f"fp8_{name}_1x128").element, dtype)
    for name, dtype in BLOCKWISE.items()
    if name.endswith("fnuz")  # forms without a negative zero, whose code is the only NaN
]
every_element = pytest.mark.parametrize(
    ("element", "dtype"), CASES, ids=[element.name for element, _ in CASES]
)


def encoded(element: Element, x: np.ndarray, power: int = 0) -> np.ndarray:
    """Codes of fp32 x * 2^power."""
    bits = torch.from_numpy(x.astype(np.float32)).view(torch.int32)
    return element.encode(bits, torch.tensor(power, dtype=torch.int32)).numpy()


def decoded(element: Element) -> np.ndarray:
    return element.decode(torch.arange(1 << element.bits, dtype=torch.uint8)).numpy()


def rounding_edges(element: Element) -> np.ndarray:
    """Every value, the middle between neighbours, and both fp32 neighbours of all of them."""
    magnitudes = decoded(element)[: element.max_code + 1].astype(np.float64)
    top = magnitudes[-1]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    edges = np.concatenate([magnitudes, middles, [top * 1.01, top * 1.5, top * 4, 2.0**100]])
    edges = edges.astype(np.float32)
    near = [edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(0))]
    return np.concatenate([*near, *(-x for x in near)])


@every_element
def test_every_code_decodes_as_in_ml_dtypes(element, dtype):
    expected = np.arange(1 << element.bits, dtype=np.uint8).view(dtype).astype(np.float32)
    got = decoded(element)
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))
    assert element.nan_codes == tuple(np.flatnonzero(~numbers))


@every_element
def test_what_an_element_knows_of_itself(element, dtype):
    info = ml_dtypes.finfo(dtype)
    assert (element.bits, element.max) == (info.bits, float(info.max))
    assert (element.mantissa_bits, element.exponent_bits) == (info.nmant, info.nexp)
    assert element.emin == info.minexp
    assert 2.0**element.emax <= element.max < 2.0 ** (element.emax + 1)
    assert decoded(element)[element.max_code] == element.max
    assert element.nan_code is None or element.nan_code in element.nan_codes
    if element.torch_dtype is not None:  # a byte of codes can be shown as it
        assert element.torch_dtype.itemsize == 1


@every_element
def test_every_number_encodes_as_itself(element, dtype):
    values = decoded(element)
    codes = np.arange(len(values), dtype=np.uint8)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(encoded(element, values)[finite], codes[finite])


@every_element
@pytest.mark.parametrize("power", [0, 1, -20, 127, -126, -128])
def test_encode_at_every_edge_of_rounding(element, dtype, power):
    """The edges themselves after multiplication: fp32 subnormal numbers at 2^127, numbers near
    2^128 at 2^-128.
    """
    edges = np.ldexp(rounding_edges(element).astype(np.float64), -power)
    edges = edges[np.abs(edges) < 2.0**128].astype(np.float32)
    exact = np.ldexp(edges.astype(np.float64), power)
    np.testing.assert_array_equal(encoded(element, edges, power), encode(exact, dtype))


@every_element
def test_encode_every_exponent_and_mantissa_edge(element, dtype):
    """Every fp32 exponent with mantissas around every step and half step of the element."""
    step = 1 << (22 - element.mantissa_bits)
    mantissas = np.arange(0, 1 << 23, step, dtype=np.int64)
    mantissas = np.concatenate([mantissas, mantissas + 1, (mantissas - 1) % (1 << 23)])
    bits = (np.arange(255, dtype=np.int64) << 23)[:, None] + mantissas
    x = bits.astype(np.int32).view(np.float32).reshape(-1)
    np.testing.assert_array_equal(encoded(element, x), encode(x.astype(np.float64), dtype))
    tiny = x[np.abs(x) < 1]
    exact = np.ldexp(tiny.astype(np.float64), 127)
    np.testing.assert_array_equal(encoded(element, tiny, 127), encode(exact, dtype))


@every_element
def test_encode_is_monotone(element, dtype):
    bits = np.sort(np.random.default_rng(1).integers(0, 0x7F800000, 20000).astype(np.int32))
    codes = encoded(element, bits.view(np.float32)).astype(int)
    assert (np.diff(codes) >= 0).all() and codes[0] == 0 and codes[-1] == element.max_code


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush denormals")
@every_element
def test_encode_ignores_the_denormal_mode(element, dtype):
    x = np.ldexp(rounding_edges(element).astype(np.float64), -127).astype(np.float32)
    expected = encoded(element, x, 127)
    assert (expected & (element.sign - 1)).any()
    torch.set_flush_denormal(True)
    try:
        got = encoded(element, x, 127)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(got, expected)


def test_negative_zero_only_where_there_is_one():
    zeros = np.array([0.0, -0.0, -1e-30])
    for element, _ in CASES:
        fnuz = element.name.endswith("fnuz")
        sign = 0 if fnuz else element.sign
        assert encoded(element, zeros).tolist() == [0, sign, sign]
        if fnuz:
            assert (element.nan_code, element.nan_codes) == (0x80, (0x80,))


@pytest.mark.parametrize("max_value", [5.0, 6.5, 8.0, 0.5])
def test_a_maximum_that_is_none_of_its_values(max_value):
    with pytest.raises(ValueError, match=f"element e2m1: max {max_value} is none of its"):
        Element("e2m1", 2, 1, bias=1, max=max_value)


def test_an_element_wider_than_a_byte():
    with pytest.raises(ValueError, match="element half: 16 bits, expected 3 to 8"):
        Element("half", 5, 10, bias=15, max=65504.0, has_inf=True)
