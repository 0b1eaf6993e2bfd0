"""A small layer of a CPU as one native call each way: the bits of one step after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import te_mx
from te_mx._ops.linear import linear_kernel_of
from te_mx.autograd import linear
from te_mx.autograd.linear import Call, LinearFunction, OneCallLinear
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.linear import MOST_CODES
from te_mx.dispatch.linear import Dtypes, LinearProblem
from te_mx.runtime.kernel_log import LAST_RUN

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")
SHAPES = [(1, 1, 1), (8, 10, 300), (8, 300, 10), (33, 65, 129), (17, 32, 32), (300, 2, 40)]
NEEDS = [(1, 1, 1), (1, 0, 1), (0, 1, 1), (0, 1, 0), (1, 0, 0), (1, 1)]
HYBRID = te_mx.recipe.Format.HYBRID
RECIPES = {
    "mxfp8": te_mx.recipe.MXFP8BlockScaling(),
    "hybrid": te_mx.recipe.MXFP8BlockScaling(fp8_format=HYBRID, scale_rule="floor"),
    "kept columns": te_mx.recipe.MXFP8BlockScaling(keep_weight_columns=True),
    "blockwise": te_mx.recipe.Float8BlockScaling(fp8_format=HYBRID),
    "fp32 scales": te_mx.recipe.Float8BlockScaling(use_f32_scales=True, amax_epsilon=0.5),
    "1 x 128": te_mx.recipe.Float8BlockScaling(w_block_scaling_dim=1, keep_weight_columns=True),
    "mxfp4": te_mx.recipe.BlockScaling("mxfp4", "mxfp4", "mxfp8_e5m2"),
    "mxfp4 of all": te_mx.recipe.BlockScaling("mxfp4", "mxfp4", "mxfp4"),
}
pytestmark = pytest.mark.usefixtures("guarded")
of_each = pytest.mark.parametrize("name", RECIPES)


def kernel_of(shape, name, dtype=F32):
    return linear_kernel_of(shape, CPU, dtype, RECIPES[name].settings)


def run(function, x, w, b, name, dtype, grad, needs) -> list[Tensor | None]:
    parts = [x, w] if b is None else [x, w, b]
    leaves = [p.detach().requires_grad_(bool(n)) for p, n in zip(parts, needs, strict=False)]
    call = Call(RECIPES[name].settings, dtype, 0)
    rest = [None] * (3 - len(leaves))
    more = [linear.plan_of(*leaves, *rest, call)] if function is OneCallLinear else []
    y = function.apply(*leaves, *rest, call, *more)[0]
    y.backward(grad)
    ran = [LAST_RUN.pop(tag, None) for tag in range(3)]
    return [y.detach(), *(leaf.grad for leaf in leaves), *ran]


def same(got, expected) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, Tensor):
            assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == theirs


@of_each
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_one_step_after_the_other(shape, name, isa):
    """At every level, and the kernels that ran."""
    (m, n, k), g = shape, torch.Generator().manual_seed(1)
    x, w = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g)
    grad = torch.randn(m, n, generator=g)
    for needs in NEEDS:
        b = torch.randn(n, generator=g) if len(needs) == 3 else None
        call = x, w, b, name, F32, grad, needs
        same(run(OneCallLinear, *call), run(LinearFunction, *call))


@of_each
@pytest.mark.parametrize("kinds", [(BF16, BF16, BF16), (F32, BF16, F16), (F16, F32, F32)], ids=str)
def test_dtypes_and_strides(kinds, name):
    x = torch.randn(3, 130, 70, dtype=kinds[0]).transpose(1, 2)[:, ::2]  # [3, 35, 130]
    w = torch.randn(260, 70, dtype=kinds[1]).t()[:, ::2]
    b = torch.randn(140, dtype=kinds[2])[::2]
    for grad in (torch.randn(70), torch.randn(35, 3, 70).transpose(0, 1)):
        call = x, w, b, name, kinds[2], grad.to(kinds[2]).expand(3, 35, 70), (1, 1, 1)
        same(run(OneCallLinear, *call), run(LinearFunction, *call))


@of_each
def test_values_that_are_no_numbers(name):
    """And rows that span so many exponents that the exact kernel multiplies them."""
    x, w, b = torch.randn(40, 96), torch.randn(33, 96), torch.randn(33)
    grad, wide = torch.randn(40, 33), x.clone()
    wide[3, :32], wide[3, 32:] = 1e-30, 1e30
    grad[7, 5], grad[:, 9] = float("nan"), float("inf")
    for one in (x, wide):
        for kind in (F32, BF16):
            call = one, w, b.to(kind), name, kind, grad.to(kind), (1, 1, 1)
            same(run(OneCallLinear, *call), run(LinearFunction, *call))


@pytest.mark.parametrize("name", ["mxfp8", "blockwise", "mxfp4"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("firsts", [(None, None), (True, False)], ids=str)
@pytest.mark.parametrize("shape", [(8, 10, 328), (40, 33, 24)], ids=str)
def test_main_grad_later_and_micro_batches(shape, firsts, delay, name, monkeypatch):
    """Of weights that are packed for panel kernels too."""
    (m, n, k), made = shape, []
    for fused in (True, False):
        torch.manual_seed(0)
        layer = te_mx.Linear(
            k, n, dtype=BF16, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay
        )
        layer.weight.main_grad = torch.randn(n, k)
        version, results = layer.weight.main_grad._version, []
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(linear, "plan_of", lambda *call: None)
            for first in firsts:
                x = torch.randn(m, k, dtype=BF16, requires_grad=True)
                with te_mx.autocast(recipe=RECIPES[name]):
                    y = layer(x, is_first_microbatch=first)
                assert type(y.grad_fn).__name__.startswith("OneCall") == fused
                y.backward(torch.randn(m, n).to(BF16))
                if delay:
                    layer.backward_dw()
                results += [y.detach(), x.grad]
        assert layer.weight.main_grad._version > version
        made.append([*results, layer.bias.grad, layer.weight.main_grad])
    assert all(map(torch.equal, *made))


def test_larger_layers_run_their_steps():
    n = MOST_CODES // 64
    assert kernel_of((2, n, 60), "mxfp8") is not None and kernel_of((2, n, 64), "mxfp8") is None


@of_each
def test_a_native_call_that_cannot_be_meant_is_refused(name):
    """Whatever a record says: nothing is read or written."""
    native, settings = binding.native(), RECIPES[name].settings
    dtypes, shape = Dtypes(F32, F32, None, F32), torch.Size((8, 40))
    problem = LinearProblem(8, 10, 40, True, True, True, settings, dtypes, shape)
    plan = kernel_of((8, 10, 40), name).plan(problem)
    room = torch.zeros(1 << 16, dtype=torch.uint8)
    names = [
        "x_data", "w_data", "g_data", "y", "dx", "dw", "x_row_codes", "x_row_scales",
        "x_col_codes", "x_col_scales", "w_col_codes", "w_col_scales", "workspace",
    ]  # fmt: skip
    good = {name: room.data_ptr() for name in names} | {"workspace_bytes": room.numel()}
    good |= {"x_row_stride": 40, "w_row_stride": 40, "g_row_stride": 10}
    calls = {
        "linear_forward": ("x_data", "w_data", "x_row_codes", "x_row_scales", "x_col_codes",
                           "w_col_scales", "workspace"),
        "linear_backward": ("g_data", "dx", "dw", "x_col_codes", "w_col_codes", "workspace"),
        "linear_wgrad": ("dw", "x_col_scales", "g_col_codes"),
    }  # fmt: skip
    for call, needed in calls.items():
        more = {"g_col_codes": good["dw"], "g_col_scales": good["dw"]}
        right = good | (more if call == "linear_wgrad" else {})
        assert getattr(native, call)(plan.record.copy(**right))[0] == 0
        wrong = [{one: 0} for one in needed]
        wrong += [{size: bad} for size in "mnk" for bad in (0, -1, 1 << 41, 1 << 62)]
        wrong += [{"kernel": bad} for bad in (-1, 0, 6, 99)] + [{"workspace_bytes": 64}]
        wrong += [{"block_k": 0}, {"w_block_rows": -1}, {"rule": 9}, {"forward": 77}]
        for each in wrong:
            args = plan.record.copy(**(right | each))
            assert getattr(native, call)(args)[0] != 0, (call, each)
            native.linear_offsets(args)
