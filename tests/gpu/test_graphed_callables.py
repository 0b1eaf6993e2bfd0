"""te_mx.make_graphed_callables on the device: replays give the bits of eager."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_mx
from te_mx.recipe import Format, MXFP8BlockScaling

HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_rule="floor")
TOKENS, WIDTH, HEADS = 192, 256, 4
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


class Block(nn.Module):
    """A small transformer block, [batch, tokens, width]."""

    def __init__(self, **how) -> None:
        super().__init__()
        self.qkv = te_mx.LayerNormLinear(WIDTH, 3 * WIDTH, **BF16, **how)
        self.out = te_mx.Linear(WIDTH, WIDTH, **BF16, **how)
        self.mlp = te_mx.LayerNormMLP(WIDTH, 4 * WIDTH, **BF16, **how)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):  # whose backward has one order of sums
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(x)


MODELS = {
    "Linear": lambda **how: te_mx.Linear(WIDTH, WIDTH, **BF16, **how),
    "LayerNormMLP": lambda **how: te_mx.LayerNormMLP(WIDTH, 2 * WIDTH, **BF16, **how),
    "block": Block,
}


def make(kind: str, fuse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind](fuse_wgrad_accumulation=fuse)
    if fuse:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.main_grad = torch.full_like(parameter, 0.25, dtype=torch.float32)
    return model


def data(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    x, grad = (torch.randn(2, TOKENS, WIDTH, generator=g, device="cuda") for _ in range(2))
    return x.bfloat16().requires_grad_(), grad.bfloat16()


def step(model: nn.Module, seeds: list[int], **first) -> list[Tensor]:
    """Results and input gradients of micro-batches, then the gradients of all parameters."""
    found = []
    for i, seed in enumerate(seeds):
        x, grad = data(seed)
        y = model(x, **(first if i == 0 else {}))
        y.backward(grad)
        found += [y.detach().clone(), x.grad.clone()]
    held = [getattr(p, "main_grad", p.grad) for p in model.parameters()]
    return found + [grad.clone() for grad in held]


def change(model: nn.Module, by: float) -> None:
    """What an optimizer does: other weights in the same memory, no gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("how", ["region", "bound", "high precision"])
@pytest.mark.parametrize("kind", MODELS)
def test_steps_of_two_micro_batches(kind, how, fuse):
    eager, model = make(kind, fuse), make(kind, fuse)
    if how == "bound":
        te_mx.convert_model(model, recipe=HYBRID)
    region = te_mx.autocast(enabled=how != "high precision", recipe=HYBRID)
    with nullcontext() if how == "bound" else region:
        te_mx.make_graphed_callables(model, (data(9)[0],))
        for round_ in range(3):
            with region:
                want = step(eager, [2 * round_, 2 * round_ + 1])
            with te_mx.autocast(recipe=HYBRID) if how == "bound" and round_ else nullcontext():
                assert_same(step(model, [2 * round_, 2 * round_ + 1]), want)
            for one in (eager, model):
                change(one, 0.01 * (round_ + 1))


def test_the_first_micro_batch_overwrites():
    eager, model = make("block", True), make("block", True)
    change(eager, 0.0)  # zeroed
    te_mx.make_graphed_callables(model, (data(9)[0],), recipe=HYBRID)
    with te_mx.autocast(recipe=HYBRID):
        want = step(eager, [1, 2])
    assert_same(step(model, [1, 2], is_first_microbatch=True), want)


def test_several_in_one_pool_and_another_region():
    torch.manual_seed(0)
    layers = [te_mx.Linear(WIDTH, WIDTH, **BF16) for _ in range(2)]
    eager = nn.Sequential(*(te_mx.Linear(WIDTH, WIDTH, **BF16) for _ in range(2)))
    eager.load_state_dict(nn.Sequential(*layers).state_dict())
    with te_mx.autocast():
        sample = data(9)[0]
        graphed = te_mx.make_graphed_callables(tuple(layers), ((sample,), (data(8)[0],)))
        want = step(eager, [1, 2])
        assert_same(step(nn.Sequential(*graphed), [1, 2]), want)
    x = data(1)[0]
    with pytest.raises(RuntimeError, match="a CUDA graph replays what was captured"):
        graphed[0](x)
    with te_mx.autocast(recipe=HYBRID), pytest.raises(RuntimeError, match="was captured with"):
        graphed[0](x)


def test_main_grads_survive_the_capture():
    model = make("block", True)
    with te_mx.autocast():
        te_mx.make_graphed_callables(model, (data(9)[0],))
    torch.cuda.synchronize()
    held = [p.main_grad for p in model.parameters() if hasattr(p, "main_grad")]
    assert held and all(grad.eq(0.25).all() for grad in held)
