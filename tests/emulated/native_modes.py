"""What runs natively on Hopper under which recipe and in which mode: the table of docs/modes.md.

    PYTHONPATH=.:tests/helpers python tests/emulated/native_modes.py

writes it where TE_MX_EMULATED names the emulated module; with --check it fails where it differs.

Each cell is a forward and a backward pass of a small module on the kernels that the registry picks
for a Hopper GPU, which the emulated ones run: its native
calls, forward + backward, and the ops that ran on the plain torch reference, if any did.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from emulated_hopper import CALLS, hopper
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.dispatch import kernels

PAGE = Path(__file__).resolve().parents[2] / "docs" / "modes.md"
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
M, K, N = 160, 128, 256  # of whole blocks of every format; more rows than kernels for few rows take
LOOPS = {"quantize_grouped", "gemm_rows", "gemm_k"}  # whose reference loops over native ops
Step = Callable[[Tensor], Tensor]
RECIPES = list(te_mx.recipe.NAMED)


HOST_ONLY = {
    "available", "packed_bytes", "upload_ends", "linear_offsets", "norm_partial_sums",
    "norm_counters", "nvfp4_multiplies", "capture_number",
}  # fmt: skip


class Watch:
    """The native calls of a pass, and the ops that the reference ran."""

    def __init__(self) -> None:
        self.reference: set[str] = set()

    def noted(self, op: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.reference.add(op)
            return run(*args)

        return call

    def taken(self) -> int:
        names = [call.name for call in CALLS]
        CALLS.clear()
        asked = ("bytes", "workspace")
        return sum(n not in HOST_ONLY and not n.endswith(asked) for n in names)


@contextmanager
def watched() -> Iterator[Watch]:
    """Hopper's kernels on this machine, with what they run noted."""
    watch = Watch()
    with warnings.catch_warnings(), hopper() as patch:
        warnings.simplefilter("ignore")
        for op in kernels.ops():
            last = kernels.kernels(op)[-1]
            if last.name == "reference" and hasattr(last, "run"):
                patch.setattr(last, "run", watch.noted(op, last.run))
        yield watch


# ------------------------------------------------------------------------------------------- modes
def linear(**fields: Any) -> Step:
    layer = te_mx.Linear(K, N, dtype=torch.bfloat16, **fields)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

    def step(x: Tensor, **call: Any) -> Tensor:
        return layer(x, **call)

    step.layer = layer  # type: ignore[attr-defined]
    return step


def micro_batches() -> Step:
    step = linear()
    return lambda x: (step(x, is_first_microbatch=True), step(x, is_first_microbatch=False))[1]


def module(kind: type[nn.Module], **fields: Any) -> Step:
    return kind(K, N, dtype=torch.bfloat16, **fields)


def grouped() -> Step:
    layer = te_mx.GroupedLinear(3, K, N, dtype=torch.bfloat16)
    return lambda x: layer(x, [60, 40, 60])


class Norm(nn.Module):
    """RMSNorm and the layers that read it, as attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.q, self.k, self.v = (nn.Linear(K, n, bias=False) for n in (N, K, K))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        return torch.cat((self.q(z), self.k(z), self.v(z)), -1)


class MLP(nn.Module):
    """Gate, up and down behind a normalization, as a Llama has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.gate, self.up = (nn.Linear(K, N, bias=False) for _ in range(2))
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(z)) * self.up(z))


def fused(kind: type[nn.Module]) -> Step:
    holder = nn.Sequential(kind()).bfloat16()
    te_mx.convert_model(holder, fuse=True)
    return holder


class Experts(nn.Module):
    """Three experts, their weights stacked, as Transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(hidden_size=K, intermediate_size=N, num_local_experts=3)
        config._experts_implementation = "grouped_mm"
        self.experts = MixtralExperts(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(2 * len(x)).view(-1, 2) % 3
        return self.experts(x, index, x.new_ones(index.shape) / 2)


def frozen(rows: int) -> Step:
    layer = te_mx.Linear(K, N, dtype=torch.bfloat16)
    te_mx.freeze_weights(layer)

    @torch.no_grad()
    def step(x: Tensor) -> Tensor:
        return layer(x[:rows])

    return step


def recomputed() -> Step:
    layer = te_mx.LayerNormMLP(K, N, activation="swiglu", dtype=torch.bfloat16)
    return lambda x: checkpoint(layer, x, use_reentrant=False)


def compiled() -> Step:
    torch._dynamo.reset()
    return torch.compile(module(te_mx.LayerNormLinear), backend="aot_eager", fullgraph=True)


MODES: dict[str, Callable[[], Step]] = {
    "Linear": linear,
    "Linear, main_grad": lambda: linear(fuse_wgrad_accumulation=True),
    "Linear, two micro-batches (forward of both)": micro_batches,
    "Linear, delayed wgrad": lambda: linear(delay_wgrad_compute=True),
    "Linear, frozen, no gradients": lambda: frozen(M),
    "Linear, frozen, 4 rows": lambda: frozen(4),
    "LayerNormLinear": lambda: module(te_mx.LayerNormLinear),
    "LayerNormLinear, compiled": compiled,
    "LayerNormMLP, gelu": lambda: module(te_mx.LayerNormMLP),
    "LayerNormMLP, swiglu": lambda: module(te_mx.LayerNormMLP, activation="swiglu"),
    "LayerNormMLP, recomputed": recomputed,
    "a norm and q, k, v, `fuse=True`": lambda: fused(Norm),
    "a norm and an MLP block, `fuse=True`": lambda: fused(MLP),
    "GroupedLinear": grouped,
    "experts, `fuse=True`": lambda: fused(Experts),
}


def cell(mode: str, recipe: str) -> str:
    """What a mode runs under a recipe."""
    torch.manual_seed(0)
    with watched() as watch:
        step = MODES[mode]()
        x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):  # the first one makes plans
            watch.taken(), watch.reference.clear()
            with te_mx.autocast(recipe=recipe):
                y = step(x)
            forward = watch.taken()
            if y.requires_grad:
                y.sum().backward()
                layer = getattr(step, "layer", None)
                if layer is not None and layer.delay_wgrad_compute:
                    layer.backward_dw()
        counts = f"{forward} + {watch.taken()}" if y.requires_grad else str(forward)
        ran = watch.reference
    if ran and ran <= LOOPS:
        return f"{counts}, group by group"
    return f"{counts}, reference: {', '.join(sorted(ran))}" if ran else counts


def row(mode: str) -> str:
    """A row of the table, in Markdown."""
    return " | ".join([f"| {mode}", *(cell(mode, name) for name in RECIPES)]) + " |"


def page() -> str:
    """docs/modes.md with a table made now."""
    recipes = [f"`{name}`" for name in RECIPES]
    lines = ["| mode | " + " | ".join(recipes) + " |", "|---" * (len(recipes) + 1) + "|"]
    before, rest = PAGE.read_text().split(BEGIN)
    made = "\n".join([*lines, *map(row, MODES)])
    return f"{before}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What runs natively on Hopper.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    made = page()
    if not check:
        PAGE.write_text(made)
    elif PAGE.read_text() != made:
        print(f"{PAGE} is not what the code does; run {sys.argv[0]} without --check")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
