"""What the forward of a module of another library does, found out by running it on stand-ins.

A twin shares everything with the module but its submodules, so that running it changes nothing in
the model; linear layers in it return made-up values and note what they were given. A few rows of
the real width tell, and no weight is read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROWS = 3


class Seen(NamedTuple):
    """One call of a stand-in: its name, input and result."""

    name: str
    inp: Tensor
    out: Tensor


class LinearStandIn(nn.Linear):
    """In the place of a linear layer: results that cover what an activation may be given, from
    where it is flat to where it bends."""

    def __init__(self, name: str, layer: nn.Linear, seen: list[Seen], seed: int) -> None:
        super().__init__(
            layer.in_features, layer.out_features, layer.bias is not None, "meta", torch.float64
        )
        self.seen, self.seed, self.called = seen, seed, name

    def forward(self, inp: Tensor) -> Tensor:
        if inp.shape[-1] != self.in_features:
            raise ValueError("the width of its layers")
        shape = (*inp.shape[:-1], self.out_features)
        values = numbers(shape, self.seed, torch.float64)
        values[0] *= 20
        self.seen.append(Seen(self.called, inp.clone(), values.clone()))
        return values


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers on the CPU that do not move torch's own generators."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu") * 2


def twin(module: nn.Module, training: bool, children: Mapping[str, nn.Module]) -> Any:
    """A module with the attributes and parameters of another one, without its hooks, with other
    children; those that are not given are twins too."""
    made = module.__class__.__new__(module.__class__)
    made.__dict__.update(nn.Module().__dict__)
    own = {name: value for name, value in module.__dict__.items() if not name.endswith("_hooks")}
    made.__dict__.update(own)
    made.__dict__["training"] = training
    for kind in ("_parameters", "_buffers"):
        made.__dict__[kind] = {name: _here(value) for name, value in own[kind].items()}
    made.__dict__["_modules"] = {
        name: children[name] if name in children else child and twin(child, training, {})
        for name, child in module._modules.items()
    }
    return made


def _here(value: Tensor | None) -> Tensor | None:
    """A parameter or buffer on the CPU, where what is probed runs; ones for other devices'."""
    if value is None or value.is_cpu:
        return value
    return torch.ones(value.shape, dtype=value.dtype, device="cpu")


@contextmanager
def apart() -> Iterator[None]:
    """Run what is probed without a trace: no graph, no autocast, torch's generator as it was."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        yield


def forward_of(module: nn.Module) -> Any:
    """The forward of a module's class, to be given the module or its twin."""
    return type(module).forward
