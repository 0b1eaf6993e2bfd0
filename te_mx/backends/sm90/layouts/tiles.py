"""The packed operands of the Hopper backend, in plain torch: what its kernels must produce.

Legend: R rows of the operand, K its reduction dimension, T = ceil(R/128) tiles along R,
S = ceil(K/128) steps of 128 along K.

An MX operand (codes [R, K], scale bytes [R, ceil(K/32)]) is cut into tiles of 128 rows x 128 K,
four blocks of 32 a row. A block counts when its scale byte e is not 255 and some code of it is not
zero. Over the counting blocks of a tile, E is the largest e (127 without any). `spread` is 0 to 8.

- Class 0, tile-shared: every e >= E - spread. Codes times 2^(e - E), rounded to nearest even once;
  one exponent E.
- Class 1, row-shared: the same in each row's group of four blocks, with the row's own E (the
  tile's for a row without counting blocks).
- Class 2, spread: codes untouched, four exponents a row, every e >= 1.
- Class 3, far: like class 2, for tiles with an e of 0 and for every tile with E > 190. Products of
  two such scales can leave the range of fp32, so the kernel applies them with care.

A product is exact up to the rounding of shifted codes: an element moves only if it becomes
subnormal, by at most half the smallest code, 2^-10 * 2^(E - 127) in E4M3, where E <= e + spread.

MXFP4 lies as codes of E4M3, the same otherwise, but exactly: an E2M1 number times 2^d is one of
E4M3 for every d in -8..6. So all blocks of a tile (or row) whose e are at most 14 apart share the
exponent max(E - 6, 0), whatever the spread is, and nothing is rounded. That exponent stands for E
in what follows; the classes are decided by the e themselves. Classes 2 and 3 have d = 0.

- codes: uint8 [R, ld], ld = K rounded up to 16. Blocks of scale 255 hold 0x7F; what lies right of
  K is padding.
Blocks of 1 x 128 with fp32 scales that are powers of two are operands of MX here, whose four blocks
of 32 have one scale: their tiles are of class 0, 1 or, with E > 190, 3.

- scales: int32 [S, T', 132], T' = T rounded up to even. One tile's words lie together and reach
  shared memory with its codes. Word r < 128 belongs to row r: classes 0 and 1 hold the bits of the
  fp32 number 2^(E - 127); classes 2 and 3 hold four scale bytes, the first block lowest, 0 for
  blocks of zeros, 255 for NaN. Word 128 is the class, word 129 is E, the others are 0."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx import formats
from te_mx.formats import Format
from te_mx.formats.element import Element
from te_mx.formats.mxfp8 import E4M3
from te_mx.layouts.base import HasParts, Layout, Parts, Shape

TILE = 128
BLOCK = 32
MULTIPLIED = torch.float8_e4m3fn, torch.float8_e5m2  # elements that the tensor cores know
SCALE_WORDS = 132
FAR_EXPONENT = 190
MAX_SPREAD = 8
DEFAULT_SPREAD = 8
# In the place of a spread, for products whose rows keep their bits beside any others: tiles are of
# class 1, every row shares the largest e of its own blocks, and those that are this far below
# become zeros.
BY_ROWS = 9
_NOTHING = 15
EMPTY_EXPONENT = 127
# E2M1 times 2^d is E4M3 for d from FP4_HEADROOM - FP4_SPREAD to FP4_HEADROOM.
FP4_SPREAD, FP4_HEADROOM = 14, 6
CLASS_NAMES = ("tile-shared", "row-shared", "spread", "far")


class PackedOperand(NamedTuple):
    """codes uint8 [R, ld], scales int32 [S, T', 132]: see the module's docstring."""

    codes: Tensor
    scales: Tensor

    def operand_parts(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Codes without the padding of their rows, in the shape of `like` [R, K], and scales."""
        return self.codes[:, : like.shape[1]], self.scales


def packed_shapes(rows: int, k: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Shapes of codes and scales of a packed operand [rows, k]."""
    # As bits: of the sizes of a graph's symbols divisions would become guards.
    return (rows, (k + 15) & -16), ((k + 127) >> 7, ((rows + 255) >> 8) << 1, SCALE_WORDS)


def check_spread(spread: int) -> None:
    """Raise ValueError unless scales can be aligned over such a spread."""
    if not 0 <= spread <= BY_ROWS:
        raise ValueError(
            f"te_mx: spread must be in 0..{MAX_SPREAD}, or {BY_ROWS} (by rows), got {spread}"
        )


class Alignment(NamedTuple):
    """How far apart the scales of blocks may be that share one, and how far below the largest of
    them that one lies."""

    spread: int
    headroom: int
    by_rows: bool = False


def is_fp4(fmt: str) -> bool:
    """Whether a format has codes of 4 bits, which lie here as those of E4M3."""
    return formats.get(fmt).element.name == "e2m1"


def alignment(fmt: str, spread: int) -> Alignment:
    """That of a format, where its codes may be rounded over so many octaves."""
    how = (FP4_SPREAD, FP4_HEADROOM) if is_fp4(fmt) else (spread, 0)
    return Alignment(*how, spread == BY_ROWS)


def tile_element(fmt: str) -> Element:
    """The element of the codes in tiles."""
    return E4M3 if is_fp4(fmt) else formats.get(fmt).element


@lru_cache(maxsize=8)
def code_values(fmt: str) -> Tensor:
    """fp32 [256]: the value of every code."""
    return formats.get(fmt).element.decode(torch.arange(256, dtype=torch.uint8, device="cpu"))


@lru_cache(maxsize=8)
def shift_table(fmt: str) -> Tensor:
    """uint8 [16, 256]: entry [d, c] is code c times 2^-d, rounded to nearest even. Of MXFP4: the
    code of E4M3 that is code c times 2^(6 - d). Zeros for d 15.

    NaN and infinities stay what they are, zeros keep their sign."""
    if is_fp4(fmt):
        values = code_values(fmt).double() * 2.0**FP4_HEADROOM
        rows = [(values * 2.0**-d).to(E4M3.torch_dtype) for d in range(FP4_SPREAD + 1)]  # exact
        made = torch.stack(rows).view(torch.uint8)
        return torch.cat([made, made.new_zeros(1, 256)])
    element, values = formats.get(fmt).element, code_values(fmt).double()
    finite = values.isfinite()
    magnitude = torch.where(finite, values.abs(), 0.0)
    # Positive finite codes are 0, 1, 2, ... in the order of their values.
    ladder = magnitude[:128][finite[:128]]
    table = torch.empty(_NOTHING + 1, 256, dtype=torch.uint8, device="cpu")
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    for d in range(_NOTHING + 1):
        target = magnitude * (2.0**-d if d < _NOTHING else 0.0)
        exponent = torch.floor(torch.log2(target.clamp(min=2.0**-60)))
        quantum = torch.exp2(exponent.clamp(min=element.emin) - element.mantissa_bits)
        rounded = torch.round(target / quantum) * quantum  # torch.round is half to even
        code = torch.searchsorted(ladder, rounded).to(torch.uint8)
        table[d] = torch.where(finite, code | (codes & 0x80), codes)
    return table


class _Aligned(NamedTuple):
    """What aligning makes of tiles: class and exponent [T, S], exponents of rows [T, 128, S]."""

    cls: Tensor
    tile_e: Tensor
    row_e: Tensor


def _blocks(codes: Tensor, scales: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles codes uint8 [T, 128, S, 4, 32], bytes int64 [T, 128, S, 4] and counting blocks bool [T,
    128, S, 4]."""
    rows, k = codes.shape
    tiles, steps = -(-rows // TILE), -(-k // TILE)
    full_codes = codes.new_zeros(tiles * TILE, steps * TILE)
    full_codes[:rows, :k] = codes
    full_scales = scales.new_zeros(tiles * TILE, steps * 4)
    full_scales[:rows, : scales.shape[1]] = scales
    c = full_codes.view(tiles, TILE, steps, 4, BLOCK)
    e = full_scales.view(tiles, TILE, steps, 4).long()
    magnitude = formats.get(fmt).element.sign - 1
    counts = ((c & magnitude) != 0).any(-1) & (e != 255)
    return c, e, counts


def _align(e: Tensor, counts: Tensor, how: Alignment) -> _Aligned:
    """The classes of tiles from the bytes of their blocks, and the exponents that are shared."""
    spread, headroom, by_rows = how
    high, low = torch.where(counts, e, -1), torch.where(counts, e, 256)
    tile_high, tile_low = high.amax((1, 3)), low.amin((1, 3))  # [T, S]
    row_high, row_low = high.amax(3), low.amin(3)  # [T, 128, S]
    empty = tile_high < 0
    tile_e = torch.where(empty, EMPTY_EXPONENT, (tile_high - headroom).clamp(min=0))
    row_e = torch.where(row_high < 0, tile_e[:, None], (row_high - headroom).clamp(min=0))

    cls = torch.full_like(tile_e, 2)
    cls[tile_low == 0] = 3
    cls[((row_high < 0) | (row_high - row_low <= spread)).all(1)] = 1
    cls[tile_high - tile_low <= spread] = 0
    cls[tile_high > FAR_EXPONENT] = 3
    if by_rows:
        cls = torch.ones_like(cls)
        row_e = torch.where(row_high < 0, EMPTY_EXPONENT, row_e)
    cls[empty] = 0
    return _Aligned(cls, tile_e, row_e)


def _check_operand(codes: Tensor, scales: Tensor, spread: int) -> None:
    rows, k = codes.shape
    if tuple(scales.shape) != (rows, -(-k // BLOCK)):
        raise ValueError(
            f"scales must have shape {(rows, -(-k // BLOCK))}, one byte for every {BLOCK} columns "
            f"of codes {tuple(codes.shape)}, got {tuple(scales.shape)}"
        )
    check_spread(spread)


def classes_of(codes: Tensor, scales: Tensor, fmt: str, spread: int = DEFAULT_SPREAD) -> Tensor:
    """uint8 [T, S]: the class that every tile of an MX operand gets when it is packed.

    Arguments and errors are those of `pack`."""
    _check_operand(codes, scales, spread)
    _, e, counts = _blocks(codes, scales, fmt)
    return _align(e, counts, alignment(fmt, spread)).cls.to(torch.uint8)


def pack(codes: Tensor, scales: Tensor, fmt: str, spread: int = DEFAULT_SPREAD) -> PackedOperand:
    """Pack an MX operand: codes uint8 [R, K], one a byte, scales uint8 [R, ceil(K/32)] ->
    PackedOperand.

    Raises ValueError when the scales do not fit the codes, or spread is not in 0..8."""
    _check_operand(codes, scales, spread)
    rows, k = codes.shape
    c, e, counts = _blocks(codes, scales, fmt)
    tiles, _, steps, _ = e.shape
    how = alignment(fmt, spread)
    cls, tile_e, row_e = _align(e, counts, how)

    target = torch.where((cls == 0)[:, None], tile_e[:, None], row_e)  # [T, 128, S]
    shifted = counts & (cls < 2)[:, None, :, None]
    d = torch.where(shifted, target[..., None] - e, 0) + how.headroom  # [T, 128, S, 4]
    d = d.clamp(max=_NOTHING)
    table = shift_table(fmt).to(codes.device).view(-1)
    packed = table[d[..., None] * 256 + c.long()]
    packed[(e == 255)[..., None].expand_as(packed)] = 0x7F

    (_, ld), words_shape = packed_shapes(rows, k)
    out_codes = codes.new_zeros(rows, ld)
    out_codes[:, :k] = packed.reshape(tiles * TILE, steps * TILE)[:rows, :k]

    shared = torch.where(target == 0, 0x00400000, target << 23)
    own = torch.where(counts | (e == 255), e, 0)
    four = own[..., 0] | own[..., 1] << 8 | own[..., 2] << 16 | own[..., 3] << 24
    words = torch.where((cls < 2)[:, None], shared, four)
    return PackedOperand(out_codes, words_of(words, cls, tile_e, words_shape))


def words_of(rows: Tensor, cls: Tensor, tile_e: Tensor, shape: tuple[int, ...]) -> Tensor:
    """int32 [S, T', 132]: the words of rows int64 [T, 128, S], classes and exponents [T, S]."""
    tiles = len(rows)
    words = torch.zeros(shape, dtype=torch.int64, device=rows.device)
    words[:, :, :TILE] = EMPTY_EXPONENT << 23
    words[:, :, TILE + 1] = EMPTY_EXPONENT
    words[:, :tiles, :TILE] = rows.permute(2, 0, 1)
    words[:, :tiles, TILE] = cls.t()
    words[:, :tiles, TILE + 1] = tile_e.t()
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def classes(packed: HasParts) -> Tensor:
    """uint8 [T, S]: the class of every tile."""
    tiles = -(-packed.codes.shape[0] // TILE)
    return packed.scales[:, :tiles, TILE].t().to(torch.uint8).contiguous()


def packed_values(packed: HasParts, k: int, fmt: str) -> Tensor:
    """fp64 [R, K]: what the GEMM multiplies, including the rounding of shifted codes."""
    rows = packed.codes.shape[0]
    steps = packed.scales.shape[0]
    tiles = -(-rows // TILE)
    values = tile_element(fmt).decode(packed.codes[:, :k]).double()
    words = (
        packed.scales[:, :tiles, :TILE].permute(1, 2, 0).reshape(tiles * TILE, steps)[:rows]
    )  # [R, S]
    cls = packed.scales[:, :tiles, TILE].t().repeat_interleave(TILE, 0)[:rows]
    word = words.long() & 0xFFFFFFFF
    shared = (words & -0x10000).view(torch.float32).double()  # frozen.py: the lowest 16 bits
    parts = []
    for b in range(4):
        byte = word >> (8 * b) & 0xFF
        own = torch.where(byte == 255, torch.nan, torch.exp2(byte.double() - 127))
        parts.append(torch.where(cls < 2, shared, own))
    scale = torch.stack(parts, -1).reshape(rows, steps * 4).repeat_interleave(BLOCK, 1)[:, :k]
    return values * scale


def takes(fmt: Format) -> bool:
    """Whether the tensor cores read the codes of an MX format, or E4M3 has all of its numbers, with
    scales that can be aligned."""
    scaling = fmt.scaling
    known = fmt.element.torch_dtype in MULTIPLIED or fmt.element.name == "e2m1"
    return known and scaling.scale == "e8m0" and scaling.block == (1, BLOCK)


def takes_wide(fmt: Format) -> bool:
    """Whether the tensor cores read the codes of a format that has blocks of 1 x 128, whose scales
    can be aligned where they are powers of two."""
    scaling = fmt.scaling
    known = fmt.element.torch_dtype in MULTIPLIED
    return known and scaling.scale == "fp32" and scaling.block == (1, TILE)


def block_bytes(scales: Tensor, k: int) -> Tensor:
    """uint8 [R, ceil(k/32)]: the scale bytes of MX for fp32 powers of two [R, ceil(k/128)].

    Raises ValueError for scales that are no powers of two (or NaN). Waits for a device."""
    bits = scales.view(torch.int32)
    exponents = bits >> 23
    powers = (bits & 0x7FFFFF == 0) & (exponents > 0) & (exponents < 255)
    if not bool((powers | scales.isnan()).all()):
        raise ValueError(
            "te_mx: scales must be powers of two to be aligned, got other fp32 numbers; quantize "
            "by the rule 'pow2', or pack to layout 'sm90_factors'"
        )
    exponents = torch.where(scales.isnan(), 255, exponents).to(torch.uint8)
    return exponents.repeat_interleave(TILE // BLOCK, 1)[:, : -(-k // BLOCK)].contiguous()


class SM90Tiles(Layout):
    """Packed operands, with scales of a tile aligned where they differ by at most 2^spread."""

    scale_dtype, pitch = torch.int32, 16
    # Shifted codes are rounded; of MXFP4, values are kept and scale bytes are not.
    exact = False
    class_names = CLASS_NAMES

    def __init__(self, spread: int) -> None:
        check_spread(spread)
        self.spread = spread
        self.name = f"sm90:{spread}"
        self.beside = MAX_SPREAD if spread == BY_ROWS else spread  # of columns of the same read

    def takes(self, fmt: Format) -> bool:
        return takes(fmt) or takes_wide(fmt)

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        return (rows, k), packed_shapes(rows, k)[1]

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        if takes_wide(fmt):
            scales = block_bytes(scales, k)
        else:
            codes = fmt.unpack(codes, k)
        return pack(codes, scales, fmt.name, self.spread).operand_parts(codes)

    def values(
        self, fmt: Format, codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype
    ) -> Tensor:
        return packed_values(PackedOperand(codes, scales), k, fmt.name).to(dtype)

    def has_classes(self, fmt: Format) -> bool:
        return takes(fmt)

    def classes(self, fmt: Format, codes: Tensor, scales: Tensor) -> Tensor:
        return classes_of(codes, scales, fmt.name, self.spread)
