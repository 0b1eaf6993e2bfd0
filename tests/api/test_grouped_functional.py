"""grouped_linear and grouped_wgrad: end offsets, expert indices, masked groups; errors; compile."""

from __future__ import annotations

import pytest
import torch
from grouped_cases import RECIPES, SPLITS, equal, loop_of, parameters, run_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, SEEDS
from torch import Tensor

import te_mx
from te_mx.recipe import MXFP8BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4 on the CPU

K, N = 64, 48


def layer_and_loop(groups: int, dtype: torch.dtype = torch.bfloat16) -> tuple:
    layer = te_mx.GroupedLinear(groups, K, N, dtype=dtype, single_grouped_weight=True)
    return layer, loop_of(layer)


@given(splits=SPLITS, behind=st.integers(0, 20), dtype=DTYPES, int32=st.booleans())
@settings(max_examples=20)
def test_end_offsets(splits: list[int], behind: int, dtype: torch.dtype, int32: bool) -> None:
    layer, layers = layer_and_loop(len(splits), dtype)
    x = torch.randn(sum(splits) + behind, K).to(dtype)
    offs = torch.tensor(splits).cumsum(0).to(torch.int32 if int32 else torch.int64)
    with te_mx.autocast():
        expected = run_loop(layers, x, splits)
    # Without a region: the default recipe. Weights as one tensor, or one a group.
    equal(te_mx.grouped_linear(x, layer.weight, offs=offs, bias=layer.bias), expected)
    weights, biases = layer.weight.unbind(0), list(layer.bias.unbind(0))
    equal(te_mx.grouped_linear(x, weights, offs=offs, bias=biases), expected)
    equal(te_mx.grouped_linear(x, weights, offs=offs, bias=layer.bias), expected)
    equal(te_mx.grouped_linear(x, layer.weight, offs=offs, bias=biases), expected)


@given(splits=SPLITS, seed=SEEDS, shuffled=st.booleans(), pad=st.booleans())
@settings(max_examples=20)
def test_expert_index(splits: list[int], seed: int, shuffled: bool, pad: bool) -> None:
    """Rows in any order, -1 between them: the rows of one group in their order make its matrix."""
    layer, layers = layer_and_loop(len(splits))
    generator = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor(splits))
    if pad:
        index = torch.cat([index, torch.full((7,), -1)])
    if shuffled:
        index = index[torch.randperm(len(index), generator=generator)]
    x = torch.randn(len(index), K, generator=generator).bfloat16()
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    with te_mx.autocast():
        y = te_mx.grouped_linear(ours, layer.weight, index=index, bias=layer.bias)
        expected = torch.zeros_like(y)
        for i, one in enumerate(layers):
            expected = expected.index_put((torch.where(index == i)[0],), one(theirs[index == i]))
    equal(y, expected)
    grad = torch.randn(y.shape, generator=generator).bfloat16()
    y.backward(grad)
    expected.backward(grad)
    equal(ours.grad, theirs.grad)
    equal(layer.weight.grad, torch.stack([one.weight.grad for one in layers]))


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=5), dtype=DTYPES)
@settings(max_examples=20)
def test_masked(counts: list[int], dtype: torch.dtype) -> None:
    layer, layers = layer_and_loop(len(counts), dtype)
    x = torch.randn(len(counts), 40, K).to(dtype)
    for i, count in enumerate(counts):
        x[i, count:] = torch.nan
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    masked = torch.tensor(counts)
    with te_mx.autocast():
        y = te_mx.grouped_linear(ours, layer.weight, masked_m=masked, bias=layer.bias)
        parts = [one(theirs[i, : counts[i]]) for i, one in enumerate(layers)]
    grad = torch.randn_like(y)
    y.backward(grad)
    for i, part in enumerate(parts):
        equal(y[i, : counts[i]], part)
        assert bool((y[i, counts[i] :] == 0).all())
        part.backward(grad[i, : counts[i]])
    equal(ours.grad, theirs.grad)
    equal(parameters(layer, "weight.grad"), torch.stack([m.weight.grad for m in layers]))
    equal(parameters(layer, "bias.grad"), torch.stack([m.bias.grad for m in layers]))


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_wgrad(recipe: str) -> None:
    splits = [33, 0, 7, 64]
    _, layers = layer_and_loop(4, torch.float32)
    x, grad = torch.randn(110, K), torch.randn(110, N)
    offs = torch.tensor(splits).cumsum(0)
    with te_mx.autocast(recipe=RECIPES[recipe]):
        run_loop(layers, x, splits).backward(grad)
    expected = torch.stack([one.weight.grad for one in layers])
    chosen = RECIPES[recipe]
    equal(te_mx.grouped_wgrad(grad, x, offs, recipe=chosen), expected)
    out = torch.full((4, N, K), 2.0)
    made = te_mx.grouped_wgrad(grad, x, offs, out=out, accumulate=True, recipe=chosen)
    assert made is out
    torch.testing.assert_close(out, expected + 2, rtol=1e-6, atol=1e-6)
    bf16 = te_mx.grouped_wgrad(grad, x, offs, out_dtype=torch.bfloat16, recipe=chosen)
    equal(bf16, expected.bfloat16())


