"""NVFP4 and MXFP4 on Hopper, in plain torch: weights that stand still as its tensor cores take
them, the bytes of csrc/include/te_mx/sm90_nvfp4.h; and NVFP4 that is multiplied at once, as what it
stands for."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_mx.formats import Format
from te_mx.layouts.base import HasParts, Layout, Parts, Shape

FORMATS, MXFP4 = ("nvfp4", "nvfp4_16x16"), "mxfp4"
ROWS, QUAD = 64, 128
BIAS = 119  # of scales of MXFP4, so that they are exponents of bf16
# Of bits 0 to 3 of a code, their places in pairs 0 to 3 of a word; of pair 3 the second lies first.
_BITS = (6, 3, 0, 14), (7, 4, 1, 10), (8, 5, 2, 11), (15, 12, 9, 13)


def _to_bytes() -> Tensor:
    """Bytes of E4M3, 0 to 127, as E5M3 without sign: more exponents, and none subnormal."""
    small = [0, 104, 112, 116, 120, 122, 124, 126]
    return torch.tensor([*small, *range(128, 247), 255], dtype=torch.uint8, device="cpu")


class SM90Nvfp4(Layout):
    """Codes [blocks of 64 x 128, 4096] and scales [blocks, 512], or 256 of MXFP4, as registers of a
    product have them; rows are filled up to 64, which `unpack` gives back. Scales are positive, as
    all writers have them."""

    name, any_rows, row_block = "sm90_nvfp4", True, ROWS

    def takes(self, fmt: Format) -> bool:
        return fmt.name in (*FORMATS, MXFP4)

    def replaces(self, fmt: Format, wanted: str, precision: str, grouped: bool) -> bool:
        if fmt.tensor_scaled:
            return wanted in ("rows", "sm90_bf16") and not grouped
        # Products in FP8 unpack MXFP4.
        return precision == "adaptive" or (precision == "invariant" and not grouped)

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        blocks = -(-rows // ROWS) * -(-k // QUAD)
        return (blocks, ROWS * QUAD // 2), (blocks, ROWS * QUAD // fmt.scaling.block[1])

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        # By bands of a 64th of the rows, which take 36 bytes a number meanwhile.
        rows, high = -(-len(codes) // (64 * ROWS)) * ROWS or ROWS, fmt.scaling.block[0]
        made, at = self.empty(fmt, len(codes), k, codes.device), 0
        for band in zip(codes.split(rows), scales.split(rows // high), strict=True):
            packed = self._pack(fmt, *band, k)
            for whole, part in zip(made, packed, strict=True):
                whole[at : at + len(part)] = part
            at += len(packed[0])
        return made

    def _pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        shapes = self.shapes(fmt, len(codes), k)
        c = pad(fmt.unpack(codes, k), (0, -k % QUAD, 0, -len(codes) % ROWS)).int()
        # [n/64, quad, r, g, k/128, h, i, u, t, second]: row 16 quad + 8 r + g, k 64 h + 16 i + 8 u
        # + 2 t + second; pair r + 2 u.
        c = c.view(-1, 4, 2, 8, c.shape[1] // QUAD, 2, 4, 2, 4, 2)
        c = c.permute(0, 4, 1, 5, 3, 8, 6, 7, 2, 9).flatten(-3, -2)  # [.., g, t, i, pair, second]
        c[..., 3, :] = c[..., 3, :].flip(-1)
        words = torch.zeros_like(c[..., 0, :])
        for bit, at in enumerate(torch.tensor(_BITS, device=c.device)[..., None]):
            words += ((c >> bit & 1) << at).sum(-2)
        words = words.to(torch.int16).contiguous().view(torch.uint8)  # low bytes first
        if fmt.name == MXFP4:
            s = scales + BIAS  # mod 256
        else:
            s = _to_bytes().to(c.device)[scales.int() & 0x7F]
            s = s.repeat_interleave(fmt.scaling.block[0], 0)
        blocks = QUAD // fmt.scaling.block[1]
        s = pad(s, (0, -s.shape[1] % blocks, 0, -len(s) % ROWS))
        s = s.view(-1, 4, 2, 8, s.shape[1] // blocks, blocks).permute(0, 4, 1, 3, 5, 2)
        return words.reshape(shapes[0]), s.reshape(shapes[1])

    def plain(self, fmt: Format, held: Any, k: int) -> Parts:
        codes, scales = super().plain(fmt, held, k)
        blocks = -(-held.rows // fmt.scaling.block[0])
        return codes[..., : held.rows, :].contiguous(), scales[..., :blocks, :].contiguous()

    def unpack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        steps = -(-k // QUAD)
        halves = codes.contiguous().view(torch.int16).int()
        halves = halves.view(-1, steps, 4, 2, 8, 4, 4, 1, 2)
        c = torch.zeros_like(halves.expand(*halves.shape[:-2], 4, 2))
        for bit, at in enumerate(torch.tensor(_BITS, device=codes.device)[..., None]):
            c |= (halves >> at & 1) << bit  # [.., g, t, i, pair, second]
        c[..., 3, :] = c[..., 3, :].flip(-1)
        c = c.unflatten(-2, (2, 2)).permute(0, 2, 8, 4, 1, 3, 6, 7, 5, 9)
        c = c.reshape(-1, steps * QUAD)[:, :k].to(torch.uint8)
        if fmt.name == MXFP4:
            s = scales - BIAS
        else:
            back = scales.new_zeros(256)
            back[_to_bytes().to(back.device).int()] = torch.arange(
                128, dtype=torch.uint8, device=back.device
            )
            s = back[scales.int()]
        high, wide = fmt.scaling.block
        s = s.view(-1, steps, 4, 8, QUAD // wide, 2).permute(0, 2, 5, 3, 1, 4)
        s = s.reshape(len(c), -1)[::high, : -(-k // wide)]
        return fmt.pack(c), s.contiguous()


class SM90Values(Layout):
    """Codes times block scales, which bf16 holds exactly: bf16 [rows, k] as bytes, or [k, rows] of
    columns, as the matrix lies. Of what cuBLAS multiplies as soon as it was quantized. Groups of
    tokens are slices of it."""

    exact, refused = False, "formats without a tensor scale"

    def __init__(self, name: str, k_first: bool) -> None:
        self.name, self.k_first = name, k_first
        self.alone, self.tokens = name, "k" if k_first else "rows"

    def takes(self, fmt: Format) -> bool:
        return fmt.tensor_scaled

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        return (k, 2 * rows) if self.k_first else (rows, 2 * k), (0,)

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        made = fmt.dequantize(codes, scales, k, torch.bfloat16)
        # NOTE: contiguous() leaves strides that say nothing, which no other dtype has a view of.
        made = (made.t() if self.k_first else made).clone(memory_format=torch.contiguous_format)
        return made.view(torch.uint8), scales.new_empty(0)

    def values(
        self, fmt: Format, codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype
    ) -> Tensor:
        made = codes.view(torch.bfloat16).to(dtype)
        return made.t() if self.k_first else made

    def put_group(self, into: HasParts, part: HasParts, start: int, end: int, group: int) -> None:
        into.codes[start:end] = part.codes

    def group_of(self, tokens: HasParts, start: int, end: int, group: int) -> Parts:
        return tokens.codes[start:end], tokens.scales


SM90_VALUES = SM90Values("sm90_bf16", False), SM90Values("sm90_bf16_cols", True)
SM90_NVFP4 = SM90Nvfp4()
