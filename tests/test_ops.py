"""The torch.library ops: schemas, fake kernels, compiling, modes, and the direct path around the
dispatcher.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_mx import ops
from te_mx.engine.explain import LAST_RUN
from te_mx.ops.library import is_direct

OPS = torch.ops.te_mx


def operand(rows: int, k: int, order: str = "k_last", fmt: str = "e4m3") -> ops.Operand:
    x = torch.randn(rows, k)
    if order == "k_last":
        parts = ops.quantize_2d(x, fmt, rowwise=True, columnwise=None, scale_rule="rceil")
        return ops.Operand(parts.row_codes, parts.row_scales, fmt, order)
    parts = ops.quantize_2d(x.t(), fmt, rowwise=False, columnwise="plain", scale_rule="rceil")
    return ops.Operand(parts.col_codes, parts.col_scales, fmt, order)


def sides(a: ops.Operand, b: ops.Operand) -> tuple:
    return (
        a.codes, a.scales, a.packed, a.fmt, a.order, b.codes, b.scales, b.packed, b.fmt, b.order
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ opcheck
@pytest.mark.parametrize("columnwise", ["", "plain", "transposed"])
@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("col_sum", [True, False])
@pytest.mark.parametrize("spread", [-1, 8])
def test_opcheck_quantize(columnwise, rowwise, col_sum, spread):
    for x in (torch.randn(5, 70), torch.randn(70, 5).t(), torch.randn(33, 33, requires_grad=True)):
        dtype = torch.bfloat16 if col_sum else torch.float32
        arguments = (x, "e4m3", rowwise, columnwise, "rceil", col_sum, dtype, spread)
        torch.library.opcheck(OPS.quantize, arguments)


@pytest.mark.parametrize("order", ["k_last", "k_first"])
@pytest.mark.parametrize("spread", [0, 8])
def test_opcheck_pack_sm90(order, spread):
    o = operand(40, 70, order)
    torch.library.opcheck(OPS.pack_sm90, (o.codes, o.scales, o.fmt, o.order, spread))


@pytest.mark.parametrize("order", ["k_last", "k_first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck_dequantize(order, dtype):
    o = operand(5, 70, order, "e5m2")
    torch.library.opcheck(OPS.dequantize, (o.codes, o.scales, "e5m2", order, dtype))


@pytest.mark.parametrize("gelu", ["", "tanh", "erf"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("bias_grad", ["", "operand", "result"])
def test_opcheck_gemm(gelu, backward, bias_grad):
    a, b = operand(24, 70), operand(20, 70, "k_first")
    bias = None if backward else torch.randn(24, requires_grad=True)
    gelu_in = torch.randn(20, 24) if backward and gelu else None
    rest = (bias, gelu, gelu_in, bias_grad, "adaptive", 8, False)
    bf16 = torch.bfloat16
    torch.library.opcheck(OPS.gemm, (*sides(a, b), *rest, bf16, torch.float32, 0))
    out = torch.randn(20, 24)
    for aux_dtype in (bf16, None):
        torch.library.opcheck(OPS.gemm_out, (*sides(a, b), *rest, out, True, aux_dtype, 0))


class Passing(TorchDispatchMode):
    """Watches the dispatcher and changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("into", [False, True])
def test_aux_that_nobody_needs(gelu, into):
    """Not made, and the result is the same, called directly and through the dispatcher."""
    a, b, bias = operand(24, 70), operand(20, 70), torch.randn(24)

    def run(want_aux):
        out = torch.ones(20, 24) if into else None
        return ops.gemm_2d(
            a, b, bias=bias, gelu=gelu, out=out, out_dtype=torch.float32, want_aux=want_aux
        )

    with_aux = run(True)
    assert with_aux.aux is not None
    for mode in (contextlib.nullcontext(), Passing()):
        with mode:
            got = run(False)
        assert got.aux is None and torch.equal(got.out, with_aux.out)


@pytest.mark.parametrize("role", ["a", "b"])
def test_opcheck_pack(role):
    o = operand(40, 70)
    packed = ops.pack_2d(o, role)
    if packed is None:
        pytest.skip("the panel kernel of this machine reads plain codes")
    from te_mx.engine import envelopes

    kernel = envelopes.panel_kernel("cpu")
    arguments = (o.codes, o.scales, o.fmt, o.order, role, kernel, packed.numel())
    torch.library.opcheck(OPS.pack, arguments)
    with pytest.raises(ValueError, match="nbytes must be"):
        OPS.pack(*arguments[:-1], packed.numel() + 64)


