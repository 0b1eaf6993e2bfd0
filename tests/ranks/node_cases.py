"""The nodes between DTensors and what a rank has (te_mx/distributed/collectives.py) against
torch's: the same bits.
"""

from __future__ import annotations

import contextlib
import gc
import weakref

import torch
import torch.distributed as dist
from tensor_parallel_cases import DEVICE, K, M, built, full, mesh, of
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import te_mx
from te_mx.distributed import ModuleParallel, collectives

GIVEN = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())


@contextlib.contextmanager
def as_torch():
    """With torch's nodes."""
    plain, collectives.dispatch_modes = collectives.dispatch_modes, lambda: 1
    try:
        yield
    finally:
        collectives.dispatch_modes = plain


class Mixed(nn.Module):
    """Layers that read one input, as attentions do, and one behind them."""

    def __init__(self, bias=True):
        super().__init__()
        self.q, self.k, self.v = (built(te_mx.Linear, K, K, bias) for _ in range(3))
        self.out = built(te_mx.Linear, K, K, bias)

    def forward(self, x):
        return self.out(self.q(x) * torch.sigmoid(self.k(x)) + self.v(x))


def split(bias=True, column=ColwiseParallel, row=RowwiseParallel):
    model = parallelize_module(Mixed(bias), mesh(), dict.fromkeys("qkv", column()) | {"out": row()})
    return parallelize_module(model, mesh(), GIVEN)


@contextlib.contextmanager
def counted():
    """How often ranks sum something at once, in a list."""
    plain, found = dist.all_reduce, []

    def count(tensor, *args, **kwargs):
        found.append(tuple(tensor.shape))
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = count
    try:
        yield found
    finally:
        dist.all_reduce = plain


def passed(model, torchs=False):
    x = of(2, M, K).requires_grad_()
    with as_torch() if torchs else contextlib.nullcontext(), te_mx.autocast():
        y = model(x)
        y.backward(of(*y.shape, seed=2))
    found = [full(t).detach().clone() for t in (y, x.grad, *(p.grad for p in model.parameters()))]
    model.zero_grad()
    return found


def compare(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def case_one_sum_each_way():
    """Forward behind the last layer, backward in front of those that read the input."""
    for styles in (
        (ColwiseParallel, RowwiseParallel),
        (ModuleParallel, lambda: ModuleParallel("row")),
    ):
        for bias in (True, False):
            model = split(bias, *styles)
            with counted() as sums:
                ours = passed(model)
            assert sums == [(2, M, K)] * 2, sums
            with counted() as sums:
                theirs = passed(model, torchs=True)
            assert not sums
            compare(ours, theirs)


def case_high_precision_sums_too():
    model = split()
    x = of(M, K).requires_grad_()
    with counted() as sums:
        model(x).backward(of(M, K))
    ours, x.grad = x.grad.clone(), None
    with as_torch():
        model(x).backward(of(M, K))
    assert len(sums) == 2 and torch.equal(ours, x.grad)


def case_hooks_beside_those_of_a_style():
    """They see DTensors, as without te_mx: a sum that is still to be made."""
    model, seen = split(), []
    expected = passed(model)
    model.out.register_forward_hook(lambda layer, inputs, y: seen.append(y), prepend=True)
    compare(passed(model), expected)
    assert seen[0].placements == (Partial(),)
    model.q.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    compare(passed(model), expected)
    assert seen[-2].placements == (Replicate(),)


def case_a_layer_without_its_hooks():
    """Its forward alone gives a DTensor, which is one in every respect."""
    model = split()
    x = DTensor.from_local(of(M, K), mesh(), [Replicate()], run_check=False)
    with te_mx.autocast():
        y = model.q.forward(x.requires_grad_())
        whole = model.out.forward(y)
    assert y.placements == (Shard(1),) and y.shape == (M, K) and y.grad_fn is not None
    assert whole.placements == (Replicate(),) and torch.equal(whole.to_local(), full(whole))
    before, at = full(y).clone(), y.to_local()
    assert torch.equal(at, before.chunk(2, 1)[torch.distributed.get_rank()])
    with torch.no_grad():
        y.mul_(2)
    assert torch.equal(full(y), 2 * before)
    assert y.redistribute(placements=[Shard(-1)]).placements == (Shard(1),)
    y.to_local(grad_placements=[Shard(1)]).float().sum().backward()
    assert x.grad is not None and model.q.weight.grad.placements == (Shard(0),)


def case_results_are_not_kept():
    """Nothing but what the caller has keeps them alive, also before Python looks for cycles."""
    model, seen = split(), []
    model.q.register_forward_hook(
        lambda layer, inputs, y: seen.append(weakref.ref(y)), prepend=True
    )
    linear = parallelize_module(built(te_mx.Linear, K, K), mesh(), ColwiseParallel())
    gc.disable()
    try:
        with te_mx.autocast():
            del_later = model(of(M, K))
            x = DTensor.from_local(of(M, K), mesh(), [Replicate()], run_check=False)
            made = linear.forward(x.requires_grad_())
            seen.append(weakref.ref(made))
            assert made.to_local().shape == (M, K // 2)
        del made, del_later
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def case_other_readers_of_an_input():
    """Gradients of one that is read by other layers too add up to the same."""

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixed, self.plain = Mixed(), built(nn.Linear, K, K)

        def forward(self, x):
            return self.mixed(x) + self.plain(x)

    model = Beside()
    names = {f"mixed.{name}": ColwiseParallel() for name in "qkv"}
    names |= {"mixed.out": RowwiseParallel()}
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh(), names | {"plain": whole})
    parallelize_module(model, mesh(), GIVEN)
    ours, theirs = passed(model), passed(model, torchs=True)
    compare(ours[:1] + ours[2:], theirs[:1] + theirs[2:])
    # One sum is rounded before the other is added to it, or behind.
    assert (ours[1].float() - theirs[1].float()).norm() < 2**-7 * theirs[1].float().norm()


def case_second_derivatives():
    model = split()
    for wanted in ("x", "weight"):
        x = of(M, K).requires_grad_()
        with te_mx.autocast():
            y = model(x).float().pow(2).sum()
        at = x if wanted == "x" else model.q.weight
        (grad,) = torch.autograd.grad(y, at, create_graph=True)
        try:
            full(grad).float().pow(2).sum().backward()
        except RuntimeError as error:
            assert "differentiate twice" in str(error), error
        else:
            raise AssertionError(f"a second derivative of {wanted}")


def case_a_mesh_of_other_ranks():
    """What is known of a mesh is not taken for another one's that equals it."""
    one, other = mesh(), mesh()
    y = torch.ones(2, 3, device=DEVICE, requires_grad=True)
    made = [collectives._kind(m, (Replicate(),), torch.Size((2, 3)), y) for m in (one, other)]
    assert made[0].mesh is one and made[1].mesh is other
    found = collectives.spread(y * 2, other, [Shard(0)], torch.Size((4, 3)))
    assert found.device_mesh is other and found.full_tensor().shape == (4, 3)
