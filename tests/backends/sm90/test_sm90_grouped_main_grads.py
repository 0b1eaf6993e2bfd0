"""main_grads of a grouped layer that are no one stack, on the calls of the native Hopper module,
which fake_sm90.py stands in for.
"""

from __future__ import annotations

import fake_sm90
import pytest
import torch
from as_on_hopper import hopper_with_groups
from grouped_cases import parameters
from torch import Tensor

import te_mx
from te_mx.backends.sm90 import grouped as sm90_grouped

SPLITS = [20, 0, 33]


@pytest.fixture
def native(threads):
    """Names of the native calls, as they come."""
    threads(1)
    with hopper_with_groups() as calls:
        yield calls


def ascending(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    return list(torch.zeros(3 * n * k, dtype=dtype).view(3, n, k))


def descending(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    return ascending(n, k, dtype)[::-1]


def with_gaps(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    return list(torch.zeros(3, n + 5, k, dtype=dtype)[:, 2 : 2 + n])


def between_rows(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    flat = torch.zeros(3 * (n * k + 8), dtype=dtype)
    return [flat[i * (n * k + 8) :][: n * k].view(n, k) for i in range(3)]


def pair() -> tuple[te_mx.GroupedLinear, te_mx.GroupedLinear]:
    """A layer with main_grads and one without."""
    made = [
        te_mx.GroupedLinear(3, 70, 48, dtype=torch.bfloat16, fuse_wgrad_accumulation=fuse)
        for fuse in (True, False)
    ]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1].float()


def backward(layer: te_mx.GroupedLinear, seed: int, **options) -> None:
    x = torch.randn(60, 70, generator=torch.Generator().manual_seed(seed)).bfloat16()
    with te_mx.autocast():
        y = layer(x, SPLITS, **options)
    y.backward(torch.full_like(y, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [ascending, descending, with_gaps, between_rows])
@pytest.mark.parametrize("save_x", [False, True])
def test_main_grads_in_a_buffer(native, monkeypatch, place, dtype, save_x) -> None:
    layer, plain = pair()
    layer.save_original_input = save_x
    grads = place(48, 70, dtype)
    for weight, grad in zip(layer.weights(), grads, strict=True):
        weight.main_grad = grad.fill_(5)
    firsts: list[tuple[int, ...]] = []
    run = fake_sm90.gemm_k

    def gemm_k(args, first_rows) -> int:
        firsts.append(tuple(first_rows))
        return run(args, first_rows)

    monkeypatch.setattr(fake_sm90, "gemm_k", gemm_k)
    versions = [grad._version for grad in grads]
    backward(layer, 0, is_first_microbatch=True)
    backward(layer, 1, is_first_microbatch=False)
    expected = {
        "ascending": (0, 48, 96), "descending": (96, 48, 0), "with_gaps": (0, 53, 106),
        "between_rows": (),
    }  # fmt: skip
    assert firsts == [expected[place.__name__]] * 2
    assert all(grad._version > before for grad, before in zip(grads, versions, strict=True))
    assert native.count("quantize_grouped") == (6 if save_x else 4)
    for seed in (0, 1):
        backward(plain, seed)
    want = parameters(plain, "weight.grad")
    near = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(torch.stack(grads).float(), want, **near)
    if place is with_gaps:
        buffer = grads[0]._base
        assert bool((buffer[:, :2] == 0).all()) and bool((buffer[:, 50:] == 0).all())


def test_main_grads_that_differ_are_added_one_by_one(native) -> None:
    """One weight overwrites, or does not train, or has another dtype."""
    for change in ("overwrite", "frozen", "dtype"):
        layer, plain = pair()
        weights = layer.weights()
        for weight, grad in zip(weights, ascending(48, 70, torch.float32), strict=True):
            weight.main_grad = grad.fill_(5)
        if change == "overwrite":
            weights[2].overwrite_main_grad = True
        elif change == "frozen":
            weights[2].requires_grad_(False)
        else:
            weights[2].main_grad = weights[2].main_grad.bfloat16()
        backward(layer, 0)
        backward(plain, 0)
        wanted = parameters(plain, "weight.grad") + torch.tensor([5, 5, 5])[:, None, None]
        if change == "overwrite":
            wanted[2] -= 5
        elif change == "frozen":
            wanted[2] = 5
        for i, weight in enumerate(weights):
            close = {"rtol": 1e-2, "atol": 1e-2} if change == "dtype" else {}
            torch.testing.assert_close(weight.main_grad.float(), wanted[i], **close)


def test_places() -> None:
    a, b, c = ascending(4, 8, torch.float32)
    assert sm90_grouped.places_of([b, c, a])[1] == [4, 8, 0]
    assert sm90_grouped.places_of([b, c, a])[0] is a
    assert sm90_grouped.places_of([c, b])[1] == [4, 0]
    assert sm90_grouped.places_of(between_rows(4, 32, torch.float32)) is None
    assert sm90_grouped.places_of([a] * 257) is None
