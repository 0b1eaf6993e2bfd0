"""Every Triton kernel compiled for every target, with no GPU, and the instruction that multiplies
looked for in what comes out. usage: python tests/backends/triton/targets.py write | <target> ..

`write` puts the table into docs/devices.md, with which targets are compared. What was compiled is
kept in Triton's cache.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(sys.prefix, "aside_triton")))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from te_mx import formats
from te_mx.backends.triton import quantize as quantizers
from te_mx.backends.triton import tiles
from te_mx.backends.triton.kernels import gemm, grouped, nibbles, nvfp4, quantize, steps, units

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32), "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64), "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1250": GPUTarget("hip", "gfx1250", 32),
}  # fmt: skip
PAIRS = ("mxfp8 x mxfp8", "mxfp8 x mxfp4", "mxfp4 x mxfp4", "nvfp4 x nvfp4", "blockwise")
_PRODUCTS = re.compile(r"tcgen05\.mma\S*|wgmma\.mma_async\S*|mma\.sync\S*|v_mfma_\w+|v_wmma_\w+")
_BLOCK_SCALED, _FP8 = (
    re.compile(r"block_scale|mfma_scale|wmma_scale"),
    re.compile(r"e4m3|fp8|f8f6f4"),
)
_PAGE = Path(__file__).parents[3] / "docs" / "devices.md"
_MARKS = "<!-- tests/backends/triton/targets.py -->", "<!-- end -->"
# Bytes of shared memory a program may have, by the target whose tiles one has.
_SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840,
           "gfx1250": 327680}  # fmt: skip
_FLAGS = ("BIAS", "AUX", "GELU", "DGELU", "ERF", "ACCUMULATE")


class Made(NamedTuple):
    """What a target makes of a kernel: the instructions that multiply, or why it does not."""

    kernel: str
    target: str
    products: tuple[str, ...]
    error: str = ""
    text: str = ""
    shared: int = 0

    @property
    def how(self) -> str:
        """What multiplies: block scales, FP8 or bf16."""
        if self.error:
            return "does not compile"
        if any(_BLOCK_SCALED.search(one) for one in self.products):
            return "block scales"
        return "FP8" if any(_FP8.search(one) for one in self.products) else "bf16 inside"

    @property
    def fits(self) -> bool:
        """Whether a multiprocessor has so much shared memory."""
        return self.shared <= _SHARED.get(table_of(self.target), 101376)

    @property
    def copies(self) -> bool:
        """Whether operands lie in shared memory twice, or go through registers, for tensor cores
        that read them there."""
        reads = self.target in ("sm_90", "sm_100", "sm_103") and self.how != "bf16 inside"
        reads = reads and "nvfp4" not in self.kernel  # whose scales do, to tensor memory
        if "cp.async.bulk.tensor" in self.text:  # by the memory itself
            return re.search(r"mma_async[^;]*\}, *\{", self.text) is not None
        loop, drained, _ = self.text.partition("cp.async.wait_group \t0;")
        copied = re.search(r"ld\.shared\.v|mma_async[^;]*\}, *\{", loop) is not None
        return reads and (copied or not drained)


def compiled(fn: Any, words: dict[str, Any], pointers: dict[str, str], target: GPUTarget) -> Any:
    """Code of a kernel: pointers and constants by name, all other arguments are int32."""
    names = fn.arg_names
    given = inspect.signature(fn.fn).parameters.values()
    words = {
        p.name: p.default for p in given if p.default is not p.empty and p.name not in pointers
    } | words
    of = {n: "constexpr" if n in words else pointers.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
        if of[n] != "constexpr" and "desc" not in of[n]
    }  # fmt: skip
    constants = {(names.index(n),): value for n, value in words.items() if n in names}
    last = "row" if words.get("A_FIRST") else "k"
    strides = [f"{one}_{last}" for one in ("a", "b", "as", "bs")]
    unit = {(names.index(n),): 1 for n in strides if n in names}
    for at in unit:
        of[names[at[0]]] = "constexpr"
        aligned.pop(at, None)
    options = {key: words[key] for key in ("num_warps", "num_stages") if key in words}
    options["enable_fp_fusion"] = False
    return triton.compile(
        ASTSource(fn, of, constants | unit, aligned), target=target, options=options
    )


def table_of(target: str) -> str:
    """The target of the table of tiles that has its own."""
    return target if target in tiles.TILES else tiles.kind((int(target[3:-1]), int(target[-1])))


def sides_of(pair: str, target: str, few: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Constants and pointers of a product of two formats."""
    e8m0 = pair != "blockwise"
    scales = "*u8" if e8m0 else "*fp32"
    pointers = dict.fromkeys(("a", "b"), "*u8") | dict.fromkeys(("a_scales", "b_scales"), scales)
    pointers |= dict.fromkeys(("out", "bias", "aux", "gelu_in"), "*bf16")
    words: dict[str, Any] = dict.fromkeys(_FLAGS, False) | {"BIAS": True, "GROUP": 8}
    words |= {"MX": e8m0, "A_LOOSE": False, "B_LOOSE": False, "EVEN": True}
    words |= {"A_FIRST": False, "B_FIRST": False}
    block = 16 if "nvfp4" in pair else 32 if e8m0 else 128
    without = target == "sm_80" or (block == 16 and not target.startswith(("sm_1", "gfx12")))
    words |= {"A_BLOCK": block, "B_BLOCK": block, "DECODED": "bf16" if e8m0 and without else ""}
    words |= tiles.TILES[table_of(target)][e8m0, few].options
    if e8m0:
        names = ["e4m3" if one == "mxfp8" else "e2m1" for one in pair.split(" x ")]
        words |= {"A": names[0], "B": names[1], "A_HEIGHT": 1, "B_HEIGHT": 1}
    else:
        tl = gemm.tl
        element = tl.float8e4b8 if target == "gfx942" else tl.float8e4nv
        words |= {"A": element, "B": element, "A_HEIGHT": 1, "B_HEIGHT": 128}
        if target == "sm_80":
            words |= {"A": "e4m3", "B": "e4m3", "DECODED": "bf16"}
    return words, pointers


