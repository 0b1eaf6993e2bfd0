"""Normalizations of models as they are: which modules compute LayerNorm or RMSNorm, and which
converted layers read what they return.

What a module computes is found out on numbers: its own forward against the formulas, in fp32. Who
reads it is found out by running the module that holds it on stand-ins (probe.py)."""

import inspect
import itertools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_mx.dispatch.fused import Norm
from te_mx.fusion.class_swap import Reclassed
from te_mx.fusion.fused_norm import NormPlan
from te_mx.fusion.probe import ROWS, apart, forward_of, numbers, twin
from te_mx.fusion.sequences import Fusion
from te_mx.nn.guards import fusion_guard

_TOLERANCE = 2e-5  # of fp32 sums over a row
_ATTENTION = ("attn", "attention")
# Layers of an attention that read its heads, not its input.
_OUTPUT = ("o_proj", "out_proj", "c_proj", "dense", "wo", "to_out")
_NOT_QUANTIZED = "not quantized, no converted layer was seen to read it"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# What submodules return beside their result, until the forward of their parent takes it: those
# named after attention, and all others. 0 is the bare tensor.
_EXTRAS = tuple(itertools.product((1, 0, 2, 3), (0, 1)))


class FoundNorm(NamedTuple):
    """A normalization that can be fused."""

    module: nn.Module
    plan: NormPlan


class Formula(NamedTuple):
    """What a module computes."""

    norm: Norm
    zero_centered: bool
    size: int


def plan_norms(
    model: nn.Module, converts: Collection[nn.Module], blocks: Collection[nn.Module]
) -> tuple[list[Fusion], list[FoundNorm]]:
    """The report and what `fuse_norms` is to do. converts: the layers that are te_mx.Linear
    afterwards. blocks: the modules that run as one step."""
    found: list[Fusion] = []
    norms: list[FoundNorm] = []
    for prefix, parent in model.named_modules():
        if isinstance(parent, _CONTAINERS):
            continue
        formulas = {
            name: formula
            for name, child in parent._modules.items()
            if child is not None and (formula := formula_of(child)) is not None
        }
        if not formulas:
            continue
        readers, reason = _readers(parent, formulas)
        for name, formula in formulas.items():
            child: Any = parent._modules[name]
            by = readers.get(name, [])
            reads = [m for one in by for m in _first_layers(one, formula.size) if m in converts]
            full = f"{prefix}.{name}" if prefix else name
            kind = f"{type(child).__name__}: {formula.norm.kind}"
            shape = str(child.weight.shape[0])
            beside = next((m for m in parent.modules() if m in converts), None)
            if beside is None or isinstance(child, Reclassed):
                fused = isinstance(child, Reclassed)
                why = (
                    "already fused" if fused else "no nn.Linear that is converted stands beside it"
                )
                found.append(Fusion(full, shape, kind, why))
                continue
            block = by[0] if len(by) == 1 and by[0] in blocks else None
            plan = NormPlan(
                *formula[:2], reads[0] if reads else beside, bool(reads), block, fusion_guard(child)
            )
            norms.append(FoundNorm(child, plan))
            note = f"quantized for {_name(model, reads[0])}" if reads else _NOT_QUANTIZED
            note += f": {reason}" if reason else ""
            found.append(Fusion(full, shape, f"{kind}, {note}", ""))
    return found, norms


def _name(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, one in model.named_modules() if one is module)


