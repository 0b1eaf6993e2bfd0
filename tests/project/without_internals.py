"""Trains with te_mx in a torch that has lost a private name: python without_internals.py FOLDER.

Prints a line for each name of te_mx/torch_internals.py, `name: ok` or what went wrong. torch needs
the names itself, so they are lost to that file alone; each name in a process of its own, forked
when torch is there and te_mx is not.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import pkgutil
import re
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch._dynamo  # for checkpoints, which would import it in every process
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils.checkpoint
from torch import nn
from torch.func import functional_call, grad

HOUSE = "te_mx.torch_internals"
MOST = 15
# Without these te_mx refuses what needs them.
NO_PLACES = {"torch._C:_current_graph_task_id", "torch._C:_will_engine_execute_node"}
NO_TRANSFORMS = {"torch._C:_functorch.peek_interpreter_stack"}
NO_WRAPPER = "torch:Tensor._make_wrapper_subclass"
MAPPING = "torch.distributed._composable_state:_module_state_mapping"
# What is refused in one process of a group, by what it is called below.
REFUSED = {
    "fully_shard": {MAPPING, "_fsdp_param_group", "_all_reduce_hook", *NO_PLACES},
    "replicated": {"_active_ddp_module", *NO_PLACES},
}


def cases() -> list[str]:
    """What to lose: each name of the file, as it asks for it."""
    spec = importlib.util.find_spec("te_mx")
    text = Path(spec.submodule_search_locations[0], "torch_internals.py").read_text()
    found = list(dict.fromkeys(re.findall(r'"(torch[\w.]*:[\w.]+|_(?!te_mx)[a-z]\w+)"', text)))
    assert 10 < len(found) <= MOST, found
    return found


def lose(lost: str) -> None:
    """Have the file not find a name."""
    get, has, find = getattr, hasattr, pkgutil.resolve_name

    def is_lost(asked):
        return asked == lost and sys._getframe(2).f_globals.get("__name__") == HOUSE

    def getattr_(owner, asked, *default):
        return default[0] if is_lost(asked) and default else get(owner, asked, *default)

    def hasattr_(owner, asked):
        return not is_lost(asked) and has(owner, asked)

    def resolve_name(path):
        if is_lost(path):
            raise AttributeError(path)
        return find(path)

    builtins.getattr, builtins.hasattr = getattr_, hasattr_
    pkgutil.resolve_name = resolve_name
    if lost == "_fsdp_param_group":  # of which the file asks for the first letters
        from torch.distributed.fsdp import fully_shard

        state = type(fully_shard(nn.Linear(2, 2))._get_fsdp_state())
        state.__getattribute__ = lambda self, name: (
            {} if name == "__dict__" and is_lost(lost) else object.__getattribute__(self, name)
        )


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


def trained(lost: str) -> list[torch.Tensor]:
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
    assert ("does not say it" in refused) == (lost in NO_PLACES), refused
    made.append(torch.zeros(64, 64) if lost in NO_PLACES else fused.weight.main_grad)

    parameters = {name: p.detach() for name, p in linear.named_parameters()}
    refused = ""
    try:
        with te_mx.autocast():
            found = grad(lambda p: functional_call(linear, p, x.detach()).sum())(parameters)
        made.extend(found.values())
    except Exception as error:
        refused = repr(error)
        made.extend(torch.zeros_like(p) for p in parameters.values())
    assert not refused or lost in NO_TRANSFORMS, refused

    te_mx.freeze_weights(linear)
    for _ in range(2):
        with torch.no_grad(), te_mx.autocast():
            made.append(linear(x))
    with torch.no_grad():
        linear.weight.mul_(2)
        with te_mx.autocast():
            made.append(linear(x))
    return made + together(lost, x.detach())


def together(lost: str, x: torch.Tensor) -> list[torch.Tensor]:
    """What a step gives in a process group, of this process alone; zeros where it is refused."""
    import te_mx
    from te_mx.distributed import quantized_all_gather

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    knobs = {"fuse_wgrad_accumulation": True}

    def spread():
        layer = te_mx.Linear(64, 64)
        dist.tensor.parallel.parallelize_module(
            layer, mesh, dist.tensor.parallel.ColwiseParallel(use_local_output=True)
        )
        return layer, lambda: layer.weight.grad.full_tensor()

    def fully_shard():
        layer = te_mx.Linear(64, 64, **knobs)
        dist.fsdp.fully_shard(layer, mesh=mesh)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        main_grad = layer.weight.main_grad
        return layer, main_grad.full_tensor

    def replicated():
        layer = te_mx.Linear(64, 64, **knobs)
        layer.weight.main_grad = torch.zeros(64, 64)
        model = nn.parallel.DistributedDataParallel(layer)
        return model, lambda: layer.weight.main_grad

    made = []
    for build in (spread, fully_shard, replicated):
        torch.manual_seed(0)
        refused = ""
        try:
            model, result = build()
            with te_mx.autocast():
                y = model(x)
            y.square().sum().backward()
            made.append(result())
        except (NotImplementedError, RuntimeError, ValueError) as error:
            refused = str(error)
            made.append(torch.zeros(64, 64))
        assert bool(refused) == (lost in REFUSED.get(build.__name__, ())), (build, refused)
        assert not refused or "te_mx" in refused or "fully_shard" in refused, refused
    with pytest.raises((NotImplementedError, ValueError)) as raised:  # of one rank there are none
        quantized_all_gather(model)
    said = "without values" if lost == NO_WRAPPER else "no te_mx module"
    assert said in str(raised.value), raised.value
    return made


def run(lost: str, folder: Path) -> None:
    """One process: names that are lost, or none."""
    store = f"file://{folder / (lost or 'nothing').replace(':', '.')}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    lose(lost)
    made, base = trained(lost), folder / "base"
    if not lost:
        torch.save(made, base)
        return
    for one, other in zip(made, torch.load(base), strict=True):
        refused = lost in NO_TRANSFORMS.union(NO_PLACES, *REFUSED.values()) and not one.any()
        if other.any() and not refused:
            torch.testing.assert_close(one, other)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for lost in ["", *cases()]:
        name = lost or "nothing"
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
