"""The torch.library ops: schemas, fake kernels, compiling, modes, and the direct path around the
dispatcher.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import te_mx
from te_mx import _ops as ops
from te_mx._ops import Epilogue
from te_mx._ops.library import is_direct
from te_mx._ops.quantize import parts_of
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu.quantize import Quantizer
from te_mx.backends.reference import quantize as reference
from te_mx.dispatch import run
from te_mx.dispatch.calls import Product, Quantize
from te_mx.dispatch.registry import pick
from te_mx.runtime.kernel_log import LAST_RUN

OPS = torch.ops.te_mx
E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
ROWS, COLS = f"{E4M3}@rows", f"{E4M3}@cols"


def operand(rows: int, k: int, layout: str = "rows", fmt: str = E4M3) -> ops.Operand:
    x = torch.randn(rows, k)
    if layout == "rows":
        return ops.quantize_2d(x, f"{fmt}@rows").row
    return ops.quantize_2d(x.t(), "", f"{fmt}@{layout}").col


def flat(*operands: ops.Operand) -> tuple:
    """The arguments of an op that two operands become."""
    return tuple(
        part
        for codes, scales, spec, rows, k, packed, _ in operands
        for part in (codes, scales, packed, spec, rows, k)
    )


# ------------------------------------------------------------------------------------------ opcheck
@pytest.mark.filterwarnings("ignore:.*not sm90:te_mx.FallbackWarning")
@pytest.mark.parametrize("col_sum", [True, False])
@pytest.mark.parametrize(
    ("row", "col"),
    [
        *itertools.product(["rows", ""], ["", "cols", "rows"]),
        ("sm90:8", "sm90:8"), ("sm90:8", ""), ("", "sm90:8"),
    ],
)  # fmt: skip
def test_opcheck_quantize(row, col, col_sum):
    specs = [f"{E4M3}@{layout}" if layout else "" for layout in (row, col)]
    dtype = torch.bfloat16 if col_sum else torch.float32
    x = torch.randn(5, 70) if col_sum else torch.randn(70, 5).t()
    given = [x, torch.randn(33, 33, requires_grad=True)] if row and col else [x]
    for x in given:
        torch.library.opcheck(OPS.quantize, (x, *specs, "rceil", col_sum, dtype))


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp6_e2m3"])
def test_opcheck_of_formats_whose_codes_share_bytes(fmt):
    x = torch.randn(5, 70)
    specs = f"{fmt}@rows", f"{fmt}@cols"
    torch.library.opcheck(OPS.quantize, (x, *specs, "even", True, torch.float32))
    sums = torch.float32, torch.tensor([7])
    turned = f"{fmt}+rht16:0x0000abcd@cols"
    torch.library.opcheck(OPS.quantize, (x, specs[0], turned, "even+sr", False, *sums))
    made = ops.quantize_2d(x, *specs, rule="even")
    for o in made[:2]:
        torch.library.opcheck(OPS.dequantize, (*o[:5], torch.bfloat16))
    sides = flat(made.row, operand(8, 70))
    rest = (None, "", None, "operand", "adaptive", 8, False, torch.float32, None, -1)
    torch.library.opcheck(OPS.gemm, (*sides, *rest))


@pytest.mark.parametrize("layout", ["rows", "cols"])
@pytest.mark.parametrize("to", ["sm90:0", "sm90:8", "rows", "cols"])
def test_opcheck_convert(layout, to):
    o = operand(40, 70, layout)
    spec = f"{E4M3}@{to}"
    if layout == to:
        assert ops.convert_2d(o, spec) is o
        return
    torch.library.opcheck(OPS.convert, (*o[:5], spec))
    made = ops.convert_2d(o, spec)
    assert made[2:] == (spec, 40, 70, None, None)
    with Passing():
        through = ops.convert_2d(o, spec)
    assert torch.equal(made.codes, through.codes) and torch.equal(made.scales, through.scales)


@pytest.mark.parametrize("layout", ["rows", "cols"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck_dequantize(layout, dtype):
    o = operand(5, 70, layout, E5M2)
    torch.library.opcheck(OPS.dequantize, (*o[:5], dtype))


@pytest.mark.parametrize(
    ("gelu", "backward", "bias_grad"),
    [*itertools.product(["", "tanh"], [False, True], ["", "operand", "result"]),
     ("erf", False, "operand"), ("erf", True, "result")],
)  # fmt: skip
def test_opcheck_gemm(gelu, backward, bias_grad):
    lhs, rhs = operand(20, 70, "cols"), operand(24, 70)
    bias = None if backward else torch.randn(24, requires_grad=True)
    gelu_in = torch.randn(20, 24) if backward and gelu else None
    rest = (bias, gelu, gelu_in, bias_grad, "adaptive", 8, False)
    bf16 = torch.bfloat16
    torch.library.opcheck(OPS.gemm, (*flat(lhs, rhs), *rest, bf16, torch.float32, 0))
    out = torch.randn(20, 24)
    for aux_dtype in (bf16, None) if gelu else (None,):
        torch.library.opcheck(OPS.gemm_out, (*flat(lhs, rhs), *rest, out, True, aux_dtype, 0))


class Passing(TorchDispatchMode):
    """Watches the dispatcher and changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("into", [False, True])