def products_of(pair: str, target: str) -> Made:
    """The GEMM of two formats."""
    words, pointers = sides_of(pair, target, False)
    if pair == "blockwise" and target in tiles.BY_TMA:
        words |= tiles.BY_TMA[target][0].options
        for side, rows in (("a", words["BM"]), ("b", words["BN"])):
            pointers[side] = f"tensordesc<fp8e4nv[{rows}, {words['BK']}]>"
        return _made(pair, target, gemm.gemm_blocks, words, pointers, TARGETS[target])
    return _made(pair, target, gemm.gemm, words, pointers, TARGETS[target])


def others_of(target: str) -> list[Made]:
    """Few rows with k in parts, groups and routed rows."""
    words, pointers = sides_of("mxfp8 x mxfp4", target, True)
    wholes = {"WHOLE": True}, dict.fromkeys(("a_whole", "b_whole"), "*fp32")
    small, of_small = sides_of("nvfp4 x nvfp4", target, True)
    few = small | wholes[0] | {"SPLIT": True, "BIAS": False}, of_small | wholes[1]
    ends = {"sums": "*fp32", **pointers}, dict.fromkeys(("starts", "ends"), "*i64")
    lists = dict.fromkeys(("ids", "experts", "count"), "*i32") | {"weights": "*fp32"}
    names = "ids", "counts", "expert_map", "sorted_ids", "expert_ids", "count"
    of_lists = dict.fromkeys(names, "*i32")
    flags = {"MOST": 8, "BLOCK": 32, "LISTED": True, "WEIGHTED": True}
    wide, of_wide = sides_of("blockwise", target, False)
    turned = sides_of("mxfp8 x mxfp8", target, False)[0] | flags
    turned |= {"EVEN": False, "A_FIRST": True, "B_FIRST": True}
    made = (
        ("nvfp4, few rows", gemm.gemm, few[0], few[1] | {"out": "*fp32"}),
        ("parts of k", gemm.add_parts, words | {"GELU": True, "AUX": True, "m": 1}, ends[0]),
        ("groups of rows", grouped.gemm_rows, wide | flags, of_wide | ends[1]),
        ("groups of k", grouped.gemm_k, turned, pointers | ends[1]),
        ("routed rows", grouped.gemm_routed, words | flags, pointers | lists),
        ("slots", grouped.count_slots, {"C": 1024}, dict.fromkeys(("ids", "counts"), "*i32")),
        ("lists", grouped.align_slots, {"C": 1024, "MOST": 8, "MAPPED": True}, of_lists),
    )
    return [_made(name, target, *one, TARGETS[target]) for name, *one in made]


