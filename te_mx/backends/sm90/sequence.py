"""Sequences of native calls of Hopper, made once for layers of one size: the records of their
steps, and where in them the addresses of a run go."""

import math
from typing import Any, NamedTuple

import torch

from te_mx.backends.base import FLOAT_DTYPES, LAYOUTS, format_fields
from te_mx.backends.native import fields_to, words_of
from te_mx.backends.sm90 import binding, blockwise, nvfp4
from te_mx.backends.sm90.gemm import ADAPTIVE
from te_mx.backends.sm90.layouts import SM90_VALUES
from te_mx.backends.sm90.quantize import sums_too
from te_mx.dispatch.registry import pick
from te_mx.layouts import spec_of

QUANTIZERS = "sm90", "sm90_random", blockwise.NAME, nvfp4.PRODUCT
AT_ONCE = "sm90", blockwise.NAME  # of which two matrices go in one call
_APART = 256  # bytes between things in one buffer


class Unfit(Exception):
    """A step does not run in a sequence, or not by the kernel that would run it by itself."""


class Place(NamedTuple):
    """An address of a run: that of an argument, and bytes behind it."""

    argument: str
    offset: int = 0


class At(NamedTuple):
    """An operand [rows, k] in a buffer, or two tensors. whole: its tensor scale."""

    codes: Place
    scales: Place
    spec: str
    rows: int
    k: int
    whole: Place | None = None


