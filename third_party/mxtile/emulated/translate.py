"""Kernel sources for a compiler of C++: `__shared__` variables become references into the shared
memory of the running CTA, `kernel<<<...>>>(...)` a call. All else stays, line by line.

    translate.py FROM TO FILE...    files relative to FROM, written below TO where they
                                    changed, x.cu as x.cu.cpp
"""

import re
import sys
from pathlib import Path

ALIGN = r"(?:__align__\((?P<align>\d+)\)\s*)?"
TYPE = r"(?P<type>[\w:]+(?:<[^;=]*?>)?)"
DYNAMIC = re.compile(r"extern\s+__shared__\s+" + ALIGN + TYPE + r"\s+(?P<name>\w+)\[\];")
STATIC = re.compile(r"(?<!extern )__shared__\s+" + ALIGN + TYPE + r"\s+(?P<names>[^;=]+);")
VARIABLE = re.compile(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)$")
LAUNCH = re.compile(r"(?P<kernel>\b\w+(?:<[^;{}]*?>)?)\s*<<<(?P<how>.*?)>>>\s*\(", re.DOTALL)


def dynamic(found: re.Match) -> str:
    kind, name, align = found["type"], found["name"], found["align"] or "16"
    return f"{kind}* const {name} = simt::shared_bytes<{kind}>({align});"


def static(found: re.Match) -> str:
    made = []
    for declared in re.split(r",(?![^\[<(]*[\])>])", found["names"]):
        variable = VARIABLE.match(declared)
        if variable is None:
            raise SystemExit(f"what does this declare? {found[0]}")
        name, sizes = variable.groups()
        kind = found["type"] + sizes.strip()
        made.append(f"auto& {name} = simt::shared_variable<{kind}>([] {{}});")
    return " ".join(made)


def translated(source: str) -> str:
    source = DYNAMIC.sub(dynamic, source)
    source = STATIC.sub(static, source)
    source = source.replace("__noinline__ ", "[[gnu::noinline]] ")
    return LAUNCH.sub(r"simt::configured(\g<kernel>, \g<how>)(", source)


def main() -> None:
    root, to = Path(sys.argv[1]), Path(sys.argv[2])
    for name in sys.argv[3:]:
        made = f'#line 1 "{root / name}"\n' + translated((root / name).read_text())
        place = to / (f"{name}.cpp" if name.endswith(".cu") else name)
        if not place.exists() or place.read_text() != made:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(made)


if __name__ == "__main__":
    main()
