"""Frozen models that convert_model(fuse=True) has fused, on few rows: MLP blocks and normalizations
run on kernels of Hopper that decode, with the numbers of their steps."""

from __future__ import annotations

import copy
import ctypes
import pickle

import fake_sm90_decode
import fake_sm90_norm_rows
import pytest
import torch
from as_on_hopper import hopper
from mlp_blocks import Gated, Joined
from torch import nn

import te_mx
from te_mx.backends.reference import fused_math
from te_mx.dispatch.fused import Norm
from te_mx.nn import activations, residual
from te_mx.nn.residual import UNUSED, Addend
from te_mx.nn.surroundings import FEW_ROWS, FUSED, RAN
from te_mx.runtime import replays

BF16 = torch.bfloat16
DECODED, GATES, SUMS = fake_sm90_decode.CALLS, fake_sm90_decode.GATES, fake_sm90_decode.SUMS
NORM_ROWS = fake_sm90_norm_rows.CALLS
OTHERS = residual._others


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    with hopper():
        monkeypatch.setattr(residual, "_others", lambda: False)  # other tests compile
        for calls in (DECODED, GATES, SUMS, NORM_ROWS):
            calls.clear()
        yield


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
    z = fused_math.normalize(x.view(-1, 64), plain.norm.weight.float(), None, norm, BF16)[2]
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
    assert GATES == ["silu"] and [(count, 64)] == NORM_ROWS and DECODED[-1] == (count, 64, 96)
    assert len(DECODED) == (3 if mlp is Gated else 2)
    assert fused.mlp.__dict__[RAN] == FEW_ROWS and fused.norm.__dict__[RAN] == FUSED
    assert torch.equal(y, by_steps(plain, x))
    torch.testing.assert_close(y, run(plain, x), rtol=2e-2, atol=2e-2)
    assert {row.fprop for row in te_mx.audit(fused) if row.fprop} == {"sm90_decode"}
    te_mx.revert_model(fused)
    assert type(fused.mlp) is mlp and type(fused.norm) is nn.RMSNorm


def test_sizes_that_are_no_vectors():
    """The activation runs between the products."""
    fused, plain = made(mlp=lambda: Gated(inner=100))
    x = torch.randn(3, 64, dtype=BF16)
    assert torch.equal(run(fused, x), by_steps(plain, x))
    assert not GATES and DECODED[-1] == (3, 64, 100)


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
        assert not GATES and fused.mlp.__dict__[RAN] != FEW_ROWS
        torch.testing.assert_close(y, run(plain, x), rtol=2e-2, atol=2e-2)
    fused, plain = made(drop=True)
    x.requires_grad_()
    NORM_ROWS.clear()
    with te_mx.autocast():
        fused(x).sum().backward()
    assert not GATES and not NORM_ROWS and x.grad is not None
    with torch.no_grad():
        assert torch.equal(fused(x), run(fused, x))  # codes are all that there is
    assert GATES == ["silu"] * 2


def test_more_rows_than_are_few():
    fused, _ = made()
    run(fused, torch.randn(65, 64, dtype=BF16))
    assert not GATES and not NORM_ROWS and not DECODED


def test_activations_that_are_no_sigmoids_run_between_the_products():
    fused, plain = made(mlp=lambda: Gated(nn.ReLU()))
    x = torch.randn(3, 64, dtype=BF16)
    assert torch.equal(run(fused.mlp, x), run(plain.mlp, x))
    assert not GATES and len(DECODED) == 6


def test_weights_that_change_are_seen():
    fused, plain = made()
    x = torch.randn(3, 64, dtype=BF16)
    run(fused, x)
    for model in (fused, plain):
        with torch.no_grad():
            model.mlp.down_proj.weight.mul_(2)
            model.norm.weight.mul_(0.5)
    assert torch.equal(run(fused, x), by_steps(plain, x))


def layers(count=2):
    """(a fused and frozen stack of layers, the same that makes no sums)."""
    torch.manual_seed(0)
    fused = nn.Sequential(*(Layer() for _ in range(count))).to(BF16).eval()
    te_mx.convert_model(fused, fuse=True)
    other = copy.deepcopy(fused)
    for model in (fused, other):
        te_mx.freeze_weights(model, fmt="mxfp8_e4m3", activations="mxfp8")
    for module in other.modules():
        module.__dict__[UNUSED] = 99
    return fused, other


