"""MLP blocks of other libraries' models that are fused where they stand, with their inner width on
two ranks: against one block a rank in one process, and the sum of what they give.
"""

from __future__ import annotations

import copy

import torch
from mlp_blocks import Gated, Plain
from tensor_parallel_cases import DEVICE, full, mesh, of, same
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import te_mx
from te_mx.autograd import layer as layers
from te_mx.distributed import ModuleParallel

M, HIDDEN, INNER = 48, 64, 128
WHOLE = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())


def plan_of(block, **last):
    first = [name for name in block._modules if name in ("gate_proj", "up_proj", "fc1")]
    (final,) = [name for name in block._modules if name in ("down_proj", "fc2")]
    return dict.fromkeys(first, ColwiseParallel()) | {final: RowwiseParallel(**last)}


def built(kind=Gated, bias=False):
    torch.manual_seed(4)
    block = kind(bias=bias, hidden=HIDDEN, inner=INNER).to(DEVICE, torch.bfloat16)
    te_mx.convert_model(nn.Sequential(block), fuse=True)
    return block


def halves(block):
    """What each rank has of a block, as a block."""
    made = [copy.deepcopy(block) for _ in range(2)]
    for name, layer in block.named_children():
        if not isinstance(layer, te_mx.Linear):
            continue
        row = name in ("down_proj", "fc2")
        for rank, one in enumerate(made):
            own = getattr(one, name)
            own.weight = nn.Parameter(layer.weight.detach().chunk(2, int(row))[rank].clone())
            if row:
                own.in_features //= 2
                if rank and own.bias is not None:
                    own.bias = nn.Parameter(torch.zeros_like(own.bias))
            else:
                own.out_features //= 2
                if own.bias is not None:
                    own.bias = nn.Parameter(layer.bias.detach().chunk(2)[rank].clone())
    return made


def expected_of(block, x, grad):
    pairs = halves(block)
    inputs = [x.detach().clone().requires_grad_() for _ in pairs]
    with te_mx.autocast():
        ys = [one(inp) for one, inp in zip(pairs, inputs, strict=True)]
    for y in ys:
        y.backward(grad)
    assert all(one._te_mx_ran == "fused" for one in pairs)
    found = {"y": ys[0].detach() + ys[1].detach(), "dx": inputs[0].grad + inputs[1].grad}
    for name, _ in block.named_parameters():
        one, two = (dict(half.named_parameters())[name].grad for half in pairs)
        row = name.startswith(("down_proj", "fc2"))
        bias_of_sum = row and "bias" in name
        found[name] = one if bias_of_sum else torch.cat([one, two], int(row))
    return found


def passed(block, x, grad, ran="fused"):
    x = x.detach().clone().requires_grad_()
    with te_mx.autocast():
        made = block(x)
    assert block._te_mx_ran == ran, block._te_mx_ran
    y = full(made)
    y.backward(grad)
    found = {"y": y.detach(), "dx": full(x.grad)}
    return found | {name: p.grad for name, p in block.named_parameters()}


def check(block, *styles, x=None):
    x, grad = (of(2, M, HIDDEN) if x is None else x), of(2, M, HIDDEN, seed=2)
    expected = expected_of(block, x, grad)
    for style in styles:
        parallelize_module(block, mesh(), style)
    same(passed(block, x, grad), expected)
    return block


def case_gated_and_plain():
    for kind, bias in ((Gated, False), (Gated, True), (Plain, True)):
        block = built(kind, bias)
        check(block, plan_of(block))


def case_input_of_all_layers():
    """The block's input is one DTensor already; its result stays one."""
    block = built()
    check(block, plan_of(block, use_local_output=False), WHOLE)


