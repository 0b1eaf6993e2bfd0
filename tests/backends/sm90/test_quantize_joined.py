"""Matrices that make one, quantized without joining them: the bytes of the joined one, on the CPU
and by what the Hopper backend asks of its native module.
"""

from __future__ import annotations

import as_on_hopper
import fake_sm90
import pytest
import torch
from mlp_blocks import Gated

import te_mx
from te_mx import _ops as ops
from te_mx._ops.quantize import parts_of

BF16 = torch.bfloat16
E4M3 = "mxfp8_e4m3"
PLAIN, PACKED = (f"{E4M3}@rows", f"{E4M3}@cols"), (f"{E4M3}@sm90:8",) * 2
FEW = ("quantize", "quantize_two", "quantize_joined")


def parts(rows=(128, 256, 40), cols=72, dtype=BF16):
    torch.manual_seed(0)
    return [torch.randn(n, cols).mul(10.0 ** (i - 1)).to(dtype) for i, n in enumerate(rows)]


def assert_same(got, want):
    assert [t.dtype for t in parts_of(got)] == [t.dtype for t in parts_of(want)]
    assert all(map(torch.equal, parts_of(got), parts_of(want)))
    assert [o and o[2:5] for o in got[:2]] == [o and o[2:5] for o in want[:2]]


@pytest.fixture
def calls(monkeypatch, threads):
    """The machine is a Hopper GPU; which quantizers of the native module were called."""
    threads(1)
    made = []

    def noted(name):
        run = getattr(fake_sm90, name)
        return lambda *args: made.append(name) or run(*args)

    with as_on_hopper.hopper() as patch:
        for name, note in [(name, noted(name)) for name in FEW]:
            patch.setattr(fake_sm90, name, note)
        yield made


@pytest.mark.parametrize("specs", [PLAIN, (PLAIN[0], ""), ("", PLAIN[1])], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_bytes_of_the_joined_matrix(dtype, specs):
    these = parts(rows=(3, 65, 1), dtype=dtype)
    whole = torch.cat(these)
    with torch.autocast("cpu", torch.bfloat16):  # which would refuse to join fp16
        got = ops.quantize_joined_2d(these, *specs, rule="floor")
    assert_same(got, ops.quantize_2d(whole, *specs, rule="floor"))


def test_opcheck():
    these = parts(rows=(5, 40))
    these[0].requires_grad_()
    for specs in (PLAIN, ("", PLAIN[1])):
        torch.library.opcheck(torch.ops.te_mx.quantize_joined, (these, *specs, "rceil"))


@pytest.mark.parametrize(
    ("these", "match"),
    [
        ([], "nothing to join"),
        ([torch.ones(2, 4), torch.ones(2, 5)], r"one width and dtype, got \(2, 4\)"),
        ([torch.ones(2, 4), torch.ones(2, 4).half()], "in torch.float16"),
        ([torch.ones(4)], "must be a matrix"),
        ([torch.ones(2, 4), torch.ones(2, 4, device="meta")], "part 1 is on meta"),
    ],
)
def test_what_cannot_be_joined(these, match):
    with pytest.raises((ValueError, RuntimeError), match=match):
        ops.quantize_joined_2d(these, *PLAIN)


@pytest.mark.parametrize("specs", [PACKED, (PACKED[0], ""), ("", PACKED[1])], ids=str)
@pytest.mark.parametrize("rows", [(128, 256, 40), (256, 128), (128,) * 4], ids=str)
def test_hopper_reads_them_where_they_lie(calls, rows, specs):
    these = parts(rows)
    got = ops.quantize_joined_2d(these, *specs)
    assert calls == ["quantize_joined"]
    assert_same(got, ops.quantize_2d(torch.cat(these), *specs))


def test_what_hopper_joins_first(calls):
    odd = parts((128, 130, 128))
    mixed = parts((128, 128))
    mixed[1] = mixed[1].t().contiguous().t()
    for these in (odd, mixed):
        calls.clear()
        got = ops.quantize_joined_2d(these, *PACKED)
        assert calls[-1] == "quantize"
        assert_same(got, ops.quantize_2d(torch.cat(these), *PACKED))


def test_a_block_joins_no_weights(calls):
    """Gate and up are read where they lie, in forward and in backward."""
    torch.manual_seed(0)
    block = Gated(hidden=128, inner=128).to(BF16)
    te_mx.convert_model(block, fuse=True)
    x = torch.randn(64, 128, dtype=BF16, requires_grad=True)
    with te_mx.autocast():
        y = block(x)
    assert calls.count("quantize_joined") == 1
    y.float().square().sum().backward()
    assert calls.count("quantize_joined") == 2
    assert block.up_proj.weight.grad is not None
