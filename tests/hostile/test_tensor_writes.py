"""Whoever writes to the codes of an MXTensor gets the product of what he wrote, although gemm keeps
packed forms.
"""

from __future__ import annotations

import pytest
import torch

import te_mx
from te_mx.backends.cpu import binding as cpu

FIELDS = ("rowwise_data", "rowwise_scale")


def product(a, b):
    return te_mx.gemm(a, b, out_dtype=torch.float32).out


def overwrite(a, other, view):
    for name in FIELDS:
        mine, theirs = getattr(a, name).view(torch.uint8), getattr(other, name).view(torch.uint8)
        view(mine).copy_(theirs)


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.detach(), lambda t: t[:]])
@pytest.mark.parametrize("made", ["quantized", "built"])
@pytest.mark.parametrize("inside", [(False, False), (True, True), (True, False)])
def test_written_codes_are_multiplied(inside, made, view):
    """`inside`: whether the tensor is made, and its fields read and written, in inference_mode."""
    x, w, v = torch.randn(80, 64), torch.randn(40, 64), torch.randn(40, 64)
    b, other = te_mx.quantize(x), te_mx.quantize(v)
    expected = product(other, b)
    with torch.inference_mode(inside[0]):
        a = te_mx.quantize(w)
        if made == "built":
            a = te_mx.MXTensor(
                a.shape, a.fmt, **{name: getattr(a, name).clone() for name in FIELDS}
            )
        for _ in range(3):  # the second use packs
            product(a, b)
    with torch.inference_mode(inside[1]):
        try:
            overwrite(a, other, view)
        except RuntimeError as error:  # torch's own rule for tensors of inference_mode
            assert inside == (True, False)
            assert "Inplace update to inference tensor" in str(error)
            return
        for _ in range(3):
            assert torch.equal(product(a, b), expected)
    assert torch.equal(product(a, b), expected)


def test_parts_that_were_given_may_be_written():
    x, w, v = torch.randn(80, 64), torch.randn(40, 64), torch.randn(40, 64)
    b, source, other = te_mx.quantize(x), te_mx.quantize(w), te_mx.quantize(v)
    with torch.inference_mode():
        parts = {name: getattr(source, name).clone() for name in FIELDS}
        a = te_mx.MXTensor(source.shape, source.fmt, **parts)
        for _ in range(3):
            product(a, b)
        for name, part in parts.items():
            part.view(torch.uint8).copy_(getattr(other, name).view(torch.uint8))
        assert torch.equal(product(a, b), product(other, b))


def test_what_nobody_can_write_is_packed_in_inference_mode():
    with torch.inference_mode():
        a, b = te_mx.quantize(torch.randn(256, 256)), te_mx.quantize(torch.randn(256, 256))
        for _ in range(3):
            product(a, b)
        forms = [form for _, form in a._packs.values()]
        packs = cpu.native() is not None
        assert forms and all((form.packed is not None) == packs for form in forms)
        a.columnwise_data, a.rowwise_data  # noqa: B018
        assert not a._packs