class Normalized(nn.Module):
    """A block behind a normalization."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(HIDDEN, eps=1e-5), Gated(hidden=HIDDEN, inner=INNER)

    def forward(self, x):
        return self.mlp(self.norm(x))


def case_codes_of_a_normalization():
    """The block reads the codes that the normalization in front of it makes, and backward makes
    the columnwise ones again: the bits of quantizing its result."""
    found, asked = [], []
    real = layers.source_of

    def watched(z):
        asked.append(real(z) is not None)
        return real(z)

    layers.source_of = watched
    for told in (True, False):
        torch.manual_seed(5)
        model = Normalized().to(DEVICE, torch.bfloat16)
        te_mx.convert_model(model, fuse=True)
        parallelize_module(model.mlp, mesh(), plan_of(model.mlp))
        parallelize_module(model.mlp, mesh(), WHOLE)
        x = of(2, M, HIDDEN).requires_grad_()
        with te_mx.autocast():
            z = model.norm(x * 1)
            y = model.mlp(z if told else z.clone())
        assert model.mlp._te_mx_ran == model.norm._te_mx_ran == "fused"
        y.backward(of(2, M, HIDDEN, seed=2))
        grads = {name: full(p.grad) for name, p in model.named_parameters()}
        found.append(grads | {"y": y.detach(), "dx": x.grad})
        assert any(asked) == told
        asked.clear()
    layers.source_of = real
    same(*found)


def case_styles_of_te_mx():
    block = built()
    column, row = ModuleParallel("column"), ModuleParallel("row")
    check(block, {"gate_proj": column, "up_proj": ModuleParallel("column"), "down_proj": row})


def case_sequence_parallel():
    """Tokens in halves, gathered in front of the block and scattered behind it."""
    block = built()
    x, grad = of(2, M, HIDDEN), of(2, M, HIDDEN, seed=2)
    expected = expected_of(block, x, grad)
    split = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1))
    plan = plan_of(block, output_layouts=Shard(1), use_local_output=False)
    for name in ("gate_proj", "up_proj"):
        plan[name] = ColwiseParallel(input_layouts=Shard(1))
    parallelize_module(block, mesh(), plan)
    parallelize_module(block, mesh(), split)
    rank = mesh().get_local_rank()
    inp = x.chunk(2, 1)[rank].clone().requires_grad_()
    with te_mx.autocast():
        y = block(inp)
    assert block._te_mx_ran == "fused" and y.placements == (Shard(1),)
    y.full_tensor().backward(grad)
    whole = DTensor.from_local(inp.grad, mesh(), [Shard(1)])
    found = {"y": y.detach(), "dx": whole}
    same(found | {name: p.grad for name, p in block.named_parameters()}, expected)


def case_main_grad():
    block = built()
    x, grad = of(2, M, HIDDEN), of(2, M, HIDDEN, seed=2)
    expected = expected_of(block, x, grad)
    parallelize_module(block, mesh(), plan_of(block))
    for layer in (block.gate_proj, block.up_proj, block.down_proj):
        layer.fuse_wgrad_accumulation = True
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    found = passed(block, x, grad)
    for name, p in block.named_parameters():
        assert p.grad is None
        torch.testing.assert_close(
            full(p.main_grad), expected[name].float(), rtol=2**-7, atol=2**-7
        )
        del found[name], expected[name]
    same(found, expected)


def case_layers_one_by_one():
    """What is not surely the same runs as before, and says why."""

    block = built()
    parallelize_module(block, mesh(), plan_of(block))
    block.up_proj.register_forward_hook(lambda *_: None)
    x, grad = of(2, M, HIDDEN), of(2, M, HIDDEN, seed=2)
    passed(block, x, grad, "up_proj has hooks other than those of parallelize_module")

    block = built()
    plan = dict.fromkeys(("gate_proj", "up_proj"), ColwiseParallel(output_layouts=Replicate()))
    plan["down_proj"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(block, mesh(), plan)
    passed(block, x, grad, "its inner width is not sharded along the features on all ranks")

    block = built()
    parallelize_module(block, mesh(), {**plan_of(block), "down_proj": ColwiseParallel(
        input_layouts=Shard(-1), output_layouts=Replicate())})  # fmt: skip
    passed(block, x, grad, "its inner width is not sharded along the features on all ranks")


def case_high_precision():
    block = built()
    parallelize_module(block, mesh(), plan_of(block))
    with te_mx.autocast(enabled=False):
        block(of(2, M, HIDDEN))
    assert block._te_mx_ran == ""