# ------------------------------------------------------------------------------------------ compile
def block(w: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> tuple:
    """One of everything."""
    qw = ops.quantize_2d(w, "e4m3", rowwise=True, columnwise="plain", scale_rule="rceil")
    qx = ops.quantize_2d(
        x, "e5m2", rowwise=True, columnwise="transposed", scale_rule="floor", col_sum=True,
        sum_dtype=torch.bfloat16,
    )  # fmt: skip
    a = ops.Operand(qw.row_codes, qw.row_scales, "e4m3", "k_last")
    b = ops.Operand(qx.row_codes, qx.row_scales, "e5m2", "k_last")
    a = a._replace(packed=ops.pack_2d(a, "a"))
    one = ops.gemm_2d(a, b, bias=bias, gelu="erf", out_dtype=torch.bfloat16, tag=7)
    two = ops.gemm_2d(
        a, b, gelu="tanh", gelu_in=one.aux, bias_grad="result", out=out, out_dtype=torch.float32,
        accumulate=True,
    )  # fmt: skip
    back = ops.dequantize_2d(qx.col_codes.t(), qx.col_scales.t(), "e5m2", "k_first", torch.float32)
    return one.out, one.aux, two.out, two.bias_grad, qx.col_sum, back


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(backend, dynamic):
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
    for n in (20, 33):
        arguments = (torch.randn(24, 70), torch.randn(n, 70), torch.randn(24))
        LAST_RUN.pop(7, None)
        out = torch.randn(n, 24)
        expected = block(*arguments, out.clone())
        ran = LAST_RUN.pop(7)
        got = compiled(*arguments, out)
        assert LAST_RUN[7] == ran
        assert got[2].data_ptr() == out.data_ptr()
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x, y)
    torch.compiler.reset()


def test_meta_tensors():
    x = torch.empty(5, 70, device="meta")
    parts = ops.quantize_2d(
        x, "e4m3", rowwise=True, columnwise="transposed", scale_rule="rceil", col_sum=True,
        sum_dtype=torch.float16,
    )  # fmt: skip
    assert parts.col_sum.dtype == torch.float16
    assert [tuple(p.shape) for p in parts] == [(5, 70), (5, 3), (70, 5), (70, 1), (70,)]
    assert all(p.is_meta for p in parts)
    o = ops.Operand(parts.row_codes, parts.row_scales, "e4m3", "k_last")
    assert ops.gemm_2d(o, o, out_dtype=torch.float16).out.shape == (5, 5)
    assert ops.pack_2d(o, "a") is None


# -------------------------------------------------------------------------------------- direct path
class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


def test_modes_and_subclasses_go_through_the_dispatcher():
    x = torch.randn(4, 32)
    assert is_direct(x) and is_direct(torch.nn.Parameter(x))
    assert not is_direct(x.as_subclass(Sub)) and not is_direct(x.to("meta"))
    expected = ops.quantize_2d(x, "e4m3", rowwise=True, columnwise=None, scale_rule="rceil")
    with Recorder() as recorder:
        assert not is_direct(x)
        got = ops.quantize_2d(x, "e4m3", rowwise=True, columnwise=None, scale_rule="rceil")
    assert "te_mx.quantize.default" in recorder.seen
    assert torch.equal(got.row_codes, expected.row_codes)


def test_the_profiler_sees_the_ops():
    a, b = operand(8, 32), operand(4, 32)
    with torch.profiler.profile() as profile:
        ops.gemm_2d(a, b, out_dtype=torch.float32)
    assert any(event.key == "te_mx::gemm" for event in profile.key_averages())


def test_vmap_is_refused_not_wrong():
    x = torch.randn(3, 4, 32)
    with pytest.raises(RuntimeError):
        torch.vmap(
            lambda t: (
                ops.quantize_2d(
                    t, "e4m3", rowwise=True, columnwise=None, scale_rule="rceil"
                ).row_codes
            )
        )(x)


def test_no_gradient_through_ops():
    x = torch.randn(4, 32, requires_grad=True)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            parts = ops.quantize_2d(
                x, "e4m3", rowwise=True, columnwise="plain", scale_rule="rceil", col_sum=True
            )
        assert not any(p.requires_grad for p in parts)


