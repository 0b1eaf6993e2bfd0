"""A linear layer as one native call each way: the bits of one step after the other. Without a GPU:
fake_sm90.py stands in for the native module, and CPU tensors for those on the device."""

from __future__ import annotations

import as_on_hopper
import fake_sm90
import pytest
import torch
from torch import Tensor

import te_mx
from te_mx import _ops as ops
from te_mx.autograd import input_cache, linear, linear_recipe
from te_mx.autograd.linear import Call, OneCallLinear
from te_mx.backends.sm90 import binding
from te_mx.dispatch import registry
from te_mx.dispatch.linear import Held
from te_mx.runtime.kernel_log import LAST_RUN

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(threads):
    threads(1)  # many small operators
    with as_on_hopper.hopper():
        yield


KERNELS = {"mxfp8": "sm90_adaptive", "pow2": "sm90_blockwise", "fp32": "sm90_blockwise"}
of_each = pytest.mark.parametrize("name", KERNELS)


def recipe(name="mxfp8", **fields):
    if name == "mxfp8":
        return te_mx.recipe.MXFP8BlockScaling(**fields)
    return te_mx.recipe.Float8BlockScaling(use_f32_scales=name == "fp32", **fields)


def settings(name="mxfp8", **fields):
    return recipe(name, **fields).settings


def step_by_step(x, w, b, s, dtype):
    return linear.LinearFunction.apply(x, w, b, Call(s, dtype))[0]


def in_one_call(x, w, b, s, dtype, tag=-1):
    plan = linear.plan_of(x, w, b, call := Call(s, dtype, tag))
    assert plan.kernel.name == KERNELS[s.scale_rule.partition(":")[0] if "128" in s.x else "mxfp8"]
    return OneCallLinear.apply(x, w, b, call, plan)[0]


def run(function, x, w, b, s, dtype, grad, needs=(True, True, True)) -> list[Tensor | None]:
    parts = [x, w] if b is None else [x, w, b]
    leaves = [p.detach().requires_grad_(n) for p, n in zip(parts, needs, strict=False)]
    y = function(*leaves, *([None] * (3 - len(leaves))), s, dtype)
    y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def same(got, expected) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
            assert torch.equal(mine, theirs)


@of_each
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 1), (0, 1, 1), (0, 1, 0), (1, 0, 0), (1, 1)])
@pytest.mark.parametrize("shape", [(75, 130, 200), (1, 1, 1), (128, 128, 128)], ids=str)
def test_bits_of_one_step_after_the_other(shape, needs, keep, name):
    (m, n, k), g = shape, torch.Generator().manual_seed(1)
    x, w = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g)
    b = torch.randn(n, generator=g) if len(needs) == 3 else None
    how = settings(name, fp8_format=te_mx.recipe.Format.HYBRID, keep_weight_columns=keep)
    call = x, w, b, how, F32, torch.randn(m, n)
    needs = tuple(bool(n) for n in needs)
    same(run(in_one_call, *call, needs), run(step_by_step, *call, needs))


@pytest.mark.parametrize("kinds", [(BF16, BF16, BF16), (F32, BF16, BF16), (BF16, F32, F32)])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"scale_rule": "floor", "alignment_spread": 3, "keep_weight_columns": True},
        {"name": "pow2", "alignment_spread": 0, "amax_epsilon": 0.5},
        {"name": "fp32", "amax_epsilon": 0.5, "keep_weight_columns": True},
        {"name": "fp32", "w_block_scaling_dim": 1, "keep_weight_columns": True},
    ],
    ids=str,
)
def test_dtypes_strides_and_leading_dimensions(kinds, fields):
    x = torch.randn(3, 130, 35, dtype=kinds[0]).transpose(1, 2)  # [3, 35, 130], strided
    w = torch.randn(130, 70, dtype=kinds[1]).t()
    b = torch.randn(140, dtype=kinds[1])[::2]
    grad = torch.randn(70, dtype=kinds[2]).expand(3, 35, 70)
    call = x, w, b, settings(**fields), kinds[2], grad
    same(run(in_one_call, *call), run(step_by_step, *call))


