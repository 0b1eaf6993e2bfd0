"""What a layout is: how the bytes of a quantized matrix lie in memory.

A quantized matrix is logical [rows, k], with blocks along k. Its format (te_mx.formats) says what
its codes and scales are, its layout where they are: shapes, how to pack and unpack, what a kernel
may expect of addresses. Plain torch is the specification; kernels must write the same bytes."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from te_mx.formats import Format

Shape = tuple[int, ...]
Parts = tuple[Tensor, Tensor]  # codes, scales


class HasParts(Protocol):
    """What has codes and scales."""

    @property
    def codes(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor: ...


class IsMatrix(HasParts, Protocol):
    """An Operand, of which layouts know no more than this."""

    @property
    def rows(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def tensor_scale(self) -> Tensor | None: ...


Matrix = TypeVar("Matrix", bound=IsMatrix)


class Layout:
    """One layout, by name. Layouts are compared and looked up by their names."""

    name: str
    scale_dtype: torch.dtype | None = None  # None: as the format stores its scales
    k_first = False  # codes lie [k, rows]
    exact = True  # unpacking gives back the codes and scales that were packed
    of_matrices = True  # False: only the tokens of groups lie so
    refused = "formats of other elements or blocks"  # what it does not take, for errors
    reads_as = ""  # of weights that stand still: as which layout products read them, if not this
    any_rows = False  # whether a kernel of its own takes any number of rows of a frozen weight
    tokens = ""  # "rows" or "k": what belongs to groups of tokens that lie so; "" for none
    alone = ""  # of tokens: the layout of a group's part by itself
    class_names: tuple[str, ...] = ()  # of tiles, where those with close scales share one
    # Bytes, a power of two: where not 1, rows of codes start at multiples of it, as the first does.
    pitch = 1
    row_block = 1  # rows are filled up to a multiple of it, which `unpack` and `values` give back

    def takes(self, fmt: Format) -> bool:
        """Whether matrices of a format can lie so."""
        return True

    def replaces(self, fmt: Format, wanted: str, precision: str, grouped: bool) -> bool:
        """Of weights that stand still: whether products of a precision that want another layout
        read them as they are, those of groups or a single one."""
        return False

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        """Shapes of codes (uint8) and scales, codes without the padding of their rows.

        Raises ValueError for layouts in which no single matrix lies."""
        raise ValueError(f"te_mx: a single matrix does not lie in layout {self.name!r}")

    def scales_dtype(self, fmt: Format) -> torch.dtype:
        """dtype of the scales of a format in this layout."""
        return self.scale_dtype or fmt.scaling.storage

    def empty(self, fmt: Format, rows: int, k: int, device: torch.device) -> Parts:
        """Room for codes and scales, uninitialized."""
        return self._room(fmt, self.shapes(fmt, rows, k), device)

    def _room(self, fmt: Format, shapes: tuple[Shape, Shape], device: torch.device) -> Parts:
        *rows, width = shapes[0]
        ld = self.row_bytes(width) or width
        codes = torch.empty((*rows, ld), dtype=torch.uint8, device=device)
        scales = torch.empty(shapes[1], dtype=self.scales_dtype(fmt), device=device)
        return codes if ld == width else codes[..., :width], scales

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        """Codes and scales that lie by rows (layout "rows"), in this layout."""
        raise NotImplementedError

    def unpack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        """The other way. Raises NotImplementedError where bytes cannot be given back."""
        raise NotImplementedError(f"layout {self.name!r} does not give its bytes back")

    def plain(self, fmt: Format, held: Any, k: int) -> Parts:
        """As `unpack`, of an Operand or a Stack with what lies aside."""
        if held.codes.dim() == 2:
            return self.unpack(fmt, held.codes, held.scales, k)
        each = [self.unpack(fmt, *one, k) for one in zip(held.codes, held.scales, strict=True)]
        return torch.stack([codes for codes, _ in each]), torch.stack(
            [scales for _, scales in each]
        )

    def joined(self, parts: Sequence[Any]) -> Any:
        """Operands of one k that lie so, their rows behind each other, as one; None where their
        bytes do not lie behind each other."""
        return None

    def values(
        self, fmt: Format, codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype
    ) -> Tensor:
        """What the codes stand for, [rows, k]."""
        return fmt.dequantize(*self.unpack(fmt, codes, scales, k), k, dtype)

    # -------------------------------------------------------------------------------- classes
    def has_classes(self, fmt: Format) -> bool:
        """Whether `classes` knows tiles of a format."""
        return False

    def classes(self, fmt: Format, codes: Tensor, scales: Tensor) -> Tensor:
        """uint8, the class of every tile when it is packed, a number of `class_names`: of codes
        [rows, k], one a byte, and scales that lie by rows."""
        raise NotImplementedError(f"layout {self.name!r} has no classes of tiles")

    # --------------------------------------------------------------------------------- groups
    def grouped_shapes(self, fmt: Format, rows: int, k: int, groups: int) -> tuple[Shape, Shape]:
        """Shapes of tokens whose rows (or k, as the layout says) belong to groups."""
        return self.shapes(fmt, rows, k)

    def grouped_empty(
        self, fmt: Format, rows: int, k: int, groups: int, device: torch.device
    ) -> Parts:
        """Room for them, uninitialized."""
        return self._room(fmt, self.grouped_shapes(fmt, rows, k, groups), device)

    def put_group(self, into: HasParts, part: HasParts, start: int, end: int, group: int) -> None:
        """Of tokens: put group number `group`, start to end, in layout `alone`, where it lies."""
        raise NotImplementedError(f"layout {self.name!r} is not that of tokens")

    def group_of(self, tokens: HasParts, start: int, end: int, group: int) -> Parts:
        """The other way: the parts of a group in layout `alone`."""
        raise NotImplementedError(f"layout {self.name!r} is not that of tokens")

    # --------------------------------------------------------------------------------- checks
    def checked(self, operand: Matrix, fmt: Format, name: str) -> Matrix:
        """The operand with parts as kernels read them: contiguous, or as the layout says.

        Raises ValueError when they are not those of a matrix [rows, k] in this layout."""
        rows, k = operand.rows, operand.k
        return self._checked(operand, fmt, name, self.shapes(fmt, rows, k), (rows, k))

    def checked_tokens(self, operand: Matrix, fmt: Format, groups: int, name: str) -> Matrix:
        """The same of tokens of so many groups."""
        rows, k = operand.rows, operand.k
        shapes = self.grouped_shapes(fmt, rows, k, groups)
        wholes = (groups,), *whole_shapes(fmt, rows)
        return self._checked(operand, fmt, name, shapes, (rows, k), wholes)

    def checked_stack(self, stack: Any, fmt: Format, name: str) -> Any:
        """The same of a Stack, the operands of all groups."""
        one = self.shapes(fmt, stack.rows, stack.k)
        shapes = (stack.groups, *one[0]), (stack.groups, *one[1])
        sizes = stack.groups, stack.rows, stack.k
        wholes = tuple([(stack.groups, *one) for one in whole_shapes(fmt, stack.rows)])
        return self._checked(stack, fmt, name, shapes, sizes, wholes)

    def _checked(
        self, held: Any, fmt: Format, name: str, shapes: tuple[Shape, Shape], sizes: Shape,
        wholes: tuple[Shape, ...] = (),
    ) -> Any:  # fmt: skip
        codes, scales, whole = held.codes, held.scales, held.tensor_scale
        scale_dtype = self.scales_dtype(fmt)
        if (
            codes.shape != shapes[0]
            or scales.shape != shapes[1]
            or codes.dtype != torch.uint8
            or scales.dtype != scale_dtype
        ):
            raise ValueError(
                f"{name}: {fmt.name} {list(sizes)} in layout {self.name!r} needs uint8 codes "
                f"{shapes[0]} and {scale_dtype} scales {shapes[1]}, got {codes.dtype} "
                f"{tuple(codes.shape)} and {scales.dtype} {tuple(scales.shape)}"
            )
        if codes.device != scales.device:
            raise ValueError(
                f"{name}: codes are on {codes.device} and scales on {scales.device}; move one"
            )
        if fmt.tensor_scaled or whole is not None:
            wholes = wholes or whole_shapes(fmt, sizes[0])
            check_tensor_scale(f"{name}: {fmt.name} {list(sizes)}", fmt, whole, wholes, codes)
        aligned = self.aligned(codes, scales)
        if whole is not None and not whole.is_contiguous():
            held = held._replace(tensor_scale=whole.contiguous())
        if aligned[0] is codes and aligned[1] is scales:
            return held
        return held._replace(codes=aligned[0], scales=aligned[1])

    def row_bytes(self, width: int) -> int | None:
        """How far apart rows of codes of so many bytes start; None where codes are contiguous."""
        return None if self.pitch == 1 else (width + self.pitch - 1) & -self.pitch

    def aligned(self, codes: Tensor, scales: Tensor) -> Parts:
        """The parts, copied where their strides are not what kernels read. Those of several groups
        lie behind each other."""
        scales, ld = scales.contiguous(), self.row_bytes(codes.shape[-1])
        if ld is None:
            return codes.contiguous(), scales
        strides = (ld, 1) if codes.dim() == 2 else (codes.shape[1] * ld, ld, 1)
        if codes.stride() == strides and codes.data_ptr() % self.pitch == 0:
            return codes, scales
        room = torch.empty((*codes.shape[:-1], ld), dtype=torch.uint8, device=codes.device)
        return room[..., : codes.shape[-1]].copy_(codes), scales

    def __repr__(self) -> str:
        return f"Layout({self.name!r})"


def whole_shapes(fmt: Format, rows: int) -> tuple[Shape, ...]:
    """Shapes that a tensor scale of a matrix may have: parts that were joined have one a row."""
    return tuple(dict.fromkeys((fmt.tensor_scale_shape(rows), (rows, 1))))


def check_tensor_scale(
    name: str, fmt: Format, whole: Tensor | None, shapes: tuple[Shape, ...], codes: Tensor
) -> None:
    """Raise ValueError unless a tensor scale is there where a format has one, fp32 in one of these
    shapes and where the codes are."""
    if whole is None or not fmt.tensor_scaled:
        needs = "needs a tensor scale" if fmt.tensor_scaled else "has no tensor scale"
        raise ValueError(f"{name} {needs}, got {'none' if whole is None else tuple(whole.shape)}")
    if whole.dtype != torch.float32 or whole.shape not in shapes or whole.device != codes.device:
        raise ValueError(
            f"{name} needs a float32 tensor scale {' or '.join(map(str, dict.fromkeys(shapes)))} "
            f"on {codes.device}, got {whole.dtype} {tuple(whole.shape)} on {whole.device}"
        )


class AnyLayout(Layout):
    """Of problems without operands yet: kernels take it, and say which layout they want."""

    name = "any"