def test_aux_that_nobody_needs(gelu, into):
    """Not made, and the result is the same, called directly and through the dispatcher."""
    lhs, rhs, epilogue = operand(20, 70), operand(24, 70), Epilogue(torch.randn(24), gelu)

    def run(want_aux):
        out = torch.ones(20, 24) if into else None
        return ops.gemm_2d(lhs, rhs, epilogue, out=out, out_dtype=torch.float32, want_aux=want_aux)

    with_aux = run(True)
    assert with_aux.aux is not None
    for mode in (contextlib.nullcontext(), Passing()):
        with mode:
            got = run(False)
        assert got.aux is None and torch.equal(got.out, with_aux.out)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_what_stands_still_is_packed_once_for_many_rows(side):
    """In the form of the kernel for many rows; as it is where nobody would gain."""
    o, mode = operand(40, 70), ops.Mode()
    kept = ops.kept_form(o, side, mode)
    kernel = pick("gemm", torch.device("cpu"), ROWS, ROWS, (1 << 10, 1 << 10, 70)).name
    nbytes = cpu.packed_bytes(kernel, "a" if side == "rhs" else "b", 40, 70)
    assert kept[:5] == o[:5] and (0 if kept.packed is None else kept.packed.numel()) == nbytes
    with torch.inference_mode():
        inside = ops.kept_form(o, side, mode)
    assert inside.packed is None or not inside.packed.is_inference()  # it outlives the mode
    empty = operand(0, 70)
    assert ops.kept_form(empty, side, mode) is empty
    compiled = torch.compile(ops.kept_form, fullgraph=True, backend="eager")
    assert compiled(o, side, mode).packed is None
    torch.compiler.reset()


