"""An `import transformer_engine` that finds te_mx, for code that cannot be changed. Opt-in."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install_shim", "remove_shim"]

# The release whose names te_mx answers to, see docs/transformer_engine.md.
_VERSION = "2.20.2+te.mx"
_ROOT = "transformer_engine"
# Modules of Transformer Engine, and the modules of te_mx that have their names.
_MODULES = {
    f"{_ROOT}.{name}": f"te_mx.{name}"
    for name in (
        "common", "common.recipe", "pytorch", "pytorch.attention", "pytorch.attention.rope",
        "pytorch.cross_entropy", "pytorch.distributed", "pytorch.fp8", "pytorch.graph",
        "pytorch.module", "pytorch.permutation", "pytorch.quantization", "pytorch.transformer",
        "pytorch.utils",
    )
}  # fmt: skip


def install_shim() -> None:
    """Make ``import transformer_engine`` in this process find te_mx from now on, whether
    Transformer Engine is installed or not: ``transformer_engine.pytorch`` is te_mx.pytorch,
    ``transformer_engine.common.recipe`` is te_mx.common.recipe. A second call changes nothing.

    Call it before anything imports Transformer Engine or looks for it, as transformers, accelerate
    and peft do. Names that te_mx does not have raise as they do in te_mx.pytorch.

    Raises:
        RuntimeError: Transformer Engine itself was imported before.
    """
    there = sys.modules.get(_ROOT)
    if there is not None:
        if getattr(there, "_te_mx", False):
            return
        raise RuntimeError(
            "install_shim: transformer_engine was imported already, from "
            f"{getattr(there, '__file__', None)}, and its classes are in use: call install_shim "
            "before anything imports it"
        )
    left = [name for name in sys.modules if name.startswith(_ROOT + ".")]
    if left:
        raise RuntimeError(
            f"install_shim: {left[0]} was imported already, and its classes are in use: call "
            "install_shim before anything imports it"
        )
    root = ModuleType(_ROOT, "Transformer Engine's names, answered by te_mx.")
    root.__dict__.update(__path__=[], __version__=_VERSION, _te_mx=True, __spec__=_spec(_ROOT))
    found = {name: importlib.import_module(ours) for name, ours in _MODULES.items()}
    for name in ("common", "pytorch"):
        setattr(root, name, found[f"{_ROOT}.{name}"])
    sys.modules.update({_ROOT: root, **found})


def remove_shim() -> None:
    """Undo `install_shim`; what was imported through it stays te_mx's."""
    if getattr(sys.modules.get(_ROOT), "_te_mx", False):
        for name in (_ROOT, *_MODULES):
            sys.modules.pop(name, None)


def _spec(name: str) -> ModuleSpec:
    """For importlib.util.find_spec, which others ask whether a package is there."""
    return ModuleSpec(name, None, origin="te_mx.pytorch.install_shim", is_package=True)
