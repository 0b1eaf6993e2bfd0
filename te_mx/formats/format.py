"""Format: an element and its scaling under one name. It is the specification: what the bytes of a
quantized matrix are and what they mean, in plain torch, on every device. And the formats by name.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_mx.formats import packing, stochastic
from te_mx.formats.element import MAGNITUDE, Element
from te_mx.formats.hadamard import Hadamard, split_name
from te_mx.formats.scaling import (
    NAN_SCALE,
    Scaling,
    is_stochastic,
    power_of_two,
    scale_bytes,
    split_rule,
)
from te_mx.runtime.arguments import check_dense, check_size, shown

READ = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Format:
    """Codes of `element` with scales of `scaling`, for a matrix [rows, k] whose blocks run along k.

    ======  ===================================  ===================================================
    part    dtype                                shape
    ======  ===================================  ===================================================
    codes   uint8, packed without gaps in a row  codes_shape: [rows, code_bytes(k)]
    scales  scaling.storage                      scales_shape: [rows, k] / block, each rounded up
    ======  ===================================  ===================================================

    value = code * 2^(byte - 127); byte 255 makes the whole block NaN, byte 0 is 2^-127. `quantize`
    and `dequantize` are those of E8M0 scales and blocks of one row; a family of formats with other
    scales overrides them. A format is equal to itself only, and pickles and copies as its name.

    With a `transform`, codes are those of the transformed matrix, and `dequantize` gives its values
    (`transform.invert` leads back). Such a format is another one: only operands with the same
    transform are multiplied. It has the name "<format>+<transform>", "mxfp4+rht32:0x1234abcd".
    """

    name: str
    element: Element
    scaling: Scaling
    short_names: tuple[str, ...] = ()
    transform: Hadamard | None = None

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return get, (self.name,)

    # ------------------------------------------------------------------------------------- shapes
    @property
    def block(self) -> int:
        """Elements along k that share a scale."""
        return self.scaling.block[1]

    @property
    def is_square(self) -> bool:
        """Whether blocks are as high as wide: codes and scales turn with the matrix."""
        return self.scaling.block[0] == self.scaling.block[1] and self.element.bits == 8

    @property
    def exact_dtype(self) -> torch.dtype:
        """A dtype of torch that holds what codes decode to: bf16, above 2^-133, where scales are
        powers of two; fp32 else, where values are rounded once."""
        return torch.bfloat16 if self.scaling.scale == "e8m0" else torch.float32

    @property
    def tensor_scaled(self) -> bool:
        """Whether codes times scales are multiplied by a third part, a scale of the tensor."""
        return self.scaling.scale == "e4m3"

    @property
    def untransformed(self) -> "Format":
        """The format without a transform: what codes mean is the same."""
        return self if self.transform is None else get(self.name.partition("+")[0])

    def blocks(self, k: int) -> int:
        """Blocks that cover k elements; the last one may be shorter."""
        return -(-k // self.block)

    def code_bytes(self, k: int) -> int:
        """Bytes of k codes."""
        return packing.packed_size(k, self.element.bits)

    def codes_shape(self, rows: int, k: int) -> tuple[int, int]:
        """Shape of the codes of [rows, k]."""
        return rows, self.code_bytes(k)

    def scales_shape(self, rows: int, k: int) -> tuple[int, int]:
        """Shape of the scales of [rows, k]."""
        return -(-rows // self.scaling.block[0]), self.blocks(k)

    def tensor_scale_shape(self, rows: int) -> tuple[int, ...]:
        """Shape of the tensor scale of [rows, k], where there is one."""
        return ()

    # ------------------------------------------------------------------------------------ packing
    def pack(self, codes: Tensor) -> Tensor:
        """Codes one a byte [.., k] -> bytes [.., code_bytes(k)], low bits first; zeros at the end
        of a row."""
        return packing.pack(codes, self.element.bits)

    def unpack(self, packed: Tensor, k: int) -> Tensor:
        """The inverse of pack: bytes [.., code_bytes(k)] -> codes one a byte [.., k]."""
        return packing.unpack(packed, k, self.element.bits)

    # ------------------------------------------------------------------------------ specification
    def quantize(self, x: Tensor, rule: str, random: Tensor | None = None) -> tuple[Tensor, ...]:
        """Codes and scales of x [rows, k], fp32, bf16 or fp16 with any strides; behind them the
        tensor scale of formats that have one.

        code = round(x * 2^(127 - byte)) to nearest even, at most +-max; the byte is
        `scaling.scale_bytes` of the block's largest magnitude. A NaN or an Inf makes byte 255 of
        its block, and of its codes NaN, or 0 where the element has none. Where the format has a
        transform, x is transformed before anything else.

        Args:
            x: the matrix.
            rule: a scale rule; with "+sr" behind it codes are rounded as `stochastic.encode` says.
            random: int32 [rows, k], `stochastic.random_bits` for each element; with "+sr" only.

        Raises:
            TypeError: x is no tensor of such a dtype, or random no int32 tensor.
            ValueError: x is no matrix, the format does not know the rule, or random bits are
                missing, not wanted or of another shape.
        """
        check_matrix("x", x, *READ)
        self.check_rule(rule)
        check_random(random, rule, x)
        k = x.shape[1]
        x = x.detach().resolve_neg().to(torch.float32)
        if self.transform is not None:
            x = self.transform.apply(x)
        bits = self._in_blocks(x.view(torch.int32))
        amax = (bits & MAGNITUDE).amax(-1)  # NaN and Inf come out on top
        scales = scale_bytes(amax, self.element, split_rule(rule)[0])
        power = 127 - scales.unsqueeze(-1)
        if random is None:
            codes = self.element.encode(bits, power)
        else:
            codes = stochastic.encode(self.element, bits, power, self._in_blocks(random))
        codes.masked_fill_((scales == NAN_SCALE).unsqueeze(-1), self.element.nan_code or 0)
        codes = codes.flatten(1)[:, :k]
        return self.pack(codes).contiguous(), scales.to(torch.uint8)

    def _in_blocks(self, values: Tensor) -> Tensor:
        """[rows, k] as [rows, blocks, block], with zeros behind k."""
        rows, k = values.shape
        whole = _pad_last(values, self.blocks(k) * self.block)
        return whole.reshape(rows, self.blocks(k), self.block)

    def dequantize(self, codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype) -> Tensor:
        """Values [rows, k] of codes and scales, rounded once to dtype.

        A value of 2^128 or more (rounding up the largest fp32 numbers gives one) becomes Inf in
        dtypes that cannot hold it.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: codes and scales are not those of a matrix with k columns.
        """
        k = self.check_parts(codes, scales, k, dtype)
        exponents = scales.int() - 127
        # Two factors, so that neither they nor the first product leave the normal range of fp32.
        half = exponents >> 1
        other = power_of_two(exponents - half)
        other = torch.where(scales == NAN_SCALE, torch.nan, other)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self.decode(codes, k, power_of_two(half).to(wide), other).to(dtype)

    def decode(self, codes: Tensor, k: int, *factors: Tensor) -> Tensor:
        """Values [rows, k] of codes [rows, code_bytes(k)], times the factors [rows, blocks(k)] of
        their blocks, one after the other. fp32, or fp64 if a factor is."""
        whole = self.blocks(k) * self.block
        codes = _pad_last(codes, self.code_bytes(whole))
        values = self.element.decode(self.unpack(codes, whole))
        values = values.reshape(len(codes), self.blocks(k), self.block)
        for factor in factors:
            values = values * factor.unsqueeze(-1)
        return values.flatten(1)[:, :k].contiguous()

    # ------------------------------------------------------------------------------------- checks
    def check_rule(self, rule: Any) -> None:
        """Raise ValueError unless the format knows a scale rule."""
        if not self.scaling.takes(rule):
            raise ValueError(
                f"scale rule of {self.name} must be one of {self.scaling.shown_rules}, got "
                f"{shown(rule)}"
            )

    def check_parts(self, codes: Any, scales: Any, k: Any, dtype: Any) -> int:
        """k as an int. Raises what `dequantize` says it raises."""
        check_matrix("codes", codes, torch.uint8)
        check_matrix("scales", scales, self.scaling.storage)
        if not isinstance(dtype, torch.dtype) or dtype not in (*READ, torch.float64):
            raise TypeError(
                f"dtype must be float32, bfloat16, float16 or float64, got {shown(dtype)}"
            )
        k = check_size("k", k)
        rows = len(codes)
        shapes = self.codes_shape(rows, k), self.scales_shape(rows, k)
        if (codes.shape, scales.shape) != shapes or codes.device != scales.device:
            raise ValueError(
                f"{self.name} codes and scales of {rows} rows and k={k} must have shapes "
                f"{shapes[0]} and {shapes[1]} and be on one device, got {tuple(codes.shape)} on "
                f"{codes.device} and {tuple(scales.shape)} on {scales.device}"
            )
        return k


def check_matrix(name: str, x: Any, *dtypes: torch.dtype) -> None:
    """Raise TypeError or ValueError unless x is a dense matrix of one of these dtypes."""
    if not isinstance(x, Tensor) or x.dtype not in dtypes:
        known, use = " or ".join(map(str, dtypes)), ""
        if isinstance(x, Tensor) and torch.uint8 in dtypes and x.element_size() == 1:
            use = f"; use {name}.view(torch.uint8)"
        elif isinstance(x, Tensor) and torch.float32 in dtypes and x.is_floating_point():
            use = f"; use {name}.float()"
        raise TypeError(f"{name} must be a tensor of {known}, got {shown(x)}{use}")
    check_dense(name, x)
    if x.dim() != 2:
        raise ValueError(f"{name} must be a matrix, got {shown(x)}")


def check_random(random: Tensor | None, rule: str, x: Tensor) -> None:
    """Raise unless random bits come with a rule that rounds with them, one for every element."""
    wanted = is_stochastic(rule)
    if random is None and not wanted:
        return
    if random is None or not wanted:
        got = "none" if random is None else "some"
        raise ValueError(
            f"random bits belong to a rule that ends in '+sr', got {got} with rule {rule!r}; "
            "te_mx.formats.stochastic.random_bits makes them"
        )
    check_matrix("random", random, torch.int32)
    if random.shape != x.shape or random.device != x.device:
        raise ValueError(
            f"random must have the shape and device of x, {tuple(x.shape)} on {x.device}, got "
            f"{tuple(random.shape)} on {random.device}"
        )


def in_blocks(values: Tensor, block: tuple[int, int]) -> Tensor:
    """[rows, cols] as [blocks down, height, blocks across, width], with zeros behind both ends."""
    (rows, cols), (height, width) = values.shape, block
    tall, wide = -(-rows // height), -(-cols // width)
    if wide * width != cols or tall * height != rows:
        missing = (0, wide * width - cols, 0, tall * height - rows)
        values = torch.nn.functional.pad(values, missing)
    return values.reshape(tall, height, wide, width)


def _pad_last(values: Tensor, size: int) -> Tensor:
    """Zeros behind the last dimension, up to size."""
    missing = size - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


# ---------------------------------------------------------------------------------------- by name
_formats: dict[str, Format] = {}  # in the order of registration
_by_any_name: dict[str, Format] = {}  # names and short names


def register(fmt: Format) -> Format:
    """Make `fmt` known by its name and its short names; returns it.

    Raises:
        ValueError: a name that is taken.
    """
    for name in (fmt.name, *fmt.short_names):
        if name in _by_any_name:
            raise ValueError(
                f"format {fmt.name!r}: the name {name!r} is taken by {_by_any_name[name]}; "
                "choose another one"
            )
    _formats[fmt.name] = fmt
    _by_any_name.update(dict.fromkeys((fmt.name, *fmt.short_names), fmt))
    return fmt


def get(name: str) -> Format:
    """The format called `name`; short names too ("e4m3" is "mxfp8_e4m3").

    "+rht16:0x1234abcd" or "+rht32:.." behind the name of an MX format is that format with a
    `Hadamard` transform of 16 or 32 along k, and these signs.

    Raises:
        ValueError: no such format.
    """
    found = _by_any_name.get(name) if isinstance(name, str) else None
    if found is None and isinstance(name, str):
        found = _transformed(name)
    if found is None:
        known = ", ".join(map(repr, _by_any_name))
        more = ""
        if isinstance(name, str) and "+" in name:
            more = (
                '; a Hadamard transform is "+rht16:0x" or "+rht32:0x" and one to eight hex digits '
                "of signs behind the name of an MX format"
            )
        raise ValueError(f"fmt must be one of {known}, got {shown(name)}{more}")
    return found


def _transformed(name: str) -> Format | None:
    """A format with a transform, made when its name is first heard."""
    parts = split_name(name)
    if parts is None:
        return None
    base, transform = get(parts[0]), parts[1]
    if base.scaling.scale == "fp32" or base.transform is not None:
        raise ValueError(
            f"fmt {name!r}: only MX formats and NVFP4 take a Hadamard transform, and one only"
        )
    proper = f"{base.name}+{transform}"
    made = _by_any_name.get(proper)
    if made is None:
        made = dataclasses.replace(base, name=proper, short_names=(), transform=transform)
    _by_any_name[proper] = _by_any_name[name] = made
    return made


def names() -> tuple[str, ...]:
    """Names of all registered formats, without the short ones, and without those with a tensor
    scale, of which there are three parts ("nvfp4")."""
    return tuple(name for name, fmt in _formats.items() if not fmt.tensor_scaled)


def every_name() -> tuple[str, ...]:
    """The names of these, too."""
    return tuple(_formats)
