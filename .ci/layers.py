"""The order of the house: imports go down only, no device's name above its backend, no function
with a list of arguments that nobody can read."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("te_mx")
# Top to bottom; a folder imports itself and those below it.
ORDER = (
    "commands",
    "moe",
    "pytorch",
    "common",
    "inspection",
    "api",
    "te",
    "conversion",
    "integrations",
    "distributed",
    "fusion",
    "nn",
    "weights",
    "autograd",
    "context",
    "recipe",
    "recipes",
    "_ops",
    "backends",
    "dispatch",
    "layouts",
    "formats",
    "runtime",
    "torch_internals",
)
TOP = ("__init__", "__main__")
# Modules that users import by name: public, and so they may import every folder.
PLUGINS = {
    "integrations.hf_quantizer",
    "integrations.lightning",
    "integrations.peft",
    "integrations.torchtitan_converter",
}
DEVICES = re.compile(r"sm_?\d\d|hopper|blackwell|gfx\d|device_capability|compute capability", re.I)
ABOVE_DEVICES = {
    "nn", "weights", "autograd", "_ops", "recipes", "formats", "integrations", "pytorch", "te",
    "fusion", "context",
}  # fmt: skip
MOST_PARAMETERS = 10
# Public functions that have the arguments of what they stand for.
PUBLIC = {
    "te_mx/api/gemm.py:gemm",
    "te_mx/api/grouped.py:grouped_gemm",  # those of gemm, and how rows are grouped
    "te_mx/api/explain.py:explain",
    "te_mx/api/convert.py:convert_model",
    "te_mx/moe/gemm.py:grouped_gemm",  # vLLM's, and what is written
    "te_mx/te/attention.py:forward",  # Transformer Engine's
}


def rank(module: str) -> int:
    """The place of te_mx.<module> in the order; -1 for what stands above every folder."""
    first = module.split(".")[0]
    return -1 if first in TOP else ORDER.index(first)


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module below te_mx) of every import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == "te_mx":
                names = [f"te_mx.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("te_mx."):
                yield node.lineno, name.removeprefix("te_mx.")


def parameters(node: ast.FunctionDef) -> int:
    """How many arguments a function has, without self and cls."""
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "ctx")])


def complaints(path: Path) -> Iterator[str]:
    text = path.read_text()
    tree = ast.parse(text)
    parts = path.relative_to(PACKAGE).parts
    module = ".".join(parts).removesuffix(".py")
    own = -1 if module in PLUGINS else rank(module)
    for line, target in imported(tree):
        if rank(target) < own:
            yield f"{path}:{line}: imports te_mx.{target}, which stands above it"
    if parts[0] in ABOVE_DEVICES:
        for number, text_line in enumerate(text.splitlines(), 1):
            if DEVICES.search(text_line):
                yield f"{path}:{number}: a device's name above backends: {text_line.strip()}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and parameters(node) > MOST_PARAMETERS:
            constructor = node.name == "__init__" and parts[0] in ("nn", "te")
            if not constructor and f"{path}:{node.name}" not in PUBLIC:
                yield f"{path}:{node.lineno}: {node.name} has {parameters(node)} parameters"


def main() -> int:
    found = [line for path in sorted(PACKAGE.rglob("*.py")) for line in complaints(path)]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
