"""te_mx.grouped_gemm on the calls of the native Hopper module, which fake_sm90.py
stands in for."""

from __future__ import annotations

import pytest
import torch
from as_on_hopper import hide_splits, hopper_with_groups
from grouped_cases import equal

import te_mx
from te_mx.dispatch import problem, registry

K, N = 200, 48


@pytest.fixture
def native(threads):
    """Names of the native calls, as they come."""
    threads(1)
    with hopper_with_groups() as calls:
        yield calls


def tokens(count: int, scale_rule: str = "rceil", fmt: str = "e4m3") -> te_mx.MXTensor:
    """Blocks whose scales differ by more than is aligned in places."""
    scales = torch.exp2(torch.randint(-9, 9, (count, -(-K // 10))).float())
    x = torch.randn(count, K) * scales.repeat_interleave(10, 1)[:, :K]
    return te_mx.quantize(x, fmt=fmt, scale_rule=scale_rule)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("alignment", [1, 128])
def test_each_group_has_the_bits_of_its_own_product(native, device, alignment, monkeypatch):
    starts = [0, 20, 20] if alignment == 1 else [0, 128, 128]
    ends = torch.tensor([20, 20, starts[2] + 140])
    q, w = tokens(starts[2] + 150), te_mx.quantize(torch.randn(3, N, K))
    bias = torch.randn(3, N)
    if device:
        hide_splits(monkeypatch)
        monkeypatch.setattr("te_mx.api.groups.readable", lambda tensor: False)
    y = te_mx.grouped_gemm(q, w, offs=ends, alignment=alignment, bias=bias, out_dtype=torch.float32)
    calls = {"quantize_grouped", "pack_stacked", "gemm_rows"}
    assert calls <= set(native) if device else not calls & set(native)
    wanted = torch.zeros_like(y)
    for g, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
        if end > start:
            own = part(q, start, end - start)
            if device:  # where tokens are packed anew
                own = te_mx.quantize(own.dequantize(torch.bfloat16))
            weight = part(w, g * N, N)
            wanted[start:end] = te_mx.gemm(
                weight, own, bias=bias[g], out_dtype=torch.float32, split_k=False
            ).out
    equal(y, wanted)


def part(q: te_mx.MXTensor, start: int, count: int) -> te_mx.MXTensor:
    codes, scales = q.rowwise_data, q.rowwise_scale
    held = {"rowwise_data": codes[start : start + count],
            "rowwise_scale": scales[start : start + count]}  # fmt: skip
    return te_mx.MXTensor((count, K), q.fmt, **held)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_quantizing_again_changes_no_value(fmt, rule):
    """What the kernel packs are the values of the tokens, whatever rule chose their scales."""
    q = tokens(64, rule, fmt)
    values = q.dequantize(torch.bfloat16)
    again = te_mx.quantize(values, fmt=fmt)
    assert torch.equal(again.dequantize(torch.float64), q.dequantize(torch.float64))


def test_what_it_declines(native):
    """fp32 scales, which quantizing again would round, and products that are to be exact."""
    kernel = next(k for k in registry.kernels("gemm_rows") if k.name == "sm90_adaptive_plain")
    place = problem.place_of(torch.device("cpu"))  # that of the stand-in
    specs = "mxfp8_e4m3@rows", "mxfp8_e4m3@rows"
    asked = problem.Problem("gemm_rows", place, *specs, 64, 64, 64, 2, "adaptive", "device")
    assert kernel.accepts(asked) is None
    assert "the device alone knows" in kernel.accepts(asked._replace(ends="host"))
    blockwise = asked._replace(lhs="fp8_e4m3_1x128@rows", rhs="fp8_e4m3_1x128@rows")
    assert kernel.accepts(blockwise) is not None
    assert "precision 'adaptive'" in kernel.accepts(asked._replace(precision="exact"))
    assert kernel.accepts(asked._replace(lhs="mxfp8_e4m3@cols")) is not None
