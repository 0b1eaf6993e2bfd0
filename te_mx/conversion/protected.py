"""Layers that a model of Transformers keeps in fp32, whatever dtype it is loaded in."""

from __future__ import annotations

import re

from torch import nn

_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def protected_in(model: nn.Module) -> dict[int, str]:
    """Why a module stays as it is, by id: one of its own parameters is among those that the model,
    or a model inside of it, names in ``_keep_in_fp32_modules`` or ``_keep_in_fp32_modules_strict``.
    A name stands for whole parts of a parameter's path, as Transformers reads it.
    """
    found: dict[int, str] = {}
    for owner in model.modules():
        for attribute in _LISTS:
            for entry in getattr(owner, attribute, None) or ():
                words = re.escape(str(entry)).replace(r"\*", ".*")
                pattern = re.compile(rf"(^|\.){words}($|\.)")
                for path, module in owner.named_modules(remove_duplicate=False):
                    names = [f"{path}.{name}" for name in module._parameters]
                    if any(pattern.search(name) for name in names):
                        kind = type(owner).__name__
                        found.setdefault(
                            id(module), f"{kind} keeps it in fp32 ({attribute}: {entry!r})"
                        )
    return found
