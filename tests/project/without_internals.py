"""Trains with te_mx in a torch that has lost a private name: python without_internals.py FOLDER.

Prints a line for each name of te_mx/torch_internals.py, `name: ok` or what went wrong. torch needs
the names itself, so they are lost to that file alone; each name in a process of its own, forked
when torch is there and te_mx is not.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import re
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed.tensor.parallel
import torch.utils.checkpoint
from torch import nn
from torch.func import functional_call, grad

HOUSE = "te_mx.torch_internals"
# Without these te_mx refuses what needs them.
NO_PLACES = {"_current_graph_task_id", "_will_engine_execute_node"}
NO_TRANSFORMS = {"_functorch", "peek_interpreter_stack"}


# What one process on a CPU does not come to, beyond importing it: lost at once, by section.
AT_ONCE = ("CUDA", "DTensor", "data-parallel wrappers", "transforms of torch.func")


def cases() -> list[frozenset[str]]:
    """What to lose: each name of the file, and those of some sections together."""
    spec = importlib.util.find_spec("te_mx")
    text = Path(spec.submodule_search_locations[0], "torch_internals.py").read_text()
    found: list[frozenset[str]] = []
    titles: set[str] = set()
    for title, section in zip(*[iter(re.split(r"\n# -{5,} (.*)\n", text)[1:])] * 2, strict=True):
        lost = sorted(names(section))
        titles.add(title)
        found += [frozenset(lost)] if title in AT_ONCE else [frozenset([name]) for name in lost]
    assert titles >= set(AT_ONCE), f"no sections {set(AT_ONCE) - titles}"
    return found


def names(text: str) -> set[str]:
    """All that a part of the file asks for by name: of getattr and hasattr, in tuples of names, and
    imports of private modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            asked = node.args[1]
            if isinstance(asked, ast.Constant) and not asked.value.startswith("__"):
                found.add(asked.value)
        elif isinstance(node, ast.Tuple):
            found.update(
                one.value for one in node.elts
                if isinstance(one, ast.Constant) and re.match(r"\w{9}", str(one.value))
            )  # fmt: skip
        elif isinstance(node, ast.ImportFrom):
            found.update(one.name for one in node.names if one.name.startswith("_"))
    return found


def lose(lost: frozenset[str]) -> None:
    """Have the file not find some names."""
    get, has, load = getattr, hasattr, builtins.__import__

    def asked_there() -> bool:
        return sys._getframe(2).f_globals.get("__name__") == HOUSE

    def getattr_(owner, asked, *default):
        if asked in lost and asked_there():
            if default:
                return default[0]
            raise AttributeError(asked)
        return get(owner, asked, *default)

    def hasattr_(owner, asked):
        return not (asked in lost and asked_there()) and has(owner, asked)

    def import_(module, given=None, own=None, fromlist=(), level=0):
        if given and given.get("__name__") == HOUSE and lost & {*(fromlist or ())}:
            raise ImportError(fromlist)
        return load(module, given, own, fromlist, level)

    builtins.getattr, builtins.hasattr, builtins.__import__ = getattr_, hasattr_, import_


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.q, self.k = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.fc1, self.act = nn.Linear(64, 128), nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(128, 64)

    def forward(self, x):
        y = self.norm(x)
        y = self.q(y) * torch.sigmoid(self.k(y))
        return x + self.fc2(self.act(self.fc1(y)))


def trained(lost: frozenset[str]) -> list[torch.Tensor]:
    """What a step gives, in all ways that names of the file are for."""
    import te_mx

    torch.manual_seed(0)
    x = torch.randn(32, 64, requires_grad=True)
    model, linear = Block(), te_mx.Linear(64, 64)
    te_mx.convert_model(model, fuse=True)
    made = []

    def passed(run):
        with te_mx.autocast():
            y = run(x)
        y.square().sum().backward()
        made.extend([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        x.grad = None
        model.zero_grad()

    passed(model)
    passed(lambda x: model(linear(x)))
    for reentrant in (False, True):
        passed(
            lambda x, re=reentrant: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=re)
        )
    with te_mx.autocast():  # results from the pool of large ones
        for _ in range(3):
            made.append(te_mx.quantize(torch.ones(2048, 2048)).dequantize()[::512, ::512].clone())

    fused = te_mx.Linear(64, 64, fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.zeros(64, 64)
    refused = ""
    try:
        with te_mx.autocast():
            fused(x).sum().backward()
    except NotImplementedError as error:
        refused = str(error)
    assert ("does not say it" in refused) == bool(lost & NO_PLACES), refused
    made.append(torch.zeros(64, 64) if lost & NO_PLACES else fused.weight.main_grad)

    parameters = {name: p.detach() for name, p in linear.named_parameters()}
    refused = ""
    try:
        with te_mx.autocast():
            found = grad(lambda p: functional_call(linear, p, x.detach()).sum())(parameters)
        made.extend(found.values())
    except Exception as error:
        refused = repr(error)
        made.extend(torch.zeros_like(p) for p in parameters.values())
    assert not refused or lost & NO_TRANSFORMS, refused

    te_mx.freeze_weights(linear)
    for _ in range(2):
        with torch.no_grad(), te_mx.autocast():
            made.append(linear(x))
    with torch.no_grad():
        linear.weight.mul_(2)
        with te_mx.autocast():
            made.append(linear(x))
    return made


def run(lost: frozenset[str], folder: Path) -> None:
    """One process: names that are lost, or none."""
    lose(lost)
    made, base = trained(lost), folder / "base"
    if not lost:
        torch.save(made, base)
        return
    for one, other in zip(made, torch.load(base), strict=True):
        if other.abs().sum() and (one.abs().sum() or not lost & (NO_PLACES | NO_TRANSFORMS)):
            torch.testing.assert_close(one, other)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for lost in [frozenset(), *cases()]:
        name = " ".join(sorted(lost)) or "nothing"
        sys.stdout.flush()
        child = os.fork()
        if not child:
            signal.alarm(60)  # a loop without an end is a failure, too
            try:
                run(lost, folder)
                print(f"{name}: ok", flush=True)
            except BaseException as error:
                traceback.print_exc()
                words = " ".join(f"{type(error).__name__}: {error}".split())
                print(f"{name}: {words}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
