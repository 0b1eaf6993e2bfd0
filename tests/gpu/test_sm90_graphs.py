"""CUDA graphs, streams, threads and host synchronization around the Hopper kernels."""

from __future__ import annotations

import threading

import pytest
import torch

import te_mx
from te_mx.autograd import input_cache
from te_mx.recipe import MXFP8BlockScaling
from te_mx.runtime import workspace

RECIPES = [MXFP8BlockScaling(precision=precision) for precision in ("adaptive", "exact")]
M, K, N = 200, 320, 264


@pytest.fixture(params=RECIPES, ids=lambda r: r.precision)
def recipe(request):
    workspace.reset("cuda")
    yield request.param
    workspace.reset("cuda")


def model():
    torch.manual_seed(1)
    layers = te_mx.Linear(K, N, dtype=torch.bfloat16), te_mx.Linear(N, K, dtype=torch.bfloat16)
    return torch.nn.Sequential(*layers).cuda()


def data(seed):
    g = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(M, K, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(2)]


def step(net, x, grad, recipe):
    """Output and gradients; those of the parameters are overwritten, not added to."""
    x = x.detach().requires_grad_()
    for p in net.parameters():
        p.grad = None
    with te_mx.autocast(recipe=recipe):
        y = net(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def assert_same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def unused(t):
    """The same codes in an MXTensor that was never multiplied: it is packed inside the GEMM."""
    return te_mx.MXTensor(
        t.shape, t.fmt, rowwise_data=t.rowwise_data, rowwise_scale=t.rowwise_scale
    )


def captured(run):
    """(graph, results) of a function, after a warm-up beside the default stream."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def siblings():
    torch.manual_seed(1)
    return [te_mx.Linear(K, n, dtype=torch.bfloat16, device="cuda") for n in (N, 64, 64)]


def test_layers_of_one_input_in_a_graph(recipe):
    """They share what the capture made, which is nothing before a replay."""
    layers, x = siblings(), data(0)[0].requires_grad_()

    def forward_and_backward():
        outputs = [each(x) for each in layers]
        loss = sum(y.float().square().sum() for y in outputs)
        parameters = [p for each in layers for p in each.parameters()]
        return [*outputs, *torch.autograd.grad(loss, [x, *parameters])]

    with te_mx.autocast(recipe=recipe):
        graph, results = captured(forward_and_backward)
        want = [each(x.detach()) for each in layers]
        assert_same([each(x) for each in layers], want)
        for seed in (1, 2):
            with torch.no_grad():
                x.copy_(data(seed)[0])
            graph.replay()
            got = [t.clone() for t in results]
            assert_same(got, forward_and_backward())


def test_a_replay_is_seen_where_its_output_is_an_input(recipe):
    x = data(0)[0]
    graph, made = captured(lambda: x * 2)
    with te_mx.autocast(recipe=recipe):
        for seed, layer in enumerate(siblings()):
            x.copy_(data(seed)[0])
            graph.replay()
            assert torch.equal(layer(made), layer(data(seed)[0] * 2))


def test_another_stream_makes_its_own(recipe):
    """Operands are not used where nothing waits for them."""
    layers, x = siblings(), data(0)[0]
    with te_mx.autocast(recipe=recipe):
        want = [each(x.clone()) for each in layers]
        torch.cuda.synchronize()
        input_cache.open_for(x)
        layers[0](x)
        assert input_cache.entry_of(x) is not None
        beside = torch.cuda.Stream()
        with torch.cuda.stream(beside):
            assert input_cache.entry_of(x) is None
            got = [each(x) for each in layers]
        torch.cuda.synchronize()
    assert_same(got, want)


def use_the_cache(recipe):
    """GEMMs that need more scratch than any before, with NaN in it."""
    a, b = (te_mx.quantize(torch.randn(3000, 1024, device="cuda")) for _ in range(2))
    te_mx.gemm(a, b, precision=recipe.precision)
    workspace.reserve("cuda", 64 << 20)
    workspace.acquire(torch.device("cuda", 0), 64 << 20).fill_(0xFF)


def test_a_training_step_in_a_graph(recipe):
    net = model()
    x, grad = data(0)
    graph, results = captured(lambda: step(net, x, grad, recipe))
    for seed in range(1, 6):
        if seed == 3:
            use_the_cache(recipe)
        if seed == 4:
            workspace.reset()
        new_x, new_grad = data(seed)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.01 * seed)
        x.copy_(new_x)
        grad.copy_(new_grad)
        graph.replay()
        got = [t.clone() for t in results]
        assert_same(got, step(net, new_x, new_grad, recipe))


def test_a_graph_takes_nothing_from_the_cache_and_leaves_nothing_in_it(recipe):
    a, b = torch.randn(M, K, device="cuda"), torch.randn(N, K, device="cuda")

    def run():
        return te_mx.gemm(te_mx.quantize(a), te_mx.quantize(b), precision=recipe.precision).out

    run()
    place = "cuda:0"
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        run()
    torch.cuda.synchronize()
    before = workspace.stats().get(place)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=beside):
        out = run()
    assert workspace.stats().get(place) == before
    use_the_cache(recipe)
    for reset in (False, True, False):
        if reset:
            workspace.reset()
        a.normal_()
        graph.replay()
        assert torch.equal(out, run())


def test_tensors_first_used_in_a_graph_are_right_outside_before_it_ran(recipe):
    """What is kept for later uses must not be something that a graph would have computed."""
    mode = {"precision": recipe.precision}
    for uses in range(3):
        A, B = (te_mx.quantize(torch.randn(r, K, device="cuda")) for r in (M, N))
        want = te_mx.gemm(unused(A), unused(B), **mode).out
        for _ in range(uses):
            te_mx.gemm(A, B, **mode)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = te_mx.gemm(A, B, **mode).out
        assert torch.equal(te_mx.gemm(A, B, **mode).out, want), f"after {uses} uses"
        graph.replay()
        assert torch.equal(inside, want)
        del graph, inside
        torch.cuda.empty_cache()
        torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")
        for _ in range(2):
            assert torch.equal(te_mx.gemm(A, B, **mode).out, want), f"after {uses} uses"


def test_a_frozen_weight_first_used_in_a_graph(recipe):
    linear = model()[0]
    x = data(0)[0]
    te_mx.freeze_weights(linear, recipe=recipe)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        want = linear(x)
        linear.load_state_dict(linear.state_dict())  # the next forward quantizes again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = linear(x)
        assert torch.equal(linear(x), want)
        graph.replay()
        assert torch.equal(inside, want)


def test_two_streams_give_the_bits_of_one(recipe):
    net = model()
    inputs = [data(seed) for seed in range(4)]
    want = [step(net, *pair, recipe) for pair in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(3):
        got = []
        for i, pair in enumerate(inputs):
            with torch.cuda.stream(streams[i % 2]):
                got.append(step(net, *pair, recipe))
        torch.cuda.synchronize()
        for mine, theirs in zip(got, want, strict=True):
            assert_same(mine, theirs)


def test_scratch_of_two_streams_is_apart(recipe):
    sides = [torch.randn(r, 2048, device="cuda") for r in (512, 640, 768)]
    tensors = [te_mx.quantize(x) for x in sides]
    mode = {"precision": recipe.precision}

    a, b, c = map(unused, tensors)
    want = te_mx.gemm(a, b, **mode).out, te_mx.gemm(b, c, **mode).out
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = [[], []]
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                one, two, three = map(unused, tensors)
                results[i].append(te_mx.gemm(*((one, two), (two, three))[i], **mode).out)
    torch.cuda.synchronize()
    for mine, theirs in zip(results, want, strict=True):
        assert all(torch.equal(out, theirs) for out in mine)


def test_a_packed_form_is_not_read_on_a_stream_that_did_not_wait_for_it(recipe):
    A, B = (te_mx.quantize(torch.randn(r, 2048, device="cuda")) for r in (512, 640))
    mode = {"precision": recipe.precision}
    want = te_mx.gemm(A, B, **mode).out
    torch.cuda.synchronize()
    late, early = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(late):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        first = te_mx.gemm(A, B, **mode).out  # the second use: packed to be kept
    with torch.cuda.stream(early):
        second = te_mx.gemm(A, B, **mode).out
    torch.cuda.synchronize()
    assert torch.equal(first, want)
    assert torch.equal(second, want)


def test_two_threads_give_the_bits_of_one(recipe):
    inputs = [data(seed) for seed in range(2)]
    want = [step(model(), *pair, recipe) for pair in inputs]
    torch.cuda.synchronize()
    got, errors = [[], []], []
    start = threading.Barrier(2)
    nets = [model() for _ in range(2)]
    torch.cuda.synchronize()

    def work(i):
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    got[i].append(step(nets[i], *inputs[i], recipe))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for mine, theirs in zip(got, want, strict=True):
        for one in mine:
            assert_same(one, theirs)


def test_nothing_waits_for_the_device(recipe):
    net = model()
    x, grad = data(0)
    a, b = torch.randn(M, K, device="cuda"), torch.randn(N, K, device="cuda")
    old = torch.zeros(N, M, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(net, x, grad, recipe)
        A, B = (te_mx.quantize(t, columnwise=True) for t in (a, b))
        for _ in range(3):
            te_mx.gemm(A, B, precision=recipe.precision, out=old, accumulate=True)
            te_mx.gemm(
                A, B, precision=recipe.precision, bias=a[:, 0], gelu="tanh", out_dtype=torch.float32
            )
            te_mx.gemm(A, B, precision=recipe.precision, grad=True, bias=True)
        A.dequantize()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_work_is_queued_behind_a_busy_device(recipe):
    """A step returns long before the device comes to it."""
    net = model()
    x, grad = data(0)
    want = step(net, x, grad, recipe)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    got = step(net, x, grad, recipe)
    done.record()
    assert not done.query(), "the host waited for the device"
    torch.cuda.synchronize()
    assert_same(got, want)