def test_col_sum():
    for rows in (0, 1, 255, 256, 257, 700):
        x = torch.randn(rows, 33, dtype=torch.bfloat16)
        for rowwise, form in ((True, "plain"), (True, None), (False, "transposed")):
            parts = ops.quantize_2d(
                x, "e5m2", rowwise=rowwise, columnwise=form, scale_rule="rceil", col_sum=True
            )
            exact = x.double().sum(0)
            bound = 2.0**-24 * rows * x.double().abs().sum(0)
            assert parts.col_sum.dtype == torch.float32
            assert ((parts.col_sum - exact).abs() <= bound).all()


# ----------------------------------------------------------------------------------------- operands
def test_strided_codes_are_made_contiguous():
    a, b = operand(24, 70), operand(20, 70)
    expected = ops.gemm_2d(a, b, out_dtype=torch.float32).out
    a = a._replace(codes=a.codes.t().contiguous().t(), scales=a.scales.t().contiguous().t())
    assert torch.equal(ops.gemm_2d(a, b, out_dtype=torch.float32).out, expected)


def test_operand_properties():
    for order in ("k_last", "k_first"):
        o = operand(5, 70, order)
        assert (o.rows, o.k) == (5, 70)


def test_bad_operands_are_refused():
    """Addresses reach native code only when shapes and dtypes belong together."""
    a, b = operand(24, 70), operand(20, 70)

    def gemm(a=a, b=b, **kwargs):
        return ops.gemm_2d(a, b, **{"out_dtype": torch.float32, **kwargs})

    with pytest.raises(ValueError, match=r"a: k_last codes \(24, 70\) need uint8 scales \(24, 3\)"):
        gemm(a=a._replace(scales=a.scales[:, :2]))
    with pytest.raises(ValueError, match="need uint8 scales"):
        gemm(b=b._replace(scales=b.scales.int()))
    with pytest.raises(ValueError, match="the same k, got 70 and 64"):
        gemm(b=operand(20, 64))
    with pytest.raises(ValueError, match=r"bias must be \[24\]"):
        gemm(bias=torch.randn(20))
    with pytest.raises(ValueError, match=r"gelu_in must be \[20, 24\]"):
        gemm(gelu="tanh", gelu_in=torch.randn(24, 20))
    with pytest.raises(ValueError, match=r"out must be contiguous \[20, 24\]"):
        gemm(out=torch.empty(24, 20).t())


def test_a_foreign_packed_form_is_ignored():
    a, b = operand(24, 70), operand(20, 70)
    expected = ops.gemm_2d(a, b, out_dtype=torch.float32).out
    for packed in (
        torch.zeros(4096, dtype=torch.uint8),
        ops.pack_2d(operand(8, 64), "a"),
        ops.pack_2d(b, "b"),
    ):
        got = ops.gemm_2d(a._replace(packed=packed), b, out_dtype=torch.float32).out
        assert torch.equal(got, expected)
    packed = ops.pack_2d(a, "a")
    if packed is not None:  # not on a cache line: not usable where it lies
        moved = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].copy_(packed)
        got = ops.gemm_2d(a._replace(packed=moved), b, out_dtype=torch.float32).out
        assert torch.equal(got, expected)


# ----------------------------------------------------------------------------------- other devices
def test_implementations_for_other_devices():
    """What devices without a native backend run, here on CPU tensors."""
    x = torch.randn(20, 70)
    for form in ("", "plain", "transposed"):
        arguments = (x, "e4m3", True, form, "rceil", True, torch.bfloat16, ops.PLAIN)
        made = ops.quantize._make_op(ops.quantize._on_other)(*arguments)
        expected = ops.quantize._make_op(ops.quantize._on_cpu)(*arguments)
        for mine, theirs in zip(made, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    a, b = operand(24, 70), operand(20, 70)
    for tag in (-1, 4):
        arguments = (
            *sides(a, b), None, "tanh", None, "result", "adaptive", 8, False,
            torch.float32, torch.float32, tag,
        )  # fmt: skip
        for mine, theirs in zip(
            ops.gemm._gemm_other(*arguments), ops.gemm._gemm_cpu(*arguments), strict=True
        ):
            torch.testing.assert_close(mine, theirs)
    ops.gemm._gemm_other(*arguments)
    assert LAST_RUN[4] == "reference"
    with pytest.raises(NotImplementedError, match="packs for CPU kernels, got codes on cpu"):
        ops.pack._on_other(a.codes, a.scales, a.fmt, a.order, "a", "amx_bf16", 64)
