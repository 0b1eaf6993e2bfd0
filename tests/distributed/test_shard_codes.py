"""Weights that FSDP2 gathers as codes are quantized together before they are asked for: the bytes
of one by one."""

import pytest
import torch
from as_on_hopper import hopper

import te_mx
from te_mx import _ops as ops
from te_mx.distributed.fsdp import Model, ShardCodes, restored

BF16 = torch.bfloat16
SETTINGS = te_mx.recipe.MXFP8BlockScaling().settings
SPEC = "mxfp8_e4m3@rows"
ALIKE = [(64, 128), (32, 128), (64, 256)]  # whole vectors of codes and of scales


class Placed:
    """Where a weight is, as `Place` says it."""

    def __init__(self, dtype, group):
        self._dtype, self._group = dtype, group

    def trains(self):
        return True

    def gathers_again(self):
        return True

    def group(self):
        return self._group

    def dtype(self, shard):
        return self._dtype


def built(shapes, dtype, master=torch.float32):
    """Shards in two groups, and what quantizes them."""
    generator = torch.Generator().manual_seed(0)
    model, groups = Model(), (object(), object())
    shards = [torch.randn(s, generator=generator).to(master) for s in shapes]
    shards[0].view(-1)[:4] = torch.tensor([float("nan"), 0.0, 1e-40, 3e38]).to(master)
    places = [Placed(dtype, groups[i % 2]) for i in range(len(shapes))]
    made = [ShardCodes(s, SETTINGS, p, model) for s, p in zip(shards, places, strict=True)]
    return shards, made


def check(shards, made, dtype):
    """One pass: what is sent of every shard. Returns it."""
    sent = [one.sent(dtype) for one in made]
    for shard, one, two in zip(shards, made, sent, strict=True):
        codes, scales = restored(two, one.forms)
        parts = shard.to(dtype).unbind(0) if shard.dim() == 3 else [shard.to(dtype)]
        rows = [ops.quantize_2d(part, SPEC).row for part in parts]
        assert codes.shape == (*shard.shape[:-1], shard.shape[-1]) and codes.dtype is torch.uint8
        assert torch.equal(codes.view(-1), torch.cat([r.codes.view(-1) for r in rows]))
        assert torch.equal(scales.view(-1), torch.cat([r.scales.view(-1) for r in rows]))
    return sent


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("master", [torch.float32, BF16])
def test_codes_of_weights_that_are_gathered_together(dtype, master):
    with hopper():
        shards, made = built(ALIKE * 2, dtype, master)
        for _ in range(3):
            sent = check(shards, made, dtype)
            shards[1].mul_(2)
        memory = [t.untyped_storage().data_ptr() for pair in sent for t in pair]
        assert len(set(memory)) == 2  # one piece for each group
        for t in (t for pair in sent for t in pair):
            assert t.dtype is torch.uint8 and t.storage_offset() % 128 == 0


def test_a_weight_that_was_written_since():
    with hopper():
        shards, made = built(ALIKE, BF16)
        for _ in range(3):
            made[0].sent(BF16)  # all are quantized
            shards[1].mul_(2)
            check(shards[1:], made[1:], BF16)


@pytest.mark.parametrize("on_hopper", [True, False])
def test_codes_of_weights_of_odd_sizes(on_hopper):
    """They are made one by one."""
    shapes = [(64, 128), (5, 32), (6, 70), (3, 96)] + [(2, 32, 64)] * (not on_hopper)

    def passes():
        shards, made = built(shapes, BF16)
        for _ in range(3):
            sent = check(shards, made, BF16)
        assert len({t.untyped_storage().data_ptr() for two in sent for t in two}) == 2 * len(shapes)

    if on_hopper:
        with hopper():
            passes()
    else:
        passes()
