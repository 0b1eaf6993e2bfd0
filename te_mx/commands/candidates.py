"""The ways to run a frozen layer: whatever it asks the registry for, every kernel that takes it, in
every configuration.

A layer may ask for several ops: first one that does it all in a call, if there is such a kernel,
else the ops of its steps. The tables' word for the second is "steps".
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

import te_mx
from te_mx.commands.shapes import Shape
from te_mx.commands.timing import Trial, sets_for
from te_mx.dispatch import registry
from te_mx.dispatch.kernels import Kernel, kernels
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.run import REFERENCE
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.table import DEFAULT, STEPS, Key, Row, served
from te_mx.dispatch.tuned.tables import key_of
from te_mx.recipe import BlockScaling

ROUTINGS = 8  # in turns: other tokens choose other experts
BLOCK = 16
_WRONG = 0.01  # of the norm of a result: far above what rounding to bf16 makes of sums


class Candidate(NamedTuple):
    """What a row of a table may say."""

    use: str
    configuration: str = ""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, self))

    def row(self, key: Key) -> Row:
        """A row that says so, of no time yet."""
        return Row(key, self.use, self.configuration, 1.0, DEFAULT, 1.0)


class Layers:
    """Frozen layers of one size, as many as no cache holds: with their parameters (kept), and with
    codes alone (plain)."""

    def __init__(self, shape: Shape, recipe: BlockScaling, device: torch.device) -> None:
        n, k = shape.n, shape.k
        self.recipe, self.device = recipe, device
        generator = torch.Generator(device).manual_seed(0)
        self._weight = torch.randn((n, k), generator=generator, device=device).bfloat16()
        self._sets = sets_for(n * k * te_mx.formats.get(recipe.w).element.bits // 8, device)
        self.kept = [self._layer(False) for _ in range(self._sets)]

    @cached_property
    def plain(self) -> list[te_mx.Linear]:
        """Made when somebody beats the default: few need them."""
        return [self._layer(True) for _ in range(self._sets)]

    def _layer(self, drop_master: bool) -> te_mx.Linear:
        weight = self._weight
        n, k = weight.shape
        layer = te_mx.Linear(k, n, bias=False, dtype=torch.bfloat16, device="meta")
        # Several layers may share one parameter: what they make of it is their own.
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        te_mx.freeze_weights(layer, drop_master, recipe=self.recipe)
        return layer


class Experts:
    """Weights of experts of one size, as many as no cache holds, and routings of tokens to them;
    calls take turns with both."""

    def __init__(self, shape: Shape, recipe: BlockScaling, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self._shape = shape
        n, k, experts, _ = shape.weights
        bits = te_mx.formats.get(recipe.w).element.bits
        # Of a call that reads few of many experts, the next one reads others.
        count = sets_for(experts * n * k * bits // 8, device)
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.randn((n, k), generator=generator, device=device).bfloat16()
        one = te_mx.quantize(drawn, fmt=recipe.w, scale_rule=recipe.scale_rule)
        parts = one.rowwise_data, one.rowwise_scale
        self._weights = []
        for _ in range(count):  # every expert has the same numbers, in memory of its own
            codes, scales = (part.repeat(experts, 1) for part in parts if part is not None)
            self._weights.append(
                te_mx.MXTensor((experts, n, k), recipe.w, rowwise_data=codes, rowwise_scale=scales)
            )
        self._lists: dict[int, list[te_mx.moe.AlignedBlocks]] = {}
        calls = max(count, ROUTINGS)
        self.kept = self.plain = [partial(self._run, i) for i in range(calls)]

    def _run(self, i: int, x: Tensor) -> Tensor:
        return te_mx.moe.grouped_gemm(
            x, self._weights[i % len(self._weights)], *self._routed(len(x))[i % ROUTINGS],
            top_k=self._shape.top_k, block_m=BLOCK, recipe=self.recipe,
        )  # fmt: skip

    def _routed(self, tokens: int) -> list[te_mx.moe.AlignedBlocks]:
        """The lists of some routings of so many tokens, drawn evenly."""
        if tokens not in self._lists:
            experts, top_k = self._shape.experts, self._shape.top_k
            generator = torch.Generator(self.device).manual_seed(tokens)
            draw = torch.rand((ROUTINGS, tokens, experts), generator=generator, device=self.device)
            self._lists[tokens] = [
                te_mx.moe.align_block_size(ids, BLOCK, experts)
                for ids in draw.topk(top_k, dim=-1).indices
            ]
        return self._lists[tokens]


class Weights(Protocol):
    """What a contest is about: layers that are called with x, as they are kept and on plain
    codes."""

    recipe: BlockScaling
    device: torch.device

    @property
    def kept(self) -> Sequence[Callable[[Tensor], Tensor]]: ...

    @property
    def plain(self) -> Sequence[Callable[[Tensor], Tensor]]: ...


class Contest:
    """One size, on layers as they are kept or on plain codes."""

    def __init__(self, shape: Shape, layers: Weights, plain: bool = False) -> None:
        self.shape, self.recipe = shape, layers.recipe
        self.layers = layers.plain if plain else layers.kept
        device = layers.device
        generator = torch.Generator(device).manual_seed(1)
        self.x = torch.randn((shape.m, shape.k), generator=generator, device=device).bfloat16()

    def __call__(self, i: int) -> Tensor:
        """The result of a layer, under the choices that hold now."""
        return self.layers[i % len(self.layers)](self.x)

    def trial(self, rows: Iterable[Row]) -> Trial:
        """The layer under the choices of these rows, and no others."""
        chosen = list(rows)

        def prepare() -> None:
            tables.try_only(chosen)
            registry.forget()

        return Trial(prepare, self)

    def problems(self) -> list[Problem]:
        """What the layer asks for, where there is a choice: the op in one call first, if there is
        one, and last an op that must have a kernel."""
        found: list[Problem] = []
        while True:
            rows = [Candidate(STEPS).row(key_of(problem)) for problem in found]
            trial = self.trial(rows)
            trial.prepare()
            with tables.watched() as asked:
                trial.call(0)
            known = [key_of(problem) for problem in found]
            fresh = [p for p in asked if self._is_mine(p) and key_of(p) not in known]
            if not fresh:
                return found
            # A look-up does not say whether K may be cut.
            found.append(fresh[0]._replace(split_k=self.recipe.split_k))
            if not is_optional(fresh[0]):
                return found

    def _is_mine(self, p: Problem) -> bool:
        if (p.m, p.n, p.k) != self.shape[:3]:
            return False
        usual = registry.default_of(p)
        # One that does not multiply by itself follows the choice for the op that does.
        return usual is not None and usual.multiplies

    def wrong(
        self, candidates: list[Candidate], row_of: Callable[[Candidate], list[Row]]
    ) -> dict[str, float]:
        """How far results are off that of the first candidate, by the names of those that are
        wrong."""
        results = {}
        for one in candidates:
            trial = self.trial(row_of(one))
            trial.prepare()
            results[one.name] = trial.call(0).double()
        expected = results[candidates[0].name]
        errors = {
            name: ((got - expected).norm() / expected.norm()).item()
            for name, got in results.items()
        }
        return {name: error for name, error in errors.items() if not error < _WRONG}


def is_optional(problem: Problem) -> bool:
    """Whether an op need not have a kernel, because others do the same in steps."""
    return kernels(problem.op)[-1].name != REFERENCE


def candidates_of(problem: Problem, any_bits: bool = False) -> list[Candidate]:
    """The ways to run a problem, the default first: those that leave the bits of every call as they
    are that a row of this m may serve, or all of them."""
    usual = registry.default_of(problem)
    assert usual is not None
    able = [
        kernel for kernel in kernels(problem.op)
        if kernel.name not in (usual.name, REFERENCE) and kernel.declines(problem) is None
    ]  # fmt: skip
    found = [
        Candidate(kernel.name, how)
        for kernel in (usual, *able)
        for how in ("", *kernel.configurations(problem))
        if any_bits or keeps_bits(kernel.configured(how) if how else kernel, problem)
    ]
    return [*found, Candidate(STEPS)] if any_bits and is_optional(problem) else found


def keeps_bits(kernel: Kernel, problem: Problem) -> bool:
    """Whether a row that names a kernel, configured, changes no bits: at all numbers of rows that
    it serves, whether k may be cut or not."""
    for m in served(problem.m):
        for split_k in (False, True):
            one = problem._replace(m=m, split_k=split_k)
            usual = registry.default_of(one)
            ignored = usual is None or kernel.declines(one) is not None
            if not ignored and kernel.sums(one) != usual.sums(one):  # type: ignore[union-attr]
                return False
    return True


def leave() -> None:
    """Back to the tables of this process."""
    tables.try_only(None)
    registry.forget()
    gc.collect()
