"""MXTensor: codes and scales of one logical tensor, rowwise, columnwise or both.

Checks of formats, codes and scales that users give."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from te_mx import _ops as ops
from te_mx import formats
from te_mx._ops import FLOAT_DTYPES
from te_mx.formats import Format
from te_mx.formats.nvfp4 import TensorScaledFormat
from te_mx.runtime import streams
from te_mx.runtime.arguments import (
    check_address,
    check_dense,
    check_flag,
    check_size,
    is_one_of,
    shown,
    usable_device,
)


def name_of(fmt: Format) -> str:
    """How a format is shown: by its short name where it has one."""
    return fmt.short_names[0] if fmt.short_names else fmt.name


def check_copy(
    usage: str, data: Tensor | None, scale: Tensor | None, fmt: Format, rows: int, cols: int,
    transposed: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Codes and scales of one copy as te_mx keeps them, contiguous, checked."""
    if data is None and scale is None:
        return None, None
    if data is None or scale is None:
        have, lack = ("data", "scale") if scale is None else ("scale", "data")
        raise ValueError(f"{usage}_{have} was given without {usage}_{lack}; give both or none")
    # A columnwise copy that lies as the matrix does has its codes one a byte.
    if usage == "rowwise":
        shapes = fmt.codes_shape(rows, cols), fmt.scales_shape(rows, cols)
    elif transposed:
        shapes = fmt.codes_shape(cols, rows), fmt.scales_shape(cols, rows)
    else:
        shapes = (rows, cols), fmt.scales_shape(cols, rows)[::-1]
    codes = _part(f"{usage}_data", data, fmt.element.torch_dtype, shapes[0])
    scales = _part(f"{usage}_scale", scale, fmt.scaling.torch_dtype, shapes[1])
    if codes.device != scales.device:
        raise ValueError(
            f"{usage}_data is on {codes.device} and {usage}_scale on {scales.device}; "
            "move them to one device"
        )
    return codes, scales


def check_tensor_scale(
    scale: Any, fmt: Format, rows: int, copies: tuple[bool, bool], device: torch.device
) -> Tensor | None:
    """The tensor scale of a format that has one, as it is kept; None for the others."""
    if not isinstance(fmt, TensorScaledFormat):
        if scale is not None:
            raise ValueError(f"tensor_scale is for formats with one, got fmt={fmt.name!r}")
        return None
    if scale is None:
        raise ValueError(
            f"{fmt.name} needs tensor_scale, what codes times block scales are multiplied by; of "
            "compressed-tensors' weight_global_scale that is the reciprocal"
        )
    check_copies(fmt, *copies)
    shape = fmt.tensor_scale_shape(rows)
    count = math.prod(shape)
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != count:
        numbers = "one number" if count == 1 else f"{count} numbers"
        raise TypeError(f"tensor_scale must be a float32 tensor of {numbers}, got {shown(scale)}")
    check_dense("tensor_scale", scale)
    if scale.device != device:
        raise ValueError(f"tensor_scale is on {scale.device} and codes on {device}; move one")
    return scale.detach().resolve_neg().reshape(shape)


def check_copies(fmt: TensorScaledFormat, rowwise: bool, columnwise: bool) -> None:
    """Raise ValueError for copies that one tensor scale does not go with: a columnwise one where
    every row has a scale, both where each is transformed and has a largest magnitude of its own."""
    if fmt.transform is not None and rowwise and columnwise:
        raise ValueError(
            f"{fmt.name} has a tensor scale of its own in each direction, and an MXTensor has one; "
            "quantize twice, with rowwise=True and with columnwise=True"
        )
    if fmt.by_rows and columnwise:
        raise ValueError(
            f"{fmt.name} has a scale a row, which blocks along the rows do not share: there is no "
            "columnwise copy; leave it away, or use nvfp4"
        )


