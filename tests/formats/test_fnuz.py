"""fn to fnuz and back: every code, in blocks with and without codes that only fnuz has."""

from __future__ import annotations

import blockwise_oracle as oracle
import numpy as np
import pytest
import torch

from te_mx import formats

PAIRS = pytest.mark.parametrize(("element", "top"), [("e4m3", 0x7E), ("e5m2", 0x7B)])


def values(codes: torch.Tensor, scales: torch.Tensor, name: str) -> np.ndarray:
    return oracle.values(codes.numpy(), scales.numpy(), name)


def every_code(scale: float = 0.75) -> tuple[torch.Tensor, torch.Tensor]:
    """All 256 codes, each in a block of its own; in blocks of 128 x 1 with its neighbours."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    return codes, torch.full((256, 1), scale)


@PAIRS
def test_every_code_to_fnuz(element, top):
    codes, scales = every_code()
    name, to = f"fp8_{element}_1x128", f"fp8_{element}fnuz_1x128"
    made, made_scales = formats.convert(codes, scales, name, to)
    before, after = values(codes, scales, name), values(made, made_scales, to)
    finite = np.isfinite(before)
    np.testing.assert_array_equal(after[finite], before[finite])
    assert (made.numpy()[~finite] == 0x80).all() and np.isnan(after[~finite]).all()
    assert made[0x80] == 0 and not np.signbit(after[0x80])
    others = [i for i in range(256) if finite[i, 0] and i != 0x80]
    assert made.flatten()[others].tolist() == others  # bytes stay
    assert bool((made_scales == 1.5).all()) and max(others) == top | 0x80


@PAIRS
def test_every_code_from_fnuz(element, top):
    codes, scales = every_code()
    name, to = f"fp8_{element}fnuz_1x128", f"fp8_{element}_1x128"
    made, made_scales = formats.convert(codes, scales, name, to)
    before, after = values(codes, scales, name), values(made, made_scales, to)
    np.testing.assert_array_equal(after, before)  # NaN is where it was
    above = (codes & 0x7F) > top
    above[0x80] = False
    assert torch.equal(made_scales, torch.where(above, 0.75, 0.375))
    assert torch.equal(made[~above & (codes != 0x80)], codes[~above & (codes != 0x80)])
    assert made[0x80] == 0x7F


@PAIRS
def test_a_block_with_codes_of_fnuz_alone(element, top):
    """All codes in two blocks, one of them negative: numbers are rounded where steps are wider."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scales = torch.tensor([[1.0], [2.0**-126]])
    name, to = f"fp8_{element}fnuz_1x128", f"fp8_{element}_1x128"
    made, made_scales = formats.convert(codes, scales, name, to)
    assert torch.equal(made_scales, scales)
    before, after = values(codes, scales, name), values(made, made_scales, to)
    step = 2.0 ** (-9 if element == "e4m3" else -16)
    with np.errstate(invalid="ignore"):
        rounded = np.round(before / scales.numpy() / step) * step * scales.numpy()
        small = np.abs(before) < step * 2 ** (3 if element == "e4m3" else 2) * scales.numpy()
    np.testing.assert_array_equal(after, np.where(small, rounded, before))
    assert (after != before).sum() > 1  # beside the NaN


@pytest.mark.parametrize("block", ["1x128", "128x1", "128x128"])
def test_there_and_back(block):
    """What fn says comes back to the byte, but -0; tails of all sides."""
    name, to = f"fp8_e4m3_{block}", f"fp8_e4m3fnuz_{block}"
    codes, scales = formats.get(name).quantize(torch.randn(200, 300), "fp32")
    there = formats.convert(codes, scales, name, to)
    back = formats.convert(*there, to, name)
    assert torch.equal(back[0], torch.where(codes == 0x80, 0, codes))
    assert torch.equal(back[1], scales)
    a, b = (formats.get(n).dequantize(*p, 300, torch.float64) for n, p in
            ((name, (codes, scales)), (to, there)))  # fmt: skip
    assert torch.equal(a, b)


def test_scales_at_the_ends_of_fp32():
    fn, fnuz = "fp8_e4m3_1x128", "fp8_e4m3fnuz_1x128"
    code = torch.tensor([[0x38]], dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"2\^127 or more cannot be doubled"):
        formats.convert(code, torch.tensor([[2.0**127]]), fn, fnuz)
    for special in (torch.inf, torch.nan):
        assert not formats.convert(code, torch.tensor([[special]]), fn, fnuz)[1].isfinite()
    # A subnormal scale doubles exactly: nothing is encoded anew, where 448 would not fit.
    top = torch.tensor([[0x7E]], dtype=torch.uint8)
    made, scales = formats.convert(top, torch.tensor([[2.0**-140]]), fn, fnuz)
    assert scales.item() == 2.0**-139 and made.item() == 0x7E
    made, scales = formats.convert(code, torch.tensor([[2.0**-126]]), fnuz, fn)
    assert scales.item() == 2.0**-126 and made.item() == 0x30  # 0.5 in both


@PAIRS
@pytest.mark.parametrize("turn", [1, -1], ids=["to fnuz", "to fn"])
def test_codes_in_the_dtypes_of_torch(element, top, turn):
    """What a checkpoint holds is taken and given as it is shown there; on meta as well."""
    names = (f"fp8_{element}_128x128", f"fp8_{element}fnuz_128x128")[::turn]
    dtypes = [formats.get(name).element.torch_dtype for name in names]
    codes, scales = formats.get(names[0]).quantize(torch.randn(130, 200), "fp32")
    expected = formats.convert(codes, scales, *names)
    for device in ("cpu", "meta"):
        made = formats.convert(codes.view(dtypes[0]).to(device), scales.to(device), *names)
        assert made[0].dtype == dtypes[1] and made[1].shape == scales.shape
        if device == "cpu":
            assert torch.equal(made[0].view(torch.uint8), expected[0])
            assert torch.equal(made[1], expected[1])
    with pytest.raises(TypeError, match="codes must be a tensor of"):
        formats.convert(codes.view(dtypes[1]), scales, *names)


@pytest.mark.parametrize(
    ("fmt", "to"),
    [
        ("fp8_e4m3_1x128", "fp8_e5m2fnuz_1x128"),
        ("fp8_e4m3_1x128", "fp8_e4m3fnuz_128x128"),
        ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
        ("mxfp8_e4m3", "fp8_e4m3fnuz_1x128"),
    ],
)
def test_other_pairs_are_refused(fmt, to):
    codes, scales = torch.zeros(1, 1, dtype=torch.uint8), torch.ones(1, 1)
    with pytest.raises(ValueError, match="fn and fnuz forms of one blockwise format"):
        formats.convert(codes, scales, fmt, to)


def test_parts_that_do_not_fit():
    codes, scales = torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2, 1)
    names = "fp8_e4m3_1x128", "fp8_e4m3fnuz_1x128"
    with pytest.raises(TypeError, match=r"codes must be a tensor of torch\.uint8"):
        formats.convert(codes.float(), scales, *names)
    with pytest.raises(ValueError, match="must have shapes"):
        formats.convert(codes, torch.ones(1, 1), *names)
    with pytest.raises(ValueError, match="codes must be a matrix"):
        formats.convert(codes[0], scales, *names)
