"""The Python side of the Hopper backend on a machine without one: tests/fake_sm90.py stands in for
the native module, and CPU tensors for those on the device.
"""

from __future__ import annotations

import fake_sm90
import pytest
import strategies
import torch

from te_mx import ops
from te_mx.backends import reference, sm90, sm90_layout
from te_mx.backends.base import PLAIN, Epilogue
from te_mx.engine import envelopes, layout
from te_mx.ops import dequantize as dequantize_op
from te_mx.ops import gemm as gemm_op
from te_mx.ops import pack as pack_op
from te_mx.ops import quantize as quantize_op

# (m, n, k): tails everywhere, one of each, whole tiles.
SHAPES = ((75, 130, 200), (1, 1, 1), (128, 128, 128))


@pytest.fixture(autouse=True)
def hopper(monkeypatch, threads):
    threads(1)  # many small operators
    monkeypatch.setattr(sm90, "_native", fake_sm90)
    monkeypatch.setattr(sm90, "_problems", {None: None})
    monkeypatch.setattr(sm90, "stream", lambda index: 0)
    monkeypatch.setattr(sm90, "set_execution", lambda args, index: None)
    monkeypatch.setattr(
        envelopes,
        "_chosen_gpu",
        {(None, "adaptive"): sm90.ADAPTIVE, (None, "exact"): sm90.EXACT},
    )


def operands(m, n, k, kind="block_scales", forms=("transposed", "plain")):
    """Plain operands a [m, k] and b [n, k]; "plain" ones lie k_first."""
    made = []
    for rows, form, seed in ((m, forms[0], 1), (n, forms[1], 2)):
        x = strategies.tensor(kind, k, rows, seed, torch.float32).clamp(-1e9, 1e9)
        q = reference.quantize(x, "e4m3", False, form, "rceil", False)
        order = "k_last" if form == "transposed" else "k_first"
        made.append(ops.Operand(q.col_codes, q.col_scales, "e4m3", order))
    return made


def packed(operand, spread=8):
    codes, scales = operand.codes, operand.scales
    if operand.order == "k_first":
        codes, scales = codes.t().contiguous(), scales.t().contiguous()
    made = sm90_layout.pack(codes, scales, operand.fmt, spread)
    return ops.Operand(*made.operand_parts(codes), operand.fmt, "sm90")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", [PLAIN, 0, 8])
@pytest.mark.parametrize("shape", [(75, 130), (1, 1)], ids=str)
def test_quantize(shape, spread, dtype):
    x = strategies.tensor("outliers", *shape, 3, dtype)
    wide = torch.nn.functional.pad(x, (2, 3))[:, 2:-3]  # rows apart, off by two elements
    for given in (x, wide, x.t().contiguous().t()):
        for row, form, rule, sums in (
            (True, None, "floor", False),
            (False, "plain", "rceil", True),
            (True, "plain", "floor", False),
            (True, "transposed", "rceil", True),
        ):
            args = ("e5m2", row, form, rule, sums)
            got = quantize_op._on_cuda(given, *args, torch.bfloat16, spread)
            want = quantize_op._on_other(x, *args, torch.bfloat16, spread)
            for mine, theirs in zip(got, want, strict=True):
                assert (mine is None) == (theirs is None)
                assert theirs is None or torch.equal(mine, theirs)


def test_two_at_a_time():
    calls = (
        ops.Quantize(torch.randn(75, 130).t(), "e4m3", True, "transposed", "rceil", spread=8),
        ops.Quantize(torch.randn(33, 40), "e5m2", False, "plain", "floor", True, torch.bfloat16),
    )
    for parts, what in zip(sm90.quantize_two(*calls), calls, strict=True):
        want = ops.quantize_2d(**what._asdict())
        for mine, theirs in zip(parts, want, strict=True):
            assert (mine is None) == (theirs is None)
            assert theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantize(dtype):
    for operand in operands(75, 130, 333):
        codes, scales, fmt, order, _ = operand
        got = dequantize_op._on_cuda(codes, scales, fmt, order, dtype)
        assert torch.equal(got, reference.dequantize(codes, scales, fmt, order, dtype))