def quantizer_of(fmt: str, rule: str, target: str) -> list[Made]:
    """The quantizer of a format, both directions; of 4 bits with all that is random."""
    one, kind = formats.get(fmt), TARGETS[target]
    scale, bits = one.scaling.scale, one.element.bits
    words = quantizers.of_rule(one, rule) | {"ROW": True, "COL": True, "TURNED": bits == 4}
    words |= {"R": 128, "C": 128} if scale == "fp32" else {"R": 32, "C": 128 if bits == 8 else 64}
    if scale != "e4m3":
        words["HARDWARE"] = kind.backend == "cuda" and kind.arch >= 89 and bits == 8
    scales = "*fp32" if scale == "fp32" else "*u8"
    pointers = {"x": "*bf16", "row_codes": "*u8", "col_codes": "*u8"}
    pointers |= {"row_scales": scales, "col_scales": scales}
    if bits == 4:
        pointers["seed"] = "*i64"
        words |= {"RANDOM": True, "ROW_SIZE": 32, "ROW_SIGNS": 0x9ABCDEF1, "COL_SIZE": 16}
    made = [units_of(fmt, rule, target)] if bits != 6 and one.scaling.block[0] == 1 else []
    if made and bits == 4 and kind.backend == "cuda" and kind.arch >= 90:
        made += words_of(fmt, rule, target)
    if scale != "e4m3":
        family = quantize.quantize_blockwise if scale == "fp32" else quantize.quantize_mx
        return [*made, _made(f"quantize {fmt}", target, family, words, pointers, kind)]
    words["TO"] = nvfp4.tl.bfloat16
    pointers |= {"row_amax": "*i32", "col_amax": "*i32", "row_whole": "*fp32", "col_whole": "*fp32"}
    if one.scaling.block[0] == 1:
        words |= {"TURNED": False, "GROUPS": 8}
        pointers |= dict.fromkeys(("starts", "ends"), "*i64")
    return made + [
        _made(f"{kernel} {fmt}", target, getattr(nvfp4, kernel), words, pointers, kind)
        for kernel in ("quantize_nvfp4", "amax")
    ]


def words_of(fmt: str, rule: str, target: str) -> list[Made]:
    """The same of whole tiles of bf16, and the largest magnitude before it."""
    kernel, (height, width) = nibbles.quantize_words, quantizers.WORDS
    words = quantizers.of_rule(formats.get(fmt), rule)
    words = {k: v for k, v in words.items() if k in kernel.arg_names}
    words |= {"FAMILY": "mx" if fmt == "mxfp4" else "nvfp4", "R": height, "C": width}
    words["num_warps"] = height * width // 2048
    pointers = {"x": "*bf16"} | dict.fromkeys(("row_codes", "col_codes"), "*u8")
    pointers |= dict.fromkeys(("row_scales", "col_scales"), "*u8")
    if fmt != "mxfp4":
        pointers |= dict.fromkeys(("found", "row_whole", "col_whole"), "*fp32")
    made = [_made(f"words {fmt}", target, kernel, words, pointers, TARGETS[target])]
    if fmt != "mxfp4":
        pointers["parts"], (width, height) = "*i32", quantizers.AMAX_WORDS
        words = {"W": width, "TURNS": height, "num_warps": 8, "N": 512}
        made += [
            _made(f"words {fmt}", target, kernel, words, pointers, TARGETS[target])
            for kernel in (nibbles.amax_words, nibbles.scale_tensor)
        ]
    return made


