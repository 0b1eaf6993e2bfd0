"""Training a small model: it converges as in high precision, and it is deterministic."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import nn

import te_mx
from te_mx.recipe import (
    DeepSeekV3,
    Float8BlockScaling,
    Format,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4 on the CPU

RECIPES = {
    "e4m3": MXFP8BlockScaling(),
    "hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "floor": MXFP8BlockScaling(scale_rule="floor"),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp4_all": MXFP4BlockScaling(g="mxfp4"),
    "nvfp4": NVFP4BlockScaling(),
    "float8_block": Float8BlockScaling(),
    "deepseek_v3": DeepSeekV3(),
}


def train(recipe, steps=100, dtype=torch.float32, plain=()):
    """Losses of a three-layer classifier on data that a random teacher labelled; layers that are
    left plain by name."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 10))
    model = nn.Sequential(
        nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 72), nn.GELU(), nn.Linear(72, 10)
    ).to(dtype)
    te_mx.convert_model(model, filter_fn=lambda _, name: name not in plain)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(128, 48, generator=generator)
        target = teacher(x).argmax(1)
        with te_mx.autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(x.to(dtype))
        loss = nn.functional.cross_entropy(logits.float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses), model


GAP = dict.fromkeys(RECIPES, 0.03) | {"floor": 0.05}  # floor saturates the largest elements
GAP |= {"mxfp4": 0.05, "mxfp4_all": 0.05, "nvfp4": 0.05}
ENDS = ("0", "4")  # in MXFP4 the data themselves and the logits would lose most: 0.2


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # the tensors are too small to share


@functools.cache
def high_precision(dtype):
    return train(None, dtype=dtype)[0]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converges_as_high_precision_does(name, dtype):
    exact = high_precision(dtype)
    ours, model = train(RECIPES[name], dtype=dtype, plain=ENDS if "fp4" in name else ())
    assert exact[-10:].mean() < 0.6 * exact[0]  # the task can be learned
    gap = ours[-10:].mean() / exact[-10:].mean() - 1
    assert abs(gap) < GAP[name], f"loss gap {gap:.2%}"
    plain = {row.name for row in te_mx.audit(model) if "high precision" in row}
    assert plain == set(ENDS if "fp4" in name else ())


def test_is_deterministic():
    losses, model = train(RECIPES["hybrid"], steps=10)
    again, other = train(RECIPES["hybrid"], steps=10)
    assert torch.equal(losses, again)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_gradients_do_not_depend_on_the_thread_count(threads):
    layer = te_mx.Linear(300, 200)
    x, grad = torch.randn(257, 300), torch.randn(257, 200)
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with te_mx.autocast():
            y = layer(inp)
        y.backward(grad)
        results.append([y.detach(), inp.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_ema_of_weights_is_seen():
    _, model = train(RECIPES["e4m3"], steps=3)
    average = te_mx.Linear(48, 96)
    x = torch.randn(4, 48)
    seen = []
    for _ in range(3):
        for p, q in zip(average.parameters(), model[0].parameters(), strict=True):
            p.data.lerp_(q.data, 0.5)
        with torch.no_grad(), te_mx.autocast():
            seen.append(average(x))
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@pytest.fixture
def one_process_group(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_distributed_wrappers(one_process_group, wrap):
    model = nn.Sequential(te_mx.Linear(48, 64), nn.ReLU(), te_mx.Linear(64, 8))
    wrapped, x = copy.deepcopy(model), torch.randn(5, 48)
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(wrapped)
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for layer in (wrapped[0], wrapped[2], wrapped):
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    for m in (model, wrapped):
        with te_mx.autocast():
            y = m(x)
        y.square().sum().backward()
    for p, q in zip(model.parameters(), wrapped.parameters(), strict=True):
        got = q.grad if wrap == "ddp" else q.grad.full_tensor()
        assert torch.equal(p.grad, got)
