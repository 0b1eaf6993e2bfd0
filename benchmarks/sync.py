"""Rows of benchmarks.models_two_gpus: weights of a trainer on one GPU to an engine on another,
layers of Llama-3-8B, as bf16, and as codes (te_mx.rollout): quantized, sent and loaded in place.

Rows have the bytes of the layers' weights and the seconds of a whole sync, the median of some.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

import te_mx
from benchmarks.row import Row, Target

FULL, QUICK = (8, 4096, 14336, 6144), (1, 256, 512, 384)  # layers, width, inner, q k v
BYTES = {"mxfp8": Target(0.53, 0.52, lower_is_better=True)}
BYTES |= {"mxfp4": Target(0.28, 0.27, lower_is_better=True)}
ROUNDS = 5


def layers(device: torch.device, count: int, width: int, inner: int, qkv: int) -> nn.Module:
    made = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
    shapes = (width, qkv), (width, width), (width, 2 * inner), (inner, width)
    return nn.ModuleList(te_mx.Linear(*shape, **made) for _ in range(count) for shape in shapes)


def send(weights: Mapping[str, Tensor] | None, device: torch.device) -> dict[str, Tensor]:
    """From rank 0 to rank 1, which knows shapes from one message."""
    known = [None if weights is None else {n: (v.shape, v.dtype) for n, v in weights.items()}]
    dist.broadcast_object_list(known, device=device)
    assert known[0] is not None
    if weights is None:
        weights = {n: torch.empty(s, dtype=d, device=device) for n, (s, d) in known[0].items()}
    way = dist.isend if dist.get_rank() == 0 else dist.irecv
    parts = [one.view(torch.uint8) for one in weights.values()]
    for work in dist.batch_isend_irecv(
        [dist.P2POp(way, one, 1 - dist.get_rank()) for one in parts]
    ):
        work.wait()
    return dict(weights)


def seconds_of(sync: Callable[[], None], device: torch.device) -> float:
    """Of the slower rank, the median."""
    turns = []
    for _ in range(ROUNDS + 1):  # the first one makes connections
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        wait()
        dist.barrier()
        start = time.perf_counter()
        sync()
        wait()
        held = torch.tensor(time.perf_counter() - start, device=device)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        turns.append(held.item())
    return statistics.median(turns[1:])


def rows(size: tuple[int, int, int, int], recipes: list[str], device: torch.device) -> list[Row]:
    if dist.get_world_size() != 2:
        return []
    trains = dist.get_rank() == 0
    model, plain = layers(device, *size), layers(device, *size)
    held = {name: one.detach() for name, one in model.named_parameters()}

    def as_bf16() -> None:
        got = send(held if trains else None, device)
        if not trains:
            for name, one in plain.named_parameters():
                one.data.copy_(got[name])

    bf16 = seconds_of(as_bf16, device)
    whole, found = sum(one.nbytes for one in held.values()), []
    for name in recipes:
        recipe = te_mx.recipe.resolve_recipe(name)
        engine = None if trains else layers(device, *size)
        if engine is not None:
            te_mx.freeze_weights(engine, drop_master=True, recipe=recipe)
        sent = torch.zeros((), dtype=torch.int64, device=device)

        def as_codes(recipe=recipe, engine=engine, sent=sent) -> None:
            made = te_mx.rollout.snapshot(model, recipe=recipe) if trains else None
            got = send(made, device)
            if engine is not None:
                te_mx.rollout.load_(engine, got)
            sent.fill_(sum(one.nbytes for one in got.values()))

        seconds = seconds_of(as_codes, device)
        digests: list[str | None] = [None, None]
        mine = te_mx.rollout.digest(model if engine is None else engine, recipe=recipe)
        dist.all_gather_object(digests, mine)
        if digests[0] != digests[1]:
            raise RuntimeError(f"{name}: the engine has other weights than the trainer: {digests}")
        shape, share = f"{size[0]} layers", int(sent) / whole
        found += [
            Row(
                "sync bytes", shape, name, None, f"{int(sent) / 1e9:.2f} GB", None, "bf16", share,
                BYTES.get(name.partition("-")[0]), f"{whole / 1e9:.2f} GB",
            ),
            Row(
                "sync", shape, name, seconds * 1e6, f"{seconds * 1e3:.1f} ms", None, "bf16",
                bf16 / seconds, None, f"{bf16 * 1e3:.1f} ms",
            ),
        ]  # fmt: skip
    return found
