"""The random Hadamard transform: against its matrix in fp64, and the products of
transformed operands."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import te_mx
from te_mx import formats
from te_mx._ops import gemm_2d, quantize_2d
from te_mx.formats.hadamard import Hadamard

SIGNS = 0x9A3C51E7
pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")


def matrix(size: int, chunk: int) -> torch.Tensor:
    """H diag(s) / sqrt(size) in fp64, by the definition."""
    h = torch.tensor(
        [[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)],
        dtype=torch.float64,
    )
    bits = [(SIGNS >> ((chunk * size + j) % 32)) & 1 for j in range(size)]
    return h * torch.tensor([1.0 - 2 * bit for bit in bits], dtype=torch.float64) / size**0.5


@pytest.mark.parametrize("k", [0, 5, 16, 31, 32, 48, 63, 100])
@pytest.mark.parametrize("size", [16, 32])
def test_it_is_the_matrix_on_whole_chunks(size, k):
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    transform = Hadamard(size, SIGNS)
    made = transform.apply(x).double()
    expected = x.clone()
    for chunk in range(k // size):
        part = slice(chunk * size, (chunk + 1) * size)
        expected[:, part] = x[:, part] @ matrix(size, chunk).t()
    torch.testing.assert_close(made, expected, rtol=0, atol=4e-6)
    torch.testing.assert_close(transform.invert(expected), x, rtol=0, atol=1e-12)
    assert torch.equal(made[:, k // size * size :].float(), x[:, k // size * size :].float())


@pytest.mark.parametrize("size", [16, 32])
def test_its_bits_are_those_of_fp32_additions_in_order(size):
    """One chunk in numpy, element by element."""
    x = np.random.default_rng(0).normal(size=size).astype(np.float32)
    x[3] = -0.0
    chunk = np.array([-v if (SIGNS >> j) & 1 else v for j, v in enumerate(x)], dtype=np.float32)
    h = 1
    while h < size:
        for i in range(size):
            if not i & h:
                a, b = chunk[i], chunk[i + h]
                chunk[i], chunk[i + h] = a + b, a - b
        h *= 2
    chunk *= np.float32(0.25) if size == 16 else np.array(0x3E3504F3, np.uint32).view(np.float32)
    made = Hadamard(size, SIGNS).apply(torch.from_numpy(x).view(1, size))
    assert made.numpy().view(np.uint32).tolist() == [chunk.view(np.uint32).tolist()]


@pytest.mark.parametrize("base", ["mxfp4", "mxfp8_e4m3", "mxfp6_e2m3"])
def test_a_transformed_format_quantizes_what_is_transformed(base):
    name = f"{base}+rht16:0x{SIGNS:08x}"
    fmt, plain = formats.get(name), formats.get(base)
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(4))
    x[2, 9] = 1e3
    made = fmt.quantize(x, "rceil")
    expected = plain.quantize(fmt.transform.apply(x), "rceil")
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert fmt.untransformed is plain and plain.untransformed is plain
    assert fmt.name == name and name not in formats.names()
    assert formats.get(f"{base}+rht16:0x{SIGNS:X}") is fmt
    assert copy.deepcopy(fmt) is fmt and pickle.loads(pickle.dumps(fmt)) is fmt


def test_an_outlier_is_spread_and_a_nan_stays():
    x = torch.full((1, 32), 0.01)
    x[0, 7] = 100.0
    plain, turned = formats.get("mxfp4"), formats.get(f"mxfp4+rht32:0x{SIGNS:08x}")
    assert plain.dequantize(*plain.quantize(x, "rceil"), 32, torch.float32)[0, 8:].eq(0).all()
    rotated = turned.dequantize(*turned.quantize(x, "rceil"), 32, torch.float32)
    assert rotated.abs().min() > 10
    x[0, 7] = torch.inf
    assert turned.dequantize(*turned.quantize(x, "rceil"), 32, torch.float32).isnan().all()


@pytest.mark.parametrize("size", [16, 32])
def test_a_product_of_two_transformed_operands_is_that_of_the_matrices(size):
    generator = torch.Generator().manual_seed(8)
    x, w = torch.randn(40, 150, generator=generator), torch.randn(24, 150, generator=generator)
    spec = f"mxfp8_e4m3+rht{size}:0x{SIGNS:08x}@rows"
    lhs, rhs = (quantize_2d(t, spec, rule="rceil").row for t in (x, w))
    made = gemm_2d(lhs, rhs, out_dtype=torch.float32).out
    exact = lhs.values(torch.float64) @ rhs.values(torch.float64).t()
    torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-4)
    error = (made - x @ w.t()).norm() / (x @ w.t()).norm()
    assert error < 0.05  # what MXFP8 itself costs


@pytest.mark.parametrize("other", ["mxfp4", "mxfp4+rht16:0x0000abcd", "mxfp4+rht32:0x0000abce"])
def test_operands_that_are_transformed_otherwise_are_refused(other):
    x = torch.ones(8, 64)
    one = quantize_2d(x, "mxfp8_e4m3+rht32:0x0000abcd@rows", rule="rceil").row
    two = quantize_2d(x, f"{other}@rows", rule="rceil").row
    for lhs, rhs in ((one, two), (two, one)):
        with pytest.raises(ValueError, match="need the same Hadamard transform along k"):
            gemm_2d(lhs, rhs, out_dtype=torch.float32)


def test_mxtensors_know_their_transform(tmp_path):
    name = f"mxfp8_e4m3+rht32:0x{SIGNS:08x}"
    x, w = torch.randn(3, 20, 70), torch.randn(24, 70)
    xq = te_mx.quantize(x, fmt=name.replace("mxfp8_", ""), columnwise=True)
    assert xq.fmt == name and repr(xq).startswith(f"MXTensor(shape=(3, 20, 70), fmt='{name}'")
    for usage in ("rowwise", "columnwise"):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            values = xq.dequantize(dtype, usage)
            assert values.dtype == dtype and (values - x).norm() < 0.04 * x.norm()
    torch.save(xq, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True).equal(xq)
    wq = te_mx.quantize(w, fmt=name)
    expected = x.view(60, 70) @ w.t()
    made = te_mx.gemm(wq, xq, out_dtype=torch.float32).out
    assert (made - expected).norm() < 0.06 * expected.norm()
    plain = te_mx.quantize(w, fmt="mxfp4")
    for call in (te_mx.gemm, te_mx.explain):
        for pair in ((plain, xq), (xq, plain)):
            with pytest.raises(ValueError, match="A and B must have the same Hadamard transform"):
                call(*pair)


def test_sums_over_k_are_refused():
    """The transform does not keep them; sums over rows are those of the product."""
    x, g = torch.randn(70, 40), torch.randn(70, 24)
    name = f"mxfp4+rht32:{SIGNS:#x}"
    A, B = (te_mx.quantize(t, fmt=name, columnwise=True) for t in (x, g))
    with pytest.raises(ValueError, match="asks for the sums of B over k, but B is mxfp4"):
        te_mx.gemm(A, B, "NT", grad=True, bias=True)
    made = te_mx.gemm(
        A, B, "NT", grad=True, bias=True, gelu_in=torch.randn(24, 40), out_dtype=torch.float32
    )
    torch.testing.assert_close(made.bias_grad, made.out.sum(0))


def test_names_that_mean_nothing():
    for name in ("mxfp4+rht8:0x1", "mxfp4+rht32", "mxfp4+rht32:1", "mxfp4+rht32:0x123456789"):
        with pytest.raises(ValueError, match="fmt must be one of"):
            formats.get(name)
    for name in ("fp8_e4m3_1x128+rht32:0x1", "mxfp4+rht32:0x1+rht32:0x1"):
        with pytest.raises(ValueError, match="only MX formats and NVFP4 take a Hadamard"):
            formats.get(name)
    with pytest.raises(ValueError, match="size 16 or 32 and signs 0 to"):
        Hadamard(64, 0)
