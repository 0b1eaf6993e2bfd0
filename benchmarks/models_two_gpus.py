"""Layers of Llama-3-8B on several GPUs against bf16: sharded (FSDP2, fp32 parameters; also with
weights that te_mx gathers as codes), replicated (DDP, bf16 parameters) or each layer on all GPUs
(tensor parallel, bf16 parameters). And "sync": weights sent to an engine (benchmarks/sync.py).

    torchrun --nproc-per-node 2 -m benchmarks.models_two_gpus [--rows fsdp2,ddp] [--recipe NAME,..]

All models are on the GPUs and take turns; a time is that of the slower rank, a memory the larger.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks import models, sync
from benchmarks.models import GIB, Workload
from benchmarks.row import HEADERS, Row, Target, line
from benchmarks.timing import Call
from te_mx.distributed import quantized_all_gather

FULL = Workload("8b-layers", {"num_hidden_layers": 8}, batch=4)
# In whole blocks on two ranks.
_EVEN = {"hidden_size": 256, "num_key_value_heads": 2, "intermediate_size": 256}
QUICK = Workload("tiny", _EVEN, batch=2, context=64)
ROUNDS, STEPS = 3, 4
BF16, OURS, SYNC = "bf16", "te_mx", "sync"
PEAK = Target(0.95, 0.85, lower_is_better=True)


def shard(model: nn.Module, kind: str = "") -> nn.Module:
    """Every layer is gathered for itself, in bf16, and asked for as the one before it begins: FSDP2
    asks when the host comes to a layer, which is late where the GPU is not far behind."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    layers = list(model.model.layers)
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for layer, after in pairwise([model, *layers]):
        layer.set_modules_to_forward_prefetch([after])
    return model


def shard_codes(model: nn.Module, kind: str) -> nn.Module:
    """The same, and te_mx gathers codes."""
    shard(model)
    if kind != BF16:
        quantized_all_gather(model, recipe=kind.removeprefix(OURS).strip() or None)
    return model


def split_layers(model: nn.Module, kind: str) -> nn.Module:
    """Attention heads, the inner width of every MLP and the vocabulary on all ranks. The input of a
    block is one DTensor for the layers that read it, so that its gradient is reduced once; logits
    stay sharded (loss_parallel)."""
    device = next(model.parameters()).device.type
    column, row = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        for block in ("self_attn", "mlp"):
            names = dict(getattr(layer, block).named_children())
            plan = {n: ColwiseParallel() for n in column if n in names}
            plan |= {n: RowwiseParallel() for n in row if n in names}
            parallelize_module(getattr(layer, block), mesh, plan)
        whole = {"hidden_states": Replicate()}
        given = PrepareModuleInput(input_kwarg_layouts=whole, desired_input_kwarg_layouts=whole)
        parallelize_module(layer.self_attn, mesh, given)
        whole_first = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        )
        parallelize_module(layer.mlp, mesh, whole_first)
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    embedding = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"lm_head": logits, "model.embed_tokens": embedding})
    return model


def replicate(model: nn.Module, kind: str) -> nn.Module:
    """Every rank has the whole model."""
    return DistributedDataParallel(model)


class Way(NamedTuple):
    """One way to use several GPUs: the dtype of parameters, the wrapping of a model of a kind, what
    is to be reached in time and memory, and whether every rank has tokens of its own."""

    dtype: torch.dtype
    wrap: Callable[[nn.Module, str], nn.Module]
    target: Target
    peak: Target = PEAK
    own_tokens: bool = True


WAYS = {
    "fsdp2": Way(torch.float32, shard, Target(1.33, 1.5)),
    "fsdp2-codes": Way(
        torch.float32, shard_codes, Target(1.4, 1.5), Target(0.9, 0.8, lower_is_better=True)
    ),
    "ddp": Way(
        torch.bfloat16, lambda model, kind: DistributedDataParallel(model), Target(1.33, 1.5)
    ),
    "tp": Way(torch.bfloat16, split_layers, Target(1.25, 1.4), own_tokens=False),
}