def check_codes(fmt: Format, codes: Tensor) -> None:
    """Raise ValueError where bytes of columnwise_data, one code each, are none of the format's."""
    count = 1 << fmt.element.bits
    plain = type(codes) is Tensor and not codes.is_meta and not torch.compiler.is_compiling()
    if count == 256 or not plain or codes.numel() == 0 or streams.capturing(codes.device):
        return
    if (largest := int(codes.max())) >= count:
        raise ValueError(
            f"columnwise_data holds the byte {largest}, and codes of {fmt.name} are 0 to "
            f"{count - 1}, one a byte where they lie as [rows, cols]; packed ones go with "
            "columnwise_transposed=True"
        )


def _part(name: str, tensor: Tensor, dtype: torch.dtype | None, shape: tuple[int, int]) -> Tensor:
    """A part of a `dtype` of one byte as uint8, of fp32 as it is."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_dense(name, tensor)
    if dtype == torch.float32:
        if tensor.dtype != dtype:
            use = ".float()"
            if not tensor.is_floating_point():  # bytes of E8M0 are no numbers
                use = ".view(torch.float8_e8m0fnu).float() of E8M0 bytes"
            raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}; use {use}")
    elif tensor.dtype not in (torch.uint8, dtype):
        both = "uint8" if dtype is None else f"uint8 or {dtype}"
        use = ".view(torch.uint8)"
        if tensor.element_size() > 1:
            use = "te_mx.quantize"
            if "scale" in name and tensor.is_floating_point():
                use = f".to({dtype})"
            elif "scale" in name:
                use = (
                    ".to(torch.uint8) of integers with a byte each, or for four bytes in an int32, "
                    "as DeepGEMM packs them, te_mx.formats.mxfp4_checkpoints.from_deep_gemm"
                )
        raise TypeError(f"{name} must be {both}, got {tensor.dtype}; use {use}")
    if tuple(tensor.shape) != shape:
        why = "one scale for every block, unpadded" if "scale" in name else "flattened to 2-D"
        raise ValueError(f"{name} must have shape {shape} ({why}), got {tuple(tensor.shape)}")
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise ValueError(f"{name} is a negative view, whose bytes are not its codes; copy it")
    check_address(name, tensor)
    stored = torch.float32 if dtype == torch.float32 else torch.uint8
    return tensor.detach().view(stored).contiguous()


# Codes and scales of the rowwise copy, then those of the columnwise one.
Parts = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class MXTensor:
    """A tensor in a block-scaled format: codes of 8, 6 or 4 bits, and one scale for every block of
    elements: a power of two for 32 of them in MX formats, fp32 for 128 or 128 x 128 in blockwise
    FP8, E4M3 for 16 in NVFP4, with one fp32 scale for the whole tensor.

    ``value = code * 2^(scale byte - 127)`` in MX formats, where scale byte 255 makes the block NaN,
    ``code * scale`` in blockwise FP8 and ``code * scale * tensor_scale`` in NVFP4. With
    [rows, cols] for the shape whose leading dimensions are flattened into rows, in MXFP8:

    ====================  =============  ==========================================================
    field                 dtype          shape
    ====================  =============  ==========================================================
    rowwise_data          float8         [rows, cols]
    rowwise_scale         float8_e8m0    [rows, ceil(cols/32)]: blocks along the last dimension
    columnwise_data       float8         [rows, cols], or [cols, rows] when columnwise_transposed
    columnwise_scale      float8_e8m0    [ceil(rows/32), cols], or [cols, ceil(rows/32)]
    ====================  =============  ==========================================================

    Codes of fewer bits are packed along the blocks, two or four thirds a byte, except where
    columnwise_data lies as [rows, cols]: there they are one a byte. In blockwise FP8 scales are
    float32, [rows, ceil(cols/128)] and so on, [ceil(rows/128), ceil(cols/128)] for 128 x 128.

    The two copies are quantized on their own from the same input. `te_mx.quantize` makes an
    MXTensor; the constructor takes parts that were made elsewhere. It is immutable, is no
    torch.Tensor, and gradients do not flow through it.

    The fields share memory with what te_mx.gemm reads, which keeps a packed form of a tensor that
    it gets again. A write to that memory is noticed unless torch does not count it: in place
    through ``.data``, NumPy or DLPack, or through a view that inference_mode made of a field that
    was read outside of it; make a new MXTensor then. Of parts that were given or read inside
    inference_mode no packed form is kept.

    Args:
        shape: logical shape, one dimension or more.
        fmt: a name of te_mx.formats; "e4m3" and "e5m2" are MXFP8.
        rowwise_data, rowwise_scale, columnwise_data, columnwise_scale: as above, data as uint8 or
            the float8 dtype of fmt, scales as uint8 or float8_e8m0fnu, or as float32. They are used
            as they are if contiguous. Data come with their scales.
        columnwise_transposed: how the columnwise copy lies.
        tensor_scale: of NVFP4 and of no other format, float32 with one element, or one for every
            row in "nvfp4_rows".

    Raises:
        ValueError, TypeError: parts that do not fit the shape, the format or each other; bytes
            that are no codes, where these have fewer bits and are one a byte. They are looked at,
            which on a GPU waits for them, when they are given and again when they were written to,
            but not in compiled code and while a CUDA graph is captured.
    """

    __slots__ = (
        "_col_transposed", "_fmt", "_held", "_looked", "_packs", "_shape", "_standing",
        "_tensor_scale", "_uncounted",
    )  # fmt: skip

    _shape: torch.Size
    _fmt: str
    _held: Parts
    _col_transposed: bool
    _tensor_scale: Tensor | None
    # Whether somebody else has tensors of inference_mode that share memory with the parts: torch
    # counts no writes to these, so nothing may be kept that was made of them.
    _uncounted: bool
    # Version of _col_codes, where these are one a byte, at which all of them are codes.
    _looked: int
    # (usage, side, mode, stream) -> (versions of codes and scales, form, from the second use on)
    _packs: dict[tuple[str, str, ops.Mode, int], tuple[tuple[int, int], ops.Operand | None]]
    # usage -> the same, of copies that te_mx.prepack packed, for both sides and all streams
    _standing: dict[str, tuple[tuple[int, int], ops.Operand]]

    def __init__(
        self,
        shape: Sequence[int],
        fmt: str,
        *,
        rowwise_data: Tensor | None = None,
        rowwise_scale: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        columnwise_scale: Tensor | None = None,
        columnwise_transposed: bool = False,
        tensor_scale: Tensor | None = None,
    ) -> None:
        known = formats.get(fmt)
        check_flag("columnwise_transposed", columnwise_transposed)
        if isinstance(shape, str | Tensor) or not isinstance(shape, Sequence):
            raise TypeError(f"shape must be a sequence of ints, got {shown(shape)}")
        shape = torch.Size([check_size("a dimension of shape", size) for size in shape])
        if len(shape) == 0:
            raise ValueError("shape must have one dimension or more, got []")
        rows, cols = math.prod(shape[:-1]), shape[-1]
        row = check_copy("rowwise", rowwise_data, rowwise_scale, known, rows, cols, False)
        col = check_copy(
            "columnwise", columnwise_data, columnwise_scale, known, rows, cols,
            columnwise_transposed,
        )  # fmt: skip
        some = row[0] if row[0] is not None else col[0]
        if some is None:
            raise ValueError("MXTensor needs a rowwise copy, a columnwise copy or both, got none")
        if row[0] is not None and col[0] is not None and row[0].device != col[0].device:
            raise ValueError(
                f"rowwise_data is on {row[0].device} and columnwise_data on {col[0].device}; "
                "move them to one device"
            )
        if col[0] is not None and not columnwise_transposed:
            check_codes(known, col[0])
        transposed = columnwise_transposed and col[0] is not None
        copies = row[0] is not None, col[0] is not None
        whole = check_tensor_scale(tensor_scale, known, rows, copies, some.device)
        self._fill(shape, name_of(known), (*row, *col), transposed, whole)
        for part in self._held:
            if part is not None:
                self._hand_out(part, part.dtype)  # the caller has them already

    def _fill(
        self, shape: torch.Size, fmt: str, held: Parts, col_transposed: bool,
        tensor_scale: Tensor | None,
    ) -> None:  # fmt: skip
        put = object.__setattr__
        put(self, "_shape", shape)
        put(self, "_fmt", fmt)
        put(self, "_held", held)
        put(self, "_col_transposed", col_transposed)
        put(self, "_tensor_scale", tensor_scale)
        compiled = torch.compiler.is_compiling()
        put(self, "_looked", -1 if compiled or held[2] is None else _version(held[2]))
        put(self, "_packs", {})
        put(self, "_standing", {})
        put(self, "_uncounted", False)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"MXTensor is immutable: cannot set {name}; make a new one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"MXTensor is immutable: cannot delete {name}")

    # ------------------------------------------------------------------------------------------
    # fields
    @property
    def shape(self) -> torch.Size:
        """Logical shape, with all leading dimensions."""
        return self._shape

    @property
    def rows(self) -> int:
        """Product of all dimensions but the last."""
        return math.prod(self._shape[:-1])

    @property
    def cols(self) -> int:
        """The last dimension."""
        return self._shape[-1]

    @property
    def fmt(self) -> str:
        """Its format: "e4m3" and "e5m2" for MXFP8, else the name in te_mx.formats."""
        return self._fmt

    @property
    def format(self) -> Format:
        """Its format as an object of te_mx.formats."""
        return formats.get(self._fmt)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        codes = self._held[0] if self._held[0] is not None else self._held[2]
        assert codes is not None
        return codes.device

    @property
    def rowwise_data(self) -> Tensor | None:
        """Codes with blocks along the last dimension, float8 [rows, cols], or None."""
        return self._hand_out(self._held[0], self._element)

    @property
    def rowwise_scale(self) -> Tensor | None:
        """Scales of rowwise_data, float8_e8m0fnu [rows, ceil(cols/32)] or float32, or None."""
        return self._hand_out(self._held[1], self.format.scaling.torch_dtype)

    @property
    def columnwise_data(self) -> Tensor | None:
        """Codes with blocks along the first dimension, float8 [rows, cols] or transposed, or
        None."""
        whole = self._col_transposed or self.format.element.bits == 8
        return self._hand_out(self._held[2], self._element if whole else torch.uint8)

    @property
    def columnwise_scale(self) -> Tensor | None:
        """Scales of columnwise_data, float8_e8m0fnu [ceil(rows/32), cols] or float32, perhaps
        transposed, or None."""
        return self._hand_out(self._held[3], self.format.scaling.torch_dtype)

    @property
    def columnwise_transposed(self) -> bool:
        """Whether columnwise_data is stored as [cols, rows]; False without a columnwise copy."""
        return self._col_transposed

    @property
    def codes(self) -> Tensor | None:
        """The bytes of rowwise_data, uint8, or None."""
        return self._hand_out(self._held[0], torch.uint8)

    @property
    def scales(self) -> Tensor | None:
        """The bytes of rowwise_scale, uint8, or the numbers where they are float32, or None."""
        return self._hand_out(self._held[1], self.format.scaling.storage)

    @property
    def tensor_scale(self) -> Tensor | None:
        """In NVFP4 a factor of all values, float32 [] or [rows, 1] ("nvfp4_rows"); else None."""
        return self._tensor_scale

    @property
    def nbytes(self) -> int:
        """Bytes of all codes and scales."""
        parts = *self._held, self._tensor_scale
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def _element(self) -> torch.dtype:
        return self.format.element.torch_dtype or torch.uint8

    def _hand_out(self, part: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """A part as it is shown to others, who may write to it."""
        if part is None:
            return None
        view = part.view(dtype)
        if torch.compiler.is_compiling():
            return view
        if view.is_inference() or part.is_inference():  # a view of one need not be one
            object.__setattr__(self, "_uncounted", True)
            self._packs.clear()
        return view

    def _parts(self) -> Parts:
        return self._held

    def _copy(self, usage: str) -> tuple[Tensor | None, Tensor | None]:
        return self._held[:2] if usage == "rowwise" else self._held[2:]

    # ------------------------------------------------------------------------------------------
    # values
    def dequantize(self, dtype: torch.dtype = torch.float32, usage: str = "rowwise") -> Tensor:
        """The values of one copy in the logical shape: code * 2^(scale byte - 127), or
        code * scale (NVFP4: times tensor_scale, in fp32), rounded to dtype; transformed back where
        the format has a transform.

        Args:
            dtype: float32, bfloat16, float16 or float64. What it cannot hold becomes Inf.
            usage: "rowwise" or "columnwise", the copy; they differ only where a code is subnormal.

        Raises:
            TypeError: another dtype.
            ValueError: the copy does not exist, or the usage is unknown.
        """
        if not isinstance(dtype, torch.dtype) or dtype not in (*FLOAT_DTYPES, torch.float64):
            raise TypeError(
                f"dtype must be float32, bfloat16, float16 or float64, got {shown(dtype)}"
            )
        operand = self.operand(usage)
        if operand is None:
            other = "columnwise" if usage == "rowwise" else "rowwise"
            raise ValueError(
                f"{self!r} has no {usage} copy; pass usage={other!r}, or quantize with {usage}=True"
            )
        values = ops.restored_2d(operand, dtype)
        if usage == "columnwise":
            values = values.t()
        return values.reshape(self._shape)

    def operand(self, usage: str) -> ops.Operand | None:
        """The copy as a GEMM operand whose k runs along the blocks; None where there is none.

        The rowwise copy is logical [rows, k = cols], the columnwise one [cols, k = rows]."""
        if not is_one_of(usage, ("rowwise", "columnwise")):
            raise ValueError(f'usage must be "rowwise" or "columnwise", got {shown(usage)}')
        (codes, scales), rows, k, layout = self._copy(usage), self.rows, self.cols, "rows"
        if usage == "columnwise":
            rows, k, layout = k, rows, "rows" if self._col_transposed else "cols"
        if codes is None or scales is None:
            return None
        if layout == "cols" and self.format.element.bits < 8 and not torch.compiler.is_compiling():
            now = _version(codes)
            if self._looked != now:
                check_codes(self.format, codes)
            object.__setattr__(self, "_looked", now)
        spec, whole = f"{self.format.name}@{layout}", self._tensor_scale
        return ops.Operand(codes, scales, spec, rows, k, None, whole)

    def _versions(self, usage: str) -> tuple[int, int]:
        """Counts of the writes to the codes and scales of a copy."""
        codes, scales = self._copy(usage)
        assert codes is not None and scales is not None
        return _version(codes), _version(scales)

    def kept_operand(
        self, usage: str, side: str, mode: ops.Mode, other: str = ""
    ) -> ops.Operand | None:
        """As `operand`, in the form that the device's kernel reads as side "lhs" or "rhs" once that
        is used again, with operands of spec `other`.

        The first use packs inside the GEMM; the second one says that the tensor stands still, so it
        keeps the packed form (about 2 bytes an element on CPUs, 1 on GPUs) for all later ones."""
        operand = self.operand(usage)
        if usage in self._standing and mode == ops.Mode():
            return self._standing_operand(usage, side, mode)
        if operand is None or self._uncounted:
            return operand
        device = operand.codes.device
        # The version counters notice writes through views of the codes. A form made on one stream
        # is not used on another, which has not waited for it.
        version = self._versions(usage)
        key = (usage, side, mode, streams.current(device))
        kept = self._packs.get(key)
        if streams.capturing(device):
            # A graph's forms exist when it is replayed, and its codes may be written in between.
            return operand
        if kept is None or kept[0] != version:
            self._packs[key] = (version, None)
            return operand
        form = kept[1]
        if form is None:
            form = ops.kept_form(operand, side, mode, other)
            self._packs[key] = (version, form)
        return form

    def _standing_operand(self, usage: str, side: str, mode: ops.Mode) -> ops.Operand:
        """The form that te_mx.prepack made of a copy. Raises RuntimeError where its codes or scales
        were written since."""
        version, form = self._standing[usage]
        if self._versions(usage) != version:
            raise RuntimeError(
                f"{self!r} was written to after te_mx.prepack, and CUDA graphs may read what was "
                "packed; make a new MXTensor of the codes, and prepack that"
            )
        device = form.codes.device
        if not streams.capturing(device):
            self._packs[usage, side, mode, streams.current(device)] = version, form
        return form

    def _stand(self) -> None:
        """What te_mx.prepack does."""
        for usage in ("rowwise", "columnwise"):
            operand = self.operand(usage)
            form = None if operand is None else ops.standing_form(operand)
            if form is not None:
                self._standing[usage] = self._versions(usage), form
        if self._standing and self.device.type == "cuda":  # streams and graphs need not wait for it
            torch.cuda.current_stream(self.device).synchronize()

    # ------------------------------------------------------------------------------------- moves,
    # copies
    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MXTensor":
        """This tensor on another device; itself when it is there already."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"MXTensor.to moves between devices; dequantize({device}) gives values")
        device = usable_device("device", device)
        check_flag("non_blocking", non_blocking)
        mine = self.device
        if device.type == mine.type and device.index in (None, mine.index):
            return self
        moved: Any = tuple(
            None if part is None else part.to(device, non_blocking=non_blocking)
            for part in self._held
        )
        whole = self._tensor_scale
        whole = None if whole is None else whole.to(device, non_blocking=non_blocking)
        return _make(self._shape, self._fmt, moved, self._col_transposed, whole)

    def equal(self, other: "MXTensor") -> bool:
        """Whether shape, format, forms and every byte are the same."""
        if not isinstance(other, MXTensor):
            raise TypeError(f"equal compares MXTensors, got {type(other).__name__}")
        if self.device != other.device or self.device.type == "meta":
            raise ValueError(
                f"equal compares bytes on one device, got {self.device} and {other.device}; move "
                "one with .to(device)"
            )
        mine = (self._shape, self._fmt, self._col_transposed)
        if mine != (other._shape, other._fmt, other._col_transposed):
            return False
        held, theirs = (*self._held, self._tensor_scale), (*other._held, other._tensor_scale)
        pairs = zip(held, theirs, strict=True)
        return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # plain tensors and types only: torch.load(weights_only=True) reads it.
        parts = (list(self._shape), self._fmt, *self._held, self._col_transposed)
        whole = self._tensor_scale
        return _rebuild_mxtensor, parts if whole is None else (*parts, whole)

    def __repr__(self) -> str:
        columns = "columnwise transposed" if self._col_transposed else "columnwise"
        copies = [] if self._held[0] is None else ["rowwise"]
        copies += [] if self._held[2] is None else [columns]
        return (
            f"MXTensor(shape={tuple(self._shape)}, fmt={self._fmt!r}, {' + '.join(copies)}, "
            f"device={str(self.device)!r})"
        )


def _make(
    shape: torch.Size, fmt: str, held: Parts, col_transposed: bool,
    tensor_scale: Tensor | None = None,
) -> MXTensor:  # fmt: skip
    """An MXTensor of parts that are known to fit."""
    made = MXTensor.__new__(MXTensor)
    made._fill(shape, fmt, held, col_transposed, tensor_scale)
    return made


def _rebuild_mxtensor(shape: list[int], fmt: str, *parts: Any) -> MXTensor:
    """What a pickle calls, with four parts, where the last two are transposed, and a tensor scale
    where there is one. It checks, because a file may hold anything."""
    names = "rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale"
    more = ("tensor_scale",) * (len(parts) > 5)
    given = dict(zip((*names, "columnwise_transposed", *more), parts, strict=True))
    return MXTensor(shape, fmt, **given)


torch.serialization.add_safe_globals([_rebuild_mxtensor])


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