# ------------------------------------------------------------------------------ what it computes
def formula_of(module: nn.Module) -> Formula | None:
    """What a module without submodules computes of rows, if that is a normalization."""
    held = module._parameters
    weight, bias = held.get("weight"), held.get("bias")
    if module._modules or module._buffers or "forward" in module.__dict__:
        return None
    if weight is None or weight.dim() != 1 or not weight.numel() or set(held) - {"weight", "bias"}:
        return None
    if bias is not None and bias.shape != weight.shape:
        return None
    size = weight.shape[0]
    w = numbers((size,), 1, torch.float32)
    b = None if bias is None else numbers((size,), 2, torch.float32)
    candidates = [value for value in module.__dict__.values() if isinstance(value, float)]
    for eps in dict.fromkeys(value for value in candidates if 0 <= value < 0.1):
        x = _rows(size, eps)
        try:
            with apart():
                made = twin(module, True, {})
                made.__dict__["_parameters"] = {
                    name: {"weight": w, "bias": b}[name] for name in held
                }
                z = forward_of(module)(made, x.clone())
        except Exception:
            return None
        if not isinstance(z, Tensor) or z.shape != x.shape or z.dtype != x.dtype:
            return None
        for kind, zero_centered in itertools.product(("RMSNorm", "LayerNorm"), (False, True)):
            expected = _normalized(x, w + 1 if zero_centered else w, b, Norm(kind, eps))
            if torch.allclose(z.double(), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                return Formula(Norm(kind, eps), zero_centered, size)
    return None


def _rows(size: int, eps: float) -> Tensor:
    """[2, 4, size]: rows as usual, large, with a mean, and so small that eps matters."""
    x = numbers((2, 4, size), 0, torch.float32)
    x[:, 1] *= 1000
    x[:, 2] += 3
    x[:, 3] *= eps**0.5
    return x


def _normalized(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    x = x.double()
    if norm.kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    z = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight.double()
    return z if bias is None else z + bias.double()


# ----------------------------------------------------------------------------------- who reads it
class _NormStandIn(nn.Module):
    def __init__(self, name: str, made: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.called, self.made = name, made

    def forward(self, x: Tensor) -> Tensor:
        z = x.clone()
        self.made.append((self.called, z))
        return z


class _Opaque(nn.Module):
    """In the place of a submodule: notes the tensors that it gets and returns one like the first
    (as wide as a linear layer makes it), and Nones as asked; attributes are the submodule's."""

    def __init__(self, real: nn.Module, extras: int, got: list[tuple[nn.Module, Tensor]]) -> None:
        super().__init__()
        self.extras = extras
        self.__dict__.update(real=real, got=got)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self.got.extend((self.real, tensor) for tensor in tensors)
        width: Any = getattr(self, "out_features", tensors[0].shape[-1])
        out = tensors[0].new_zeros((*tensors[0].shape[:-1], width))
        return (out, *[None] * self.extras) if self.extras else out


def _readers(
    parent: nn.Module, formulas: dict[str, Formula]
) -> tuple[dict[str, list[nn.Module]], str]:
    """The submodules that get what each normalization returns, or why that is not known."""
    if "forward" in parent.__dict__:
        return {}, "the forward of what holds it was replaced on the instance"
    if any(isinstance(child, _CONTAINERS[1:]) for child in parent._modules.values()):
        return {}, ""  # the end of a stack of layers, not a part of one
    reason = ""
    for of_attention, of_others in _EXTRAS:
        made: list[tuple[str, Tensor]] = []
        got: list[tuple[nn.Module, Tensor]] = []
        children: dict[str, nn.Module] = {}
        for name, child in parent._modules.items():
            if name in formulas:
                children[name] = _NormStandIn(name, made)
            elif child is not None and any(True for _ in child.parameters()):
                extras = of_attention if any(word in name for word in _ATTENTION) else of_others
                linear = isinstance(child, nn.Linear)
                children[name] = _Opaque(child, 0 if linear else extras, got)
        try:
            with apart():
                _call(parent, twin(parent, False, children), next(iter(formulas.values())).size)
        except Exception as error:
            reason = reason or f"what holds it could not be followed: {type(error).__name__}"
            continue
        return {
            name: [
                reader
                for reader, tensor in got
                if any(one is tensor for other, one in made if other == name)
            ]
            for name in formulas
        }, ""
    return {}, reason


def _call(parent: nn.Module, made: nn.Module, size: int) -> None:
    """Run a twin on rows, with None for all else that it must be given."""
    forward = forward_of(parent)
    given = list(inspect.signature(forward).parameters.values())[2:]
    needed = {
        p.name: None
        for p in given
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    forward(made, numbers((1, ROWS, size), 0, torch.float32), **needed)


def _first_layers(reader: nn.Module, size: int) -> Iterator[nn.Linear]:
    """The layers in a submodule that can be those which read its input."""
    for name, module in reader.named_modules():
        own = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and module.in_features == size and own not in _OUTPUT:
            yield module