@of_each
@pytest.mark.parametrize("needs", [(1, 1, 1), (0, 1, 0), (1, 0, 0)])
def test_an_input_that_is_kept_itself(needs, name):
    """Backward quantizes it again."""

    def keeps_x(x, w, b, s, dtype):
        call = Call(s, dtype, save_x=True)
        return OneCallLinear.apply(x, w, b, call, linear.plan_of(x, w, b, call))[0]

    x, w = torch.randn(3, 35, 130, dtype=BF16), torch.randn(70, 130, dtype=BF16)
    how = settings(name, fp8_format=te_mx.recipe.Format.HYBRID)
    call = x, w, torch.randn(70), how, BF16, torch.randn(3, 35, 70, dtype=BF16)
    needs = tuple(bool(n) for n in needs)
    same(run(keeps_x, *call, needs), run(step_by_step, *call, needs))
    if needs[1]:
        x = x.requires_grad_()
        y = keeps_x(x, w.requires_grad_(), None, how, BF16)
        saved = y.grad_fn.saved_tensors
        assert saved[0] is x and saved[1] is None


@pytest.mark.parametrize("save_x", [False, True])
@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("fields", [{}, {"scale_rule": "floor"}, {"name": "fp32"}], ids=str)
def test_backward_on_codes_of_a_weight(fields, needs, save_x, monkeypatch):
    """As fully_shard gathers them, or one_copy_weights leaves them."""
    how, taken = settings(**fields, one_copy_weights=True), []

    def keeps_codes(x, w, b, s, dtype):
        return linear.LinearFunction.apply(x, w, b, Call(s, dtype, save_x=save_x))[0]

    x, w = torch.randn(3, 35, 130, dtype=BF16), torch.randn(70, 130, dtype=BF16)
    call = x, w, torch.randn(70), how, BF16, torch.randn(3, 35, 70, dtype=BF16)
    needs = tuple(bool(n) for n in needs)
    in_one = linear.gradients_on_codes
    monkeypatch.setattr(
        linear, "gradients_on_codes", lambda *args: taken.append(in_one(*args)) or taken[-1]
    )
    got = run(keeps_codes, *call, needs)
    square = how.w.endswith("128x128")
    assert [made is not None for made in taken] == [needs[0] and not square]
    monkeypatch.setattr(linear, "gradients_on_codes", lambda *args: None)
    same(got, run(keeps_codes, *call, needs))


def test_one_token_without_leading_dimensions():
    call = torch.randn(70), torch.randn(33, 70), torch.randn(33), settings(), F32, torch.randn(33)
    same(run(in_one_call, *call), run(step_by_step, *call))


@of_each
@pytest.mark.parametrize("keep", [False, True])
def test_what_is_saved_is_what_backward_reads(keep, name):
    x, w = torch.randn(40, 70, requires_grad=True), torch.randn(33, 70, requires_grad=True)
    how = settings(name, keep_weight_columns=keep)
    y = in_one_call(x, w, None, how, F32)
    x_col, nothing, w_saved, _link = y.grad_fn.saved_tensors
    assert nothing is None
    plan = y.grad_fn.how[1]
    wanted = linear_recipe.roles(x.device, how)
    pairs = [(plan.quantized(Held((x_col, None), (x_col, None))).col, x, x_col, wanted.x.col)]
    if keep:
        pairs.append((plan.w_columns((w_saved, None)), w, w_saved, wanted.w.col))
    else:
        assert w_saved.data_ptr() == w.data_ptr() and w_saved.dtype == F32
    for got, t, saved, spec in pairs:
        want = ops.quantize_2d(t.detach(), "", spec, rule=how.scale_rule).col
        assert got[2:] == want[2:] and got.codes.stride() == want.codes.stride()
        assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
        held = want.codes.nbytes + want.scales.nbytes
        assert saved.dtype == torch.uint8 and saved.nbytes <= held + 16 * 70 + 2 * 256  # padding


class Watched(Tensor):
    """A subclass that sees what happens to it."""


@of_each
@pytest.mark.parametrize("keep", [False, True])
def test_watched_gradients_go_step_by_step(keep, name):
    x, w, b = torch.randn(40, 70), torch.randn(33, 70), torch.randn(33)
    call = x, w, b, settings(name, keep_weight_columns=keep), F32
    grad = torch.randn(40, 33)
    expected = run(step_by_step, *call, grad)
    for needs in ((True, True, True), (True, False, True), (False, True, False)):
        got = run(in_one_call, *call, grad.as_subclass(Watched), needs)
        keep = (True, *needs)
        for mine, theirs, kept in zip(got, expected, keep, strict=True):
            assert mine is None if not kept else torch.equal(mine, theirs)


