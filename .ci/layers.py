"""The order of the house: imports go down only and never in a circle, no device's name above its
backend, no function with a list of arguments that nobody can read."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("te_mx")
# Top to bottom; a folder imports itself and those below it.
ORDER = (
    "commands",
    "conformance",
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
# Their docstrings tell users on which device an argument matters, and `doctor` what a device lacks.
NAME_DEVICES = {"api", "inspection", "commands", "backends"}
NAME_BACKENDS = {"commands", "backends"}
MOST_PARAMETERS = 10
KERNELS = Path("te_mx/backends/triton/kernels")  # in a language without records
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


def module_of(path: Path) -> str:
    """The name below te_mx of a file; a package's is that of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def is_module(name: str) -> bool:
    path = PACKAGE / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module below te_mx) of every import, those inside functions and for types alone
    too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            inside = f"{node.module}.".removeprefix("te_mx.")
            names = [
                f"{node.module}.{alias.name}" if is_module(inside + alias.name) else node.module
                for alias in node.names
            ]
        else:
            continue
        for name in dict.fromkeys(names):
            if name.startswith("te_mx."):
                yield node.lineno, name.removeprefix("te_mx.")


def of_a_device(module: str) -> bool:
    """Whether a module is of the backend of one device; the reference runs on all."""
    first, _, rest = module.partition(".")
    folder = rest.split(".")[0]
    if first != "backends" or folder in ("", "reference"):
        return False
    return (PACKAGE / first / folder).is_dir()


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The modules that import each other, over however many others: strongly connected components
    (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        waiting.append(module)
        for target in sorted(imports.get(module, ())):
            if target not in order:
                visit(target)
            if target in waiting:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == order[module]:
            first = waiting.index(module)
            circle = waiting[first:]
            del waiting[first:]
            if len(circle) > 1 or module in imports.get(module, ()):
                found.append(sorted(circle))

    for module in imports:
        if module not in order:
            visit(module)
    return found


def parameters(node: ast.FunctionDef) -> int:
    """How many arguments a function has, without self and cls."""
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "ctx")])


def complaints(path: Path) -> Iterator[str]:
    text = path.read_text()
    tree = ast.parse(text)
    parts = path.relative_to(PACKAGE).parts
    module = module_of(path)
    own = -1 if module in PLUGINS else rank(module)
    for line, target in imported(tree):
        if rank(target) < own:
            yield f"{path}:{line}: imports te_mx.{target}, which stands above it"
        if of_a_device(target) and parts[0] not in NAME_BACKENDS:
            yield f"{path}:{line}: imports te_mx.{target}, of a device: ask dispatch or layouts"
    if parts[0] not in NAME_DEVICES:
        for number, text_line in enumerate(text.splitlines(), 1):
            if DEVICES.search(text_line):
                yield f"{path}:{number}: a device's name above backends: {text_line.strip()}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and parameters(node) > MOST_PARAMETERS:
            constructor = node.name == "__init__" and parts[0] in ("nn", "te")
            free = path.parent == KERNELS or f"{path}:{node.name}" in PUBLIC
            if not constructor and not free:
                yield f"{path}:{node.lineno}: {node.name} has {parameters(node)} parameters"


def main() -> int:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = [line for path in paths for line in complaints(path)]
    imports = {
        module_of(path): {target for _, target in imported(ast.parse(path.read_text()))}
        for path in paths
    }
    found += [f"{PACKAGE}: a circle of imports: {', '.join(each)}" for each in circles(imports)]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
