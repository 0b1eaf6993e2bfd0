"""NVFP4 of te_mx._sm90 in plain torch, on addresses of CPU memory, as fake_sm90: the quantizer, the
values of plain codes, and products of frozen MXFP4 weights."""

from __future__ import annotations

import torch
from fake_sm90_decode import NAMES, bounds_of_rows, rows_of, write_products
from torch import Tensor

from te_mx import formats
from te_mx.backends.sm90.layouts import SM90_NVFP4, SM90_VALUES
from te_mx.formats.hadamard import Hadamard
from te_mx.formats.stochastic import random_bits
from te_mx.layouts.operand import Operand, Stack, stacked
from te_mx.layouts.plain import COLS, GROUPED_COLS, ROWS


class _Record:
    """The fields of a native record."""

    def __init__(self, **fields):
        self.row_codes = self.row_scales = self.col_codes = self.col_scales = self.seed = 0
        self.scale = self.first = 0
        self.tries, self.narrow = 0, False
        self.row_k_first = self.col_k_first = False
        self.scale_rows = self.square = self.row_transforms = self.col_transforms = False
        self.groups = None
        self.__dict__.update(fields)

    def copy(self, **fields):
        return type(self)(**self.__dict__ | fields)


class Nvfp4QuantizeArgs(_Record):
    pass


class Nvfp4Args(_Record):
    gate = ldgate = bias = workspace_bytes = 0
    quantizes, activates, x_act, mx = False, False, 3, False


class Nvfp4FinishArgs(_Record):
    of_lhs = of_rhs = bias = 0
    lhs_rows = rhs_rows = accumulate = False


class Nvfp4MultiplyArgs(_Record):
    of_lhs = of_rhs = bias = 0
    lhs_k_first = rhs_k_first = accumulate = False


def _format(args, side: str) -> formats.Format:
    name = "nvfp4_16x16" if args.square else "nvfp4"
    name = "nvfp4_rows" if getattr(args, f"{side}_scale_rows", False) else name
    if getattr(args, f"{side}_transforms"):
        size = 32 if getattr(args, f"{side}_by_32") else 16
        name += f"+{Hadamard(size, getattr(args, f'{side}_signs'))}"
    return formats.get(name)


def _quantized(args, x: Tensor, random: Tensor | None, side: str) -> Operand:
    """One direction of one matrix, in the layout that its record asks for."""
    rule = "te" + ("", "_4over6", "_4over6_mse")[args.tries]
    rule += "_448" if args.tries and not args.narrow else ""
    rule += "" if random is None else "+sr"
    if side == "col":
        x, random = x.t().contiguous(), None if random is None else random.t().contiguous()
    fmt, layout = _format(args, side), ROWS
    if not getattr(args, f"{side}_scales"):
        layout = SM90_VALUES[side == "col"]
    elif getattr(args, f"{side}_k_first"):
        layout = COLS
    codes, scales, whole = fmt.quantize(x, rule, random)
    parts = layout.pack(fmt, codes, scales, x.shape[1])
    return Operand(*parts, f"{fmt.name}@{layout.name}", *x.shape, None, whole)


def _input(args) -> tuple[Tensor, Tensor | None]:
    """x, and random words of its elements."""
    from fake_sm90 import _DTYPES, at

    (rows, cols), stride = (args.x_rows, args.x_cols), args.x_row_stride
    x = at(args.x_data, ((rows - 1) * stride + cols,), _DTYPES[args.x_dtype])
    x = x.as_strided((rows, cols), (stride, 1))
    if not args.seed:
        return x, None
    return x, random_bits(at(args.seed, (1,), torch.int64), *x.shape, args.first)


def _write(args, side: str, made: Operand | Stack) -> None:
    from fake_sm90 import at

    at(getattr(args, f"{side}_codes"), tuple(made.codes.shape)).copy_(made.codes)
    if scales := getattr(args, f"{side}_scales"):
        at(scales, tuple(made.scales.shape)).copy_(made.scales)
    whole = made.tensor_scale
    at(getattr(args, f"{side}_scale"), tuple(whole.shape), torch.float32).copy_(whole)


def nvfp4_quantize(args) -> int:
    (x, random), sides = _input(args), ("row", "col")
    for side in sides:
        if not getattr(args, f"{side}_codes"):
            continue
        if args.groups is None:
            _write(args, side, _quantized(args, x, random, side))
            continue
        from fake_sm90_grouped import bounds_of

        fmt, sizes = _format(args, side), x.shape if side == "row" else x.shape[::-1]
        layout = GROUPED_COLS if side == "col" else ROWS
        if not getattr(args, f"{side}_scales"):
            layout = SM90_VALUES[side == "col"]
        parts = layout.grouped_empty(fmt, *sizes, args.groups.count, x.device)
        shape = fmt.tensor_scale_shape(sizes[0]) or (args.groups.count,)
        spec, whole = f"{fmt.name}@{layout.name}", torch.ones(shape)
        made = Operand(*(part.zero_() for part in parts), spec, *sizes, None, whole)
        for i, (start, end) in enumerate(zip(*bounds_of(args.groups), strict=True)):
            if start < end:
                bits = None if random is None else random[start:end]
                one = _quantized(args, x[start:end], bits, side)
                layout.put_group(made, one, start, end, i)
                whole[slice(start, end) if whole.dim() == 2 else i] = one.tensor_scale
        _write(args, side, made)
    return 0


