"""The workspace cache: growth, threads, fork, guard bytes, re-entrance."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

import te_mx
from te_mx.runtime import workspace

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def empty_cache():
    workspace.reset()
    workspace._slots.by_place.clear()
    gc.collect()
    yield
    workspace.reset()


def mine() -> dict[str, int]:
    return workspace.stats().get("cpu", {})


def test_public_name():
    assert te_mx.workspace is workspace


def test_nothing_asked_nothing_held():
    assert workspace.acquire(CPU, 0) is None
    assert workspace.stats() == {}


def test_grows_to_the_largest_need():
    small = workspace.acquire(CPU, 1000)
    assert small.numel() == workspace.PAGE and small.data_ptr() % 64 == 0
    assert workspace.acquire(CPU, 10).data_ptr() == small.data_ptr()
    large = workspace.acquire(CPU, 100_000)
    assert large.numel() == 102_400
    assert workspace.acquire(CPU, 1000).data_ptr() == large.data_ptr()
    assert mine() == {
        "buffers": 1, "bytes": 102_400, "requests": 4, "allocations": 2, "largest_need": 100_000,
    }  # fmt: skip


def test_growth_is_exact_up_to_the_cap_and_geometric_past_it():
    cap = workspace.EXACT_UP_TO
    assert workspace.grown_size(cap, cap // 2) == cap
    assert workspace.grown_size(cap + 1, cap) == cap + cap // 4
    assert workspace.grown_size(2 * cap, cap) == 2 * cap


def test_growth_keeps_what_a_caller_holds():
    held = workspace.acquire(CPU, 4096)
    held.fill_(7)
    workspace.acquire(CPU, 1 << 20)
    workspace.reset()
    assert (held == 7).all()


def test_reserve_and_reset():
    workspace.reserve("cpu", 1 << 16)
    assert mine()["bytes"] == 1 << 16
    workspace.reserve("cpu", 0)
    workspace.acquire(CPU, 1 << 16)
    assert mine()["allocations"] == 1
    workspace.reset("cpu")
    assert mine()["bytes"] == mine()["buffers"] == 0
    with pytest.raises(ValueError, match="0 or more, got -1"):
        workspace.reserve("cpu", -1)


def test_each_thread_has_its_own_and_takes_it_along():
    here = workspace.acquire(CPU, 4096)
    inside, go = {}, threading.Event()
    ready = threading.Event()

    def work():
        inside["address"] = workspace.acquire(CPU, 8192).data_ptr()
        ready.set()
        go.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(10)
    assert inside["address"] != here.data_ptr()
    assert mine()["buffers"] == 2 and mine()["bytes"] == 4096 + 8192
    go.set()
    thread.join()
    gc.collect()
    assert mine()["buffers"] == 1 and mine()["bytes"] == 4096


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_with_the_lock_held():
    """Another thread may hold the lock at the moment of the fork; the child must not wait for
    it.
    """
    workspace.acquire(CPU, 4096)
    with workspace._lock:
        pid = os.fork()
        if pid == 0:
            ok = workspace.stats()["cpu"]["buffers"] == 1
            threading.Thread(target=workspace.acquire, args=(CPU, 4096)).start()
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_buffer_made_in_inference_mode_serves_outside():
    with torch.inference_mode():
        buffer = workspace.acquire(CPU, 4096)
    assert not buffer.is_inference()
    buffer.zero_()


def test_guard_bytes_catch_an_overrun():
    with workspace.guarded():
        buffer = workspace.acquire(CPU, 100)
        assert (buffer[:100] == 0xFF).all()
        workspace.release(buffer, 100)
        buffer[100] = 0
        with pytest.raises(AssertionError, match="behind its workspace of 100 bytes"):
            workspace.release(buffer, 100)
        assert workspace.stats() == {}  # guarded buffers are not cached


def test_gemm_stays_in_its_workspace(isa, guarded):
    """Every layout, epilogue and family at sizes around the tile edges, with poisoned, guarded
    scratch.
    """
    for n, m, k in ((1, 5, 33), (16, 64, 64), (17, 48, 97), (70, 130, 200)):
        w = te_mx.quantize(torch.randn(m, k))
        x = te_mx.quantize(torch.randn(n, k))
        g = te_mx.quantize(torch.randn(n, m), columnwise=True)
        wc = te_mx.quantize(torch.randn(k, m), rowwise=False, columnwise=True)
        xc = te_mx.quantize(torch.randn(n, k), rowwise=False, columnwise=True)
        for made in (
            te_mx.gemm(w, x, bias=torch.randn(m), gelu="erf"),
            te_mx.gemm(wc, x, "NN", grad=True, gelu_in=torch.randn(n, m), bias=True),
            te_mx.gemm(xc, g, "NT", grad=True, bias=True),
        ):
            assert made.out.isfinite().all()


def test_reentrant_use_from_a_finalizer():
    """A GEMM inside the growth of another one's buffer, as a finalizer may do it, leaves both
    right.
    """
    a, b = te_mx.quantize(torch.randn(40, 64)), te_mx.quantize(torch.randn(33, 64))
    expected = te_mx.gemm(a, b).out
    outer = workspace.acquire(CPU, 1 << 16)
    assert torch.equal(te_mx.gemm(a, b).out, expected)
    assert outer.numel() == 1 << 16


def test_many_threads_multiply_at_once():
    a = te_mx.quantize(torch.randn(96, 128))
    inputs = [te_mx.quantize(torch.randn(n, 128)) for n in (1, 16, 40, 70)]
    expected = [te_mx.gemm(a, x).out for x in inputs]
    wrong = []

    def work(i):
        for _ in range(20):
            if not torch.equal(te_mx.gemm(a, inputs[i]).out, expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
