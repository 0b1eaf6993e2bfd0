"""Attentions whose q, k and v are three layers that read one input: those run as one in compiled
code (te_mx/nn/joined_layers.py).

That nothing else reads the input is read off the source of the forward: its first argument stands
there in `<argument>.shape` and as the one argument of a call of each of the layers, and nowhere
else.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection
from typing import Any, NamedTuple

from torch import nn

from te_mx.fusion.sequences import Fusion
from te_mx.nn.joined_layers import WHOLE, ReadersPlan
from te_mx.nn.reclassed import Reclassed
from te_mx.nn.surroundings import hooked

_NAMES = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"), ("wq", "wk", "wv"),
)  # fmt: skip


class Readers(NamedTuple):
    """A module whose layers can run as one."""

    module: nn.Module
    plan: ReadersPlan


def plan_readers(
    model: nn.Module, converts: Collection[nn.Module]
) -> tuple[list[Fusion], list[Readers]]:
    """The report and what `join_readers` is to do. converts: the layers that are te_mx.Linear
    afterwards."""
    found: list[Fusion] = []
    readers: list[Readers] = []
    for prefix, module in model.named_modules():
        children = module._modules
        names = next((some for some in _NAMES if set(some) <= children.keys()), None)
        if names is None or isinstance(module, Reclassed):
            continue
        layers: list[Any] = [children[name] for name in names]
        if any(layer not in converts or hooked(layer) for layer in layers):
            continue
        widths = {layer.in_features for layer in layers}
        if len(widths) > 1 or any(layer.out_features % WHOLE for layer in layers):
            continue
        argument = argument_read_by(module, names)
        if len(set(map(id, layers))) < len(names) or argument is None:
            continue
        outs = " + ".join(str(layer.out_features) for layer in layers)
        what = f"{type(module).__name__}: {' + '.join(names)} are one product in compiled code"
        found.append(Fusion(prefix or "(root)", f"{widths.pop()} -> {outs}", what, ""))
        readers.append(Readers(module, ReadersPlan(names, argument)))
    return found, readers


def argument_read_by(module: nn.Module, names: Collection[str]) -> str | None:
    """The first argument of a module's forward, if these layers are called on it, once each, and
    nothing else is done with it or them but to ask for its shape."""
    forward = type(module).forward
    if "forward" in module.__dict__ or inspect.unwrap(forward) is not forward:
        return None
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or none of a function
        return None
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return None
    if function.decorator_list:
        return None
    me, argument = (one.arg for one in function.args.args[:2])
    body = [node for part in function.body for node in ast.walk(part)]
    allowed, called = set(), []
    for node in body:
        if isinstance(node, ast.Attribute) and node.attr == "shape":
            allowed.add(id(node.value))
        elif isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            name, given = _child(node.func, me), node.args[0]
            if name in names and isinstance(given, ast.Name) and given.id == argument:
                called.append(name)
                allowed |= {id(given), id(node.func)}
    for node in body:
        mentions = _child(node, me) in names or (isinstance(node, ast.Name) and node.id == argument)
        if mentions and id(node) not in allowed:
            return None
    return argument if sorted(called) == sorted(names) else None


def _child(node: ast.AST, me: str) -> str:
    """The name in `self.name`, or an empty string."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me:
        return node.attr
    return ""