def test_sums_of_the_residual_stream_come_from_the_products():
    fused, other = layers()
    for step in range(4):
        x = torch.randn(2, 1, 64, dtype=BF16)
        SUMS.clear()
        y = run(fused, x)
        assert type(y) is torch.Tensor and len(SUMS) == (4 + (4 if step < 2 else 0))
        SUMS.clear()
        assert torch.equal(y, run(other, x)) and not SUMS
    for layer in fused:
        unused = [m.__dict__[UNUSED] for m in (layer.attn.q, layer.attn.o, layer.mlp.down_proj)]
        assert unused == [2, 0, 0]
    with torch.inference_mode():
        SUMS.clear()
        assert torch.equal(run(fused, x), y) and not SUMS  # nobody would see that x changed


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda x, y: x + y, True),
        (lambda x, y: y + x, True),
        (lambda x, y: x.add(y), True),
        (lambda x, y: torch.add(y, x), True),
        (lambda x, y: x.mul_(2) + y, False),
        (lambda x, y: x + y.mul_(2), False),
        (lambda x, y: x.clone() + y, False),
        (lambda x, y: torch.add(x, y, alpha=2), False),
        (lambda x, y: x - y, False),
        (lambda x, y: x.add_(y), False),
        (lambda x, y: y.add_(x), False),
        (lambda x, y: x + 2 * y, False),
    ],
)
def test_a_sum_is_that_of_what_is_added(change, same):
    fused, other = layers(1)
    made = []
    for model in (fused, other):
        x = torch.randn(3, 64, dtype=BF16, generator=torch.Generator().manual_seed(1))
        with torch.no_grad(), te_mx.autocast():
            y = model[0].mlp(model[0].norm2(x))
            total = y._sum.total if type(y) is Addend else None
            made.append(change(x, y))
            assert (made[-1] is total) == (same and model is fused)
    assert torch.equal(made[0], made[1])


def with_sum(model, x):
    """A result with a sum."""
    with torch.no_grad(), te_mx.autocast():
        y = model[0].mlp(model[0].norm2(x))
    assert type(y) is Addend
    return y


def test_a_sum_has_the_gradients_of_its_parts():
    fused, _ = layers(1)
    x = torch.randn(3, 64, dtype=BF16, requires_grad=True)
    (x + with_sum(fused, x)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    x = x.detach()
    y = with_sum(fused, x).requires_grad_()
    (x + y).sum().backward()
    assert torch.equal(y.grad, torch.ones_like(x))


class Other(torch.Tensor):
    """Whose sums are something else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "other"


def test_whatever_is_done_with_a_result_makes_it_a_plain_tensor():
    fused, other = layers(1)
    x = torch.randn(3, 64, dtype=BF16)
    expected = run(other[0].mlp, run(other[0].norm2, x))
    for look in (
        copy.copy, copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y)), lambda y: y.data,
        lambda y: torch.stack([y])[0], lambda y: torch.add(x, other=y) - x,
    ):  # fmt: skip
        fused[0].mlp.down_proj.__dict__[UNUSED] = 0
        y = with_sum(fused, x)
        seen = look(y)
        assert type(y) is type(seen) is torch.Tensor and not y.__dict__
        assert seen.shape == y.shape and torch.equal(y, expected)
    fused[0].mlp.down_proj.__dict__[UNUSED] = 0
    y = with_sum(fused, x)
    ctypes.memset(y.data_ptr(), 0, y.nbytes)  # as a kernel of others writes
    assert torch.equal(x + y, x)
    fused[0].mlp.down_proj.__dict__[UNUSED] = 0
    assert x.as_subclass(Other) + with_sum(fused, x) == "other"
    assert with_sum(fused, x) + x.as_subclass(Other) == "other"


def test_no_sum_of_what_may_have_changed_unseen(monkeypatch):
    fused, _ = layers(1)

    def check(change, x=None):
        x = torch.randn(3, 64, dtype=BF16) if x is None else x
        fused[0].mlp.down_proj.__dict__[UNUSED] = 0
        y = with_sum(fused, x)
        total = y._sum.total
        with monkeypatch.context() as patch:
            change(x, patch)
            assert (again := x + y) is not total
        assert torch.equal(again, x + y)

    check(lambda x, patch: x.data.mul_(2))
    check(lambda x, patch: patch.setattr(replays, "_count", replays.count() + 1))
    check(lambda x, patch: patch.setattr(residual, "_place", lambda x: (1, 0)))  # another stream
    y = with_sum(fused, x := torch.randn(3, 64, dtype=BF16))
    first, second = x + y, x + y
    assert first is not second and torch.equal(first, second)

    for place in ((1, 0), (0, None)):  # the product on another stream, in a capture nobody knows
        x = torch.randn(3, 64, dtype=BF16)
        with monkeypatch.context() as patch, torch.no_grad(), te_mx.autocast():
            z = fused[0].norm2(x)
            patch.setattr(residual, "_place", lambda x, place=place: place)
            assert type(fused[0].mlp(z)) is torch.Tensor
    x.data.mul_(2)
    assert type(run(fused[0].mlp, run(fused[0].norm2, x))) is torch.Tensor


def test_no_sums_where_there_is_compiled_code_or_a_process_group(monkeypatch):
    fused, _ = layers(1)
    x = torch.randn(3, 64, dtype=BF16)
    torch._dynamo.reset()
    monkeypatch.setattr(residual, "_others", OTHERS)
    torch.compiler.disable(lambda: None)
    y = with_sum(fused, x)
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        assert type(run(fused[0].mlp, run(fused[0].norm2, x))) is torch.Tensor

    @torch.compile(fullgraph=True, backend="eager")
    def add(x, y):
        return x + y

    assert torch.equal(add(x, y), x + y)  # of before
    again = run(fused[0].mlp, run(fused[0].norm2, x))
    assert type(again) is torch.Tensor and torch.equal(again, y)
