"""Frozen models that convert_model(fuse=True) has fused, on few rows: MLP blocks and normalizations
run on kernels of Hopper that decode, with the numbers of their steps."""

from __future__ import annotations

import copy

import pytest
import torch
from emulated_hopper import CALLS, GATES, PRODUCTS
from mlp_blocks import Gated, Joined
from torch import nn

import te_mx
from te_mx.backends.reference import fused
from te_mx.dispatch.fused import Norm
from te_mx.nn import activations
from te_mx.nn.guards import FUSED, ON_FROZEN, RAN

pytestmark = pytest.mark.usefixtures("on_hopper")

BF16 = torch.bfloat16


def norm_rows():
    """Sizes of the inputs of normalizations that run in a kernel for few rows."""
    return [(a.x.rows, a.x.cols) for name, a, _ in CALLS if name == "normalize_rows"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return self.o(self.q(x) * self.k(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(64, eps=1e-6), nn.RMSNorm(64, eps=1e-6)
        self.attn, self.mlp = Attention(), Gated()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, mlp=Gated):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(64, eps=1e-6), mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def made(drop=False, mlp=Gated, **kwargs):
    """(a fused and frozen model, the same that is not fused)."""
    torch.manual_seed(0)
    fused = Model(mlp).to(BF16).eval()
    with torch.no_grad():
        fused.norm.weight.uniform_(0.5, 2)
    plain = copy.deepcopy(fused)
    for model, fuse in ((fused, True), (plain, False)):
        te_mx.convert_model(model, fuse=fuse)
        te_mx.freeze_weights(model, drop, fmt="mxfp4", activations="mxfp8", **kwargs)
    return fused, plain


def run(model, x):
    with torch.no_grad(), te_mx.autocast():
        return model(x)


def by_steps(plain, x):
    """The model from its frozen layers, with what stands between them in fp32, rounded once."""
    m, norm = plain.mlp, Norm("RMSNorm", plain.norm.eps)
    z = fused.normalize(x.view(-1, 64), plain.norm.weight.float(), None, norm, BF16)[2]
    h = run(m.gate_up_proj, z) if isinstance(m, Joined) else [
        run(layer, z) for layer in (m.gate_proj, m.up_proj)
    ]  # fmt: skip
    h = h if isinstance(h, torch.Tensor) else torch.cat(h, -1)
    a = activations.plain(h.float(), activations.resolve("a test", "swiglu", None)).to(BF16)
    return x + run(m.down_proj, a).view(x.shape)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("mlp", [Gated, Joined])
@pytest.mark.parametrize("rows", [(1,), (2, 3), (32,)], ids=str)
def test_a_block_and_the_normalization_before_it(mlp, drop, rows):
    fused, plain = made(drop, mlp)
    x = torch.randn(*rows, 64, dtype=BF16)
    y = run(fused, x)
    count = x[..., 0].numel()
    assert GATES == ["silu"] and norm_rows() == [(count, 64)] and PRODUCTS[-1] == (count, 64, 96)
    assert len(PRODUCTS) == (3 if mlp is Gated else 2)
    assert fused.mlp.__dict__[RAN] == ON_FROZEN and fused.norm.__dict__[RAN] == FUSED
    assert torch.equal(y, by_steps(plain, x))
    torch.testing.assert_close(y, run(plain, x), rtol=2e-2, atol=2e-2)
    assert {row.fprop for row in te_mx.audit(fused) if row.fprop} == {"sm90_mxfp4"}
    te_mx.revert_model(fused)
    assert type(fused.mlp) is mlp and type(fused.norm) is nn.RMSNorm


def test_sizes_that_are_no_vectors():
    """The activation runs between the products."""
    fused, plain = made(mlp=lambda: Gated(inner=100))
    x = torch.randn(3, 64, dtype=BF16)
    assert torch.equal(run(fused, x), by_steps(plain, x))
    assert not GATES and PRODUCTS[-1] == (3, 64, 100)


def test_what_changed_or_needs_gradients_runs_its_own_forward():
    x = torch.randn(3, 64, dtype=BF16)
    for change in (
        lambda model: model.mlp.down_proj.register_forward_hook(lambda *_: None),
        lambda model: setattr(model.mlp, "act_fn", nn.GELU()),
        lambda model: te_mx.unfreeze_weights(model.mlp.up_proj),
    ):
        fused, plain = made()
        change(fused), change(plain)
        y = run(fused, x)
        assert not GATES and fused.mlp.__dict__[RAN] != ON_FROZEN
        torch.testing.assert_close(y, run(plain, x), rtol=2e-2, atol=2e-2)
    fused, plain = made(drop=True)
    x.requires_grad_()
    CALLS.clear()
    with te_mx.autocast():
        fused(x).sum().backward()
    assert not GATES and not norm_rows() and x.grad is not None
    with torch.no_grad():
        assert torch.equal(fused(x), run(fused, x))  # codes are all that there is
    assert GATES == ["silu"] * 2


def test_more_rows_than_are_few():
    """They run from the one copy of 4 bits all the same."""
    fused, plain = made()
    x = torch.randn(65, 64, dtype=BF16)
    y = run(fused, x)
    assert GATES == ["silu"] and PRODUCTS[-1] == (65, 64, 96)
    torch.testing.assert_close(y, run(plain, x), rtol=2e-2, atol=2e-2)


def test_activations_that_are_no_sigmoids_run_between_the_products():
    fused, plain = made(mlp=lambda: Gated(nn.ReLU()))
    x = torch.randn(3, 64, dtype=BF16)
    assert torch.equal(run(fused.mlp, x), run(plain.mlp, x))
    assert not GATES and len(PRODUCTS) == 6


def test_weights_that_change_are_seen():
    fused, plain = made()
    x = torch.randn(3, 64, dtype=BF16)
    run(fused, x)
    for model in (fused, plain):
        with torch.no_grad():
            model.mlp.down_proj.weight.mul_(2)
            model.norm.weight.mul_(0.5)
    assert torch.equal(run(fused, x), by_steps(plain, x))
