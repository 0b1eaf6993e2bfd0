"""The path of operands packed for Hopper, run in plain torch on any machine: what the quantizer,
the GEMM and the modules do with operands of order "sm90".
"""

import pytest
import torch

import te_mx
from te_mx import ops
from te_mx.autograd import operands as autograd_operands
from te_mx.backends import sm90, sm90_layout
from te_mx.engine import envelopes

KINDS = ("gauss", "rows", "spread", "zeros")


def data(rows: int, cols: int, kind: str) -> torch.Tensor:
    x = torch.randn(rows, cols)
    if kind == "rows":
        x *= torch.exp2(torch.randint(-20, 20, (rows, 1)).float())
    if kind == "spread":
        x *= torch.exp2(torch.randint(-15, 15, (rows, cols)).float())
    if kind == "zeros":
        x[torch.rand(rows, cols) < 0.95] = 0
    return x


def packed(x: torch.Tensor, spread: int, **kwargs: object) -> ops.QuantizedParts:
    words = {"rowwise": True, "columnwise": "transposed", **kwargs}
    return ops.quantize_2d(x, "e4m3", scale_rule="rceil", spread=spread, **words)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 70), (130, 257), (1, 1)])
@pytest.mark.parametrize("spread", [0, 8])
def test_packed_quantization_is_quantization_then_packing(shape, kind, spread):
    x = data(*shape, kind)
    got = packed(x, spread, col_sum=True)
    rounded = packed(x, spread, col_sum=True, sum_dtype=torch.bfloat16)
    assert torch.equal(rounded.col_sum, x.sum(0).bfloat16())
    plain = ops.quantize_2d(
        x, "e4m3", rowwise=True, columnwise="transposed", scale_rule="rceil", col_sum=True
    )
    assert torch.equal(got.col_sum, x.sum(0))
    for codes, words, o in (
        (*got[:2], ops.Operand(*plain[:2], "e4m3", "k_last")),
        (*got[2:4], ops.Operand(*plain[2:4], "e4m3", "k_last")),
    ):
        expected = sm90_layout.pack(o.codes, o.scales, "e4m3", spread)
        assert torch.equal(codes, expected.codes[:, : o.k]) and torch.equal(words, expected.scales)
        assert codes.stride(0) % 16 == 0 or codes.shape[0] == 1


