"""te_mx.inspect on models: what it reads, and that it leaves a model as it was."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx import formats
from te_mx.inspection.collect import measure

E4M3 = formats.get("mxfp8_e4m3")
OPERANDS = [("x", "fprop"), ("x", "wgrad"), ("w", "fprop"), ("w", "dgrad"), ("g", "dgrad"),
            ("g", "wgrad")]  # fmt: skip


def numbers(report, ignore=()):
    """Everything that was measured, without the names in `ignore`."""
    return [{k: v for k, v in r._asdict().items() if k not in ignore} for r in report]


def expected(x, w, g):
    """The sums of the operands of one layer, by (role, gemm)."""
    x, g = (t.detach().flatten(0, -2) for t in (x, g))
    w = w.detach()
    each = x, x.t(), w, w.t(), g, g.t()
    return {
        key: measure(t, {E4M3: "rceil"}, 8, None)[0] for key, t in zip(OPERANDS, each, strict=True)
    }


def check(report, layer, sums):
    readings = {(r.role, r.gemm): r for r in report[layer]}
    assert readings.keys() == sums.keys()
    for key, r in readings.items():
        assert r.sqnr == pytest.approx(sums[key].sqnr, abs=1e-4)
        assert r.elements == sums[key].elements
        assert r.subnormal * r.elements == pytest.approx(sums[key].subnormal)
        assert (r.scale_min, r.scale_max) == (sums[key].exponent(0), sums[key].exponent(1))


def inspect(model, batch, **how):
    return te_mx.inspect(model, batch, **{"fmt": "e4m3", **how})


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(approximate="tanh"), nn.Linear(96, 64)
    )


# ------------------------------------------------------------------------------------ what is read
def test_x_w_and_g_are_those_of_the_layer():
    model = mlp()
    x = torch.randn(3, 20, 64)
    z = model[0](x)
    h = model[1](z)
    a = model[2](h)
    y = model[3](a)
    dh, dy = torch.autograd.grad(y.square().sum() / 2, (h, y))
    report = inspect(model, x)
    assert report.layers == ["1", "3"] and report.about.loss == pytest.approx(
        y.square().sum().item() / 2
    )
    check(report, "1", expected(z, model[1].weight, dh))
    check(report, "3", expected(a, model[3].weight, dy))


@pytest.mark.parametrize(
    "change", ["frozen", "converted", "bound", "fused", "compiled", "no_grad", "bare"]
)
def test_the_same_numbers_for(change):
    """However the model is wrapped, and whatever requires a gradient."""
    model, x = mlp(), torch.randn(50, 64)
    plain = inspect(model, x)
    if change == "frozen":
        model.requires_grad_(False)
    elif change == "converted":
        te_mx.convert_model(model)
    elif change == "bound":
        te_mx.convert_model(model, recipe=te_mx.get_default_recipe())
    elif change == "fused":
        te_mx.convert_model(model, fuse=True)
    elif change == "compiled":
        model = torch.compile(model, backend="eager")
        model(x)
    elif change == "no_grad":
        with torch.no_grad():
            report = inspect(model, x)
    if change == "bare":
        with torch.inference_mode():
            report = inspect(model, x)
    elif change != "no_grad":
        report = inspect(model, x)
    kept = numbers(report, ("layer", "kind", "sqnr"))
    assert kept == numbers(plain, ("layer", "kind", "sqnr"))
    assert [r.sqnr for r in report] == pytest.approx([r.sqnr for r in plain], abs=1e-3)
    if change == "fused":
        assert report.layers == ["0.fc1", "0.fc2"]


def test_in_place_operations_after_a_layer_do_not_hide_its_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32))
    x = torch.randn(2, 40, 32)
    h = model[0](x)
    y = model[2](h.relu())
    (dh,) = torch.autograd.grad(y.square().sum() / 2, h)
    check(inspect(model, x), "0", expected(x, model[0].weight, dh))


def test_checkpointed_layers_are_read_once():
    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.inner, self.last, self.reentrant = mlp(), nn.Linear(64, 64), reentrant

        def forward(self, x):
            if self.reentrant is None:
                return self.last(self.inner(x))
            return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))

    torch.manual_seed(0)
    plain, x = Checkpointed(None), torch.randn(50, 64)
    model = Checkpointed(False)
    model.load_state_dict(plain.state_dict())
    assert numbers(inspect(model, x)) == numbers(inspect(plain, x))
    # The older kind runs the first forward without a graph: said, not left out in silence.
    model.reentrant = True
    with pytest.warns(UserWarning, match="None of the inputs"):
        report = inspect(model, x)
    assert report.about.no_gradient == ("inner.1", "inner.3")
    assert "no gradient reached" in str(report)
    with pytest.raises(RuntimeError, match=r"use_reentrant|\.grad\(\)"):
        inspect(nn.Sequential(nn.Linear(64, 64), model), x)


def test_groups_are_measured_by_themselves():
    torch.manual_seed(0)
    layer = te_mx.GroupedLinear(3, 64, 48)
    x, splits = torch.randn(70, 64), [33, 0, 27]
    parts = [x[:33], x[33:33], x[33:60]]
    sums: dict = {}
    for part, weight, bias in zip(parts, layer.weights(), layer.biases(), strict=True):
        y = F.linear(part, weight, bias)
        for key, one in expected(part, weight, y).items():
            sums.setdefault(key, one)
            if sums[key] is not one:
                sums[key].add(one)
    for given in (splits, torch.tensor(splits)):
        report = inspect(layer, (x, given))
        check(report, "(root)", sums)
    assert report["(root)"][0].elements == 60 * 64


def test_repeated_shared_and_silent_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.never, self.still = (nn.Linear(32, 32) for _ in range(3))
            self.alias = self.a
            self.attention = nn.MultiheadAttention(32, 2)
            self.int = nn.Linear(32, 32, dtype=torch.float64)

        def forward(self, x):
            with torch.no_grad():
                x = self.still(x)
            return self.alias(self.a(x)), self.attention(x, x, x)[0]

    torch.manual_seed(0)
    model, x = Model(), torch.randn(40, 32)
    report = inspect(model, x)
    assert report.layers == ["a", "still"]
    elements = {(r.layer, r.role, r.gemm): r.elements for r in report}
    assert elements["a", "x", "fprop"] == elements["a", "g", "dgrad"] == 2 * 40 * 32
    assert elements["a", "w", "fprop"] == 32 * 32
    about = report.about
    assert about.never_ran == ("never", "attention.out_proj")
    assert about.no_gradient == ("still",)
    assert about.skipped == {"int": "its weight is torch.float64, not float32, bfloat16 or float16"}
    text = str(report)
    for said in ("never ran: never", "reached (torch.no_grad", "not read: int", "in_proj_weight"):
        assert said in text


# --------------------------------------------------------------------------------- batches and loss
@dataclass
class Output:
    """Like those of Hugging Face: an object with a loss."""

    loss: torch.Tensor
    logits: torch.Tensor


class Classifier(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.kind = nn.Embedding(50, 32), nn.Linear(32, 7), kind

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        outputs = {
            "dict": {"loss": loss, "logits": logits}, "object": Output(loss, logits),
            "scalar": loss, "tuple": (input_ids, [logits]), "nothing": "?",
        }  # fmt: skip
        return outputs[self.kind]


@pytest.mark.parametrize("kind", ["dict", "object", "scalar", "loss_fn"])
def test_every_way_to_a_loss(kind):
    ids, labels = torch.randint(50, (4, 10)), torch.randint(7, (4, 10))
    batch = {"input_ids": ids, "labels": labels}
    how = {}
    if kind == "loss_fn":
        kind = "tuple"
        how["loss_fn"] = lambda out: F.cross_entropy(out[1][0].flatten(0, 1), labels.flatten())
    model = Classifier(kind)
    report = inspect(model, batch, **how)
    hidden = model.embed(ids)
    logits = model.head(hidden)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (g,) = torch.autograd.grad(loss, logits)
    assert report.about.loss == pytest.approx(loss.item())
    check(report, "head", expected(hidden, model.head.weight, g))
    assert numbers(inspect(model, (ids, labels), **how)) == numbers(report)


def test_without_a_loss_something_stands_in_and_is_named():
    report = inspect(Classifier("tuple"), torch.randint(50, (4, 10)))
    assert report.roles == ["x", "w", "g"] and "stand-in" in str(report)
    only = inspect(Classifier("nothing"), torch.randint(50, (4, 10)), gradients=False)
    assert only.about.loss is None and "no backward" in str(only)
    assert {(r.role, r.gemm) for r in only} == {("x", "fprop"), ("w", "fprop")}


def test_rules_and_elements_are_what_was_asked_for():
    model, x = mlp(), torch.randn(1000, 64)
    report = inspect(model, x, fmt=["mxfp4", "e4m3"], scale_rule="floor", max_elements=300 * 64)
    assert report.about.rules == {"mxfp4": "floor", "mxfp8_e4m3": "floor"}
    first = report["1"][0]
    assert first.saturated > 0 and first.elements == 2 * 128 * 64
    assert "at most about 19,200 elements" in str(report)
    usual = ["mxfp8_e4m3", "mxfp8_e5m2", "fp8_e4m3_1x128", "mxfp6_e2m3", "mxfp4"]
    assert list(te_mx.inspect(model, x[:2]).about.rules) == usual
    names = [*formats.names(), "nvfp4", "nvfp4_16x16", "nvfp4_rows"]
    every = te_mx.inspect(model, x[:2], fmt=names)
    assert list(every.about.rules) == names and every.about.rules["nvfp4"] == "te"


# ------------------------------------------------------------------------------ nothing has changed
class Busy(nn.Module):
    """With everything that a forward may change."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(32), nn.Dropout(0.5)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("cache", torch.ones(2))
        self.register_buffer("codes", torch.tensor([1, 2]).to(torch.float8_e5m2))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nan", torch.tensor(math.nan))
        self.fails = ""

    def forward(self, x):
        self.steps += 1
        self.flags.logical_not_()
        self.cache = torch.rand(5) * random.random()
        x = self.first(self.dropout(self.norm(x)))
        if self.fails == "forward":
            raise ZeroDivisionError
        if self.fails == "backward":
            x.register_hook(lambda g: 1 // 0)
        return self.second(x)


def state(model):
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    grads = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()]
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    rng = torch.get_rng_state(), random.getstate()
    return tensors, hooks, grads, identities, rng, [m.training for m in model.modules()]


