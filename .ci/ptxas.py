"""What ptxas said of the Hopper kernels: none may spill registers, no wgmma may be serialized, and
there are no more of them than MOST, because each takes its time to build.

usage: python .ci/ptxas.py BUILD_FOLDER

Reads the log that csrc/sm90/keep_log.sh left beside every object. A build without the kernels has
nothing to check.
"""

import re
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "csrc" / "sm90"
# Kernels: what a value at run time serves as well needs no instance. 15 are those of NVFP4:
# products of 8 to 256 rows of bf16 (six) and fp16 (three), values of both layouts, factors of a
# product and what follows it, the quantizer (two); two more of MXFP4, whose rows are quantized, and
# one that unpacks it; two multiply groups of rows with MXFP4 that stands still. Four are those of
# few rows at precision "invariant". Two quantize rows of few groups, and activated
# rows. Four: parts and transforms of 32 for NVFP4, tiles of 192 rows of its weights.
MOST = 290
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALIZED = re.compile(r"C7510|wgmma\.mma_async instructions are serialized")


def kernels(log: str) -> list[tuple[str, int, int]]:
    """(mangled name, bytes spilled, registers) of every kernel in a log."""
    found = []
    for part in log.split("ptxas info    : Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", part)
        spills, registers = SPILLS.search(part), REGISTERS.search(part)
        assert name and spills and registers, f"ptxas writes its output in another way now:\n{part}"
        found.append((name[1], sum(map(int, spills.groups())), int(registers[1])))
    return found


def main(build: Path) -> int:
    # Objects of an earlier configuration may still lie there; its module does not.
    if not list(build.glob("_sm90*")):
        print("ptxas: this build has no Hopper kernels")
        return 0
    objects = build / "csrc" / "sm90" / "CMakeFiles" / "te_mx_sm90.dir"
    wrong, count = [], 0
    for source in sorted(SOURCES.glob("*/*.cu")):
        name = source.relative_to(SOURCES)
        log = objects / f"{name}.o.log"
        if not log.exists():
            wrong.append(f"{name}: no log {log}; build first")
            continue
        text = log.read_text()
        found = kernels(text)
        count += len(found)
        wrong += [f"{name}: {kernel} spills {n} bytes" for kernel, n, _ in found if n]
        wrong += [
            f"{name}: {line.strip()}" for line in text.splitlines() if SERIALIZED.search(line)
        ]
    if count > MOST:
        wrong.append(f"{count} kernels, at most {MOST} are meant to be (csrc/sm90/README.md)")
    print("\n".join(wrong) if wrong else f"ptxas: {count} kernels without spills")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