def units_of(fmt: str, rule: str, target: str) -> Made:
    """The quantizer of both directions from one read."""
    one, kind, kernel = formats.get(fmt), TARGETS[target], units.quantize_units
    family = {"e8m0": "mx", "fp32": "blockwise", "e4m3": "nvfp4"}[one.scaling.scale]
    words = {k: v for k, v in quantizers.of_rule(one, rule).items() if k in kernel.arg_names}
    height, width = quantizers.UNITS[family, True]
    cuda = kind.backend == "cuda"
    casts, packed = cuda and kind.arch >= 89, cuda and kind.arch >= 90
    words |= {"FAMILY": family, "BITS": one.element.bits, "R": height, "C": width, "EVEN": packed}
    words |= {"ASM": cuda, "CASTS": casts, "PACKED": packed}
    words |= {"TURNED": True, "num_warps": height * width // 64 // kind.warp_size}
    pointers = {"x": "*bf16", "row_codes": "*u8", "col_codes": "*u8"}
    pointers |= dict.fromkeys(
        ("row_scales", "col_scales"), "*fp32" if family == "blockwise" else "*u8"
    )
    if family == "nvfp4":
        pointers |= {"row_amax": "*i32", "row_whole": "*fp32", "col_whole": "*fp32"}
    return _made(f"both {fmt}", target, kernel, words, pointers, kind)


def _made(
    name: str, target: str, fn: Any, words: dict[str, Any], pointers: dict[str, str],
    kind: GPUTarget,
) -> Made:  # fmt: skip
    try:
        found = compiled(fn, words, pointers, kind)
    except Exception as error:  # a compiler may fail in any way: the table says so
        while error.__cause__ is not None:
            error = error.__cause__
        return Made(name, target, (), f"{type(error).__name__}: {str(error)[-300:]}")
    text = found.asm["ptx" if kind.backend == "cuda" else "amdgcn"]
    found_in = tuple(sorted(set(_PRODUCTS.findall(text))))
    return Made(name, target, found_in, text=text, shared=found.metadata.shared)


def products(targets: Iterable[str] = TARGETS) -> list[Made]:
    return [products_of(pair, target) for target in targets for pair in PAIRS]


def steps_of(target: str) -> list[Made]:
    """The fused steps: a norm and a gated derivative, and the sums of norms both ways."""
    kind, one = TARGETS[target], formats.get("mxfp8_e4m3")
    words = quantizers.of_rule(one, "rceil") | {"ROW": True, "COL": True, "TURNED": False}
    words |= {"HARDWARE": False, "R": 32, "C": 128, "num_warps": 2, "TO": nvfp4.tl.bfloat16}
    pointers = dict.fromkeys(("row_codes", "col_codes", "row_scales", "col_scales"), "*u8")
    pointers |= {"x": "*bf16", "out": "*bf16"}
    of_norm = dict.fromkeys(("mean", "rstd", "weight", "bias"), "*fp32")
    sums = {"x": "*bf16", "inverse": "fp32", "eps": "fp32"} | of_norm
    back = {"dz": "*bf16", "dx": "*bf16", "dweight": "*fp32", "dbias": "*fp32"}
    norm, act = {"STEP": "norm"}, {"STEP": "dact", "ACT": "clamped_silu", "GATED": True}
    mx = quantize.quantize_mx
    return [
        _made("norm", target, mx, words | norm, pointers | of_norm, kind),
        _made("dact", target, mx, words | act, pointers | {"grad": "*bf16"}, kind),
        _made("norm_sums", target, steps.norm_sums, {"R": 4}, sums, kind),
        _made("norm_backward", target, steps.norm_backward, {"R": 1}, sums | back, kind),
        _made("norm_weights", target, steps.norm_weights, {"R": 16, "C": 256}, sums | back, kind),
    ]


def quantizers_of(target: str) -> list[Made]:
    ways = [("mxfp8_e4m3", "rceil"), ("mxfp4", "even"), ("fp8_e4m3_1x128", "pow2")]
    ways += [("mxfp6_e3m2", "floor"), ("nvfp4", "te"), ("nvfp4_16x16", "te_4over6_mse")]
    made = [one for fmt, rule in ways for one in quantizer_of(fmt, rule, target)]
    return made + steps_of(target)


def cells(target: str) -> str:
    """What the page says of a target, after compiling for it."""
    return " | ".join(one.how for one in products([target]))


def written() -> dict[str, str]:
    """What the page says, by target."""
    text = _PAGE.read_text()
    lines = text[text.index(_MARKS[0]) : text.index(_MARKS[1])].splitlines()[3:]
    rows = [line.strip("| ").split(" | ", 1) for line in lines]
    return {target: found for names, found in rows for target in names.split(", ")}


def write() -> None:
    text = _PAGE.read_text()
    rows: dict[str, list[str]] = {}
    for target in TARGETS:
        rows.setdefault(cells(target), []).append(target)
    head = [f"| Triton 3.9 for | {' | '.join(PAIRS)} |", "|---|" + "---|" * len(PAIRS)]
    body = [f"| {', '.join(names)} | {found} |" for found, names in rows.items()]
    start, end = text.index(_MARKS[0]), text.index(_MARKS[1]) + len(_MARKS[1])
    lines = [_MARKS[0], *head, *body, _MARKS[1]]
    _PAGE.write_text(text[:start] + "\n".join(lines) + text[end:])


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write()
    for target in sys.argv[1:] if sys.argv[1:] != ["write"] else ():
        made = products([target]) + others_of(target) + quantizers_of(target)
        print(*(f"{one.kernel}: {one.how} {one.shared} {one.error}" for one in made), sep="\n")
        assert not any(one.error or one.copies or not one.fits for one in made)
        found = cells(target)
        assert written()[target] == found, f"docs/devices.md does not say {found} of {target}"