# ------------------------------------------------------------------------------------------ compile
def block(w: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> tuple:
    """One of everything."""
    qw = ops.quantize_2d(w, ROWS, COLS)
    qx = ops.quantize_2d(
        x, f"{E5M2}@rows", f"{E5M2}@rows", rule="floor", col_sum=True, sum_dtype=torch.bfloat16
    )
    lhs, rhs = qx.row, ops.kept_form(qw.row, "rhs", ops.Mode())
    one = ops.gemm_2d(lhs, rhs, Epilogue(bias, "erf"), out_dtype=torch.bfloat16, tag=7)
    two = ops.gemm_2d(
        lhs, rhs, Epilogue(None, "tanh", one.aux, "result", True), out=out, out_dtype=torch.float32
    )
    turned = ops.convert_2d(qx.col, f"{E5M2}@cols")
    strided = ops.Operand(qx.col.codes.t(), qx.col.scales.t(), turned.spec, *turned[3:])
    back = [ops.dequantize_2d(o, torch.float32) for o in (qx.col, turned, strided)]
    return one.out, one.aux, two.out, two.bias_grad, qx.col_sum, *back


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
    made = ops.quantize_2d(x, ROWS, ROWS, col_sum=True, sum_dtype=torch.float16)
    assert made.col_sum.dtype == torch.float16
    assert [tuple(p.shape) for p in parts_of(made)] == [(5, 70), (5, 3), (70, 5), (70, 1), (70,)]
    assert all(p.is_meta for p in parts_of(made))
    assert ops.gemm_2d(made.row, made.row, out_dtype=torch.float16).out.shape == (5, 5)
    assert ops.convert_2d(made.row, COLS).codes.shape == (70, 5)
    assert ops.dequantize_2d(made.col, torch.bfloat16).shape == (70, 5)
    assert ops.kept_form(made.row, "rhs", ops.Mode()) is made.row


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
    expected = ops.quantize_2d(x, ROWS).row
    with Recorder() as recorder:
        assert not is_direct(x)
        got = ops.quantize_2d(x, ROWS).row
    assert "te_mx.quantize.default" in recorder.seen
    assert torch.equal(got.codes, expected.codes)


def test_the_profiler_sees_the_ops():
    lhs, rhs = operand(4, 32), operand(8, 32)
    with torch.profiler.profile() as profile:
        ops.gemm_2d(lhs, rhs, out_dtype=torch.float32)
    assert any(event.key == "te_mx::gemm" for event in profile.key_averages())


def test_vmap_is_refused_not_wrong():
    x = torch.randn(3, 4, 32)
    with pytest.raises(RuntimeError):
        torch.vmap(lambda t: ops.quantize_2d(t, ROWS).row.codes)(x)


def test_no_gradient_through_ops():
    x = torch.randn(4, 32, requires_grad=True)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            made = ops.quantize_2d(x, ROWS, COLS, col_sum=True)
        assert not any(p.requires_grad for p in parts_of(made))


def test_col_sum():
    for rows in (0, 1, 255, 256, 257, 700):
        x = torch.randn(rows, 33, dtype=torch.bfloat16)
        for row, col in (("rows", "cols"), ("rows", ""), ("", "rows"), ("", "")):
            specs = (f"{E5M2}@{layout}" if layout else "" for layout in (row, col))
            made = ops.quantize_2d(x, *specs, col_sum=True)
            exact = x.double().sum(0)
            bound = 2.0**-24 * rows * x.double().abs().sum(0)
            assert made.col_sum.dtype == torch.float32
            assert ((made.col_sum - exact).abs() <= bound).all()


# ----------------------------------------------------------------------------------------- operands
def test_strided_codes_are_made_contiguous():
    lhs, rhs = operand(20, 70), operand(24, 70)
    expected = ops.gemm_2d(lhs, rhs, out_dtype=torch.float32).out
    rhs = rhs._replace(codes=rhs.codes.t().contiguous().t(), scales=rhs.scales.t().contiguous().t())
    assert torch.equal(ops.gemm_2d(lhs, rhs, out_dtype=torch.float32).out, expected)


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
def test_operands_say_their_sizes_whatever_the_shape_of_their_codes():
    for fmt, layout in ((E4M3, "rows"), (E4M3, "cols"), ("mxfp4", "rows"), ("mxfp4", "cols")):
        o = operand(5, 70, layout, fmt)
        assert (o.rows, o.k, o.format.name, o.layout.name) == (5, 70, fmt, layout)
        assert o.values().shape == (5, 70)
        assert torch.equal(o.values(), ops.dequantize_2d(o, torch.float32))


def test_bad_operands_are_refused():
    """Addresses reach native code only when shapes and dtypes belong together."""
    lhs, rhs = operand(20, 70), operand(24, 70)

    def gemm(lhs=lhs, rhs=rhs, epilogue=Epilogue(), **kwargs):  # noqa: B008
        return ops.gemm_2d(lhs, rhs, epilogue, **{"out_dtype": torch.float32, **kwargs})

    needs = r"mxfp8_e4m3 \[24, 70\] in layout 'rows' needs uint8 codes \(24, 70\) and torch.uint8 "
    with pytest.raises(ValueError, match=rf"rhs: {needs}scales \(24, 3\), got .* \(24, 2\)"):
        gemm(rhs=rhs._replace(scales=rhs.scales[:, :2]))
    with pytest.raises(ValueError, match=r"lhs: .* needs .* torch.uint8 scales .* got .*int32"):
        gemm(lhs=lhs._replace(scales=lhs.scales.int()))
    for sizes in ({"rows": 23}, {"k": 69}, {"rows": 70, "k": 24}, {"spec": COLS}):
        with pytest.raises(ValueError, match=r"rhs: mxfp8_e4m3 .* needs uint8 codes"):
            gemm(rhs=rhs._replace(**sizes))
    with pytest.raises(ValueError, match="the same k, got 64 and 70"):
        gemm(lhs=operand(20, 64))
    with pytest.raises(ValueError, match=r"bias must be \[24\], got \(20,\)"):
        gemm(epilogue=Epilogue(bias=torch.randn(20)))
    with pytest.raises(ValueError, match=r"gelu_in must be \[20, 24\], got \(24, 20\)"):
        gemm(epilogue=Epilogue(gelu="tanh", gelu_in=torch.randn(24, 20)))
    with pytest.raises(ValueError, match=r"out must be contiguous \[20, 24\]"):
        gemm(out=torch.empty(24, 20).t())


def test_a_foreign_packed_form_is_ignored():
    lhs, rhs, mode = operand(20, 70), operand(24, 70), ops.Mode()
    expected = ops.gemm_2d(lhs, rhs, out_dtype=torch.float32).out
    for packed in (
        torch.zeros(4096, dtype=torch.uint8),
        ops.kept_form(operand(8, 64), "rhs", mode).packed,
        ops.kept_form(lhs, "lhs", mode).packed,
    ):
        got = ops.gemm_2d(lhs, rhs._replace(packed=packed), out_dtype=torch.float32).out
        assert torch.equal(got, expected)
    packed = ops.kept_form(rhs, "rhs", mode).packed
    if packed is not None:  # not on a cache line: not usable where it lies
        moved = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].copy_(packed)
        got = ops.gemm_2d(lhs, rhs._replace(packed=moved), out_dtype=torch.float32).out
        assert torch.equal(got, expected)