def test_k_first_operands_pack_like_their_transpose():
    x = data(70, 40, "spread")
    q = ops.quantize_2d(x, "e4m3", rowwise=False, columnwise="plain", scale_rule="rceil")
    got = torch.ops.te_mx.pack_sm90(q.col_codes, q.col_scales, "e4m3", "k_first", 8)
    for mine, theirs in zip(got, packed(x, 8)[2:4], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixed", [False, True])
def test_gemm_of_packed_operands_on_the_reference_backend(kind, mixed):
    w, x = data(24, 300, kind), data(20, 300, "gauss")
    qw, qx = packed(w, 8), packed(x, 8)
    a = ops.Operand(qw.row_codes, qw.row_scales, "e4m3", "sm90")
    b = ops.Operand(qx.row_codes, qx.row_scales, "e4m3", "sm90")
    values = sm90_layout.packed_values(b, 300, "e4m3")
    if mixed:
        b = te_mx.quantize(x).operand("rowwise")
        values = te_mx.quantize(x).dequantize(torch.float64)
    expected = values @ sm90_layout.packed_values(a, 300, "e4m3").t()
    made = ops.gemm_2d(a, b, out_dtype=torch.float32, bias_grad="operand", tag=3)
    torch.testing.assert_close(made.out, expected.float())
    torch.testing.assert_close(made.bias_grad, values.sum(1).float())
    assert ops.gemm.LAST_RUN[3] == envelopes.REFERENCE


def test_a_packed_operand_is_checked():
    q = packed(torch.randn(40, 70), 8)
    o = ops.Operand(q.row_codes, q.row_scales, "e4m3", "sm90")
    for bad in (o._replace(scales=o.scales[:, :1]), o._replace(scales=o.scales.byte())):
        with pytest.raises(ValueError, match=r"a: packed codes \(40, 70\) need int32 scale words"):
            ops.gemm_2d(bad, o, out_dtype=torch.float32)
    # Rows that do not lie as the kernels read them are copied.
    moved = o._replace(codes=o.codes.contiguous())
    assert sm90.aligned(moved).codes.stride(0) == 80
    one = ops.gemm_2d(o, o, out_dtype=torch.float32).out
    assert torch.equal(ops.gemm_2d(moved, o, out_dtype=torch.float32).out, one)


@pytest.fixture
def hopper_forms(monkeypatch):
    """Modules ask for operands as they do on Hopper; the reference multiplies them."""
    monkeypatch.setattr(
        autograd_operands, "gemm_form", lambda device, precision, spread: ops.GemmForm(
            "transposed", spread if precision == "adaptive" else ops.PLAIN
        ),
    )  # fmt: skip


def gradients(layer, x, grad, **fields):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with te_mx.autocast(recipe=te_mx.recipe.MXFP8BlockScaling(**fields)):
        y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("shape", [(40, 70, 33), (1, 1, 1), (130, 260, 140)])
def test_linear_on_packed_operands(shape, hopper_forms):
    """With spread 0 nothing is rounded, so the exact path gives the same."""
    m, k, n = shape
    layer = te_mx.Linear(k, n)
    x, grad = data(m, k, "gauss"), data(m, n, "rows")
    exact = gradients(layer, x, grad, precision="exact")
    for spread, bound in ((0, 1e-6), (8, 2e-3)):
        for mine, theirs in zip(
            gradients(layer, x, grad, alignment_spread=spread), exact, strict=True
        ):
            scale = theirs.double().norm() + 1e-30
            assert (mine.double() - theirs.double()).norm() <= bound * scale


def test_kept_weights_follow_the_precision(hopper_forms):
    """A weight packed for one precision or spread is not used at another."""
    layer, x = te_mx.Linear(64, 48), torch.randn(8, 64)
    seen = []
    for fields in ({}, {"alignment_spread": 3}, {"precision": "exact"}, {"precision": "exact"}):
        with te_mx.autocast(recipe=te_mx.recipe.MXFP8BlockScaling(**fields)):
            layer(x, is_first_microbatch=not seen)
        seen.append(layer._microbatch)
    assert seen[0] is not seen[1] is not seen[2] and seen[2] is seen[3]


def test_explain_counts_classes():
    A, B = te_mx.quantize(data(300, 256, "gauss")), te_mx.quantize(data(40, 256, "spread"))
    note = te_mx.explain(A, B, classes=True).note
    assert "A has 6 tile-shared tiles; B has" in note
    with pytest.raises(ValueError, match="classes=True counts tiles of tensors"):
        te_mx.explain(m=1, n=1, k=1, classes=True)


def test_precision_errors():
    A = te_mx.quantize(torch.randn(4, 32))
    for make in (
        lambda **f: te_mx.gemm(A, A, **f),
        lambda **f: te_mx.recipe.MXFP8BlockScaling(**f),
    ):
        with pytest.raises(ValueError, match="precision must be one of 'adaptive', 'exact'"):
            make(precision="fast")
        with pytest.raises(ValueError, match="alignment_spread must be 0 to 8"):
            make(alignment_spread=9)
        with pytest.raises(TypeError, match="alignment_spread must be an int"):
            make(alignment_spread=2.0)


def test_other_gpus_are_named(monkeypatch):
    """What explain says on GPUs that are not Hopper."""
    cuda = torch.device("cuda", 3)
    monkeypatch.setitem(sm90._problems, 3, "needs a Hopper GPU (sm_90), cuda:3 is sm_80")
    problem = envelopes.problem(cuda, 8, 8, 8)
    assert envelopes.choose(problem)[0] == envelopes.REFERENCE
    assert dict(envelopes.choose(problem)[1])["sm90_adaptive"].endswith("cuda:3 is sm_80")
    monkeypatch.setitem(sm90._problems, 3, None)
    assert envelopes.choose(problem)[0] == "sm90_adaptive"
    assert envelopes.choose(problem._replace(precision="exact"))[0] == "sm90_exact"
    assert ops.gemm_form(cuda, "adaptive", 5) == ("transposed", 5)
    assert ops.gemm_form(cuda, "exact", 5) == ("transposed", ops.PLAIN)
    monkeypatch.setitem(sm90._problems, 3, "no")
    assert ops.gemm_form(cuda, "adaptive", 5) == ("plain", ops.PLAIN)


@pytest.mark.parametrize(
    ("capability", "hip", "text"),
    [((8, 0), None, "is sm_80"), ((10, 0), None, "is sm_100"), ((9, 4), "6.0", "AMD")],
)
def test_reasons_of_a_device(monkeypatch, capability, hip, text):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert text in sm90._find_problem(0)


def test_a_build_without_the_module_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(sm90, "_native", None)
    monkeypatch.setattr(sm90, "_import_error", "hidden by a test")
    assert "te_mx._sm90 cannot be imported (hidden by a test)" in sm90._find_problem(0)
