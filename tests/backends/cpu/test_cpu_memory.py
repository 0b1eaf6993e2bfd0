"""Large results on the CPU lie in blocks that are used again, and never in one that is in use."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

import te_mx
from te_mx.backends.cpu import binding as cpu
from te_mx.runtime import cpu_memory
from te_mx.runtime.cpu_memory import LEAST, Block, Pool

UNIT = LEAST // 4
HUGE_PAGE = 2 << 20
BYTE = torch.uint8


def test_small_tensors_come_from_torch():
    pool = Pool()
    made = pool.empty((LEAST // 4 - 1,), torch.float32)
    assert made.untyped_storage().resizable() and pool.used_bytes == 0


@pytest.mark.parametrize("dtype", [BYTE, torch.bfloat16, torch.float32])
def test_a_block_serves_again_when_its_storage_is_gone(dtype):
    pool, shape = Pool(), (3, 5, UNIT)
    first = pool.empty(shape, dtype)
    assert first.shape == shape and first.dtype == dtype and first.is_contiguous()
    assert first.data_ptr() % 64 == 0 and not first._is_view()
    address, view = first.data_ptr(), first[1].flatten()
    first.fill_(3)
    del first
    other = pool.empty(shape, dtype)  # a view still holds the storage
    again = other.data_ptr()
    assert again != address and bool((view == 3).all())
    del view, other
    gc.collect()
    held = [pool.empty(shape, dtype) for _ in range(2)]
    assert {t.data_ptr() for t in held} == {address, again}


def test_memory_is_bounded_by_what_was_used_at_one_time():
    pool = Pool()
    for units in (4, 64, 8, 32, 16, 6, 128, 48, 5):
        made = pool.empty((units * UNIT,), BYTE)
        assert pool.used_bytes + pool.idle_bytes <= pool.peak_bytes * 3 // 2
        del made
    held = [pool.empty((8 * UNIT,), BYTE) for _ in range(40)]
    assert len({t.data_ptr() for t in held}) == 40
    assert pool.used_bytes == pool.peak_bytes >= 320 * UNIT
    held.clear()
    for units in (12, 20, 40):
        pool.empty((units * UNIT,), BYTE)
        assert pool.used_bytes + pool.idle_bytes <= pool.peak_bytes * 3 // 2
    pool.reset()
    assert pool.idle_bytes == pool.used_bytes == pool.peak_bytes == 0


def test_a_block_serves_tensors_of_its_size():
    """A storage that is larger than its tensor would be saved and sent as a whole."""
    pool = Pool()
    large = pool.empty((64 * UNIT,), BYTE).data_ptr()
    small = pool.empty((24 * UNIT,), BYTE)  # both may be kept: 1.5 times 64 units
    assert small.data_ptr() != large and small.untyped_storage().nbytes() == small.nbytes
    assert pool.empty((8, 4 * UNIT), torch.bfloat16).data_ptr() == large


def test_the_longest_idle_goes_first():
    pool = Pool()
    held = [pool.empty((units * UNIT,), BYTE) for units in (4, 8, 12)]
    for _ in range(2):
        del held[0]
        pool.empty((16 * UNIT,), BYTE)  # finds what is idle by now
    held.clear()
    # At most 54 beside 36 that were used at one time: 4, 8 and 12 go, 16 stays.
    large = pool.empty((32 * UNIT,), BYTE)
    assert (pool.peak_bytes, pool.idle_bytes) == (36 * UNIT, 16 * UNIT)
    assert large.numel() == pool.used_bytes


def test_tensors_are_resized_as_those_of_torch():
    pool = Pool()
    made = pool.empty((3, UNIT), torch.float32).fill_(3)
    held = made.untyped_storage()
    resizable, nbytes = held.resizable(), held.nbytes()  # a failed assert would print the storage
    assert resizable and nbytes == 12 * UNIT
    made.resize_(5, UNIT)
    assert held.nbytes() == 20 * UNIT and bool((made[:3] == 3).all())
    held.resize_(0)
    assert made.untyped_storage().nbytes() == 0
    made.set_(torch.ones(2))
    assert made.tolist() == [1, 1]
    del made, held
    pool.empty((3, UNIT), torch.float32)  # what was resized does not come back
    assert pool.used_bytes == 12 * UNIT and pool.idle_bytes == 0


@pytest.mark.parametrize(
    "refer",
    [
        lambda made: made[5:],
        lambda made: made.numpy(),
        lambda made: made.untyped_storage(),
        lambda made: made.detach(),
        lambda made: memoryview(made.numpy()),
        lambda made: torch.utils.dlpack.to_dlpack(made),
        lambda made: (made.view(torch.float32).requires_grad_().square()).grad_fn,
    ],
)
def test_whatever_refers_to_memory_keeps_it(refer):
    pool = Pool()
    made = pool.empty((LEAST,), BYTE).fill_(7)
    address = made.data_ptr()
    held = refer(made)
    del made
    other = pool.empty((LEAST,), BYTE)
    assert other.data_ptr() != address
    del held, other
    gc.collect()
    assert address in [pool.empty((LEAST,), BYTE).data_ptr() for _ in range(2)]


def test_results_may_be_out_of_later_calls():
    """torch resizes an out= of another shape."""
    layer = te_mx.Linear(64, 2048)
    with torch.no_grad(), te_mx.autocast():
        y = layer(torch.randn(2048, 64))
    a, b = torch.randn(2100, 8), torch.randn(8, 2048)
    y.resize_(0)
    assert torch.equal(torch.mm(a, b, out=y), a @ b)
    with torch.no_grad(), te_mx.autocast():
        y = layer(torch.randn(2048, 64))
    assert torch.equal(y.share_memory_(), y.clone()) and y.is_shared()


def test_without_counts_of_references_torch_allocates(monkeypatch):
    assert cpu_memory.idle_is_known()
    monkeypatch.setattr(Block, "is_idle", lambda self: True)
    assert not cpu_memory.idle_is_known.__wrapped__()
    monkeypatch.setattr(cpu_memory, "idle_is_known", lambda: False)
    pool = Pool()
    assert pool.empty((LEAST,), BYTE).numel() == LEAST and not pool.peak_bytes


def test_a_block_is_taken_before_it_is_a_tensor(monkeypatch):
    """Or another thread, which comes in between, gets the same memory."""
    pool, seen = Pool(), []
    tensor = Block.tensor

    def between(self, *how):
        seen.append(self.is_idle())
        return tensor(self, *how)

    monkeypatch.setattr(Block, "tensor", between)
    for _ in range(2):  # fresh memory, and memory that is used again
        pool.empty((LEAST,), BYTE)
    assert seen == [False, False]


def test_threads_get_blocks_of_their_own():
    pool, wrong = Pool(), []

    def work(mark: int) -> None:
        for _ in range(8):
            made = pool.empty((LEAST,), BYTE).fill_(mark)
            if not bool((made == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pool.reset()
    assert pool.used_bytes == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_writes_into_memory_of_its_own():
    pool = Pool()
    held = pool.empty((2 * LEAST,), BYTE).fill_(1)
    idle = pool.empty((LEAST,), BYTE).fill_(1).data_ptr()
    child = os.fork()
    if child == 0:
        held[0] = 2  # one element: torch's threads do not survive a fork
        made = pool.empty((LEAST,), BYTE)
        made[0] = 2
        os._exit(int(made.data_ptr() != idle))
    assert os.waitpid(child, 0)[1] == 0
    assert held[0] == 1 and pool.empty((LEAST,), BYTE)[0] == 1


@pytest.mark.skipif(cpu.missing_reason() is not None, reason="the native module is not built")
def test_layers_find_their_memory_again(monkeypatch):
    """Results of a step lie in the blocks of the steps before it, and are right."""
    layer = te_mx.GroupedLinear(8, 1024, 2048, dtype=torch.bfloat16)
    x = torch.randn(2048, 1024, dtype=torch.bfloat16)

    def step():
        layer.zero_grad()
        with te_mx.autocast():
            y = layer(x.requires_grad_(), [512, 0, 600, 300, 0, 100, 7, 500])
        y.backward(torch.ones_like(y))
        return y.detach().clone(), layer.weight2.grad.clone()

    te_mx.workspace.reset()
    expected = step()
    for _ in range(2):  # sizes of all kinds have been idle then
        step()
    monkeypatch.setattr(cpu_memory, "_fresh", None)  # nothing is asked of the system
    for _ in range(2):
        for got, want in zip(step(), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.skipif(cpu.missing_reason() is not None, reason="the native module is not built")
def test_results_change_in_place_as_those_of_torch():
    layer = te_mx.Linear(64, 2048)
    x = torch.randn(2048, 64, requires_grad=True)
    with te_mx.autocast():
        y = layer(x)
    assert y.nbytes >= LEAST
    torch.nn.functional.relu_(y).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("nbytes", [1, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 64, 3 * HUGE_PAGE + 5])
def test_memory_in_huge_pages_has_the_bytes_asked_for(nbytes):
    made = cpu_memory.in_huge_pages(nbytes)
    assert made.dtype is BYTE and made.shape == (nbytes,) and made.is_contiguous()
    assert made.data_ptr() % 64 == 0  # packed forms start at a cache line
    if nbytes >= HUGE_PAGE:
        assert made.data_ptr() % HUGE_PAGE == 0
    made.fill_(7)
    assert int(made[-1]) == 7


def test_an_operand_in_huge_pages_multiplies_as_any_other(monkeypatch):
    """1024 x 1024 fills a page with its panels; the bits are those of memory from torch."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(1024, 1024, generator=generator) for _ in range(2))

    def product():
        b, a = te_mx.quantize(x), te_mx.quantize(w)
        return [te_mx.gemm(a, b, "TN").out for _ in range(3)]  # packed from the second on

    huge = product()
    monkeypatch.setattr(
        "te_mx.backends.cpu.gemm.in_huge_pages", lambda nbytes: torch.empty(nbytes, dtype=BYTE)
    )
    for one, other in zip(huge, product(), strict=True):
        assert torch.equal(one, other)
