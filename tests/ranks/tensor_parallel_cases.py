"""Tensor parallelism over DTensors on two ranks, against the same sums in one process."""

from __future__ import annotations

import copy
import gc
import os
import weakref

import halves
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import te_mx
from te_mx.distributed import ModuleParallel

DEVICE = os.environ.get("TE_MX_RANKS_DEVICE", "cpu")
# Before, layers that ranks share run between graphs: docs/compatibility.md, group_cases.compiles.
ONE_GRAPH = torch.__version__ >= "2.12"
K, N, M = 128, 192, 48


def mesh():
    return init_device_mesh(DEVICE, (2,))


def of(*shape, seed=1):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.bfloat16().to(DEVICE)


def built(family, *args, dtype=torch.bfloat16, **given):
    torch.manual_seed(3)
    module = family(*args, dtype=dtype, device=DEVICE, **given)
    for name, p in module.named_parameters():
        if "bias" in name or "norm" in name:
            nn.init.normal_(p, 0.5)
    return module


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def wholes(found):
    """Values by the names of parameters, with those of a gated fc1 in one."""
    made = {}
    for name, value in found.items():
        other = name.replace("fc1_activated", "fc1_gate")
        if other != name:
            made[name.replace("_activated", "")] = torch.cat([full(value), full(found[other])])
        elif "fc1_gate" not in name:
            made[name] = value
    return made


def same(found, expected):
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    wrong = []
    for name, value in expected.items():
        got, wanted = (full(t).float() for t in (found[name], value))
        if not torch.equal(full(found[name]), full(value)):
            apart = (got - wanted).abs()
            at = tuple(i.item() for i in torch.unravel_index(apart.argmax(), apart.shape))
            wrong.append(
                f"{name}: {(apart > 0).sum()} of {apart.numel()}, most at {at}, {got[at]:.9g} for "
                f"{wanted[at]:.9g}; {apart.norm() / wanted.norm():.2g} of the norm"
            )
    assert not wrong, "differ:\n" + "\n".join(wrong)


def passed(module, x, grad, *args, region=True):
    """As halves.run, of a module on DTensors."""
    x = x.detach().clone().requires_grad_()
    with te_mx.autocast(enabled=region):
        y = full(module(x, *args))
    y.backward(grad)
    found = {"y": y.detach(), "dx": full(x.grad)}
    return found | wholes({name: p.grad for name, p in module.named_parameters()})


def reference(module, kind, x, grad, *args, region=True):
    with te_mx.autocast(enabled=region):
        return halves.run(copy.deepcopy(module), kind, x, grad, *args)


def check(module, style, kind, x, grad, *args, region=True):
    expected = reference(module, kind, x, grad, *args, region=region)
    parallelize_module(module, mesh(), style)
    same(passed(module, x, grad, *args, region=region), expected)


def case_linear_column():
    linear = built(te_mx.Linear, K, N)
    check(linear, ColwiseParallel(output_layouts=Replicate()), "column", of(M, K), of(M, N))


def case_linear_row():
    style = RowwiseParallel(input_layouts=Replicate())
    check(built(te_mx.Linear, K, N), style, "row", of(3, M, K), of(3, M, N))


def case_layernorm_linear():
    for norm in ("LayerNorm", "RMSNorm"):
        module = built(te_mx.LayerNormLinear, K, N, normalization=norm)
        check(module, ModuleParallel(output_layouts=Replicate()), "column", of(M, K), of(M, N))


def case_layernorm_mlp():
    for act in ("gelu", "silu", "swiglu"):
        module = built(te_mx.LayerNormMLP, K, N, activation=act)
        check(module, ModuleParallel(), "both", of(M, K), of(M, K))