@of_each
@pytest.mark.parametrize("keep", [False, True])
def test_hooks_of_saved_tensors_and_recomputation(keep, name):
    x, w = torch.randn(40, 70), torch.randn(33, 70)
    call = x, w, None, settings(name, keep_weight_columns=keep), F32, torch.randn(40, 33)
    expected, moved = run(step_by_step, *call), []

    def pack(t):
        moved.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        same(run(in_one_call, *call), expected)
    assert [t.dtype for t in moved if t.numel()] == [torch.uint8, torch.uint8 if keep else F32]

    def elsewhere(t):  # neither contiguous nor aligned
        room = torch.zeros(2 * t.numel() + 1, dtype=t.dtype)[1:]
        return room[::2].copy_(t.view(-1)).view(t.shape)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, elsewhere):
        same(run(in_one_call, *call), expected)

    def recomputed(*args):
        return torch.utils.checkpoint.checkpoint(in_one_call, *args, use_reentrant=False)

    same(run(recomputed, *call), expected)


@of_each
@pytest.mark.parametrize("keep", [False, True])
def test_an_input_gradient_is_added_to_another(keep, name):
    x, w, grad = torch.randn(40, 70, requires_grad=True), torch.randn(33, 70), torch.randn(40, 33)
    how = settings(name, keep_weight_columns=keep)
    y = in_one_call(x, w.requires_grad_(), None, how, F32)
    node = y.grad_fn
    (codes, scales, of_w, _), before = node.saved_tensors, torch.randn(40, 70)
    parts = (codes, scales), (of_w, None) if keep else of_w
    dx, added = node.how[1].backward(grad, *parts, None)[0], before.clone()
    assert node.how[1].backward(grad, *parts, added)[0] is added
    assert torch.equal(added, before + dx)