# ----------------------------------------------------------------------------------- other devices
def test_what_devices_without_a_native_backend_run():
    """The reference, here on CPU tensors, beside what the CPU runs."""
    x = torch.randn(20, 70)
    for col in ("", COLS, ROWS):
        what = Quantize(x, ROWS, col, "rceil", True, torch.bfloat16)
        made = run.reference("quantize").run(what), run.quantize(what)
        for mine, theirs in zip(*map(parts_of, made), strict=True):
            torch.testing.assert_close(mine, theirs)
    lhs, rhs, epilogue = operand(20, 70), operand(24, 70), Epilogue(None, "tanh", None, "result")
    expected = ops.gemm_2d(lhs, rhs, epilogue, out_dtype=torch.float32)
    out, aux = torch.empty(20, 24), torch.empty(20, 24)
    product = Product(lhs, rhs, epilogue, out, aux, ops.Mode())
    name, sums = run.reference("gemm").run(product)
    assert name == "reference"
    for mine, theirs in zip((out, aux, sums), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for device in ("meta", "mps", "xpu"):
        kernel = pick("gemm", torch.device(device), ROWS, ROWS, (20, 24, 70))
        assert kernel is run.reference("gemm")


def test_directions_that_no_kernel_makes_together_are_made_apart(monkeypatch):
    """Each by its own kernel, and the sums once; what only the reference makes, with it."""
    made = []
    run = Quantizer.__call__
    noted = lambda self, what: made.append(what) or run(self, what)  # noqa: E731
    monkeypatch.setattr(Quantizer, "__call__", noted)
    x = torch.randn(70, 50)
    for row, col, native in (
        ("mxfp8_e4m3@rows", "mxfp8_e5m2@cols", 2),
        ("mxfp8_e4m3@rows", "mxfp6_e2m3@cols", 1),
        ("mxfp6_e2m3@rows", "mxfp6_e2m3@cols", 0),
    ):
        made.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", te_mx.FallbackWarning)
            got = ops.quantize_2d(x, row, col, rule="rceil", col_sum=True)
        expected = reference.quantize(Quantize(x, row, col, "rceil", True))
        assert len(made) == (native if cpu.native() else 0)
        assert sum(what.col_sum for what in made) <= 1
        for side in ("row", "col"):
            mine, theirs = getattr(got, side), getattr(expected, side)
            assert mine.spec == theirs.spec
            assert torch.equal(mine.codes, theirs.codes)
            assert torch.equal(mine.scales, theirs.scales)
        torch.testing.assert_close(got.col_sum, expected.col_sum)