def case_halves_of_a_gated_fc1():
    """Frozen before and after, compiled, copied and reset; shards of fc1 as it is are refused."""
    from torch.distributed.tensor import distribute_module, distribute_tensor

    def made(freeze_first=False):
        module = built(te_mx.LayerNormMLP, K, N, activation="swiglu")
        if freeze_first:
            te_mx.freeze_weights(module)
        return parallelize_module(module, mesh(), ModuleParallel())

    x, plain = of(M, K), made()
    with torch.no_grad(), te_mx.autocast():
        expected = plain(x)
    late = made()
    te_mx.freeze_weights(late)
    compiled = torch.compile(made(), backend="eager", fullgraph=ONE_GRAPH)
    for module in (made(True), late, compiled, copy.deepcopy(plain)):
        for _ in range(2):
            with torch.no_grad(), te_mx.autocast():
                assert torch.equal(module(x), expected)
    assert late._source.kept.keys() == {"fc1_weight", "fc2_weight"}
    with torch.no_grad(), te_mx.autocast():
        late.fc1_gate_weight.mul_(2)
        plain.fc1_gate_weight.mul_(2)
        assert torch.equal(late(x), plain(x)) and not torch.equal(late(x), expected)
    plain.reset_parameters()
    assert not full(plain.fc1_gate_bias).any() and full(plain.fc1_activated_weight).any()

    def rows(name, module, its):
        for key, p in list(module.named_parameters()):
            place = Shard(int(key == "fc2_weight")) if key[:2] == "fc" and p.dim() > 1 else None
            place = Shard(0) if key == "fc1_bias" else place or Replicate()
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, its, [place])))

    by_hand = built(te_mx.LayerNormMLP, K, N, activation="swiglu")
    distribute_module(by_hand, mesh(), rows)
    try:
        by_hand(x)
    except ValueError as error:
        assert "te_mx.distributed.ModuleParallel" in str(error), error
    else:
        raise AssertionError("ran on rows that are no halves")


def case_high_precision():
    module = built(te_mx.LayerNormMLP, K, 50, activation="swiglu")
    check(module, ModuleParallel(), "both", of(M, K), of(M, K), region=False)


def case_grouped_column():
    for stacked in (False, True):
        module = built(te_mx.GroupedLinear, 3, K, N, single_grouped_weight=stacked)
        style = ModuleParallel("column", output_layouts=Replicate())
        check(module, style, "column", of(M, K), of(M, N), [20, 0, 28])


def case_grouped_row():
    for stacked, bias in ((False, False), (True, False), (False, True), (True, True)):
        module = built(te_mx.GroupedLinear, 3, K, N, bias, single_grouped_weight=stacked)
        style = ModuleParallel("row", input_layouts=Replicate())
        check(module, style, "row", of(M, K), of(M, N), [20, 0, 28])


def case_experts():
    """Every rank has two of four experts and their rows."""
    whole = built(te_mx.GroupedLinear, 4, K, N, single_grouped_weight=True)
    module = parallelize_module(copy.deepcopy(whole), mesh(), ModuleParallel("experts"))
    x, grad, splits = of(M, K), of(M, N), [10, 14, 0, 24]
    mine = slice(0, 24) if dist.get_rank() == 0 else slice(24, 48)
    x_mine = x[mine].clone().requires_grad_()
    with te_mx.autocast():
        y = whole(x, splits)
        made = module(x_mine, splits[2 * dist.get_rank() :][:2])
    y.backward(grad)
    made.backward(grad[mine].clone())
    assert torch.equal(made, y[mine])
    for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(full(ours.grad), theirs.grad)


def mlp(convert=True):
    torch.manual_seed(5)
    made = nn.Sequential(nn.LayerNorm(K), nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))
    made = made.to(DEVICE, torch.bfloat16)
    if convert:
        te_mx.convert_model(made)
    return made


PLAN = {"1": ColwiseParallel(), "3": RowwiseParallel()}


def case_convert_before_and_after():
    before = parallelize_module(mlp(), mesh(), PLAN)
    after = parallelize_module(mlp(False), mesh(), PLAN)
    report = te_mx.convert_model(after)
    assert report.count("converted") == 2, report
    x, grad = of(M, K), of(M, K)
    same(passed(after, x, grad), passed(before, x, grad))


