"""What the tests of LayerNormLinear and LayerNormMLP share."""

from __future__ import annotations

import torch

import te_mx
from te_mx._ops.fused import act_quantize_2d, norm_backward_2d, norm_quantize_2d
from te_mx.dispatch import fused
from te_mx.dispatch.fused import Activation, Norm, Target

_NOTHING = Target("", "", "rceil")


def filled(module):
    """Parameters with values that show every one of them."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or "layer_norm" in name:
                parameter.normal_()
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    return module


def gradients(module, x, run=None, grad=None):
    """(output, gradients of x and of the parameters by name)."""
    x = x.detach().clone().requires_grad_()
    out = (run or module)(x)
    first = out[0] if isinstance(out, tuple) else out
    grad = torch.randn_like(first, dtype=torch.float32).to(first.dtype) if grad is None else grad
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    got = torch.autograd.grad(first, wanted, grad, allow_unused=True)
    return out, dict(zip(["x", *names], got, strict=True))


class NormStep(torch.autograd.Function):
    """A normalization alone, out of the ops that the modules use."""

    @staticmethod
    def forward(ctx, x, weight, bias, norm, zero_centered):
        full = weight.float() + zero_centered
        bias32 = None if bias is None else bias.float()
        step = fused.NormStep(x, full, bias32, norm, x.dtype, True, _NOTHING)
        made = norm_quantize_2d(step)
        ctx.save_for_backward(x, full, made.mean, made.rstd)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return made.z

    @staticmethod
    def backward(ctx, dz):
        x, full, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = norm_backward_2d(dz, x, full, mean, rstd, x.dtype)
        bias = None if ctx.dtypes[1] is None else dbias.to(ctx.dtypes[1])
        return dx, dweight.to(ctx.dtypes[0]), bias, None, None


class ActStep(torch.autograd.Function):
    """An activation alone."""

    @staticmethod
    def forward(ctx, h, act):
        ctx.save_for_backward(h)
        ctx.act = act
        return act_quantize_2d(fused.ActStep(h, None, act, h.dtype, True, _NOTHING)).out

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        step = fused.ActStep(h, grad, ctx.act, h.dtype, True, _NOTHING)
        return act_quantize_2d(step).out, None


def one_after_the_other(module, act: Activation | None = None):
    """The same computation as a LayerNormLinear or LayerNormMLP, of te_mx.Linear layers."""

    def linear(x, weight, bias):
        layer = te_mx.Linear(weight.shape[1], weight.shape[0], device="meta")
        layer._parameters["weight"], layer._parameters["bias"] = weight, bias
        return layer(x)

    def run(x):
        norm = Norm(module.normalization, module.eps)
        z = NormStep.apply(
            x.flatten(0, -2), module.layer_norm_weight, module.layer_norm_bias, norm,
            int(module.zero_centered_gamma),
        ).view(x.shape)  # fmt: skip
        if act is None:
            return linear(z, module.weight, module.bias)
        h = linear(z, module.fc1_weight, module.fc1_bias)
        a = ActStep.apply(h.flatten(0, -2), act).view(*x.shape[:-1], -1)
        return linear(a, module.fc2_weight, module.fc2_bias)

    return run


def assert_same(got, expected):
    """Equal outputs and gradients, bit for bit."""
    for name, value in expected[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=0, atol=0, msg=lambda m, n=name: n + m)
    first, second = (o[0][0] if isinstance(o[0], tuple) else o[0] for o in (got, expected))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def relative(got, expected) -> float:
    got, expected = got.double(), expected.double()
    return ((got - expected).norm() / expected.norm().clamp(min=1e-30)).item()