def prepared(
    work: Workload, kind: str, row: str, device: torch.device
) -> tuple[Call, float | None]:
    """A step that has run, and the most memory it takes in GiB on any rank."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    way = WAYS[row]
    model = work.build(device, way.dtype)
    region = models.CONVERSIONS[kind](model)
    model = way.wrap(model, kind)
    first = 2 * dist.get_rank() if way.own_tokens else 0
    batches = [models.tokens_of(work, device, seed=first + i) for i in range(2)]
    step = models.training_step(torch.compile(model) if work.compiled else model, region, batches)
    for i in range(models.WARM_UP):
        loss = float(step(i))
    if not loss < 20:
        raise RuntimeError(f"{row}: the loss of {kind} is {loss} after {models.WARM_UP} steps")
    if not on_gpu:
        return step, None
    torch.cuda.reset_peak_memory_stats(device)
    step(0)
    peak = (torch.cuda.max_memory_allocated(device) - before) / GIB
    return step, largest(peak, device)


def largest(value: float, device: torch.device) -> float:
    """The largest of all ranks."""
    held = torch.tensor(value, device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return held.item()


def seconds_of(step: Call, device: torch.device) -> float:
    """Of one of STEPS steps. Every rank runs as many: steps wait for each other."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    for i in range(STEPS):
        step(i)
    synchronize()
    return largest((time.perf_counter() - start) / STEPS, device)


def rows(name: str, work: Workload, device: torch.device, ours: list[str]) -> list[Row]:
    """Of the models of te_mx, by their kinds."""
    kinds = [BF16, *ours]
    made = {kind: prepared(work, kind, name, device) for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind in kinds:
            times[kind].append(seconds_of(made[kind][0], device))
    way = WAYS[name]
    batches = dist.get_world_size() if way.own_tokens else 1
    tokens = work.tokens * batches
    seconds = {kind: statistics.median(rounds) for kind, rounds in times.items()}
    speed = {kind: f"{tokens / s / 1e3:,.1f}k tok/s" for kind, s in seconds.items()}
    layers = work.config().num_hidden_layers
    shape = f"{layers} layers {batches}x{work.batch}x{work.context}"
    found = []
    for kind in ours:
        turns = [b / o for b, o in zip(times[BF16], times[kind], strict=True)]
        how = f"fuse=True{kind.removeprefix(OURS)}"
        found.append(
            Row(
                name, shape, how, seconds[kind] * 1e6, speed[kind], None, BF16,
                statistics.median(turns), way.target, speed[BF16],
            )
        )  # fmt: skip
        mine, theirs = made[kind][1], made[BF16][1]
        if mine is not None and theirs is not None:
            found.append(
                Row(
                    f"{name} GiB", shape, how, None, f"{mine:.1f} GiB", None, BF16,
                    mine / theirs, way.peak, f"{theirs:.1f} GiB",
                )
            )  # fmt: skip
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="benchmarks.models_two_gpus", description=__doc__)
    p.add_argument("--rows", default=",".join([*WAYS, SYNC]), metavar="NAME,..")
    p.add_argument("--recipe", default="", metavar="NAME,..", help="of te_mx.recipe.NAMED")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--quick", action="store_true", help="a tiny model, for a test that it runs")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = p.parse_args(argv)
    args.rows = args.rows.split(",")
    args.kinds = [f"{OURS} {name}" if name else OURS for name in args.recipe.split(",")]
    if not set(args.kinds) <= models.CONVERSIONS.keys():
        p.error(f"--recipe names recipes of te_mx.recipe.NAMED, got {args.recipe}")
    if not set(args.rows) <= {*WAYS, SYNC}:
        p.error(f"--rows are {', '.join(WAYS)}, {SYNC}, got {','.join(args.rows)}")
    if "RANK" not in os.environ:
        p.error("needs the processes that torchrun starts: torchrun --nproc-per-node 2 -m ...")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        first = dist.get_rank() == 0
        if first:
            print(line(HEADERS), flush=True)
        work = replace(QUICK if args.quick else FULL, compiled=args.compile)
        for name in args.rows:
            if name == SYNC:
                recipes = args.recipe.split(",") if args.recipe else ["mxfp8", "mxfp4"]
                found = sync.rows(sync.QUICK if args.quick else sync.FULL, recipes, device)
            else:
                with loss_parallel() if name == "tp" else nullcontext():
                    found = rows(name, work, device, args.kinds)
            for row in found:
                if first:
                    print(line(row.cells()), flush=True)
            models.clean_up()
    finally:
        with suppress(RuntimeError):  # where a rank failed, the others may be gone
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # NOTE: once, on a busy machine, a rank that was done aborted while the interpreter took down
    # what torch.distributed had left: "terminate called without an active exception".
    os._exit(code)
