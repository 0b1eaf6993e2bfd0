"""The cases of the conformance set: what is quantized to what, how bytes become a digest, and what
products may be off by."""

import ctypes
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx import formats
from te_mx.api.gemm import gemm, quantize
from te_mx.formats import Format, blockwise
from te_mx.formats import mxfp4_checkpoints as checkpoints
from te_mx.formats.stochastic import random_bits
from te_mx.layouts.plain import COLS

# ------------------------------------------------------------------------------------------ inputs
# The inputs of the conformance set, by rule: integers on bits of fp32, the same everywhere.
_WORD = 0xFFFFFFFF
_BLOCK = 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ONE, _INF = 127 << 23, 0x7F800000


def words(seed: int, rows: int, cols: int) -> Tensor:
    """int64 [rows, cols] of 32 random bits: MurmurHash3's finalizer of seed * 0x9E3779B9 + the
    number of the element, modulo 2^32."""
    h = (torch.arange(rows * cols) + seed * 0x9E3779B9) & _WORD
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = ((h ^ (h >> shift)) * multiplier) & _WORD
    return (h ^ (h >> 16)).view(rows, cols)


def _exponents(step: int) -> Tensor:
    """Every exponent: in row r the first of every 32 has the biased exponent r, the others one that
    is up to 15 lower."""
    w = words(1, 255, 160)
    first = torch.arange(160) % _BLOCK == 0
    exponent = torch.arange(255)[:, None] - torch.where(first, 0, w >> 24 & 15)
    return exponent.clamp(min=0) << 23 | w & 0x7FFFFF | (w & 1 << 23) << 8


