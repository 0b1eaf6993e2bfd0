"""te_mx.gemm of tensors that stand still on the CPU: from the third call on the plan of its kernel,
with the same bits, and only while nothing has changed."""

import pytest
import torch
from torch import Tensor

import te_mx
from te_mx.api import gemm as api
from te_mx.backends.cpu import binding

pytestmark = pytest.mark.skipif(binding.isa() < 0, reason="needs the native module")
FORMATS = ["mxfp8_e4m3", "mxfp4", "fp8_e4m3_1x128"]


@pytest.fixture
def taken(monkeypatch):
    """How often a plan that was known gave the result."""
    count = []
    run = api.run

    def counted(*args):
        made = run(*args)
        if made is not None:
            count.append(True)
        return made

    monkeypatch.setattr(api, "run", counted)
    binding.forget()
    yield count
    binding.forget()


def sides(a_fmt="mxfp8_e4m3", b_fmt=None, m=40, n=70, k=96, spread=1.0, rule=None):
    torch.manual_seed(1)
    x, w = torch.randn(m, k), torch.randn(n, k)
    x[:, 0] *= spread
    made = zip((w, x), (a_fmt, b_fmt or a_fmt), strict=True)
    return [te_mx.quantize(t, fmt=f, columnwise=True, scale_rule=rule) for t, f in made]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("b_fmt", FORMATS)
@pytest.mark.parametrize("a_fmt", FORMATS)
def test_bits_of_the_long_way(taken, a_fmt, b_fmt, dtype):
    A, B = sides(a_fmt, b_fmt, spread=1e25)  # some rows need wide_f64 in some formats
    first, *later = [te_mx.gemm(A, B, out_dtype=dtype).out for _ in range(4)]
    assert all(torch.equal(first, one) for one in later) and taken == [True, True]
    out = torch.full_like(first, torch.nan)
    assert te_mx.gemm(A, B, out=out).out is out and torch.equal(out, first) and len(taken) == 3


@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("rule", ["fp32", "pow2"])
def test_layouts_of_blockwise(taken, layout, rule):
    torch.manual_seed(2)
    make = {"fmt": "fp8_e4m3_1x128", "columnwise": True, "scale_rule": rule}
    A = te_mx.quantize(torch.randn(300, 70), **make)
    B = te_mx.quantize(torch.randn(*((40, 300) if layout == "NN" else (300, 40))), **make)
    first, *later = [te_mx.gemm(A, B, layout).out for _ in range(4)]
    assert all(torch.equal(first, one) for one in later) and taken == [True, True]


def test_what_was_written_is_packed_anew(taken):
    A, B = sides()
    before = [te_mx.gemm(A, B).out for _ in range(4)][-1]
    B.rowwise_scale.view(torch.uint8).add_(1)
    after = te_mx.gemm(A, B).out
    assert torch.equal(after, before * 2) and len(taken) == 2


def test_operands_of_another_level_are_not_read(taken):
    A, B = sides()
    want = [te_mx.gemm(A, B).out for _ in range(4)][-1]
    level = binding.ISA_LEVELS[binding.isa()]
    try:
        binding.set_isa("portable")
        for _ in range(4):
            torch.testing.assert_close(te_mx.gemm(A, B).out, want, rtol=2**-7, atol=1e-3)
        assert len(taken) == 5  # but for the first one, which plans for this level
        C, D = sides()
        made = [te_mx.gemm(C, D).out for _ in range(4)]
        assert all(torch.equal(made[0], one) for one in made) and taken[-2:] == [True, True]
    finally:
        binding.set_isa(level)


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x], layout=torch.strided)


@pytest.mark.parametrize("lies", [Tensor.to_sparse, Tensor.to_mkldnn, nested])
def test_what_cannot_be_written_is_refused_as_before(taken, lies):
    A, B = sides()
    want = te_mx.gemm(A, B, out_dtype=torch.float32).out
    for _ in range(3):
        with pytest.raises(TypeError, match="out must be a dense tensor"):
            te_mx.gemm(A, B, out=lies(torch.ones(40, 70)), out_dtype=torch.float32)
        assert torch.equal(te_mx.gemm(A, B, out_dtype=torch.float32).out, want)
    assert taken == [True, True]
