"""te_mx.autocast in one thread: nesting, re-entry, decorators, errors."""

from __future__ import annotations

import asyncio
import functools

import pytest
import torch

import te_mx
from te_mx.context.region import current_recipe, current_settings
from te_mx.recipe import Format, MXFP8BlockScaling

HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)
FLOOR = MXFP8BlockScaling(scale_rule="floor")


def test_enters_and_leaves():
    assert current_recipe() is None
    with te_mx.autocast():
        assert current_recipe() == te_mx.get_default_recipe()
    assert current_recipe() is None
    assert current_settings() is None


def test_nesting_and_enabled_false():
    with te_mx.autocast(recipe=HYBRID):
        with te_mx.autocast():
            assert current_recipe() == MXFP8BlockScaling()
            with te_mx.autocast(enabled=False, recipe=FLOOR):
                assert current_recipe() is None
                assert current_settings() is None
                with te_mx.autocast(recipe=FLOOR):
                    assert current_recipe() == FLOOR
            assert current_recipe() == MXFP8BlockScaling()
        assert current_recipe() == HYBRID


def test_leaves_on_exceptions():
    with pytest.raises(KeyError), te_mx.autocast():
        raise KeyError
    assert current_recipe() is None


def test_one_object_many_times_and_recursively():
    context = te_mx.autocast(recipe=FLOOR)

    def descend(depth: int) -> None:
        with context:
            assert current_recipe() == FLOOR
            if depth:
                with te_mx.autocast(enabled=False):
                    descend(depth - 1)
                    assert current_recipe() is None
            assert current_recipe() == FLOOR

    descend(5)
    descend(0)
    assert current_recipe() is None


def test_decorator():
    @te_mx.autocast(recipe=HYBRID)
    def inside(value: int) -> tuple[int, object]:
        """Docs."""
        return value, current_recipe()

    assert inside(3) == (3, HYBRID)
    assert inside.__name__ == "inside" and inside.__doc__ == "Docs."
    assert current_recipe() is None

    @te_mx.autocast(enabled=False)
    def off() -> object:
        return current_recipe()

    with te_mx.autocast():
        assert off() is None


def test_decorator_of_a_recursive_function():
    @te_mx.autocast()
    def count(depth: int) -> int:
        assert current_recipe() is not None
        return 0 if depth == 0 else 1 + count(depth - 1)

    assert count(20) == 20


def test_decorator_of_an_async_function():
    @te_mx.autocast(recipe=HYBRID)
    async def inside() -> object:
        await asyncio.sleep(0)
        return current_recipe()

    async def main() -> None:
        assert await inside() == HYBRID
        assert current_recipe() is None

    asyncio.run(main())


def test_decorating_a_generator_is_refused():
    with pytest.raises(TypeError, match="generator function"):

        @te_mx.autocast()
        def generate():
            yield 1

    with pytest.raises(TypeError, match="generator function"):

        @te_mx.autocast()
        async def generate_async():
            yield 1


@pytest.mark.parametrize("what", [None, 3, torch.ones(2), te_mx.Linear], ids=str)
def test_decorating_what_is_no_function_is_refused(what):
    with pytest.raises(TypeError, match="autocast decorates functions, got"):
        te_mx.autocast()(what)


def test_decorating_a_partial_generator_is_refused():
    def generate(value):
        yield value

    with pytest.raises(TypeError, match="generator function partial"):
        te_mx.autocast()(functools.partial(generate, 1))


def test_errors_name_argument_and_remedy():
    with pytest.raises(TypeError, match=r"autocast.recipe=...."):
        te_mx.autocast(MXFP8BlockScaling())
    with pytest.raises(TypeError, match="recipe must be"):
        te_mx.autocast(recipe=8)
    with pytest.raises(ValueError, match="recipe must be one of mxfp8, "):
        te_mx.autocast(True, "fp8")


def test_repr():
    assert repr(te_mx.autocast(recipe=HYBRID)) == f"autocast({HYBRID!r})"
    assert repr(te_mx.autocast(enabled=False)) == "autocast(enabled=False)"


def test_unknown_attribute_of_the_module():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        te_mx.context.region.nothing  # noqa: B018