def nvfp4_quantize_stacked(args, addresses) -> int:
    assert not args.seed
    for side in ("row", "col"):
        if getattr(args, f"{side}_codes"):
            inputs = (_input(args.copy(x_data=at))[0] for at in addresses)
            _write(args, side, stacked([_quantized(args, x, None, side) for x in inputs]))
    return 0


def nvfp4_from_rows(args) -> int:
    from fake_sm90 import _DTYPES, at

    fmt = formats.get("nvfp4_16x16" if args.square else "nvfp4")
    layout = COLS if args.k_first else ROWS
    codes, scales = layout.shapes(fmt, args.n, args.k)
    made = layout.values(fmt, at(args.w, codes), at(args.w_scales, scales), args.k, torch.float32)
    if args.scale:
        made *= at(args.scale, (args.n, 1) if args.scale_rows else (), torch.float32)
    made = made.t() if args.k_first else made
    at(args.out, tuple(made.shape), _DTYPES[args.out_dtype]).copy_(made)
    return 0


def nvfp4_multiply_workspace() -> int:
    return 16


def nvfp4_multiplies(args) -> int:
    """cublasLt adds a bias in bf16 alone."""
    from fake_sm90 import _DTYPES

    types = {_DTYPES[args.out_dtype], _DTYPES[args.bias_dtype if args.bias else args.out_dtype]}
    wrong = torch.float16 in types or (args.bias and types != {torch.bfloat16})
    return 2 if wrong else 0


def nvfp4_multiply(args) -> int:
    from fake_sm90 import at

    def side(name: str, rows: int) -> Tensor:
        k_first = getattr(args, f"{name}_k_first")
        made = at(
            getattr(args, name), (args.k, rows) if k_first else (rows, args.k), torch.bfloat16
        )
        return (made.t() if k_first else made).float()

    args.lhs_rows = args.rhs_rows = False
    return _finish(args, side("lhs", args.m) @ side("rhs", args.n).t())


def nvfp4_finish(args) -> int:
    from fake_sm90 import at

    return _finish(args, at(args.sums, (args.m, args.n), torch.float32))


def _finish(args, made: Tensor) -> int:
    from fake_sm90 import _DTYPES, at

    def scale(side: str, shape: tuple[int, ...]) -> Tensor | float:
        place = getattr(args, f"of_{side}")
        shape = shape if getattr(args, f"{side}_rows") else ()
        return at(place, shape, torch.float32) if place else 1.0

    made = made * (scale("lhs", (args.m, 1)) * scale("rhs", (args.n,)))
    if args.bias:
        made = made + at(args.bias, (args.n,), _DTYPES[args.bias_dtype]).float()
    out = at(args.out, (args.m, args.n), _DTYPES[args.out_dtype])
    out.copy_(made + out.float() if args.accumulate else made)
    return 0


def nvfp4_workspace(m, k) -> int:
    return 2 * m * (k + -k % 8)


def nvfp4_product(a) -> int:
    from fake_sm90 import _RULES

    x = rows_of(a)
    if x is None:
        return 2
    if a.quantizes:
        assert a.workspace_bytes == nvfp4_workspace(a.m, a.k)
        fmt = formats.get(NAMES[a.x_element])
        x = fmt.dequantize(*fmt.quantize(x.contiguous(), _RULES[a.rule]), a.k, torch.float64)
    else:
        assert a.ldx % 8 == 0 and a.x % 16 == 0 and x.dtype == torch.bfloat16
    bounds = bounds_of_rows(a)
    write_products(a, bounds, x.double(), lambda i: _values(a, len(bounds), i))
    return 0


def nvfp4_to_values(a) -> int:
    from fake_sm90 import _DTYPES, at

    at(a.out, (a.n, a.k), _DTYPES[a.out_dtype]).copy_(_values(a, 1, 0))
    return 0


def _values(a, count, i) -> torch.Tensor:
    """What weight i of so many stands for."""
    from fake_sm90 import at

    fmt = formats.get("mxfp4" if a.mx else "nvfp4")
    codes, scales = (
        at(place, (count, *shape))[i]
        for place, shape in zip((a.w, a.w_scales), SM90_NVFP4.shapes(fmt, a.n, a.k), strict=True)
    )
    values = SM90_NVFP4.values(fmt, codes, scales, a.k, torch.float64)[: a.n]
    if a.mx or not a.scale:
        return values
    return values * at(a.scale, (a.n, 1) if a.scale_rows else (1,), torch.float32)