X, W = torch.ones(6, 16), torch.ones(2, 8, 16)
OFFS = torch.tensor([2, 4])
CASES = [
    ({"inp": X, "weight": W}, ValueError, "one of offs, index and masked_m, got none"),
    ({"inp": X, "weight": W, "offs": OFFS, "index": OFFS}, ValueError, "got .*offs.*index"),
    ({"inp": X, "weight": W[0], "offs": OFFS}, ValueError, r"\[G, N, K\] or a sequence"),
    ({"inp": X, "weight": [W], "offs": OFFS}, ValueError, r"\[G, N, K\] or a sequence"),
    ({"inp": X, "weight": [], "offs": OFFS}, ValueError, "sequence of"),
    ({"inp": X, "weight": [W[0], W[0, :4]], "offs": OFFS}, ValueError, "all of one shape"),
    ({"inp": X[:, :8], "weight": W, "offs": OFFS}, ValueError, r"\[R, 16\].*got \(6, 8\)"),
    ({"inp": X.long(), "weight": W, "offs": OFFS}, TypeError, "float32, bfloat16 or float16"),
    ({"inp": X, "weight": W, "offs": OFFS, "bias": X}, ValueError, r"bias must be \[2, 8\]"),
    ({"inp": X, "weight": W, "offs": OFFS.float()}, TypeError, "int32 or int64 tensor"),
    ({"inp": X, "weight": W, "offs": [2, 4]}, TypeError, r"got \[2, 4\]"),
    ({"inp": X, "weight": W, "offs": OFFS[:1]}, ValueError, r"have shape \(2,\), got \(1,\)"),
    ({"inp": X, "weight": W, "offs": OFFS + 5}, ValueError, "the 6 rows there are, got"),
    ({"inp": X, "weight": W, "offs": OFFS.flip(0)}, ValueError, "group 1 would be rows 4 to 2"),
    ({"inp": X, "weight": W, "index": OFFS}, ValueError, r"have shape \(6,\)"),
    ({"inp": X, "weight": W, "index": torch.arange(6)}, ValueError, "below the 2 groups.*got 5"),
    ({"inp": X, "weight": W, "masked_m": OFFS}, ValueError, r"\[G, M_max, 16\]"),
    ({"inp": X.view(2, 3, 16), "weight": W, "masked_m": OFFS}, ValueError, "0 to M_max = 3"),
    ({"inp": X.view(3, 2, 16), "weight": W, "masked_m": OFFS}, ValueError, "with G = 2"),
    ({"inp": X, "weight": W, "offs": OFFS.to("meta")}, ValueError, "move offs there"),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES)
def test_errors_say_what_is_wrong(call: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        te_mx.grouped_linear(**call)


WGRAD_CASES = [
    ((X[0], X, OFFS), {}, "grad must be a matrix"),
    ((X[:3], X, OFFS), {}, "same rows, got 3 and 6"),
    ((X, X, OFFS), {"accumulate": True}, "pass the tensor as out="),
    ((X, X, OFFS), {"out": torch.ones(2, 16, 8)}, r"contiguous \(2, 16, 16\)"),
    ((X, X, OFFS[None]), {}, "must be a vector"),
]


@pytest.mark.parametrize(("args", "options", "message"), WGRAD_CASES)
def test_wgrad_errors(args: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        te_mx.grouped_wgrad(*args, **options)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("recipe", ["default", "one copy", None])
def test_compiled_layer_takes_new_splits_without_compiling_anew(
    stacked: bool, recipe: str | None
) -> None:
    enabled = recipe is not None
    given = MXFP8BlockScaling(one_copy_weights=recipe == "one copy")
    torch._dynamo.reset()
    layer = te_mx.GroupedLinear(3, K, N, single_grouped_weight=stacked)
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.randn(90, K, requires_grad=True)
    for splits in ([30, 40, 10], [0, 90, 0], [1, 2, 3]):
        m_splits = torch.tensor(splits)
        results = []
        for f in (layer, compiled):
            layer.zero_grad()
            x.grad = None
            with te_mx.autocast(enabled=enabled, recipe=given):
                y = f(x, m_splits)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, parameters(layer, "weight.grad")))
        for got, expected in zip(results[1], results[0], strict=True):
            if enabled:
                equal(got, expected)
            else:  # every group on all rows, because a graph does not know the splits
                torch.testing.assert_close(got, expected)
    assert len(graphs) == 1


def test_compiled_functional_forms() -> None:
    torch._dynamo.reset()
    layer, _ = layer_and_loop(3, torch.float32)
    x = torch.randn(60, K)

    def forms(x: Tensor, offs: Tensor, index: Tensor, counts: Tensor) -> list[Tensor]:
        return [
            te_mx.grouped_linear(x, layer.weight, offs=offs, bias=layer.bias),
            te_mx.grouped_linear(x, layer.weight, index=index),
            te_mx.grouped_linear(x.view(3, 20, K), layer.weight, masked_m=counts),
            te_mx.grouped_wgrad(x, x, offs),
        ]

    args = (x, torch.tensor([5, 5, 40]), torch.arange(60) % 4 - 1, torch.tensor([20, 0, 3]))
    compiled = torch.compile(forms, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*args), forms(*args), strict=True):
        equal(got, expected)