@pytest.mark.parametrize("spread", [0, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack(shape, spread):
    for operand in operands(*shape):
        codes, words = pack_op._sm90_on_cuda(*operand[:4], spread)
        want = packed(operand, spread)
        assert torch.equal(codes, want.codes)
        assert torch.equal(words, want.scales)
        assert codes.stride(0) % 16 == 0


@pytest.mark.parametrize("form", ["packed", "one packed", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemm(shape, form, guarded):
    m, n, _ = shape
    a, b = operands(*shape)
    mode = ops.Mode("adaptive", 3)
    ready = packed(a, 3), packed(b, 3)
    if form == "packed":
        a, b = ready
    elif form == "one packed":
        b = ready[1]
    old, gelu_in = torch.randn(n, m), torch.randn(n, m).half()
    bias = torch.randn(2 * m)[::2]
    for epilogue in (
        Epilogue(),
        Epilogue(bias=bias),
        Epilogue(bias=bias, gelu="tanh"),
        Epilogue(gelu="erf", gelu_in=gelu_in, bias_grad="result"),
        Epilogue(accumulate=True),
    ):
        out = old.clone()
        got = gemm_op._on_cuda(a, b, epilogue, out, torch.bfloat16, 5, mode)
        want, aux = old.clone(), torch.empty(n, m, dtype=torch.bfloat16)
        keeps = epilogue.gelu is not None and epilogue.gelu_in is None
        bias_grad = reference.gemm(*ready, epilogue, want, aux if keeps else None)
        assert torch.equal(got.out, want)
        assert (got.aux is not None) == keeps
        assert not keeps or torch.equal(got.aux, aux)
        assert (got.bias_grad is None) == (bias_grad is None)
        assert bias_grad is None or torch.equal(got.bias_grad, bias_grad)
        assert gemm_op.LAST_RUN[5] == "sm90_adaptive"


@pytest.mark.parametrize("form", ["transposed", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gradient_of_a_plain_operand(shape, form, guarded):
    m, n, _ = shape
    a, b = operands(*shape, forms=("plain", form))
    epilogue = Epilogue(bias_grad="operand")
    got = gemm_op._on_cuda(a, b, epilogue, torch.empty(n, m), None, -1, ops.Mode())
    values = reference.dequantize(*b[:4], torch.float64)
    assert torch.equal(got.bias_grad, values.sum(0 if form == "plain" else 1).float())


@pytest.mark.parametrize("k", [33, 40, 48])
def test_operands_whose_rows_lie_elsewhere_are_copied(k):
    a, b = operands(75, 130, k)
    want = gemm_op._on_cuda(
        packed(a), packed(b), Epilogue(), torch.empty(130, 75), None, -1, ops.Mode()
    )
    moved = []
    for operand in (packed(a), packed(b)):
        apart = torch.full((operand.rows, k + 64), 7, dtype=torch.uint8)[:, 3 : k + 3]
        words = torch.empty(*operand.scales.shape[:2], 140, dtype=torch.int32)[..., :132]
        moved.append(
            operand._replace(codes=apart.copy_(operand.codes), scales=words.copy_(operand.scales))
        )
    got = gemm_op._on_cuda(*moved, Epilogue(), torch.empty(130, 75), None, -1, ops.Mode())
    assert torch.equal(got.out, want.out)


def test_exact_refuses_packed_operands():
    a, b = operands(5, 6, 64)
    with pytest.raises(ValueError, match="exact"):
        gemm_op._on_cuda(packed(a), b, Epilogue(), torch.empty(6, 5), None, -1, ops.Mode("exact"))


def test_what_native_code_refuses_runs_on_the_reference(monkeypatch, fresh_warnings):
    for name in ("quantize", "dequantize", "gemm"):
        monkeypatch.setattr(fake_sm90, name, lambda *_: 2)
    a, b = operands(5, 6, 64)
    x = torch.randn(5, 64)
    with pytest.warns(RuntimeWarning, match="quantize"):
        quantize_op._on_cuda(x, "e4m3", True, None, "rceil", False, torch.float32, PLAIN)
    with pytest.warns(RuntimeWarning, match="dequantize"):
        dequantize_op._on_cuda(*a[:4], torch.float32)
    out = torch.empty(6, 5)
    with pytest.warns(RuntimeWarning, match="gemm"):
        gemm_op._on_cuda(packed(a), packed(b), Epilogue(), out, None, -1, ops.Mode())
    want = torch.empty(6, 5)
    reference.gemm(packed(a), packed(b), Epilogue(), want, None)
    assert torch.equal(out, want)


def test_a_wrong_status_is_a_bug_that_shows(monkeypatch):
    monkeypatch.setattr(fake_sm90, "dequantize", lambda *_: 1)
    with pytest.raises(RuntimeError, match="status 1"):
        dequantize_op._on_cuda(*operands(5, 6, 64)[0][:4], torch.float32)


@pytest.mark.parametrize(
    ("capability", "module", "said"),
    [
        ((8, 9), fake_sm90, "needs a Hopper GPU .sm_90., cuda:0 is sm_89"),
        ((12, 0), fake_sm90, "sm_120"),
        ((9, 0), None, "nvcc"),
    ],
)
def test_reasons_not_to_run(monkeypatch, capability, module, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(sm90, "_problems", {})
    monkeypatch.setattr(sm90, "_native", module)
    monkeypatch.setattr(sm90, "_import_error", None if module else "not built")
    monkeypatch.setattr(envelopes, "_chosen_gpu", {})
    problem = envelopes.Problem("cuda", -1, 8, 8, 8, "adaptive", 0)
    kernel, declined = envelopes.choose(problem)
    assert kernel == envelopes.REFERENCE
    assert said.replace(".sm_90.", "(sm_90)") in dict(declined)[sm90.ADAPTIVE]
    assert envelopes.select_for(problem) == envelopes.REFERENCE


def test_the_table_of_kernels_on_hopper(monkeypatch):
    monkeypatch.setattr(sm90, "_problems", {0: None})
    monkeypatch.setattr(envelopes, "_chosen_gpu", {})
    for precision in ("adaptive", "exact"):
        problem = envelopes.problem(torch.device("cuda", 0), 8, 8, 8, precision)
        assert envelopes.select_for(problem) == f"sm90_{precision}"
        assert envelopes.select_gpu(0, 8, 0, 8, precision) == envelopes.ZERO_SIZE
    device = torch.device("cuda", 0)
    assert envelopes.packing_kernel(device) == sm90.ADAPTIVE
    assert layout.gemm_form(device, "adaptive", 5) == ("transposed", 5)
    assert layout.gemm_form(device, "exact", 5).spread == PLAIN