@pytest.mark.parametrize("fails", ["", "forward", "backward"])
def test_the_model_is_as_it_was(fails):
    model = Busy()
    model.second.bias.requires_grad_(False)
    model.first.weight.grad = torch.ones(32, 32)
    seen = []
    model.first.weight.register_hook(seen.append)
    model.first.register_forward_hook(lambda *_: None)
    model.fails = fails
    before = state(model)
    if fails:
        with pytest.raises(ZeroDivisionError):
            inspect(model, torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))
    else:
        inspect(model, torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(state(model), before, rtol=0, atol=0, equal_nan=True)
    assert model.codes._version == model.nan._version == 0
    assert not seen
    assert torch.is_grad_enabled() and not torch.overrides._get_current_function_mode_stack()


@pytest.mark.usefixtures("family")
def test_te_mx_layers_remember_what_they_did():
    layer = te_mx.Linear(64, 64, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    layer.weight.main_grad = torch.zeros(64, 64)
    x = torch.randn(40, 64)
    with te_mx.autocast():
        layer(x).sum().backward()
    layer.backward_dw()
    main, said = layer.weight.main_grad.clone(), str(te_mx.audit(layer))
    report = inspect(layer, x)
    assert torch.equal(layer.weight.main_grad, main) and str(te_mx.audit(layer)) == said
    assert layer.delay_wgrad_compute and layer.fuse_wgrad_accumulation and not layer._delayed
    assert report.about.no_gradient == ()
    # A recipe that is active around the call is not asked, and is active afterwards.
    with te_mx.autocast():
        assert numbers(inspect(layer, x)) == numbers(report)
        layer(x)
    assert str(te_mx.audit(layer)).splitlines()[2] == said.splitlines()[2]


# ------------------------------------------------------------------------------------------- errors
class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            return self.layer(x)


def dropped():
    layer = te_mx.Linear(8, 8)
    te_mx.freeze_weights(layer, drop_master=True)
    return layer


X = torch.ones(4, 8)
LINEAR = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("model", "how", "error", "says"),
    [
        (nn.Conv1d(3, 3, 3), {}, ValueError, r"must have a linear layer .* Conv1d has none"),
        (nn.Bilinear(3, 4, 5), {}, ValueError, r"its matrices are weight \(Bilinear\)"),
        (LINEAR, {"filter_fn": lambda m, n: False}, ValueError, "that filter_fn keeps"),
        (LINEAR.double(), {}, ValueError, r"'\(root\)': its weight is torch.float64"),
        (nn.Linear(8, 8, device="meta"), {}, ValueError, "has no values .* load the model"),
        (nn.LazyLinear(8), {}, ValueError, "it is lazy"),
        (dropped(), {}, RuntimeError, "te_mx.unfreeze_weights"),
        (Detached(), {}, RuntimeError, "no gradient can reach .* pass gradients=False"),
        (Classifier("nothing"), {"batch": torch.ones(2, 2).int()}, TypeError, "pass loss_fn"),
        (nn.Linear(8, 8), {"loss_fn": lambda y: y}, TypeError, "loss_fn must return a scalar"),
        (nn.Linear(8, 8), {"loss_fn": 3}, TypeError, "loss_fn must be a function"),
        (nn.Linear(8, 8), {"batch": 3}, TypeError, "batch must be a tensor, tuple"),
        (nn.Linear(8, 8), {"fmt": "nf4"}, ValueError, "fmt must be among .* got 'nf4'"),
        (
            nn.Linear(8, 8),
            {"fmt": "mxfp4+rht16:0x1"},
            ValueError,
            "fmt must be among .* got",
        ),
        (nn.Linear(8, 8), {"fmt": []}, ValueError, "one or more"),
        (nn.Linear(8, 8), {"fmt": ["mxfp4", 3]}, TypeError, "got 3"),
        (nn.Linear(8, 8), {"scale_rule": "up"}, ValueError, "scale_rule must be one of 'rceil'"),
        (nn.Linear(8, 8), {"alignment_spread": 9}, ValueError, "spread must be in 0..8"),
        (nn.Linear(8, 8), {"max_elements": 0}, ValueError, "max_elements must be 1 or more"),
    ],
)
def test_errors_name_the_remedy(model, how, error, says):
    arguments = {"batch": X, **how}
    with pytest.raises(error, match=says):
        te_mx.inspect(copy.deepcopy(model), arguments.pop("batch"), **arguments)