def case_sequence_parallel():
    """The tokens are sharded around the two layers: the same bits as without."""
    from torch.distributed.tensor.parallel import SequenceParallel

    plain = parallelize_module(mlp(), mesh(), PLAN)
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    model = parallelize_module(mlp(), mesh(), plan)
    x, grad = of(M, K), of(M, K)
    expected = passed(plain, x, grad)
    mine = slice(0, M // 2) if dist.get_rank() == 0 else slice(M // 2, M)
    x_mine = x[mine].clone().requires_grad_()
    with te_mx.autocast():
        y = model(x_mine)
    y = y.full_tensor()
    y.backward(grad)
    assert torch.equal(y, expected["y"])
    assert torch.equal(x_mine.grad, expected["dx"][mine])
    for name, p in model.named_parameters():
        if not name.startswith("0"):  # whose gradient sums in another order
            assert torch.equal(full(p.grad), full(expected[name])), name


def case_replicated_weights():
    """Weights on every rank, tokens sharded: the sum over ranks of what each has."""
    for module in (built(te_mx.Linear, K, N), built(te_mx.LayerNormMLP, K, N)):
        out = N if isinstance(module, te_mx.Linear) else K
        x, grad = of(M, K), of(M, out)
        expected = []
        for half in range(2):
            one, rows = copy.deepcopy(module), slice(24 * half, 24 * half + 24)
            with te_mx.autocast():
                one(x[rows]).backward(grad[rows].clone())
            expected.append({name: p.grad for name, p in one.named_parameters()})
        from torch.distributed.tensor import distribute_module, distribute_tensor

        module = distribute_module(module, mesh())
        with te_mx.autocast():
            y = module(distribute_tensor(x, mesh(), [Shard(0)]))
        y.full_tensor().backward(grad)
        sums = {name: g + expected[1][name] for name, g in expected[0].items()}
        same({name: p.grad for name, p in module.named_parameters()}, sums)


def case_loss_parallel():
    linear = built(te_mx.Linear, K, N, False)
    whole, x, target = copy.deepcopy(linear), of(M, K), torch.arange(M, device=DEVICE)
    parallelize_module(linear, mesh(), ColwiseParallel(use_local_output=False))
    with loss_parallel(), te_mx.autocast():
        loss = nn.functional.cross_entropy(linear(x).float(), target)
        loss.backward()
    with te_mx.autocast():
        expected = nn.functional.cross_entropy(whole(x).float(), target)
    expected.backward()
    torch.testing.assert_close(full(loss), expected)
    torch.testing.assert_close(full(linear.weight.grad), whole.weight.grad)


def case_siblings():
    """Layers that read one DTensor send one gradient; bits are those of layers that read a tensor
    each. What is written to it in between is seen."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            sent.append(func.__name__ if "all_reduce" in func.__name__ else "")
            return func(*args, **(kwargs or {}))

    for way in (None, "mul_", "data"):
        found, sums = [], []
        for shared in (True, False):
            sent: list[str] = []
            layers = [built(te_mx.Linear, K, N) for _ in range(3)]
            for layer in layers:
                parallelize_module(layer, mesh(), ColwiseParallel())
            inp = of(M, K).requires_grad_()
            x = DTensor.from_local(inp * 1, mesh(), [Replicate()])
            made = []
            with te_mx.autocast(), Counts():
                for layer in layers:
                    made.append(layer(x if shared else x.clone()))
                    with torch.no_grad():
                        if way is not None:
                            (x.detach() if way == "mul_" else x.data).mul_(2)
                torch.cat(made, -1).backward(
                    torch.cat([of(M, N // 2, seed=s) for s in (2, 3, 4)], -1)
                )
            found.append([t.detach() for t in made])
            sums.append((inp.grad, len(list(filter(None, sent)))))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), way
        torch.testing.assert_close(sums[0][0], sums[1][0], rtol=2**-6, atol=2**-6)
        assert way is not None or (sums[0][1], sums[1][1]) == (1, 1), sums


def case_inputs_are_not_kept():
    layer = parallelize_module(built(te_mx.Linear, K, N), mesh(), ColwiseParallel())
    for leaf, grad in ((True, True), (True, False), (False, True)):
        x = DTensor.from_local(of(M, K), mesh(), [Replicate()]).requires_grad_(grad)
        x = x if leaf else x * 1
        with te_mx.autocast():
            layer(x).sum().backward()
        alive = weakref.ref(x)
        del x
        gc.collect()
        assert alive() is None, (leaf, grad)


def case_compile():
    whole = mlp()
    model = parallelize_module(copy.deepcopy(whole), mesh(), PLAN)
    other = parallelize_module(copy.deepcopy(whole), mesh(), PLAN)
    x, grad = of(M, K), of(M, K)
    same(passed(torch.compile(other, backend="aot_eager"), x, grad), {
        (f"_orig_mod.{name}" if name[0].isdigit() else name): full(t)
        for name, t in passed(model, x, grad).items()
    })  # fmt: skip


def case_checkpointing():
    from torch.utils.checkpoint import checkpoint

    model = parallelize_module(mlp(), mesh(), PLAN)
    again = parallelize_module(mlp(), mesh(), PLAN)
    x, grad = of(M, K).requires_grad_(), of(M, K)
    expected = passed(model, x, grad)
    with te_mx.autocast():
        y = checkpoint(again, x, use_reentrant=False)
    y.backward(grad)
    assert torch.equal(y, expected["y"]) and torch.equal(x.grad, expected["dx"])
    for name, p in again.named_parameters():
        assert torch.equal(full(p.grad), full(expected[name])), name


def case_main_grad_and_delayed():
    """Two micro-batches; main_grad as a DTensor and as what this rank has of it."""
    styles = (
        (te_mx.Linear, "column", ColwiseParallel(output_layouts=Replicate())),
        (te_mx.Linear, "row", RowwiseParallel(input_layouts=Replicate())),
        (te_mx.LayerNormLinear, "column", ModuleParallel(output_layouts=Replicate())),
        (te_mx.LayerNormMLP, "both", ModuleParallel()),
    )
    for family, kind, style in styles:
        for fuse, delay in ((True, False), (False, True), (True, True)):
            plain = built(family, K, N, dtype=torch.float32)
            out = K if kind == "both" else N
            steps = [reference(plain, kind, of(M, K, seed=s), of(M, out, seed=9)) for s in (1, 2)]
            given = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
            module = built(family, K, N, dtype=torch.float32, **given)
            parallelize_module(module, mesh(), style)
            weights = [n for n, p in module.named_parameters() if n in module._weight_keys]
            if fuse:
                for i, name in enumerate(weights):
                    p = getattr(module, name)
                    like = p if i else p.to_local()
                    p.main_grad = torch.zeros_like(like, dtype=torch.float32)
            for s in (1, 2):
                x = of(M, K, seed=s).requires_grad_()
                with te_mx.autocast():
                    y = full(module(x))
                y.backward(of(M, out, seed=9))
                if delay:
                    module.backward_dw()
            for name in weights:
                p = getattr(module, name)
                made = p.main_grad if fuse else p.grad
                assert p.grad is None or not fuse
                if not isinstance(made, DTensor):
                    made = DTensor.from_local(made, p.device_mesh, p.placements, run_check=False)
                assert torch.equal(full(made), steps[0][name] + steps[1][name]), name


def case_shards_across_blocks():
    """Refused, by name, before anything runs; fine in high precision."""
    cut = (
        (te_mx.Linear, (K, 96), ColwiseParallel(), "out_features=96 into pieces of 48"),
        (te_mx.Linear, (96, N), RowwiseParallel(input_layouts=Replicate()), "in_features=96"),
        (te_mx.LayerNormMLP, (K, 96), ModuleParallel(), "ffn_hidden_size=96"),
    )
    for family, sizes, style, said in cut:
        module = parallelize_module(built(family, *sizes), mesh(), style)
        x = of(M, sizes[0])
        try:
            with te_mx.autocast():
                module(x)
        except ValueError as error:
            assert said in str(error) and "whole blocks of 32" in str(error), error
        else:
            raise AssertionError(f"{family.__name__} ran on {said}")
        module(x)


def case_mixed_tensors():
    module = parallelize_module(built(te_mx.Linear, K, N), mesh(), ColwiseParallel())
    module.bias = nn.Parameter(torch.zeros(N, dtype=torch.bfloat16, device=DEVICE))
    plain = built(te_mx.Linear, K, N)
    for layer, x in ((module, of(M, K)), (plain, DTensor.from_local(of(M, K), mesh()))):
        try:
            with te_mx.autocast():
                layer(x)
        except TypeError as error:
            assert "is a DTensor and" in str(error), error
        else:
            raise AssertionError("a plain tensor beside DTensors ran")


def case_frozen():
    """freeze_weights before and after parallelize_module."""
    x, plain = of(M, K), parallelize_module(mlp(), mesh(), PLAN)
    with torch.no_grad(), te_mx.autocast():
        expected = plain(x)
    for first in (True, False):
        model = mlp()
        if first:
            te_mx.freeze_weights(model)
        parallelize_module(model, mesh(), PLAN)
        if not first:
            te_mx.freeze_weights(model)
        for _ in range(2):
            with torch.no_grad(), te_mx.autocast():
                assert torch.equal(model(x), expected)
        if not first:
            kept = model[1]._source.kept["weight"]
            with torch.no_grad(), te_mx.autocast():
                model(x)
            assert model[1]._source.kept["weight"] is kept
            with torch.no_grad():
                model[1].weight.mul_(2)
                plain[1].weight.mul_(2)
                with te_mx.autocast():
                    assert torch.equal(model(x), plain(x))
    te_mx.freeze_weights(model := mlp(), drop_master=True)
    try:
        parallelize_module(model, mesh(), PLAN)
    except TypeError as error:
        assert "only codes of its weight are left" in str(error)
    else:
        raise AssertionError("codes alone were parted")
