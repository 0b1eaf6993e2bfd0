"""Rotary embeddings against Transformer Engine's own source."""

from __future__ import annotations

import pytest
import te_source
import torch

import te_mx.pytorch as te


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_turning_is_transformer_engines(layout, interleaved, percent):
    names = ("_rotate_half", "_apply_rotary_pos_emb_base")
    theirs = te_source.functions("attention", "rope.py", names=names)[names[1]]
    angles = te.RotaryPositionEmbedding(16, percent, interleaved=interleaved)(9)
    assert angles.shape == (9, 1, 1, int(16 * percent)) and angles.dtype == torch.float32
    t = torch.randn(7, 3, 2, 16) if layout == "sbhd" else torch.randn(3, 7, 2, 16)
    for dtype in (torch.float32, torch.bfloat16):
        x = t.to(dtype)
        got = te.apply_rotary_pos_emb(x, angles, layout, interleaved=interleaved)
        assert torch.equal(got, theirs(x, angles[:7], layout, interleaved))
        fused = te.apply_rotary_pos_emb(x, angles, layout, interleaved=interleaved, fused=True)
        once = theirs(x.float(), angles[:7], layout, interleaved).to(dtype)
        assert fused.dtype == dtype and torch.equal(fused, once)
        assert got.is_contiguous() and fused.is_contiguous()


@pytest.mark.parametrize("fused", [True, False])
def test_the_result_is_contiguous_whatever_the_input_is(fused):
    angles = te.RotaryPositionEmbedding(16)(9)
    turned = torch.randn(2, 7, 3, 16).transpose(0, 1)
    out = te.apply_rotary_pos_emb(turned, angles, fused=fused)
    assert out.is_contiguous()
    assert torch.equal(out, te.apply_rotary_pos_emb(turned.contiguous(), angles, fused=fused))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_gradients_round_once(interleaved, dtype):
    torch.manual_seed(0)
    angles = te.RotaryPositionEmbedding(16, 0.5, interleaved=interleaved)(64)
    t, grad = torch.rand(64, 2, 4, 16).to(dtype), torch.rand(64, 2, 4, 16).to(dtype)
    found = []
    for wide in (False, True):
        x = (t.float() if wide else t.clone()).requires_grad_()
        te.apply_rotary_pos_emb(x, angles, fused=True, interleaved=interleaved).backward(
            grad.to(x.dtype)
        )
        found.append(x.grad)
    assert torch.equal(found[0], found[1].to(dtype))


def test_angles_and_interpolation():
    plain = te.RotaryPositionEmbedding(8, rotary_base=100.0)
    angles = plain(5, offset=2)
    frequency = 100.0 ** -(torch.arange(0, 8, 2) / 8)
    expected = torch.outer(torch.arange(2.0, 7.0), frequency)
    assert torch.allclose(angles.view(5, 8), torch.cat((expected, expected), 1))
    cut = te.RotaryPositionEmbedding(8, 1.0, 2, 4, 100.0)
    assert torch.allclose(cut(8), plain(8) / 2)  # up to twice the length that is known
    assert torch.allclose(cut(16), plain(16) / 4)  # beyond: as much longer as it is
    pairs = te.RotaryPositionEmbedding(8, interleaved=True, rotary_base=100.0)(5, 2).view(5, 8)
    assert torch.allclose(pairs, expected.repeat_interleave(2, 1))


def test_positions_of_packed_and_later_tokens():
    angles = te.RotaryPositionEmbedding(8)(12)
    t = torch.randn(9, 2, 8)
    steps = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    got = te.apply_rotary_pos_emb(t, angles, "thd", cu_seqlens=steps)
    for first, last in ((0, 4), (4, 9)):
        alone = te.apply_rotary_pos_emb(t[first:last].unsqueeze(1), angles)
        assert torch.equal(got[first:last], alone.squeeze(1))
    x = torch.randn(3, 2, 2, 8)
    starts = torch.tensor([0, 5])
    for layout in ("sbhd", "bshd"):
        given = x if layout == "sbhd" else x.transpose(0, 1)
        moved = te.apply_rotary_pos_emb(given, angles, layout, start_positions=starts)
        moved = moved if layout == "sbhd" else moved.transpose(0, 1)
        later = te.apply_rotary_pos_emb(x[:, 1:], angles[5:])
        assert torch.equal(moved[:, 1:], later)
        assert torch.equal(moved[:, :1], te.apply_rotary_pos_emb(x[:, :1], angles))
