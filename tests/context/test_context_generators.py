"""Regions inside of generators, which may end anywhere: in another region, thread or task."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading

import pytest
import torch

import te_mx
from te_mx.context.region import current_recipe, current_settings
from te_mx.recipe import Format, MXFP8BlockScaling

HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)
FLOOR = MXFP8BlockScaling(scale_rule="floor")


def values(region):
    with region:
        yield 1
        yield 2


def started(region):
    made = values(region)
    next(made)
    return made


def in_a_thread(run):
    raised = []

    def catch():
        try:
            run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.fixture(autouse=True)
def own_context():
    """A test that fails leaves nothing behind."""
    assert current_recipe() is None
    yield
    te_mx.context.region.innermost.set(None)


@pytest.mark.parametrize("end", ["close", "run out", "throw", "collect"])
def test_one_that_ends_inside_another_region(end):
    made = started(te_mx.autocast(recipe=HYBRID))
    with te_mx.autocast(recipe=FLOOR):
        if end == "close":
            made.close()
        elif end == "run out":
            list(made)
        elif end == "throw":
            with pytest.raises(KeyError):
                made.throw(KeyError())
        else:
            del made
            gc.collect()
        assert current_recipe() == FLOOR and current_settings() == FLOOR.settings
        with te_mx.autocast(enabled=False):
            assert current_recipe() is None
        assert current_recipe() == FLOOR
    assert current_recipe() is None and current_settings() is None


def test_two_that_end_in_the_order_they_began():
    first, second = (started(te_mx.autocast(recipe=r)) for r in (HYBRID, FLOOR))
    first.close()
    assert current_recipe() == FLOOR
    second.close()
    assert current_recipe() is None


def test_one_that_another_thread_closes_inside_its_own_region():
    made = started(te_mx.autocast(recipe=HYBRID))

    def close():
        with te_mx.autocast(recipe=FLOOR):
            made.close()
            assert current_recipe() == FLOOR
        assert current_recipe() is None

    in_a_thread(close)
    assert current_recipe() is None and current_settings() is None


def test_a_layer_follows_when_another_thread_closed_it():
    layer, x = te_mx.Linear(32, 32), torch.randn(4, 32)
    plain = layer(x)
    made = started(te_mx.autocast())
    in_a_thread(made.close)
    assert layer(x).equal(plain)


def test_one_object_that_other_threads_entered_too():
    """Which of its regions ended is not known then: none of them is touched."""
    shared = te_mx.autocast(recipe=HYBRID)
    made = started(shared)
    with shared:
        in_a_thread(made.close)
        assert current_recipe() == HYBRID


def test_an_async_generator_that_another_task_closes():
    async def stream():
        with te_mx.autocast(recipe=HYBRID):
            yield 1

    async def main():
        made = stream()
        await asyncio.create_task(made.__anext__())
        with te_mx.autocast(recipe=FLOOR):
            await asyncio.create_task(made.aclose())
            assert current_recipe() == FLOOR
        assert current_recipe() is None

    asyncio.run(main())


def test_a_context_that_was_copied_inside_keeps_the_recipe():
    made = started(te_mx.autocast(recipe=HYBRID))
    copied = contextvars.copy_context()
    made.close()
    assert current_recipe() is None
    assert copied.run(current_recipe) == HYBRID


def test_leaving_what_was_not_entered_changes_nothing():
    with te_mx.autocast(recipe=FLOOR):
        te_mx.autocast().__exit__(None, None, None)
        assert current_recipe() == FLOOR