class Room:
    """Places in one buffer, one behind the other, or in a part of it that is not read again."""

    def __init__(self, argument: str, start: int = 0, end: int | None = None) -> None:
        self.argument, self.size, self._end = argument, start, end

    def has(self, nbytes: int) -> bool:
        """Whether there is place for so many bytes."""
        return self._end is None or self.size + nbytes <= self._end

    def take(self, nbytes: int) -> Place:
        at = self.size
        self.size = at + -(-nbytes // _APART) * _APART
        return Place(self.argument, at)

    def matrix(self, rows: int, cols: int, dtype: torch.dtype) -> Place:
        return self.take(rows * cols * dtype.itemsize)

    def operand(self, spec: str, rows: int, k: int) -> At:
        fmt, layout = spec_of(spec)
        (shape, scales), dtype = layout.shapes(fmt, rows, k), layout.scales_dtype(fmt)
        codes = self.take(math.prod(shape) if fmt.tensor_scaled else rows * ((k + 15) & -16))
        at = At(codes, self.take(math.prod(scales) * dtype.itemsize), spec, rows, k)
        if not fmt.tensor_scaled:
            return at
        return at._replace(whole=self.take(4 * math.prod(fmt.tensor_scale_shape(rows))))


class Source(NamedTuple):
    """A matrix that is read: its address and, unless it is compact, the distance of its rows."""

    at: Place
    rows: int
    cols: int
    dtype: torch.dtype
    stride: str = ""

    @property
    def nbytes(self) -> int:
        """Of a compact one."""
        return self.rows * self.cols * self.dtype.itemsize

    def over(self) -> Room:
        """Where it lies, for what is made when it has been read."""
        argument, offset = self.at
        return Room(argument, offset, offset + self.nbytes)


class Sums(NamedTuple):
    """Where the sums of columns go, of a dtype, with room for partial ones."""

    at: Place
    dtype: torch.dtype
    partial: Place


Fields = dict[str, Any]
CALLS = {"QuantizeArgs": "quantize", "Nvfp4QuantizeArgs": "nvfp4_quantize"}


class Steps:
    """A sequence as it is put together: `arguments` names those of a run, the stream first."""

    def __init__(self, device: torch.device, arguments: tuple[str, ...], temp: Room) -> None:
        self.device, self.temp = device, temp
        self.index = -1 if device.index is None else device.index
        self._numbers = {name: i for i, name in enumerate(arguments)}
        self._steps: list[tuple[str, tuple[Any, ...], list[tuple[int, str, int, int]]]] = []
        self.native = binding.native()
        self._scratch: Place | None = None  # of products of NVFP4, one after the other

    def made(self) -> Any:
        """The sequence."""
        return self.native.sequence(self._steps, self.index, len(self._numbers))

    def add(self, call: str, *records: tuple[str, Fields]) -> None:
        """A call of records, each a type and its fields; places among these differ by run."""
        made, arguments = [], []
        for i, (kind, fields) in enumerate(records):
            fixed = {name: v for name, v in fields.items() if not isinstance(v, Place)}
            made.append(getattr(self.native, kind)(**fixed))
            places = {"stream": Place("stream")} | {
                name: v for name, v in fields.items() if isinstance(v, Place)
            }
            arguments += [
                (i, name, self._numbers[at.argument], at.offset) for name, at in places.items()
            ]
        self._steps.append((call, tuple(made), arguments))

    def counters(self, words: int) -> Fields:
        """Scratch words that a kernel counts in, as fields of its record: zeros that the quantizer
        before it leaves in passing, which saves a launch, or any words, of which it makes zeros."""
        at = self.temp.take(4 * words)
        for call, records, arguments in reversed(self._steps):
            if call in ("quantize", "quantize_two"):
                records[-1].workspace_bytes = 4 * words
                number = self._numbers[at.argument]
                arguments.append((len(records) - 1, "workspace", number, at.offset))
                return {"workspace": at, "workspace_bytes": 4 * words}
        return {"counters": at}

    # ----------------------------------------------------------------------------------- quantizers
    def passes(
        self, source: Source, row: str, col: str, rule: str
    ) -> list[tuple[str, str, str]]:  # fmt: skip
        """(row, col, kernel) of the reads that make both: one, or one for each direction."""

        def kernel(row: str, col: str) -> str:
            sizes = source.rows, source.cols, 1
            return pick("quantize", self.device, row, col, sizes, source.dtype, rule=rule).name

        if not (row or col):
            return []
        for tried in ([(row, col)], [(row, ""), ("", col)]):
            found = [(*one, kernel(*one)) for one in tried if any(one)]
            if all(name in QUANTIZERS for *_, name in found):
                return found
        raise Unfit

    def quantizer(
        self, source: Source, made: tuple[str, str, str], rule: str,
        to: tuple[At | None, At | None], sums: Sums | None = None, seed: Place | None = None,
    ) -> tuple[str, Fields]:  # fmt: skip
        """The record of one read of a matrix."""
        at, rows, cols, dtype, stride = source
        fields: Fields = {
            "x_data": at, "x_rows": rows, "x_cols": cols, "x_dtype": FLOAT_DTYPES[dtype],
            "x_row_stride": Place(stride) if stride else cols,
        }  # fmt: skip
        if seed is not None:
            fields["seed"] = seed
        if made[2] != nvfp4.PRODUCT:
            return "QuantizeArgs", fields | target(made[0], made[1], rule, to, sums)
        known, words = nvfp4.quantizer_fields(made[0], made[1], rows, cols, dtype, rule)
        fields |= known | {"amax": self.temp.take(4 * words)}
        for side, where in zip(("row", "col"), to, strict=True):
            if where is not None:
                layout = spec_of(where.spec).layout
                fields |= {
                    f"{side}_codes": where.codes, f"{side}_scale": where.whole,
                    f"{side}_scales": 0 if layout in SM90_VALUES else where.scales,
                    f"{side}_k_first": layout.k_first,
                }  # fmt: skip
        return "Nvfp4QuantizeArgs", fields

    def quantize(
        self, source: Source, rule: str, to: tuple[At | None, At | None], sums: Sums | None = None,
        seed: Place | None = None,
    ) -> None:  # fmt: skip
        """A matrix to operands, and its sums with the first read."""
        self.together(self.reads(source, rule, to, sums, seed), [])

    def reads(
        self, source: Source, rule: str, to: tuple[At | None, At | None], sums: Sums | None = None,
        seed: Place | None = None,
    ) -> list[tuple[str, tuple[str, Fields]]]:  # fmt: skip
        """The reads of a matrix: the kernel of each, and its record."""
        row, col = ("" if one is None else one.spec for one in to)
        made = self.passes(source, row, col, rule)
        if sums is not None and not (made and sums_too(source.dtype, *made[0][:2])):
            raise Unfit
        found = []
        for i, one in enumerate(made):
            where = to[0] if one[0] else None, to[1] if one[1] else None
            call = self.quantizer(source, one, rule, where, None if i else sums, seed)
            found.append((one[2], call))
        return found

    def together(
        self, first: list[tuple[str, tuple[str, Fields]]],
        second: list[tuple[str, tuple[str, Fields]]],
    ) -> None:  # fmt: skip
        """Reads of matrices that do not depend on each other: one of each at the same time where
        that can be; `first` without sums."""
        calls = [one[0] for one in (first, second) if one]
        kernels, records = {kernel for kernel, _ in calls}, [record for _, record in calls]
        call = ""
        if len(calls) == 2 and kernels.issubset(AT_ONCE):
            call = "quantize_two"
        elif len(calls) == 2 and kernels == {nvfp4.PRODUCT} and nvfp4.made_together(records):
            call = "nvfp4_quantize_two"
        if call:
            self.add(call, *records)
            first, second = first[1:], second[1:]
        for _, record in (*first, *second):
            self.add(CALLS[record[0]], record)

    # ------------------------------------------------------------------------------------- products
    def gemm(
        self, lhs: At, rhs: At, out: Place, out_dtype: torch.dtype, how: tuple[str, int],
        spare: Room | None = None, **epilogue: Any,
    ) -> str:  # fmt: skip
        """out [m, n] = epilogue(lhs @ rhs^T), with further fields of the record; how: precision and
        spread; spare: room that nobody reads any more. Returns the name of the kernel."""
        precision, spread = how
        sizes = lhs.rows, rhs.rows, lhs.k
        kernel = pick(
            "gemm", self.device, lhs.spec, rhs.spec, sizes, out_dtype, precision, "", spread
        )
        if kernel.name == nvfp4.PRODUCT:
            self._multiply(lhs, rhs, spare or self.temp, epilogue | {
                "out": out, "out_dtype": FLOAT_DTYPES[out_dtype]
            })  # fmt: skip
            return kernel.name
        aligned = [blockwise.is_aligned(one.spec) for one in (lhs, rhs)]
        fits = kernel.name == ADAPTIVE or (
            kernel.name == blockwise.NAME and aligned[0] == aligned[1]
        )
        if not fits or kernel.configuration:
            raise Unfit
        fields: Fields = {
            "out": out, "out_dtype": FLOAT_DTYPES[out_dtype], "ldo": rhs.rows, **epilogue,
        }  # fmt: skip
        for side, one in (("lhs", lhs), ("rhs", rhs)):
            word, order = words_of(one.spec)
            known = {
                "rows": one.rows, "k": one.k, "layout": LAYOUTS[order], "codes": one.codes,
                "scales": one.scales, **format_fields(word),
            }  # fmt: skip
            fields |= {f"{side}_{name}": value for name, value in known.items()}
        # How much scratch it needs does not depend on addresses, but on which there are.
        asked = {name: 1 if isinstance(v, Place) else v for name, v in fields.items()}
        nbytes = self.native.workspace_bytes(self.native.GemmArgs(**asked))
        if nbytes:
            fields |= {"workspace": self.temp.take(nbytes), "workspace_bytes": nbytes}
        self.add("gemm", ("GemmArgs", fields))
        return kernel.name

    def _multiply(self, lhs: At, rhs: At, spare: Room, epilogue: Fields) -> None:
        """A product of what bf16 holds of both, by cublasLt, where that takes it."""
        sizes = {"m": lhs.rows, "n": rhs.rows, "k": lhs.k}
        known = {"out", "out_dtype", "accumulate", "bias", "bias_dtype"}
        if not known.issuperset(epilogue) or any(size % 8 for size in sizes.values()):
            raise Unfit
        fields: Fields = sizes | {"ldo": rhs.rows} | epilogue
        for side, one in (("lhs", lhs), ("rhs", rhs)):
            fmt, layout = spec_of(one.spec)
            if not fmt.tensor_scaled or fmt.tensor_scale_shape(1) != ():
                raise Unfit
            values = one.codes
            if layout not in SM90_VALUES:
                nbytes = 2 * one.rows * one.k
                values = (spare if spare.has(nbytes) else self.temp).take(nbytes)
                made = nvfp4.values_fields(one.spec, one.rows, one.k) | {
                    "w": one.codes, "w_scales": one.scales, "out": values,
                    "out_dtype": FLOAT_DTYPES[torch.bfloat16],
                }  # fmt: skip
                self.add("nvfp4_from_rows", ("Nvfp4Args", made))
            fields |= {side: values, f"of_{side}": one.whole, f"{side}_k_first": layout.k_first}
        fields |= self._factors(lhs, rhs)
        if self._scratch is None:
            self._scratch = self.temp.take(self.native.nvfp4_multiply_workspace())
        fields |= {
            "workspace": self._scratch, "workspace_bytes": self.native.nvfp4_multiply_workspace()
        }  # fmt: skip
        # What the library takes does not depend on addresses that start at whole 16 bytes.
        asked = {name: 16 if isinstance(v, Place) else v for name, v in fields.items()}
        for adds in {False, "accumulate" in fields}:
            args = self.native.Nvfp4MultiplyArgs(**asked | {"accumulate": adds})
            args.device = self.index
            if not binding.supported(self.native.nvfp4_multiplies(args)):
                raise Unfit
        self.add("nvfp4_multiply", ("Nvfp4MultiplyArgs", fields))

    def _factors(self, lhs: At, rhs: At) -> Fields:
        """The field of a product whose tensor scales a quantizer multiplies, the last one of both;
        without it a kernel does, which is one launch more."""
        if lhs.whole is None or rhs.whole is None:
            return {}
        beside = {lhs.whole: rhs.whole, rhs.whole: lhs.whole}
        times = {(self._numbers[at.argument], at.offset): of for at, of in beside.items()}
        for _, records, arguments in reversed(self._steps):
            for i, field, *at in arguments:
                side, other = field[:3], times.get(tuple(at))
                if other is None or field not in ("row_scale", "col_scale"):
                    continue
                taken = any(one[:2] == (i, f"{side}_factors") for one in arguments)
                if taken or records[i].row_by_32 or records[i].col_by_32:
                    return {}
                made = self.temp.take(12)
                for name, place in (("factors", made), ("times", other)):
                    number = self._numbers[place.argument]
                    arguments.append((i, f"{side}_{name}", number, place.offset))
                return {"factors": made}
        return {}


def target(
    row: str, col: str, rule: str, to: tuple[At | None, At | None], sums: Sums | None = None
) -> Fields:
    """What a native record says of what is made of a matrix."""
    spec = row or col
    if not spec:
        return {}
    fields: Fields = dict(fields_to(row, col, rule))
    for side, where in zip(("row", "col"), to, strict=True):
        if where is not None:
            fields |= {f"{side}_codes": where.codes, f"{side}_scales": where.scales}
    if sums is not None:
        fields |= {
            "col_sum": sums.at, "col_sum_dtype": FLOAT_DTYPES[sums.dtype],
            "col_sum_ws": sums.partial,
        }  # fmt: skip
    return fields