def test_a_second_derivative_is_refused():
    x, w = torch.randn(8, 40, requires_grad=True), torch.randn(8, 40, requires_grad=True)
    b = torch.randn(8, requires_grad=True)
    y = in_one_call(x * 2, w, b, settings(), F32)
    made = torch.autograd.grad(y.sum(), [x, w, b], create_graph=True)
    for first in made:
        for second in (x, w, b):
            with pytest.raises(RuntimeError, match="differentiate twice"):
                torch.autograd.grad(first.sum(), second, allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        made[0].sum().backward()


def test_outputs_and_gradients_are_no_views():
    x, w = torch.randn(2, 4, 40, requires_grad=True), torch.randn(8, 40, requires_grad=True)
    y = in_one_call(x, w, None, settings(), F32)
    y += 1
    dx, dw = torch.autograd.grad(y.sum(), [x, w])
    dx += x
    dw += w


@of_each
@pytest.mark.parametrize(
    "functions, taken",
    [((in_one_call, in_one_call), [False, True]), ((step_by_step, in_one_call), [True]),
     ((in_one_call, step_by_step), [False])],
)  # fmt: skip
def test_layers_of_one_input_read_one_copy(functions, taken, name, monkeypatch):
    """The first quantizes it, in one call or step by step; the other takes what it made."""
    x, weights, how = torch.randn(40, 72), torch.randn(2, 33, 72), settings(name)
    forward, given, made = fake_sm90.linear_forward, [], []

    def noted(args):
        given.append(args.x_given)
        return forward(args)

    monkeypatch.setattr(fake_sm90, "linear_forward", noted)
    for shared in (True, False):
        leaf, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        with te_mx.autocast(recipe=recipe(name)):
            if shared:
                input_cache.open_for(leaf)
            first, second = (
                function(leaf if shared else leaf.clone(), each, None, how, F32)
                for function, each in zip(functions, w.unbind(), strict=True)
            )
        made.append([first, second, *torch.autograd.grad((first + second).sum(), [leaf, w])])
    same(*made)
    assert given == taken + [False] * len(taken)


@of_each
def test_what_ran_is_recorded(name):
    x, w = torch.randn(8, 40, requires_grad=True), torch.randn(8, 40)
    for tag in (9000, 9001, 9002):
        LAST_RUN.pop(tag, None)
    in_one_call(x, w, None, settings(name), F32, tag=9000).sum().backward()
    ran = [LAST_RUN.get(tag) for tag in (9000, 9001, 9002)]
    assert ran == [KERNELS[name], KERNELS[name], None]


@of_each
def test_modules_run_on_it(name):
    layer, x = te_mx.Linear(70, 33), torch.randn(40, 70, requires_grad=True)
    for fields, function in (
        ({}, "OneCallLinearBackward"),
        ({"split_k": True}, "LinearFunctionBackward"),
        ({"precision": "exact"}, "LinearFunctionBackward"),
    ):
        with te_mx.autocast(recipe=recipe(name, **fields)):
            assert type(layer(x).grad_fn).__name__ == function


class Cuda:
    """As much of a tensor on a GPU as the decision looks at."""

    is_leaf = True

    def __init__(self, *shape, grad=True, device="cuda:0"):
        self.shape, self.requires_grad, self.dtype = torch.Size(shape), grad, BF16
        self.device = torch.device(device)

    def numel(self):
        return self.shape.numel()

    def is_neg(self):
        return False


def _on_one_device(*tensors):
    return len({t.device for t in tensors if t is not None}) == 1


def test_what_it_serves(monkeypatch):
    monkeypatch.setattr(linear, "are_direct", _on_one_device)
    monkeypatch.setattr(binding, "_problems", {0: None, 1: "needs a Hopper GPU (sm_90)"})
    x, w, plain = Cuda(8, 40), Cuda(16, 40), Call(settings(), BF16)

    def serves(x, w, call=plain, bias=None):
        return linear.plan_of(x, w, bias, call) is not None

    assert serves(x, w)
    assert serves(Cuda(8, 40, grad=False), w)
    assert serves(x, w, Call(settings(fp8_format=te_mx.recipe.Format.HYBRID), F32))
    for fields in (
        {"precision": "exact"},
        {"backward_override": "high_precision"},
        {"backward_override": "dequantized"},
        {"wgrad_with_hp": True},
        {"one_copy_weights": True},
        {"split_k": True},
    ):
        for name in KERNELS:
            assert not serves(x, w, Call(settings(name, **fields), BF16)), fields
    low, square = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
    for fields, served in (
        ({"x": low, "w": square, "g": low}, True), ({"x": low, "w": low, "g": low}, False),
        ({"x": low, "w": low, "g": low, "scale_rule": "fp32"}, True),
        ({"x": low, "w": "fp8_e5m2_128x128", "g": low}, False),
        ({"x": low, "w": square, "g": "fp8_e4m3fnuz_1x128"}, False),
        ({"x": "fp8_e4m3fnuz_1x128", "w": "fp8_e4m3fnuz_128x128", "g": low}, False),
        ({"g": "mxfp4"}, True), ({"x": "mxfp4", "w": "mxfp4"}, True),
        ({"scale_rule": "even"}, True), ({"x": "mxfp8_e5m2"}, False), ({"w": "mxfp4"}, False),
        ({"g": "mxfp6_e2m3"}, False),
    ):  # fmt: skip
        if "128" in fields.get("x", ""):
            fields = {"scale_rule": "pow2"} | fields
        how = te_mx.recipe.BlockScaling(**fields)
        assert serves(x, w, Call(how.settings, BF16)) is served, fields
    assert serves(x, w, plain._replace(grad_target=object()))
    for other, weight, bias in (
        (Cuda(8, 40, device="meta"), Cuda(16, 40, device="meta"), None),
        (Cuda(0, 40), w, None),
        (x, Cuda(0, 40), None),
        (Cuda(8, 40, device="cuda:1"), Cuda(16, 40, device="cuda:1"), None),
        (x, Cuda(16, 40, device="cuda:1"), None),
        (x, w, Cuda(16, device="cuda:1")),
        (Cuda(2**31 - 256, 40), w, None),
        (x, Cuda(2**31 - 256, 40), None),
        (Cuda(8, 40, grad=False), Cuda(16, 40, grad=False), None),
    ):
        assert not serves(other, weight, bias=bias)
    assert serves(Cuda(2**31 - 257, 40), w)
    monkeypatch.setattr(linear, "is_watched", lambda: True)
    assert not serves(x, w)
    monkeypatch.undo()
    registry.forget()
    assert serves(torch.randn(8, 40, requires_grad=True), torch.randn(16, 40))


def layer_and_steps(name, **fields):
    """A layer and what it makes step by step, on the same weight."""
    torch.manual_seed(0)
    layer = te_mx.Linear(70, 33, dtype=BF16, **fields)
    layer.weight.main_grad = torch.randn(33, 70)
    return layer, [torch.randn(m, 70, dtype=BF16) for m in (40, 8)]


def trained(layer, inputs, how, firsts, fused, monkeypatch):
    """Outputs, gradients of the inputs and of the parameters after a step of micro-batches."""
    made, nodes = [], set()
    layer.bias.grad = layer.weight.grad = None
    main = layer.weight.main_grad.clone()
    layer.weight.main_grad = main
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(linear, "plan_of", lambda *call: None)
        for x, first in zip(inputs, firsts, strict=True):
            leaf = x.clone().requires_grad_()
            with te_mx.autocast(recipe=how):
                y = layer(leaf, is_first_microbatch=first)
            nodes.add(type(y.grad_fn).__name__)
            y.backward(torch.arange(y.numel()).view(y.shape).sin().to(y.dtype))
            if layer.delay_wgrad_compute:
                layer.backward_dw()
            made += [y.detach(), leaf.grad]
    assert nodes == {"OneCallLinearBackward" if fused else "LinearFunctionBackward"}
    return [*made, layer.bias.grad, layer.weight.grad, main]


@of_each
@pytest.mark.parametrize("firsts", [(None, None), (True, False)], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"fuse_wgrad_accumulation": True},
        {"delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True, "save_original_input": True},
        {},
    ],
    ids=str,
)
def test_what_trainers_do(fields, firsts, name, monkeypatch):
    """Gradients in main_grad and later, weights that are quantized once for two micro-batches."""
    layer, inputs = layer_and_steps(name, **fields)
    start = layer.weight.main_grad
    got = trained(layer, inputs, recipe(name), firsts, True, monkeypatch)
    layer.weight.main_grad = start
    same(got, trained(layer, inputs, recipe(name), firsts, False, monkeypatch))
    if "fuse_wgrad_accumulation" in fields:
        assert got[-2] is None and not torch.equal(got[-1], start)


