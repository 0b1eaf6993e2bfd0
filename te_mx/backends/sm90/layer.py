"""Whole layers of Hopper, one native call each way: the steps that autograd would run, of the same
kernels on the same bytes, as sequences (sequence.py) with what only they read in one buffer."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends.base import BIAS_GRADS, FLOAT_DTYPES, GELUS
from te_mx.backends.reference.fused import inverse
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.envelope import not_adaptive, why_not
from te_mx.backends.sm90.fused import makes
from te_mx.backends.sm90.sequence import At, Place, Room, Source, Steps, Sums, Unfit, target
from te_mx.dispatch.fused import ACT_IDS
from te_mx.dispatch.layer import (
    Buffers,
    Gradients,
    LayerKernel,
    LayerPlan,
    LayerProblem,
    Product,
    Saved,
)
from te_mx.dispatch.linear import LATER, Into, Part
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import is_stochastic
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand
from te_mx.runtime.kernel_log import note_written

_F32, _U8 = torch.float32, torch.uint8
_NO_WEIGHT = None, None
_ALIGNMENT = 16  # of matrices that kernels make and read
# The arguments of a run. Of a weight: itself and its stride, or codes and scales.
_WEIGHTS = "w1", "w1_beside", "w2", "w2_beside"
FORWARD = (
    "stream", "work", "columns", "others", "y", "z", "x", "x_stride", "norm_weight", "norm_bias",
    *_WEIGHTS, "b1", "b2",
)  # fmt: skip
BACKWARD = (
    "stream", "work", "columns", "others", "g", "g_stride", "x", "x_stride", "norm_weight",
    "seed1", "seed2", *_WEIGHTS, "dx", "dweight", "dbias", "dw1", "dw1_add", "dw2", "dw2_add",
    "db1", "db2",
)  # fmt: skip


class _Kept(NamedTuple):
    """Where things lie in the buffers that forward leaves for backward, and their sizes."""

    columns: int
    others: int
    mean: Place | None
    rstd: Place | None
    h: Place | None
    inputs: tuple[At | None, ...]
    weights: tuple[At | None, ...]


def _kept(p: LayerProblem) -> _Kept:
    columns, others = Room("columns"), Room("others")
    mean = rstd = h = None
    if p.norm is not None and p.need_dx:
        mean = None if p.norm.kind == "RMSNorm" else columns.matrix(p.m, 1, _F32)
        rstd = columns.matrix(p.m, 1, _F32)
    if p.second is not None:
        h = others.matrix(p.m, p.first.n, p.dtype)
    products = p.first, p.second
    inputs = [
        columns.operand(p.formats.x[1], one.k, p.m) if one is not None and one.need_dw else None
        for one in products
    ]
    weights = [
        others.operand(p.formats.w[1], one.k, one.n)
        if one is not None and one.kept and not one.given
        else None
        for one in products
    ]
    return _Kept(columns.size, others.size, mean, rstd, h, tuple(inputs), tuple(weights))


def _given(name: str, spec: str, rows: int, k: int) -> At:
    """The operand of a weight that was made before; values have their tensor scale beside."""
    beside = Place(f"{name}_beside")
    return At(Place(name), beside, spec, rows, k, beside)


def _weight(name: str, product: Product) -> Source:
    return Source(Place(name), product.n, product.k, product.dtype, f"{name}_beside")


def _act(p: LayerProblem) -> dict[str, Any]:
    act = p.act
    assert act is not None
    return {
        "act": ACT_IDS[act.base], "gated": act.gated, "limit": act.limit, "alpha": act.alpha,
        "offset": act.offset,
    }  # fmt: skip


def _matrix(name: str, source: Source) -> dict[str, Any]:
    at, rows, cols, dtype, stride = source
    return {
        f"{name}_data": at, f"{name}_rows": rows, f"{name}_cols": cols,
        f"{name}_row_stride": Place(stride) if stride else cols,
        f"{name}_dtype": FLOAT_DTYPES[dtype],
    }  # fmt: skip


class _Builder:
    """The sequences of a problem."""

    def __init__(self, p: LayerProblem) -> None:
        for spec in (*p.formats.x, *p.formats.w, *p.formats.g):
            fmt, layout = spec_of(spec)
            if not (layout.name.startswith("sm90") or fmt.tensor_scaled):
                raise Unfit  # a product packs it first
        self.p, self.device, self.kept = p, p.device, _kept(p)
        self.how = p.formats.precision, p.formats.spread
        # Of the output gradient, where no quantizer adds up what it reads.
        self.sums_apart = spec_of(p.formats.g[0]).format.tensor_scaled
        self.kernels: list[str] = []

    # ------------------------------------------------------------------------------------- forward
    def forward(self) -> tuple[Any, int]:
        """The sequence, and bytes of its workspace."""
        p, temp = self.p, Room("work")
        steps, formats, second = Steps(self.device, FORWARD, temp), p.formats, p.second
        rows = [
            _given(name, formats.w[0], one.n, one.k) if one.given
            else temp.operand(formats.w[0], one.n, one.k)
            for name, one in (("w1", p.first), ("w2", second)) if one is not None
        ]  # fmt: skip
        reads = [
            [] if one.given else steps.reads(
                _weight(name, one), formats.rule, (rows[i], self.kept.weights[i])
            )
            for i, (name, one) in enumerate((("w1", p.first), ("w2", second))) if one is not None
        ]  # fmt: skip
        x = Source(Place("x"), p.m, p.first.k, p.x_dtype, "x_stride")
        z = temp.operand(formats.x[0], p.m, p.first.k)
        to = z, self.kept.inputs[0]
        if p.norm is None:
            steps.together(reads[0], steps.reads(x, formats.rule, to))
            if second is not None:
                steps.together(reads[1], [])
        else:
            steps.together(reads[0], reads[1] if second is not None else [])
            self._normalize(steps, x, to)
        bias: dict[str, Any] = {}
        if p.first.bias is not None:
            bias = {"bias": Place("b1"), "bias_dtype": FLOAT_DTYPES[p.first.bias]}
        if second is None:
            self.kernels.append(steps.gemm(z, rows[0], Place("y"), p.dtype, self.how, **bias))
            return steps.made(), temp.size
        a = self._activated(steps, z, rows[0], bias)
        bias = {}
        if second.bias is not None:
            bias = {"bias": Place("b2"), "bias_dtype": FLOAT_DTYPES[second.bias]}
        self.kernels.append(steps.gemm(a, rows[1], Place("y"), p.dtype, self.how, **bias))
        return steps.made(), temp.size

    def _normalize(self, steps: Steps, x: Source, to: tuple[At, At | None]) -> None:
        """z of x to operands, by way of memory where the kernel does not end in the quantizer."""
        p, temp, norm, rule = self.p, steps.temp, self.p.norm, self.p.formats.rule
        assert norm is not None
        if p.x_dtype not in (p.dtype, _F32):
            raise Unfit
        row, col = ("" if one is None else one.spec for one in to)
        mean, rstd = self.kept.mean, self.kept.rstd
        if rstd is None:
            mean = None if norm.kind == "RMSNorm" else temp.matrix(p.m, 1, _F32)
            rstd = temp.matrix(p.m, 1, _F32)
        fields = _matrix("x", x) | {
            "rms": norm.kind == "RMSNorm", "eps": norm.eps, "inverse": inverse(p.first.k),
            "weight": Place("norm_weight"), "weight_dtype": FLOAT_DTYPES[p.norm_dtype],
            "rstd": rstd, "z_dtype": FLOAT_DTYPES[p.dtype],
        }  # fmt: skip
        fields |= steps.counters(1 + (p.m + 127) // 128)
        if mean is not None:
            fields["mean"] = mean
        if p.norm_bias:
            fields["bias"] = Place("norm_bias")
        if makes(row, col, rule, p.dtype, norm=True):
            if p.return_z:
                fields["z"] = Place("z")
            steps.add("normalize", ("NormArgs", fields | target(row, col, rule, to)))
            return
        where = Place("z") if p.return_z else temp.matrix(p.m, p.first.k, p.dtype)
        z = Source(where, p.m, p.first.k, p.dtype)
        steps.add("normalize", ("NormArgs", fields | {"z": z.at}))
        steps.quantize(z, rule, to)

    def _activated(self, steps: Steps, z: At, w: At, bias: dict[str, Any]) -> At:
        """The operand of a = act(h)."""
        p, temp, second, act = self.p, steps.temp, self.p.second, self.p.act
        assert second is not None and act is not None and self.kept.h is not None
        h, rule = Source(self.kept.h, p.m, p.first.n, p.dtype), p.formats.rule
        to = temp.operand(p.formats.x[0], p.m, second.k), self.kept.inputs[1]
        row, col = p.formats.x[0], "" if to[1] is None else to[1].spec
        if act.gelu_form is not None:
            a = Source(temp.matrix(p.m, second.k, p.dtype), p.m, second.k, p.dtype)
            self.kernels.append(steps.gemm(
                z, w, a.at, p.dtype, self.how, gelu=GELUS[act.gelu_form], aux=h.at,
                aux_dtype=FLOAT_DTYPES[p.dtype], **bias,
            ))  # fmt: skip
            steps.quantize(a, rule, to)
            return to[0]
        self.kernels.append(steps.gemm(z, w, h.at, p.dtype, self.how, **bias))
        fields = _matrix("h", h) | _act(p) | {"out_dtype": FLOAT_DTYPES[p.dtype]}
        if makes(row, col, rule, p.dtype):
            steps.add("activate", ("ActArgs", fields | target(row, col, rule, to)))
            return to[0]
        a = Source(temp.matrix(p.m, second.k, p.dtype), p.m, second.k, p.dtype)
        steps.add("activate", ("ActArgs", fields | {"out": a.at}))
        steps.quantize(a, rule, to)
        return to[0]

    # ------------------------------------------------------------------------------------ backward
    def backward(
        self, g_dtype: torch.dtype, into: tuple[torch.dtype | None, ...], apart: bool
    ) -> tuple[Any, int]:
        """The same. into: the dtypes that weight gradients are written in, None for columns that
        stay. apart: without the normalization."""
        p, temp = self.p, Room("work")
        steps, formats = Steps(self.device, BACKWARD, temp), p.formats
        first, second = p.first, p.second
        spare = temp
        last, number = (first, 1) if second is None else (second, 2)
        source = Source(Place("g"), p.m, last.n, g_dtype, "g_stride")
        through = p.need_dx if second is None else True
        to = self._gradient(temp, last, through, into[-1], number)
        sums = None if self.sums_apart else self._sums(temp, f"db{number}", last)
        g = steps.reads(source, formats.g_rule, to, sums, self._seed("seed1"))
        w = self._columns(steps, number, last) if through else ([], None)
        steps.together(w[0], g)
        if second is not None:
            assert to[0] is not None and w[1] is not None
            to_h = self._gradient(temp, first, p.need_dx, into[0], 1)
            back = self._columns(steps, 1, first) if p.need_dx else ([], None)
            spare = self._through(steps, to[0], w[1], to_h, back[0])
            self._wgrad(steps, to[1], 1, into[1], None)
            to, w = to_h, back
        if p.need_dx:
            assert to[0] is not None and w[1] is not None
            self._dgrad(steps, to[0], w[1], apart, spare)
            if self.sums_apart:  # dgrad has read what it lies over
                spare = Source(to[0].codes, to[0].rows, to[0].k, torch.bfloat16).over()
        self._wgrad(steps, to[1], 0, into[0], spare)
        return steps.made(), temp.size

    def _gradient(
        self, temp: Room, product: Product, row: bool, into: torch.dtype | None, number: int
    ) -> tuple[At | None, At | None]:
        """Where an output gradient [m, n] goes: its columns where they stay if they do."""
        specs, m = self.p.formats.g, self.p.m
        col = None
        if product.need_dw:
            room = temp if into is not None else Room(f"dw{number}")
            col = room.operand(specs[1], product.n, m)
        return temp.operand(specs[0], m, product.n) if row else None, col

    def _seed(self, name: str) -> Place | None:
        return Place(name) if is_stochastic(self.p.formats.g_rule) else None

    def _sums(self, temp: Room, name: str, product: Product) -> Sums | None:
        if not product.need_db:
            return None
        assert product.bias is not None
        return Sums(
            Place(name), product.bias, temp.matrix((self.p.m + 127) // 128, product.n, _F32)
        )

    def _columns(self, steps: Steps, number: int, product: Product) -> tuple[list[Any], At]:
        """The reads that make the columns of a weight, and where these are."""
        name, formats = f"w{number}", self.p.formats
        spec = formats.w[1]
        if product.given:
            return [], _given(name, spec, product.k, product.n)
        kept = self.kept.weights[number - 1]
        if kept is not None:
            return [], kept
        made = steps.temp.operand(spec, product.k, product.n)
        return steps.reads(_weight(name, product), formats.w_columns_rule, (None, made)), made

    def _through(
        self, steps: Steps, g: At, w: At, to: tuple[At | None, At | None], others: list[Any]
    ) -> Room:
        """The gradient of h, to operands, with its sums. others: reads that go beside these.
        Returns room that is free then."""
        p, temp, act, rule = self.p, steps.temp, self.p.act, self.p.formats.g_rule
        assert act is not None and p.second is not None and self.kept.h is not None
        row, col = ("" if one is None else one.spec for one in to)
        if not (row or col):
            raise Unfit
        h = Source(self.kept.h, p.m, p.first.n, p.dtype)
        dtype, seed = FLOAT_DTYPES[p.dtype], self._seed("seed2")
        if act.gelu_form is not None:
            dh = Source(temp.matrix(p.m, p.first.n, p.dtype), p.m, p.first.n, p.dtype)
            sums: dict[str, Any] = {}
            if p.first.need_db:
                sums = {"bias_grad_kind": BIAS_GRADS["result"], "bias_grad": Place("db1")}
            steps.gemm(
                g, w, dh.at, p.dtype, self.how, gelu=GELUS[act.gelu_form], gelu_in=h.at,
                gelu_in_dtype=dtype, **sums,
            )  # fmt: skip
            steps.together(others, steps.reads(dh, rule, to, None, seed))
            return dh.over()
        da = Source(temp.matrix(p.m, p.second.k, p.dtype), p.m, p.second.k, p.dtype)
        steps.gemm(g, w, da.at, p.dtype, self.how)
        of_columns = self._sums(temp, "db1", p.first)
        fields = _matrix("h", h) | _matrix("grad", da) | _act(p) | {"out_dtype": dtype}
        if makes(row, col, rule, p.dtype):
            steps.together(others, [])
            record = fields | target(row, col, rule, to, of_columns)
            steps.add("activate", ("ActArgs", record))
            return da.over()
        dh = Source(temp.matrix(p.m, p.first.n, p.dtype), p.m, p.first.n, p.dtype)
        steps.add("activate", ("ActArgs", fields | {"out": dh.at}))
        steps.together(others, steps.reads(dh, rule, to, of_columns, seed))
        return da.over()

    def _dgrad(self, steps: Steps, g: At, w: At, apart: bool, spare: Room) -> None:
        """dx, through the normalization if there is one."""
        p, temp = self.p, steps.temp
        if p.norm is None:
            dtype = p.x_dtype
            if p.second is not None and p.x_dtype != p.dtype:
                raise Unfit  # which is rounded twice
            steps.gemm(g, w, Place("dx"), dtype, self.how)
            return
        if apart:
            steps.gemm(g, w, Place("dx"), p.dtype, self.how)
            return
        m, k = p.m, p.first.k
        room = spare if spare.has(m * k * p.dtype.itemsize) else temp
        dz = Source(room.matrix(m, k, p.dtype), m, k, p.dtype)
        steps.gemm(g, w, dz.at, p.dtype, self.how)
        assert self.kept.rstd is not None
        x = Source(Place("x"), m, k, p.x_dtype, "x_stride")
        sums = steps.native.norm_partial_sums(m) * 2 * k
        fields = _matrix("dz", dz) | _matrix("x", x) | {
            "rms": p.norm.kind == "RMSNorm", "inverse": inverse(k), "dx": Place("dx"),
            "dx_dtype": FLOAT_DTYPES[p.x_dtype], "weight": Place("norm_weight"),
            "weight_dtype": FLOAT_DTYPES[p.norm_dtype],
            "rstd": self.kept.rstd, "dweight": Place("dweight"), "dbias": Place("dbias"),
            "partial": temp.matrix(sums, 1, _F32), "row_sums": temp.matrix(2 * m, 1, _F32),
        }  # fmt: skip
        fields |= steps.counters(1 + (m + 127) // 128 + (k + 127) // 128)
        if self.kept.mean is not None:
            fields["mean"] = self.kept.mean
        steps.add("normalize_backward", ("NormGradArgs", fields))

    def _wgrad(
        self, steps: Steps, g: At | None, i: int, into: torch.dtype | None, spare: Room | None
    ) -> None:
        x = self.kept.inputs[i]
        if g is None or x is None or into is None:
            return
        name = f"dw{i + 1}"
        steps.gemm(g, x, Place(name), into, self.how, spare, accumulate=Place(f"{name}_add"))


# A backward pass: its sequence, bytes of its workspace, what it makes (as Plan.outputs), and where
# columns lie that are left.
_Back = tuple[Any, int, list[tuple[int, Any, Any]], list[At | None]]


class Plan(LayerPlan):
    def __init__(self, p: LayerProblem) -> None:
        self.problem, self.device, self.builder = p, p.device, _Builder(p)
        self.sequence, self.work = self.builder.forward()
        self.kernels = tuple(self.builder.kernels)
        self.room, self.w = self.builder.kept, p.formats.w
        stochastic = is_stochastic(p.formats.g_rule)
        self.seeds = 0 if not stochastic else 1 if p.second is None else 2
        self.products = (p.first,) if p.second is None else (p.first, p.second)
        self.n = self.products[-1].n
        self._backward: dict[tuple[Any, ...], _Back | None] = {}
        self.ran = tuple([
            (i, gemm, kernel)
            for i, (one, kernel) in enumerate(zip(self.products, self.kernels, strict=True))
            for gemm, runs in ((1, i or p.need_dx), (2, one.need_dw)) if runs
        ])  # fmt: skip
        k, summed = p.first.k, p.first.bias
        if p.act is not None and p.act.gelu_form is not None:
            summed = _F32  # by a GEMM
        self.casts = summed is not p.first.bias
        # What backward makes: gradients 0 and 5 of weight and bias of the normalization, 1 and 2 of
        # weights, 3 and 4 of biases, with shape and dtype.
        sums = self.builder.sums_apart
        self.outputs: list[tuple[int, Any, Any]] = []
        if p.need_dx and p.norm is not None:
            self.outputs += [(i, (k,), p.norm_dtype) for i in (0, 5) if i == 0 or p.norm_bias]
        for i, one in enumerate(self.products):
            if one.need_dw:
                self.outputs.append((1 + i, (one.n, one.k), one.dtype))
            if one.need_db and not sums:
                self.outputs.append((3 + i, (one.n,), summed if i == 0 else one.bias))
        # That of the usual call, so that what native code does not take is known before forward.
        if self._back(p.dtype, p.return_z, None, None) is None:
            raise Unfit

    def _back(self, g_dtype: torch.dtype, apart: bool, *into: Any) -> _Back | None:
        """How backward runs where weight gradients go so: None to autograd, a dtype to a tensor
        that is there, LATER as columns of the output gradient. apart: without the normalization."""
        wanted: list[torch.dtype | None] = [one.dtype for one in self.products]
        outputs = {i: (i, size, dtype) for i, size, dtype in self.outputs if i % 5 or not apart}
        views: list[At | None] = [None, None]
        for i, (one, to) in enumerate(zip(self.products, into, strict=False)):
            if to is LATER:
                room = Room("dw")
                views[i] = room.operand(self.problem.formats.g[1], one.n, self.problem.m)
                wanted[i], outputs[1 + i] = None, (1 + i, (room.size,), _U8)
            elif to is not None:
                wanted[i] = to
                del outputs[1 + i]
        made: _Back | None = None
        if g_dtype in FLOAT_DTYPES:
            with suppress(Unfit):
                sequence, nbytes = self.builder.backward(g_dtype, tuple(wanted), apart)
                made = sequence, nbytes, list(outputs.values()), views
        key = g_dtype, apart, into
        self._backward[key] = made
        return made

    def forward(
        self, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
        weights: Sequence[tuple[Tensor | None, Tensor | None]], b1: Tensor | None,
        b2: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        p, room, make, shape = self.problem, self.room, x.new_empty, x.shape
        y = make(*shape[:-1], self.n, dtype=p.dtype)
        z = make(*shape, dtype=p.dtype) if p.return_z else None
        columns = make(room.columns, dtype=_U8)
        others = make(room.others, dtype=_U8) if room.others else None
        work = make(self.work, dtype=_U8)
        first, second = weights
        status = self.sequence.run(
            binding.stream(self.device.index), work, columns, others, y, z,
            *_rows(x, p.first.k), norm_weight, norm_bias, *_weight_at(*first),
            *(_NO_WEIGHT if p.second is None else _weight_at(*second)),
            None if b1 is None else b1.contiguous(), None if b2 is None else b2.contiguous(),
        )  # fmt: skip
        if status:
            _did_not_start(status)
        return y, z, columns, others

    def backward(
        self, g: Tensor, x: Tensor | None, shape: torch.Size, norm_weight: Tensor | None,
        kept: Buffers, weights: Sequence[Tensor | None], into: Sequence[Into | None], seeds: Any,
        apart: bool,
    ) -> Gradients | None:  # fmt: skip
        p, make, adds = self.problem, g.new_empty, [False, False]
        to: list[Any] = [None] * 6
        how: list[Any] = [None, None]
        for i, place in enumerate(into):
            if place is not None:
                to[1 + i], adds[i] = out, _ = place
                how[i] = LATER if out is None else out.dtype
                if out is not None and self.builder.sums_apart and out.data_ptr() % _ALIGNMENT:
                    return None
        key = g.dtype, apart, (*how,)
        back = self._backward[key] if key in self._backward else self._back(g.dtype, apart, *how)
        if back is None:
            return None
        sequence, nbytes, outputs, views = back
        g, g_stride = _rows(g, self.n)
        for i, size, dtype in outputs:
            to[i] = make(*size, dtype=dtype)
        dweight, dw1, dw2, db1, db2, dbias = to
        work, dx = make(nbytes, dtype=_U8), None
        if p.need_dx:
            dx_shape, dtype = ((p.m, p.first.k), p.dtype) if apart else (shape, p.x_dtype)
            dx = make(*dx_shape, dtype=dtype)
        w1, beside1, w2, beside2 = weights
        status = sequence.run(
            binding.stream(self.device.index), work, *kept, g, g_stride,
            *((None, 0) if x is None else _rows(x, p.first.k)), norm_weight,
            seeds[0] if seeds else None, seeds[-1] if seeds else None,
            *_weight_at(w1, beside1),
            *(_NO_WEIGHT if p.second is None else _weight_at(w2, beside2)),
            dx, dweight, dbias, dw1, adds[0], dw2, adds[1], db1, db1 if p.second is None else db2,
        )  # fmt: skip
        if status:
            _did_not_start(status)
        for i, place in enumerate(into):
            if place is not None and place.out is not None:
                note_written(place.out)
            elif place is not None:
                to[1 + i] = _view(to[1 + i], views[i])  # type: ignore[arg-type]
        if self.casts and db1 is not None:
            db1 = db1.to(p.first.bias)
        if self.builder.sums_apart and self.products[-1].need_db:
            db = g.view(-1, self.n).sum(0, dtype=_F32).to(self.products[-1].bias)
            db1, db2 = (db, None) if p.second is None else (None, db)
        return dx, (dweight, dbias), (to[1], to[2]), (db1, db2)

    def saved(self, columns: Tensor, others: Tensor | None) -> Saved:
        p, room = self.problem, self.room

        def vector(at: "Place | None") -> "Tensor | None":
            return None if at is None else _values(columns, at, (p.m,), _F32)

        def operands(side: "tuple[At | None, ...]", buffer: Any) -> "tuple[Operand | None, ...]":
            return tuple(None if at is None else _view(buffer, at) for at in side)

        h = None
        if room.h is not None and others is not None:
            h = _values(others, room.h, (p.m, p.first.n), p.dtype)
        inputs, weights = operands(room.inputs, columns), operands(room.weights, others)
        return Saved(vector(room.mean), vector(room.rstd), h, inputs, weights)

    def given_columns(self, i: int, part: Part) -> Operand:
        one, (codes, scales) = self.products[i], part
        assert scales is not None
        if self.builder.sums_apart:
            return Operand(codes, codes.new_empty(0), self.w[1], one.k, one.n, None, scales)
        return Operand(codes, scales, self.w[1], one.k, one.n)

    def as_saved(self, kept: Sequence[Tensor | None]) -> list[Any]:
        made, (columns, others, _, first, _, second) = list(kept), kept
        if _lies(columns) and (others is None or _lies(others)) and first is second is None:
            return made
        for i, buffer in enumerate(made[:2]):
            if buffer is not None and not _lies(buffer):
                made[i] = buffer.clone(memory_format=torch.contiguous_format)
        for i, scales in enumerate(made[3::2]):
            if scales is not None:
                codes = made[2 + 2 * i]
                assert codes is not None
                operand = self.given_columns(i, (codes, scales)).checked("the weight")
                whole = operand.tensor_scale
                made[2 + 2 * i : 4 + 2 * i] = (
                    operand.codes, operand.scales if whole is None else whole
                )  # fmt: skip
        return made


def _lies(buffer: Any) -> bool:
    """Whether kernels read it."""
    return buffer.is_contiguous() and buffer.data_ptr() % _ALIGNMENT == 0


def _rows(x: Tensor, k: int) -> tuple[Tensor, int]:
    """A matrix of the rows of x [..., k], and how far apart they are."""
    if x.is_contiguous():
        return x, k
    x_MK = x if x.dim() == 2 else x.reshape(-1, k)
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    return x_MK, x_MK.stride(0)


def _weight_at(weight: Tensor | None, scales: Tensor | None) -> tuple[Any, Any]:
    """Two arguments of a weight: values and how far apart their rows are, or codes and scales."""
    if weight is None or scales is not None:
        return weight, scales
    if weight.is_contiguous():
        return weight, weight.shape[1]
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    return weight, weight.stride(0)


def _values(kept: Tensor, at: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return kept[at.offset : at.offset + nbytes].view(dtype).view(shape)


def _view(buffer: Tensor, at: At) -> Operand:
    """An operand where it lies in a buffer."""
    fmt, layout = spec_of(at.spec)
    (lies, shape), ld = layout.shapes(fmt, at.rows, at.k), (at.k + 15) & -16
    scales = _values(buffer, at.scales, shape, layout.scales_dtype(fmt))
    if at.whole is not None:
        codes = _values(buffer, at.codes, lies, _U8)
        whole = _values(buffer, at.whole, fmt.tensor_scale_shape(at.rows), _F32)
        return Operand(codes, scales, at.spec, at.rows, at.k, None, whole)
    codes = _values(buffer, at.codes, (at.rows, ld), _U8)
    return Operand(codes[:, : at.k], scales, at.spec, at.rows, at.k)


def _did_not_start(status: int) -> None:
    binding.supported(status)
    raise RuntimeError("te_mx internal error: a Hopper kernel did not start")


class Layers(LayerKernel):
    """In sequences of the kernels that would run the steps."""

    name = "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(lhs="", rhs="", rule="rceil"))
        return (
            reason or not_adaptive(problem) or ("keeps K in one piece" if problem.split_k else None)
        )

    def make_plan(self, problem: LayerProblem) -> LayerPlan | None:
        try:
            return Plan(problem)
        except Unfit:
            return None


register(Layers())
