"""The ways to run one product of a frozen layer: every kernel that takes it, in every
configuration, on weights as te_mx.freeze_weights keeps them.

A call quantizes its bf16 input and multiplies, as the layer does; the result is bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.autograd.steps import mode_of, plan_input
from te_mx.autograd.steps_kept import kept_weight
from te_mx.commands.shapes import Shape
from te_mx.commands.timing import Call, sets_for
from te_mx.dispatch.calls import Epilogue, Product
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import Kernel, default, kernels
from te_mx.dispatch.run import REFERENCE
from te_mx.dispatch.tuned.table import Key
from te_mx.dispatch.tuned.tables import key_of
from te_mx.ops import Operand, quantized
from te_mx.recipes.settings import Settings

_WRONG = 0.01  # of the norm of a result: far above what rounding to bf16 makes of sums


class Weights(NamedTuple):
    """A weight [n, k] quantized several times, as it stands still (kept) and as plain codes, which
    weights have whose master was dropped."""

    kept: list[Operand]
    plain: list[Operand]


class Candidate(NamedTuple):
    """A kernel in a configuration."""

    kernel: Kernel
    configuration: str

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.kernel.name, self.configuration)))


def make_weights(n: int, k: int, settings: Settings, device: torch.device) -> Weights:
    """As many as no cache holds."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn((n, k), generator=generator, device=device).bfloat16()
    one = kept_weight(values, settings, False).row
    sets = sets_for(one.codes.nbytes, device)
    kept = [one, *(kept_weight(values, settings, False).row for _ in range(1, sets))]
    at_rest = settings._replace(one_copy=True)  # which keeps plain codes
    return Weights(kept, [kept_weight(values, at_rest, False).row for _ in range(sets)])


class Contest:
    """One problem and its candidates.

    key: of its row. candidates: the default first.
    """

    def __init__(
        self, shape: Shape, settings: Settings, weights: list[Operand], device: torch.device
    ) -> None:
        self.weights, self.settings, self.mode = weights, settings, mode_of(settings)
        generator = torch.Generator(device).manual_seed(1)
        self.x = torch.randn((shape.m, shape.k), generator=generator, device=device).bfloat16()
        self.target = plan_input(device, settings, False).target
        self.problem = Problem(
            "gemm", place_of(device), self.target.row, weights[0].spec, shape.m, shape.n, shape.k,
            precision=settings.precision, dtype=torch.bfloat16, spread=settings.spread,
            split_k=settings.split_k,
        )  # fmt: skip
        self.key: Key = key_of(self.problem)
        usual = default(self.problem)[0]
        able = [
            kernel for kernel in kernels("gemm")
            if kernel.name not in (usual.name, REFERENCE) and kernel.accepts(self.problem) is None
        ]  # fmt: skip
        self.candidates = [
            Candidate(kernel.configured(how) if how else kernel, how)
            for kernel in (usual, *able)
            for how in ("", *kernel.configurations(self.problem))
        ]

    @property
    def usual(self) -> Candidate:
        """What runs without a table."""
        return self.candidates[0]

    def call(self, candidate: Candidate) -> Call:
        """The layer, run by a candidate."""
        run, m, n = candidate.kernel.run, self.problem.m, self.problem.n

        def layer(i: int) -> Tensor:
            row = quantized(self.x, self.target).row
            assert row is not None
            out = torch.empty((m, n), dtype=torch.bfloat16, device=self.x.device)
            weight = self.weights[i % len(self.weights)]
            if run(Product(row, weight, Epilogue(), out, None, self.mode)) is None:
                raise RuntimeError(f"{candidate.name} accepts {self.problem} and does not run it")
            return out

        return layer

    def check(self, report: Callable[[str], None]) -> None:
        """Leave out candidates whose result is not that of the default, and say so."""
        expected = self.call(self.usual)(0).double()
        for one in list(self.candidates[1:]):
            got = self.call(one)(0).double()
            error = ((got - expected).norm() / expected.norm()).item()
            if not error < _WRONG:
                report(f"{one.name} is {error:.2g} off the default and left out: please report it")
                self.candidates.remove(one)
