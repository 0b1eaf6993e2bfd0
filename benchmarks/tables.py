"""The tables and the picture of README and docs, made of benchmarks/results.

usage: python -m benchmarks.tables [--check]

A page has regions `<!-- table: name -->` .. `<!-- /table -->`; what stands between is written here
from the newest row of each kind. With --check nothing is written, and a page that differs is named.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks import results
from benchmarks.results import Record

ROOT = Path(__file__).parents[1]
PAGES = "README.md", "docs/index.md", "docs/performance.md", "benchmarks/README.md"
PICTURE = "docs/speed.svg"
REGION = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
H200, AMX, EPYC = "nvidia-h200", "amx", "amd-epyc"


@dataclass(frozen=True)
class Cell:
    """What rows of a machine say together: their mean. The patterns match whole fields."""

    machine: str
    benchmark: str
    shape: str = ".*"
    kernel: str = ".*"
    peer: str = ".*bf16.*"

    def rows(self, known: dict[str, list[Record]]) -> list[Record]:
        wanted = {name: getattr(self, name) for name in results.KEY}
        found = [
            row
            for row in known.get(self.machine, ())
            if all(re.fullmatch(pattern, row[name]) for name, pattern in wanted.items())
        ]
        if not found:
            raise LookupError(f"no row of {self.machine} is {wanted}: run that benchmark --save")
        newest = max(row["date"] for row in found)
        return [row for row in found if row["date"] == newest]


@dataclass(frozen=True)
class Line:
    """A line of a table: several cells stand beside each other, with a slash between."""

    what: str
    against: str
    cells: tuple[Cell, ...]
    bars: tuple[str, ...] = ()  # what the picture calls the cells


def h200(benchmark: str, *shapes: str, **more: str) -> tuple[Cell, ...]:
    return tuple(Cell(H200, benchmark, shape, **more) for shape in shapes or (".*",))


def llama(row: str, *recipes: str) -> tuple[Cell, ...]:
    return tuple(Cell(H200, row, kernel=f"fuse=True {recipe}") for recipe in recipes)


def decode_weights(form: str, *tokens: int) -> tuple[Cell, ...]:
    return tuple(Cell(H200, f"decode {form}", f"M{m} .*") for m in tokens)


RECIPES = "mxfp8", "float8_block", "deepseek_v3", "mxfp4", "mxfp4_all"
FIVE = "MXFP8 / Float8BlockScaling / DeepSeekV3 / MXFP4 forward / MXFP4 in all GEMMs"
LINEAR = Line(
    "`te_mx.Linear`, forward + backward, 16384 tokens, 4096 -> 14336, MXFP8",
    "`nn.Linear` bf16",
    h200("linear fwd\\+bwd", "16384 14336 4096"),
    ("Linear, forward + backward (H200)",),
)
MODEL = Line(
    "a Llama of 861 M parameters, a training step, MXFP8",
    "the same model in bf16",
    llama("861m-eager", "mxfp8"),
    ("training step of a Llama (H200)",),
)
MEMORY = Line("its peak memory (less is better)", "the same", llama("861m-eager GiB", "mxfp8"))
DECODE = Line(
    # MXFP4's kernel is newer than its results.
    "a frozen layer, one token, MXFP8 weights, mean of the shapes of LLMs",
    "cuBLAS bf16 in a CUDA graph",
    decode_weights("mxfp8", 1),
    ("decoding one token, MXFP8 (H200)",),
)
ON_CPU = Line(
    "`te_mx.Linear`, forward + backward, 2048 x 2048 x 2048, two cores with AMX",
    "`nn.Linear` bf16",
    (Cell(AMX, "linear fwd\\+bwd", "2048 2048 2048"),),
    ("Linear on two CPU cores (AMX)",),
)

TABLES: dict[str, list[Line]] = {
    "readme": [LINEAR, MODEL, MEMORY, DECODE, ON_CPU],
    "training": [
        Line("GEMM of quantized operands, 8192 / 4096 cube", "cuBLAS bf16",
             h200("gemm", "8192 8192 8192", "4096 4096 4096", peer="cuBLAS bf16")),
        Line("the same, 8192 cube: 1 % outlier channels / rows of the weight scaled at random / no "
             "two scales alike", "cuBLAS bf16",
             tuple(Cell(H200, name, "8192 8192 8192") for name in
                   ("gemm outliers", "gemm row scales", "gemm spread"))),
        Line("Linear, forward + backward, tokens x out x in: 8192 x 4096 x 4096 / "
             "16384 x 4096 x 4096 / 8192 x 14336 x 4096 / 16384 x 14336 x 4096", "`nn.Linear` bf16",
             h200("linear fwd\\+bwd", "8192 4096 4096", "16384 4096 4096", "8192 14336 4096",
                  "16384 14336 4096")),
        Line(f"the Llama of 861 M, eager, {FIVE}", "the same in bf16",
             llama("861m-eager", *RECIPES)),
        *(Line(f"{model}, likewise", "the same in bf16", llama(row, *RECIPES)) for row, model in (
            ("8b-eager", "six layers of Llama-3-8B"),
            ("mixtral", "shapes of Mixtral"),
            ("qwen3-moe", "shapes of Qwen3-MoE"))),
        Line("peak memory, MXFP8: 861 M / six layers of 8 B / Mixtral / Qwen3-MoE (less is better)",
             "the same in bf16",
             tuple(Cell(H200, f"{row} GiB", kernel="fuse=True mxfp8")
                   for row in ("861m-eager", "8b-eager", "mixtral", "qwen3-moe"))),
        Line("quantize, both directions, 8192 x 8192", "a device copy of as many bytes",
             h200("quantize both", "8192 8192", peer=".*copy.*")),
    ],
    "inference": [
        Line(f"frozen Linear, {weights}, 1 / 4 / 16 / 32 / 64 tokens",
             "cuBLAS bf16 in a CUDA graph", decode_weights(form, 1, 4, 16, 32, 64))
        for form, weights in (("mxfp8", "MXFP8 weights"),
                              ("mxfp4", "MXFP4 weights"))
    ] + [
        Line(f"`fused_experts`, {form.upper()}, {experts} experts, top {top}, {k} -> {n}, 1 / 8 / "
             "32 / 128 / 512 / 2,048 / 8,192 tokens", "`grouped_mm` bf16 in a CUDA graph",
             tuple(Cell(H200, f"mixture {form}", f"{m}x{top} of {experts} {k} {n}")
                   for m in (1, 8, 32, 128, 512, 2048, 8192)))
        for form in ("mxfp8", "mxfp4")
        for experts, top, k, n in ((64, 6, 2048, 1408), (128, 8, 4096, 1536), (32, 4, 2880, 2880))
    ],
    "cpu": [
        Line("GEMM of quantized operands, 1024 / 2048 / 4096 cube", "`F.linear` bf16",
             tuple(Cell(AMX, "gemm TN", f"{n} {n} {n}", peer="F.linear bf16")
                   for n in (1024, 2048, 4096))),
        Line("Linear, forward + backward, 2048 cube / 4096 x 4096 x 1024", "`nn.Linear` bf16",
             tuple(Cell(AMX, "linear fwd\\+bwd", shape)
                   for shape in ("2048 2048 2048", "4096 4096 1024"))),
        Line("frozen Linear, 4096 x 4096, 1 / 4 / 16 tokens", "`nn.Linear` bf16",
             tuple(Cell(AMX, "decode", f"{m} 4096 4096", peer="nn.Linear bf16")
                   for m in (1, 4, 16))),
    ] + [
        Line(f"the same with inputs as they are, {form}, two cores without AMX", "`nn.Linear` bf16",
             tuple(Cell(EPYC, name, f"{m} 4096 4096", peer="nn.Linear bf16")
                   for m in (1, 4, 16)))
        for form, name in (("MXFP4", "weights only"), ("NVFP4", "weights only, NVFP4"))
    ],
}  # fmt: skip


def known_rows(folder: Path = results.FOLDER) -> dict[str, list[Record]]:
    """Rows by machine; those of the newest CPU with AMX also under that word."""
    machines = results.machines(folder)
    rows = {name: results.rows_of(files) for name, files in machines.items()}
    for name, files in machines.items():
        if files[0]["machine"].get("level") == "amx":
            rows.setdefault(AMX, rows[name])
    return rows


def number(cell: Cell, known: dict[str, list[Record]]) -> float:
    return mean(row["value"] for row in cell.rows(known))


def table(lines: list[Line], known: dict[str, list[Record]]) -> str:
    """A markdown table, and under it the days and commands that it comes from."""
    made = ["| what | times | against |", "|---|---|---|"]
    sources: dict[str, dict[str, None]] = {}
    for line in lines:
        values = " / ".join(f"{number(cell, known):.2f}" for cell in line.cells)
        made.append(f"| {line.what} | **{values}** | {line.against} |")
        for cell in line.cells:
            for row in cell.rows(known):
                sources.setdefault(name_of(cell.machine), {})[row["date"]] = None
    where = "; ".join(f"{name}, {', '.join(sorted(dates))}" for name, dates in sources.items())
    return "\n".join(made) + f"\n\nMeasured: {where}; the commands stand in benchmarks/results.\n"


def name_of(machine: str) -> str:
    return {
        H200: "NVIDIA H200", AMX: "two cores of an Intel Xeon with AMX",
        EPYC: "two of an AMD EPYC without",
    }[machine]  # fmt: skip


def newest(known: dict[str, list[Record]]) -> str:
    """How many rows each machine has, and what they reach."""
    made = [
        "| machine | newest | rows | reach what they must | of these, the aim |",
        "|---|---|---|---|---|",
    ]
    for name, rows in known.items():
        if name == AMX:
            continue
        judged = [row["verdict"] for row in rows if row["verdict"]]
        reached = len(judged) - judged.count("SHORT")
        date = max(row["date"] for row in rows)
        made.append(
            f"| {name} | {date} | {len(rows)} | {reached} of {len(judged)} "
            f"| {judged.count('aim')} |"
        )
    return "\n".join(made) + "\n"


def short_rows(known: dict[str, list[Record]]) -> str:
    """What misses what it must reach: the worst row of a benchmark, and how many of them do."""
    made = ["| machine | the worst row / what it must be (rows that miss of all) |", "|---|---|"]
    for name, rows in known.items():
        found: dict[str, list[Record]] = {}
        for row in rows if name != AMX else ():
            if row["verdict"]:
                found.setdefault(row["benchmark"], []).append(row)
        said = []
        for benchmark, judged in found.items():
            short = [row for row in judged if row["verdict"] == "SHORT"]
            if short:
                worst = max(short, key=_distance)
                said.append(
                    f"{benchmark} {worst['value']:.2f}/{worst['target']['must']:g} "
                    f"({len(short)}/{len(judged)})"
                )
        if said:
            made.append(f"| {name} | {'; '.join(said)} |")
    return "\n".join(made) + "\n"


def _distance(row: Record) -> float:
    """How far a row is from what it must reach, as a ratio above 1."""
    must, value = row["target"]["must"], row["value"]
    return value / must if row["target"]["lower_is_better"] else must / value


def picture(known: dict[str, list[Record]]) -> str:
    """Bars of how many times faster than bf16 the lines of README's table are, as SVG."""
    bars = [
        (name, number(cell, known))
        for line in (LINEAR, MODEL, DECODE, ON_CPU)
        for name, cell in zip(line.bars, line.cells, strict=True)
    ]
    left, scale, step = 300, 180, 34  # room for names in the widest of usual fonts
    width, height = left + int(scale * 2.9), step * len(bars) + 40
    one = left + scale
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="sans-serif" font-size="14">',
        "<title>Speed of te_mx, bf16 = 1</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, (name, value) in enumerate(bars):
        y = 12 + i * step
        made += [
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{y}" width="{scale * value:.0f}" height="20" fill="#3f6fb5"/>',
            f'<text x="{left + scale * value + 8:.0f}" y="{y + 15}">{value:.2f}x</text>',
        ]
    made += [
        f'<line x1="{one}" x2="{one}" y1="4" y2="{height - 26}" stroke="#888" '
        'stroke-dasharray="4 3"/>',
        f'<text x="{one}" y="{height - 10}" text-anchor="middle" fill="#555">bf16 = 1</text>',
        "</svg>",
    ]
    return "\n".join(made) + "\n"


def pages(known: dict[str, list[Record]]) -> Iterator[tuple[Path, str]]:
    """What every page should say."""
    made = {name: table(lines, known) for name, lines in TABLES.items()}
    made |= {"newest": newest(known), "short": short_rows(known)}
    for name in PAGES:
        path = ROOT / name
        if path.is_file():
            yield path, REGION.sub(lambda m: m[1] + made[m[2]] + m[3], path.read_text())
    yield ROOT / PICTURE, picture(known)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__.split("\n")[0]
    )
    p.add_argument("--check", action="store_true", help="write nothing, fail where a page differs")
    args = p.parse_args(argv)
    differ = 0
    for path, text in pages(known_rows()):
        if path.exists() and path.read_text() == text:
            continue
        differ += 1
        if args.check:
            print(f"{path.relative_to(ROOT)} does not say what benchmarks/results has: "
                  "python -m benchmarks.tables")  # fmt: skip
        else:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if args.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
