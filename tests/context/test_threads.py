"""autocast and te_mx.Linear across threads, asyncio tasks, forked workers."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import te_mx
from te_mx.context.region import current_recipe
from te_mx.recipe import Format, MXFP8BlockScaling

HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)
FLOOR = MXFP8BlockScaling(scale_rule="floor")


def test_a_new_thread_starts_outside():
    seen = []
    with te_mx.autocast():
        thread = threading.Thread(target=lambda: seen.append(current_recipe()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_copied_context_carries_the_recipe():
    with te_mx.autocast(recipe=HYBRID):
        context = contextvars.copy_context()
    assert context.run(current_recipe) == HYBRID


def test_one_object_in_many_threads_at_once():
    shared = te_mx.autocast(recipe=FLOOR)
    barrier = threading.Barrier(4, timeout=60)

    def work(enter: bool) -> bool:
        for _ in range(20):
            barrier.wait()
            if enter:
                with shared, te_mx.autocast(enabled=False), shared:
                    barrier.wait()
                    if current_recipe() != FLOOR:
                        return False
            else:
                barrier.wait()
                if current_recipe() is not None:
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [True, False, True, False]))


def test_asyncio_tasks_are_apart():
    async def task(recipe: MXFP8BlockScaling | None) -> bool:
        if recipe is None:
            await asyncio.sleep(0)
            return current_recipe() is None
        with te_mx.autocast(recipe=recipe):
            for _ in range(5):
                await asyncio.sleep(0)
                if current_recipe() != recipe:
                    return False
        return current_recipe() is None

    async def main() -> list[bool]:
        return await asyncio.gather(*(task(r) for r in (HYBRID, None, FLOOR, None, HYBRID)))

    assert all(asyncio.run(main()))


def test_linear_from_several_threads_gives_the_same_bits():
    layer = te_mx.Linear(70, 33)
    x = torch.randn(19, 70)
    with te_mx.autocast():
        expected = layer(x)

    def work(i: int) -> torch.Tensor:
        with te_mx.autocast(enabled=i % 2 == 0):
            results = [layer(x) for _ in range(10)]
        assert all(torch.equal(r, results[0]) for r in results)
        return results[0]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(8)))
    for i, result in enumerate(results):
        assert torch.equal(result, expected if i % 2 == 0 else layer.forward(x))


class _Quantizing(Dataset):
    """Runs a layer under autocast in the worker, as preprocessing with a model does."""

    def __init__(self, layer: te_mx.Linear) -> None:
        self.layer = layer

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool]:
        outside = current_recipe() is None
        x = torch.full((40, 64), 1.0 + index)
        with torch.no_grad(), te_mx.autocast():
            return self.layer(x), outside


@pytest.mark.parametrize("workers", [1, 2])
def test_forked_dataloader_workers(workers):
    layer = te_mx.Linear(64, 32)
    dataset = _Quantizing(layer)
    expected = [dataset[i][0] for i in range(len(dataset))]  # the parent used its threads already
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context="fork", timeout=60
    )
    for i, (y, outside) in enumerate(loader):
        assert torch.equal(y, expected[i])
        assert outside
