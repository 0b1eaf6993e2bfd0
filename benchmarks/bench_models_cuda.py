"""Whole models on one GPU against bf16: tokens a second, peak memory, what a layer keeps.

Both models are on the device and take turns; the memory of each is without that of the other.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import kernel_times, models
from benchmarks.gpu import GpuContext
from benchmarks.models import GIB, Candidate, Workload
from benchmarks.row import Row, Target
from benchmarks.timing import Effort, Times, interleaved
from examples.llama.models import transformers

PEAK = Target(0.75, 0.7, lower_is_better=True)
KEPT = {
    "converted": Target(1.0, 0.85, lower_is_better=True),
    "fused": Target(0.65, 0.5, lower_is_better=True),
}
# Three rounds of about four steps of 0.2 s, after the warm-up of models.candidate.
EFFORT = Effort(seconds=0, min_rounds=3, max_rounds=3, min_batch_ms=700)
OURS = "te_mx"


@dataclass(frozen=True)
class Case:
    """A line of the table: a workload, what it must reach, and who takes part beside bf16."""

    work: Workload
    target: Target
    kinds: tuple[str, ...] = ("bf16", OURS)


CASES = {
    "861m-eager": Case(Workload("861m"), Target(1.32, 1.45)),
    "861m-compiled": Case(
        Workload("861m", compiled=True), Target(1.32, 1.45), ("bf16", OURS, "torchao float8")
    ),
    "861m-causal": Case(
        Workload("861m", compiled=True, attention=models.CAUSAL), Target(1.32, 1.45)
    ),
    "8b-eager": Case(Workload("8b-layers"), Target(1.4, 1.55)),
    "8b-compiled": Case(Workload("8b-layers", compiled=True), Target(1.35, 1.55)),
    "mixtral": Case(Workload("mixtral"), Target(1.25, 1.4)),
    "qwen3-moe": Case(Workload("qwen3-moe"), Target(1.25, 1.4)),
}
LAYER = "layer"  # the row of what a layer keeps
NAMES = [LAYER, *CASES]
QUICK = dict.fromkeys(("861m", "8b-layers"), "tiny")
QUICK |= dict.fromkeys(("mixtral", "qwen3-moe"), "mixtral-tiny")


def whole(context: GpuContext) -> Iterator[Row]:
    """The rows that context.rows names, all of them where it names none."""
    try:
        transformers()
    except RuntimeError as error:
        print(f"not run: {', '.join(context.rows or NAMES)} ({error})", flush=True)
        return
    for name in context.rows or NAMES:
        if name == LAYER:
            yield from layer_memory(context)
        else:
            yield from case_rows(context, name, CASES[name])
        models.clean_up()


def sized(context: GpuContext, work: Workload) -> Workload:
    """The same on a tiny model in a run that only says that it runs."""
    small = replace(work, shape=QUICK[work.shape], changes={}, batch=2, context=64)
    return small if context.quick else work


def case_rows(context: GpuContext, name: str, case: Case) -> Iterator[Row]:
    work = sized(context, case.work)
    made: dict[str, Candidate] = {}
    kinds = ("bf16", *(f"{OURS} {recipe}" for recipe in context.recipes))
    for kind in kinds if context.recipes else case.kinds:
        with _left_out(kind, needed=kind == "bf16" or kind.startswith(OURS)):
            made[kind] = models.candidate(work, kind, context.device)
    _check_losses(name, made)
    effort = Effort.quick() if context.quick else EFFORT
    calls = {kind: one.step for kind, one in made.items()}
    times = interleaved(calls, effort, warm_up=0, clock=context.clock)
    for ours in [kind for kind in made if kind.startswith(OURS)]:
        yield from _rows(name, case, work, made, times, ours)
    if context.profile:
        for kind in made:
            step = partial(made[kind].step, 0)
            found = kernel_times.of(step, context.device)
            print(kernel_times.table(f"{name} {kind}", found, times.seconds(kind)), flush=True)


def _rows(
    name: str, case: Case, work: Workload, made: dict[str, Candidate], times: Times, ours: str
) -> Iterator[Row]:
    """Of one of te_mx's models beside the others' models."""
    how = f"fuse=True{ours.removeprefix(OURS)}"
    shape = f"{work.config().num_hidden_layers} layers {work.batch}x{work.context}"
    speed = {kind: f"{work.tokens / times.seconds(kind) / 1e3:,.1f}k tok/s" for kind in made}
    us = times.seconds(ours) * 1e6
    for peer in [kind for kind in made if not kind.startswith(OURS)]:
        bf16 = peer == "bf16"
        yield Row(
            name, shape, how, us, speed[ours], None, peer, times.ratio(peer, ours),
            case.target if bf16 else None, speed[peer],
        )  # fmt: skip
        mine, theirs = made[ours].peak, made[peer].peak
        if mine is not None and theirs is not None:
            yield Row(
                f"{name} GiB", shape, how, None, f"{mine / GIB:.1f} GiB", None, peer,
                mine / theirs, PEAK if bf16 else None, f"{theirs / GIB:.1f} GiB",
            )  # fmt: skip


def _check_losses(name: str, made: dict[str, Candidate]) -> None:
    """The first losses are those of the same weights: far apart, something else was computed."""
    reference = made["bf16"].first_loss
    for kind, one in made.items():
        if not abs(one.first_loss - reference) < 0.02 * reference:
            raise RuntimeError(
                f"{name}: the first loss of {kind} is {one.first_loss}, that of bf16 {reference}: "
                "they do not compute the same model"
            )


@contextlib.contextmanager
def _left_out(kind: str, needed: bool) -> Iterator[None]:
    """A peer that is not installed, or does not run here, is named with the reason."""
    try:
        yield
    except Exception as error:
        if needed:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        print(f"not run: {kind} ({reason})", flush=True)


def layer_memory(context: GpuContext) -> Iterator[Row]:
    """What one decoder layer of the 861 M Llama keeps from forward to backward: what two layers
    keep without what one keeps, so that embedding, last norm and head drop out."""
    work = sized(context, Workload("861m"))
    regions = {
        "bf16": models.stays_bf16,
        "converted": partial(models.to_te_mx, fuse=False),
        "fused": partial(models.to_te_mx, fuse=True),
    }
    kept = {}
    for kind, convert in regions.items():
        totals = []
        for layers in (1, 2):
            part = replace(work, changes={"num_hidden_layers": layers, "vocab_size": 256})
            model = part.build(context.device)
            region = convert(model)
            tokens = models.tokens_of(part, context.device)
            totals.append(models.kept_for_backward(model, region, tokens))
        kept[kind] = totals[1] - totals[0]
    for kind, target in KEPT.items():
        yield Row(
            f"layer {kind}", f"861m {work.batch}x{work.context}", "kept for backward", None,
            f"{kept[kind] / 1e6:.1f} MB", None, "bf16", kept[kind] / kept["bf16"], target,
            f"{kept['bf16'] / 1e6:.1f} MB",
        )  # fmt: skip