def test_a_frozen_weight_that_trains_its_input(monkeypatch):
    layer, inputs = layer_and_steps("mxfp8")
    te_mx.freeze_weights(layer)
    how, firsts = recipe(), (None, None)
    same(
        trained(layer, inputs, how, firsts, True, monkeypatch),
        trained(layer, inputs, how, firsts, False, monkeypatch),
    )


def test_main_grad_is_written_by_the_native_call(monkeypatch):
    """No gradient of the weight is made beside it."""
    layer, (x, _) = layer_and_steps("mxfp8", fuse_wgrad_accumulation=True)
    calls = []
    backward = fake_sm90.linear_backward

    def noted(args):
        calls.append((args.dw == layer.weight.main_grad.data_ptr(), args.dw_accumulate))
        return backward(args)

    monkeypatch.setattr(fake_sm90, "linear_backward", noted)
    with te_mx.autocast():
        for first in (None, True):
            layer(x, is_first_microbatch=first).sum().backward()
    assert calls == [(True, True), (True, False)]


def test_a_pass_that_does_not_ask_for_the_weight_leaves_main_grad(monkeypatch):
    layer, (x, _) = layer_and_steps("mxfp8", fuse_wgrad_accumulation=True)
    x, before = x.requires_grad_(), layer.weight.main_grad.clone()
    with te_mx.autocast():
        y = layer(x)
    torch.autograd.grad(y.sum(), x)
    assert torch.equal(layer.weight.main_grad, before)


def test_an_input_that_a_transform_left_trains_as_any_other():
    left = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(torch.randn(64, 64))
    (x,), layer = left, te_mx.Linear(64, 64)
    with pytest.raises(NotImplementedError):
        x.untyped_storage()
    gradients = []
    for one in (x, x.detach().clone()):
        with te_mx.autocast():
            layer(one).sum().backward()
        gradients.append(layer.weight.grad)
        layer.weight.grad = None
    assert torch.equal(*gradients)
