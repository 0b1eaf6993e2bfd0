"""MLP blocks of models as they are: which modules compute down(act(gate(x)) * up(x)), or
fc2(act(fc1(x))), and with which activation.

Names say nothing for certain, so every candidate is run on stand-ins (probe.py), in training
and in evaluation. What it gives its layers and returns must be those very values, and what goes
into the last layer must be an activation that te_mx has, of what the first ones gave."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_mx.fusion.class_swap import Reclassed
from te_mx.fusion.fused_mlp import BlockPlan
from te_mx.fusion.probe import ROWS, LinearStandIn, Seen, apart, forward_of, numbers, twin
from te_mx.fusion.sequences import Fusion
from te_mx.nn import activations
from te_mx.nn.guards import fusion_guard, hooked
from te_mx.nn.linear import Linear

# Names of layers that make a module a candidate whose refusal is worth a row.
_USUAL = (
    {"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"fc1", "fc2"},
    {"w1", "w2"}, {"c_fc", "c_proj"}, {"wi_0", "wi_1", "wo"}, {"wi", "wo"}, {"lin1", "lin2"},
    {"dense_h_to_4h", "dense_4h_to_h"},
)  # fmt: skip
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Block(NamedTuple):
    """A module that can run as one step."""

    module: nn.Module
    plan: BlockPlan


def plan_blocks(
    model: nn.Module, converts: Collection[nn.Module], why_not: Callable[[nn.Linear], str],
    unlike: Callable[[Sequence[str]], str],
) -> tuple[list[Fusion], list[Block]]:  # fmt: skip
    """The report and what `fuse_blocks` is to do. converts: the layers that are te_mx.Linear
    afterwards. `why_not` says why another one is not, if not because the user excluded it,
    `unlike` why layers of these names do not run with one recipe."""
    found: list[Fusion] = []
    blocks: list[Block] = []
    for prefix, module in model.named_modules():
        names = [name for name, child in module._modules.items() if isinstance(child, nn.Linear)]
        usual = any(wanted <= set(names) for wanted in _USUAL)
        if isinstance(module, (*_CONTAINERS, Reclassed)):
            continue
        if not usual and (other := _of_other_layers(module)) is not None:
            found.append(Fusion(prefix or "(root)", "", *other))
            continue
        if not usual and len(names) not in (2, 3):
            continue
        plan, reason = _follow(module, names)
        if plan is None and not usual:
            continue
        linears: list[Any] = [module._modules[name] for name in names]
        for name, linear in zip(names, linears, strict=True):
            if reason:
                break
            if linear not in converts:
                left = "" if type(linear) is Linear else why_not(linear)
                reason = f"{name}: {left}" if left else f"{name} is excluded by filter_fn"
            elif hooked(linear):
                reason = f"{name} has hooks or a forward of its own"
        reason = reason or unlike([f"{prefix}.{name}" if prefix else name for name in names])
        if plan is None or reason:
            kinds = f"{type(module).__name__}: {' + '.join(names)}"
            found.append(Fusion(prefix or "(root)", "", kinds, reason))
            continue
        kinds = " + ".join((*plan.first, plan.act.name, plan.last))
        sizes: Any = module._modules[plan.first[0]], module._modules[plan.last]
        shape = f"{sizes[0].in_features} -> {sizes[1].in_features} -> {sizes[1].out_features}"
        found.append(Fusion(prefix or "(root)", shape, f"{type(module).__name__}: {kinds}", ""))
        blocks.append(Block(module, plan))
    return found, blocks


def _of_other_layers(module: nn.Module) -> tuple[str, str] | None:
    """The name of a block of usual names and no nn.Linear, as GPT-2's Conv1D, and why it stays."""
    for wanted in _USUAL:
        for name, child in module._modules.items():
            weight = None if child is None else child._parameters.get("weight")
            if (
                name in wanted <= set(module._modules)
                and not isinstance(child, nn.Linear)
                and isinstance(weight, Tensor)
                and weight.dim() == 2
            ):
                layers = " + ".join(name for name in module._modules if name in wanted)
                return (
                    f"{type(module).__name__}: {layers}",
                    f"{name} is a {type(child).__name__}, and blocks of nn.Linear are fused",
                )
    return None


# --------------------------------------------------------------------------------------- following
def _follow(module: nn.Module, names: list[str]) -> tuple[BlockPlan | None, str]:
    """What the module is, or why it is no block."""
    others = [child for name, child in module._modules.items() if name not in names]
    if len(names) not in (2, 3) or any(True for child in others if _holds(child)):
        return None, "it holds more than the layers of an MLP"
    if module._parameters or module._buffers:
        return None, "it has parameters or buffers of its own"
    if "forward" in module.__dict__:
        return None, "its forward was replaced on the instance"
    plans = []
    for training in (True, False):
        try:
            seen, x, out = _run(module, names, training)
        except Exception as error:
            return None, f"its forward could not be followed: {type(error).__name__}: {error}"
        plan, reason = _read(module, seen, x, out)
        if plan is None:
            return None, reason + (" in training" if training else "")
        plans.append(plan)
    if plans[0][:3] != plans[1][:3]:
        return None, "training and evaluation differ"
    return plans[0], ""


def _holds(child: nn.Module | None) -> bool:
    """Whether a submodule has parameters or buffers."""
    return child is not None and any(bool(m._parameters or m._buffers) for m in child.modules())


def _run(module: nn.Module, names: list[str], training: bool) -> tuple[list[Seen], Tensor, Any]:
    seen: list[Seen] = []
    linears: dict[str, Any] = {name: module._modules[name] for name in names}
    stand_ins = {
        name: LinearStandIn(name, linear, seen, seed)
        for seed, (name, linear) in enumerate(linears.items(), 1)
    }
    x = numbers((ROWS, 2, linears[names[0]].in_features), 0, torch.float64)
    with apart():
        out = forward_of(module)(twin(module, training, stand_ins), x.clone())
    return seen, x, out


def _read(module: nn.Module, seen: list[Seen], x: Tensor, out: Any) -> tuple[BlockPlan | None, str]:
    """The plan of a module from what its layers saw."""
    *first, last = seen
    called = [one.name for one in seen]
    if len(set(called)) != len(called) or len(first) != len(_linears(module)) - 1:
        return None, "it does not call each of its layers once"
    if any(not _same(one.inp, x) for one in first):
        return None, "it changes its input before its first layers"
    if not isinstance(out, Tensor) or not _same(out, last.out):
        return None, "it changes or adds to the result of its last layer"
    orders = [first] if len(first) == 1 else [first, first[::-1]]
    for order in orders:
        h = torch.cat([one.out for one in order], -1)
        act = activations.known(h, last.inp, gated=len(order) == 2)
        if act is not None:
            names = tuple(one.name for one in order)
            around = fusion_guard(module, (*names, last.name))
            return BlockPlan(names, last.name, act, around), ""
    return None, "what is between its layers is no activation that te_mx has"


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [child for child in module._modules.values() if isinstance(child, nn.Linear)]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
