"""House rules that no linter knows: small files, nothing half done, no test switched off."""

import re
import subprocess
import sys
from pathlib import Path

MAX_BYTES = 500_000
MAX_LINES = {".py": 800, ".cpp": 600, ".h": 600, ".hpp": 600, ".cu": 600, ".cuh": 600}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# A test may ask for hardware (skipif with a reason); it may not be skipped for good.
SWITCHED_OFF = re.compile(r"(@|marks=)pytest\.mark\.(skip\b|xfail)|unittest\.skip\b|assert True\b")
# Kernels are written in the words of third_party/mxtile, so that another tile library could serve.
INTRINSICS = re.compile(r"\b_mm\d*_|\b_tile_\w+\(|\basm\b|#include <\w*intrin\.h>")
# torch does not bring numpy, so te_mx runs without.
NUMPY = re.compile(r"\b(import|from) numpy\b|\bfrom_numpy\(|\.numpy\(")


def complaints(path: Path) -> list[str]:
    size = path.stat().st_size
    if size > MAX_BYTES:
        return [f"{path}: {size // 1000} kB, at most {MAX_BYTES // 1000}"]
    limit = MAX_LINES.get(path.suffix)
    if limit is None:
        return []
    lines = path.read_text().splitlines()
    found = []
    if len(lines) > limit:
        found.append(
            f"{path}: {len(lines)} lines, at most {limit}: is there more than one idea in it?"
        )
    for number, line in enumerate(lines, 1):
        if UNFINISHED.search(line):
            found.append(f"{path}:{number}: unfinished: {line.strip()}")
        if path.suffix == ".py" and SWITCHED_OFF.search(line):
            found.append(f"{path}:{number}: a test is switched off: {line.strip()}")
        if path.parts[0] == "te_mx" and NUMPY.search(line):
            found.append(f"{path}:{number}: needs numpy, which te_mx does not: {line.strip()}")
        if path.parts[0] == "csrc" and INTRINSICS.search(line):
            found.append(f"{path}:{number}: raw instruction outside mxtile: {line.strip()}")
    return found


def main() -> int:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    this = Path(__file__).resolve()
    paths = [Path(n) for n in names if Path(n).is_file() and Path(n).resolve() != this]
    found = [line for path in paths for line in complaints(path)]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