def _ties(step: int) -> Tensor:
    """Every tie, and both neighbours: in row r blocks of 32 start with a number of five bits of
    mantissa or a neighbour of one, and go on through all such numbers of 21 binades."""
    row, col = torch.arange(96)[:, None], torch.arange(2112)
    top = _ONE + (row // 3 << 18) + (row % 3 - 1) * step
    j = col // _BLOCK * 31 + col % _BLOCK - 1
    number = _ONE - (j // 96 << 23) + (j % 32 << 18) + (j // 32 % 3 - 1) * step
    number = torch.where(number > top, number - (1 << 23), number)
    number = torch.where(j < 2016, number, 0).where(col % _BLOCK > 0, top)
    return number | (words(2, 96, 2112) & 1 << 23) << 8


def _spread(step: int) -> Tensor:
    """Sums of four bytes, so nearly normal, rows of every size, and outliers."""
    w, of_row = words(3, 97, 300), words(4, 97, 1)
    sums = sum((w >> 8 * i & 255 for i in range(4)), torch.zeros_like(w)) - 510
    outlier = torch.where(words(5, 97, 300) % 61 == 0, 10, 0)
    values = torch.ldexp(sums.float(), (of_row % 33 - 24 + outlier).int())
    return values.view(torch.int32).long() & _WORD


def _special(step: int) -> Tensor:
    """Blocks of zeros of both signs, of subnormal numbers, of the smallest; NaN, Inf and the
    largest number among others."""
    w, row, col = words(6, 64, 160), torch.arange(64)[:, None], torch.arange(160)
    kind, at = (row * 5 + col // _BLOCK) % 8, (col % _BLOCK).expand(64, -1)
    sign = (w & 1 << 23) << 8
    made = (120 + (w >> 28 & 7)) << 23 | w & 0x7FFFFF | sign
    for which, value in ((0, 0), (1, 1 << 31), (2, w & 0x7FFFFF | sign), (3, step | sign)):
        made = torch.where(kind == which, value, made)
    odd = ((4, 0x7FC00000), (5, _INF), (6, _INF | 1 << 31), (7, _INF - step))
    for which, value in odd:
        made = torch.where((kind == which) & (at == 7), value, made)
    return made


_MAKERS: dict[str, Callable[[int], Tensor]] = {
    "exponents": _exponents, "ties": _ties, "spread": _spread, "special": _special,
}  # fmt: skip
INPUTS = tuple(_MAKERS)


@functools.cache
def make(name: str, dtype: str) -> Tensor:
    """The input of a name, in "fp32" or "bf16": the upper halves of fp32, neighbours stay such."""
    narrow = dtype == "bf16"
    bits = _MAKERS[name](1 << 16 if narrow else 1)
    if narrow:
        bits = bits >> 16
        return torch.where(bits < 1 << 15, bits, bits - (1 << 16)).short().view(torch.bfloat16)
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).int().view(torch.float32)


_FILE = Path(__file__).parent / "digests.json"
SEED = 0x0123456789ABCDEF  # of stochastic rounding
_SIGNS = "0x1234abcd"
_MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")
_WHOLE = "tensor scale"
_PARTS = "code", "scale", _WHOLE
_ROWS, _COLS = "rows", "columns"


class Case(NamedTuple):
    """One format, by one rule, in one direction, of inputs in one dtype."""

    fmt: str
    rule: str
    direction: str
    dtype: str

    def __str__(self) -> str:
        return " ".join(self)


class Result(NamedTuple):
    """What a case gave: inputs whose digests differ, and how their bytes do from the specification
    in plain torch; None where these are the same, and so the set is not of this version."""

    case: str
    wrong: "dict[str, Difference | None]"


@functools.cache
def cases() -> tuple[Case, ...]:
    """All cases of quantizers."""
    ways = [(fmt, rule) for fmt in _MX for rule in ("rceil", "floor", "even", "rceil+sr")]
    ways += [(f"mxfp4+rht{size}:{_SIGNS}", "rceil") for size in (16, 32)]
    blocks = [name for name in formats.names() if formats.get(name).scaling.scale == "fp32"]
    ways += [(name, rule) for name in blocks for rule in ("pow2", "fp32", "fp32:1e-12")]
    ways += [
        (name, rule) for name in ("nvfp4", "nvfp4_16x16", "nvfp4_rows")
        for rule in formats.get(name).scaling.rules
    ]  # fmt: skip
    found = itertools.product(ways, (_ROWS, _COLS), DTYPES)
    every = (Case(*way, direction, dtype) for way, direction, dtype in found)
    return tuple(one for one in every if one[0] != "nvfp4_rows" or one.direction == _ROWS)


@functools.cache
def expected() -> dict[str, dict[str, str]]:
    """The digests that the package holds, by case and input."""
    found: dict[str, dict[str, str]] = json.loads(_FILE.read_text())
    return found


def digest(*parts: Tensor) -> str:
    """The first 12 hex digits of SHA-256 of the bytes of parts behind each other, row by row; NaN
    of fp32 has the bytes 00 00 C0 7F."""
    made = hashlib.sha256()
    for part in parts:
        held = part.detach().cpu().contiguous()
        if held.dtype == torch.float32:
            held = torch.where(held.isnan(), torch.nan, held)
        made.update(ctypes.string_at(held.data_ptr(), held.nbytes))
    return made.hexdigest()[:12]


# ----------------------------------------------------------------------------------------- quantize
def specified(case: Case, name: str) -> tuple[Tensor, ...]:
    """Codes [rows, code bytes], scales and, if there is one, the tensor scale, in plain torch; of
    columns those of the transposed matrix."""
    fmt, x = formats.get(case.fmt), make(name, case.dtype)
    random = None
    if case.rule.endswith("+sr"):
        random = random_bits(torch.tensor([SEED]), *x.shape)
    if case.direction == _COLS:
        x, random = x.t(), None if random is None else random.t()
    return fmt.quantize(x, case.rule, random)


def made(case: Case, name: str, device: torch.device) -> tuple[Tensor, ...]:
    """The same by te_mx.quantize, on whatever kernel it runs; columns lie as the matrix does."""
    fmt, x = formats.get(case.fmt), make(name, case.dtype).to(device)
    rule = case.rule.removesuffix("+sr")
    random, both = rule != case.rule, case.fmt != "nvfp4_rows"
    q = quantize(
        x, case.fmt, columnwise=both, columnwise_transposed=False if both else None,
        scale_rule=rule, rounding="stochastic" if random else "nearest",
        seed=SEED if random else None,
    )  # fmt: skip
    if case.direction == _COLS:
        codes, scales = q.columnwise_data, q.columnwise_scale
        assert codes is not None and scales is not None
        parts = codes.view(torch.uint8), scales.view(fmt.scaling.storage)
        parts = COLS.unpack(fmt, *parts, x.shape[0])
    else:
        assert q.codes is not None and q.scales is not None
        parts = q.codes, q.scales
    return parts if q.tensor_scale is None else (*parts, q.tensor_scale)


class Difference(NamedTuple):
    """How two results differ: percent of block scales and of codes, whether the scale of the tensor
    does, and the first difference."""

    scales: float
    codes: float
    whole: bool
    first: str

    def __str__(self) -> str:
        whole = " t" if self.whole else ""
        return f"{self.scales:.3g} / {self.codes:.3g}{whole}"


def difference(
    fmt: Format, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]
) -> Difference | None:
    """Of two results; None where they are the same."""
    shares, first = dict.fromkeys(_PARTS, 0.0), ""
    for name, mine, other in zip(_PARTS, ours, theirs, strict=False):
        mine, other = mine.cpu(), other.cpu()
        if mine.shape != other.shape:
            shapes = tuple(other.shape), tuple(mine.shape)
            return Difference(100.0, 100.0, True, f"{name}s of {shapes[0]}, not {shapes[1]}")
        if name == "code" and fmt.element.bits < 8:
            k = mine.shape[1] * 8 // fmt.element.bits
            mine, other = fmt.unpack(mine, k), fmt.unpack(other, k)
        apart = (mine != other) & ~((mine != mine) & (other != other))
        if count := int(apart.sum()):
            at = apart.nonzero()[0].tolist()
            values = other[tuple(at)].item(), mine[tuple(at)].item()
            shares[name] = 100 * count / apart.numel()
            first = first or f"{name}{at or ''} is {values[0]:.9g}, not {values[1]:.9g}"
    return Difference(shares["scale"], shares["code"], shares[_WHOLE] > 0, first) if first else None


def check(case: Case, device: torch.device) -> Result:
    """Whether te_mx makes the bytes of the set on a device."""
    wrong = {}
    for name in INPUTS:
        parts = made(case, name, device)
        if digest(*parts) != expected().get(str(case), {}).get(name):
            wrong[name] = difference(formats.get(case.fmt), specified(case, name), parts)
    return Result(str(case), wrong)


# ------------------------------------------------------------------------------------------ layouts
def of_layouts() -> Iterator[tuple[str, str]]:
    """(name, digest) of the bytes that other libraries' layouts have of the input "ties" in bf16:
    MXFP4 as compressed-tensors, gpt-oss, DeepGEMM and ggml store it, torchao's blockwise FP8, and
    blockwise FP8 without negative zero. And of what all codes and scales decode to."""
    x = make("ties", "bf16")
    k = x.shape[1]
    e2m1, e8m0 = formats.get("mxfp4").quantize(x, "even")
    yield "mxfp4 of compressed-tensors", digest(*checkpoints.to_compressed_tensors(e2m1, e8m0, k))
    yield "mxfp4 of gpt-oss", digest(*checkpoints.to_gpt_oss(e2m1, e8m0, k))
    codes, words = checkpoints.to_deep_gemm(e2m1, e8m0, k)
    yield "mxfp4 of DeepGEMM", digest(codes, words.t())
    yield "mxfp4 of ggml", digest(checkpoints.to_ggml(e2m1, e8m0, k))
    for name in (
        "act_quant_lhs", "act_quant_rhs", "act_quant_transposed_lhs", "weight_quant_rhs",
        "weight_quant_transposed_rhs",
    ):  # fmt: skip
        for dtype in blockwise.DTYPES:
            codes, scales = getattr(blockwise, name)(x, 128, dtype)
            yield f"{name} of torchao, {str(dtype)[6:]}", digest(codes.view(torch.uint8), scales)
    given = formats.get("fp8_e4m3_128x128").quantize(x, "fp32")
    fnuz = formats.convert(given[0], given[1], "fp8_e4m3_128x128", "fp8_e4m3fnuz_128x128")
    yield "DeepSeek's e4m3 128x128 as fnuz", digest(*fnuz)
    for name in (*_MX, "nvfp4"):
        fmt = formats.get(name)
        every = torch.arange(1 << fmt.element.bits, dtype=torch.uint8)
        every = fmt.pack(every.repeat(-(-fmt.block // len(every)))[None])
        k = every.shape[1] * 8 // fmt.element.bits
        scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, fmt.blocks(k))
        values = fmt.dequantize(every.repeat(256, 1), scales, k, torch.float32)
        yield f"values of {name}", digest(values)


# ----------------------------------------------------------------------------------------- products
_PAIRS = (
    ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp8_e5m2"), ("mxfp8_e5m2", "mxfp8_e4m3"),
    ("mxfp4", "mxfp4"), ("mxfp8_e4m3", "mxfp4"), ("nvfp4", "nvfp4"),
    ("fp8_e4m3_1x128", "fp8_e4m3_1x128"), ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
)  # fmt: skip
_SIZES = ((1, 64, 256), (97, 130, 300), (256, 256, 512))  # m, n, k
# What shifted codes and FP8 tensor cores may add: of k times the largest of both rows.
_OF_THE_LARGEST = {"cpu": 0.0, "cuda": 2.0**-9}


class Off(NamedTuple):
    """A product, the kernel that made it and its largest error, of what it may be."""

    name: str
    kernel: str
    error: float

    @property
    def right(self) -> bool:
        """Whether it is inside of its bound, NaN being outside."""
        return self.error <= 1.0


def products(device: torch.device) -> Iterator[Off]:
    """Every pair of formats and every layout, within |d - exact| <= 4 (k + 2) 2^-24 sum |a b| +
    2^-150; on GPUs k 2^-9 max|a| max|b| of both rows more: FP8 tensor cores may sum in 13 bits."""
    from te_mx.api.explain import explain

    for (a, b), (m, n, k) in itertools.product(_PAIRS, _SIZES):
        left, right = (_matrix(seed, size, k) for seed, size in ((7, m), (8, n)))
        q, w = (quantize(x.to(device), fmt) for x, fmt in ((left, a), (right, b)))
        exact, bound = _bound(q.dequantize(torch.float64), w.dequantize(torch.float64), device)
        got = gemm(A=w, B=q, out_dtype=torch.float32).out.double()
        error = ((got - exact).abs() / bound).max().item()
        yield Off(f"{a} x {b} {m}x{n}x{k}", explain(w, q).kernel, error)


def _matrix(seed: int, rows: int, k: int) -> Tensor:
    """Numbers with rows and blocks of several sizes."""
    w, block = words(seed, rows, k), words(seed + 8, rows, -(-k // 32))
    power = block.repeat_interleave(32, 1)[:, :k] % 7 - 12
    return torch.ldexp((w % 511 - 255).float(), power.int())


def _bound(a: Tensor, b: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    k = a.shape[1]
    bound = 4 * (k + 2) * 2.0**-24 * (a.abs() @ b.abs().t()) + 2.0**-150
    largest = a.abs().amax(1, keepdim=True) * b.abs().amax(1)
    return a @ b.t(), bound + k * _OF_THE_LARGEST[device.type] * largest
