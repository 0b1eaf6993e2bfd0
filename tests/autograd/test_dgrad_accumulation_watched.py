"""Input gradients of layers that read one tensor add up in their GEMMs: nothing is lost or kept
where passes meet, fail or are watched."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from input_cache_cases import opened, together
from sibling_cases import ALL, PATHS, Apart, given, qkv, run, running, upstream
from torch import Tensor

import te_mx


@pytest.fixture(params=PATHS)
def path(request, threads):
    threads(1)
    with running(request.param):
        yield request.param


def test_an_error_in_the_middle(path):
    layers = qkv(path=path)
    apart, x = Apart(layers), given().requires_grad_()
    outputs = run(layers, x)
    g, held = upstream(outputs), [outputs[0].grad_fn.siblings]
    seen = []

    def fails(grad):
        seen.extend(weakref.ref(one) for one in held[0]._passes.values())
        raise KeyError("in the middle")

    for _ in range(2):
        hook = outputs[1].register_hook(fails)
        with pytest.raises(KeyError):
            torch.autograd.grad(outputs, x, g, retain_graph=True)
        hook.remove()
    left = list(held[0]._passes)
    first, second = (torch.autograd.grad(outputs, x, g, retain_graph=True)[0] for _ in range(2))
    assert apart.is_sum(first) and torch.equal(first, second) and list(held[0]._passes) == left
    del outputs, hook, held[:]
    gc.collect()
    assert seen and not any(one() for one in seen)  # gone with the graph


@pytest.mark.parametrize("inner", [ALL, (0, 1), (2,)], ids=str)
def test_a_pass_inside_of_a_pass(path, inner):
    layers = qkv(path=path)
    apart, x = Apart(layers), given().requires_grad_()
    outputs = run(layers, x)
    g, made = upstream(outputs), []

    def once_more(grad):
        if not made:
            made.append(None)
            of = [outputs[i] for i in inner], x, [g[i] for i in inner]
            made.append(torch.autograd.grad(*of, retain_graph=True)[0])

    outputs[1].register_hook(once_more)
    (dx,) = torch.autograd.grad(outputs, x, g, retain_graph=True)
    assert apart.is_sum(dx) and apart.is_sum(made[1], inner)


def test_passes_of_two_threads_at_the_same_time(path):
    layers = qkv(path=path)
    apart, x = Apart(layers), given().requires_grad_()
    outputs = run(layers, x)
    g, together, made = upstream(outputs), threading.Barrier(2, timeout=30), []

    def wait(grad):
        together.wait()

    for y in outputs:  # both are behind the same layer before one goes on
        y.register_hook(wait)

    def backward():
        made.extend(torch.autograd.grad(outputs, x, g, retain_graph=True))

    threads = [threading.Thread(target=backward) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 and all(apart.is_sum(dx) for dx in made)
    assert torch.equal(*made)


@pytest.mark.parametrize("leaf", [True, False])
def test_hooks_of_the_input_get_the_sum_once(path, leaf):
    layers = qkv(path=path)
    apart, x = Apart(layers), given().requires_grad_()
    h, seen = x if leaf else x * 1, []
    if not leaf:
        h.retain_grad()
    h.register_hook(lambda grad: seen.append(grad) or grad * 2)
    outputs = run(layers, h)
    torch.autograd.backward(outputs, upstream(outputs))
    (dx,) = seen
    assert apart.is_sum(dx) and torch.equal(x.grad, 2 * dx) and torch.equal(h.grad, 2 * dx)


@pytest.mark.parametrize("hooked", [(0,), (1,), (2,), ALL], ids=str)
def test_hooks_of_a_layers_node_get_what_is_its_own(path, hooked):
    layers = qkv(path=path)
    apart, x = Apart(layers), given().requires_grad_()
    outputs = run(layers, x)
    seen = {}
    for i in hooked:

        def doubles(grads, _, i=i):
            seen[i] = grads[0]
            return 2 * grads[0], *grads[1:]

        outputs[i].grad_fn.register_hook(doubles)
    torch.autograd.backward(outputs, upstream(outputs))
    assert sorted(seen) == list(hooked) and all(apart.is_sum(seen[i], (i,)) for i in hooked)
    wanted = sum(apart.dx[i] * (2 if i in hooked else 1) for i in ALL)
    torch.testing.assert_close(x.grad, wanted, rtol=1e-5, atol=1e-6)


def test_hooks_where_gradients_accumulate(path):
    """As DistributedDataParallel has them: each once in a pass, when the gradient is whole."""
    layers = qkv(path=path)
    apart, x = Apart(layers), given().requires_grad_()
    calls = []
    held = {"x": x, **dict(layers.named_parameters())}
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in held.values()]
    for name, node in zip(held, nodes, strict=True):
        node.register_hook(lambda *_, name=name: calls.append(name))
    x.register_post_accumulate_grad_hook(lambda x: calls.append(x.grad.clone()))
    for _ in range(2):
        calls.clear()
        layers.zero_grad()
        x.grad = None
        outputs = run(layers, x)
        torch.autograd.backward(outputs, upstream(outputs))
        (whole,) = [one for one in calls if isinstance(one, Tensor)]
        assert apart.is_sum(whole) and torch.equal(x.grad, whole)
        assert sorted(one for one in calls if isinstance(one, str)) == sorted(held)


def test_an_input_that_left_its_graph(path):
    """x.detach_() changes no version, but where gradients go."""
    layers = qkv(path=path)
    apart, leaf = Apart(layers), given().requires_grad_()
    x = leaf * 1
    with te_mx.autocast():
        first = layers[0](opened(x))
        x.detach_().requires_grad_()
        others = [layer(x) for layer in layers[1:]]
    outputs = [first, *others]
    torch.autograd.backward(outputs, upstream(outputs))
    assert apart.is_sum(leaf.grad, (0,)) and apart.is_sum(x.grad, (1, 2))


def test_nothing_is_kept(path):
    layers = qkv(path=path)
    te_mx.convert_model(layers, recipe=te_mx.get_default_recipe())  # no region to forget x in
    x = given().requires_grad_()
    for _ in range(5):
        outputs = together(layers, x)
        siblings, nodes = outputs[0].grad_fn.siblings, [weakref.ref(y.grad_fn) for y in outputs]
        assert len(siblings._nodes) <= 3
        torch.autograd.backward(outputs, upstream(outputs))
        assert not siblings._passes
        del outputs, siblings
        assert [node() for node in nodes] == [None] * 3
    gone = weakref.ref(x)
    del x
    assert gone() is None
