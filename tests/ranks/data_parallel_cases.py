"""Data parallelism on two ranks against the mean of two passes in one process: fully_shard, alone
and with gathered codes, HSDP, DistributedDataParallel, and both kinds of parallelism together.
"""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
from tensor_parallel_cases import DEVICE, PLAN, K, M, N, built, full, mlp, of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import te_mx
from te_mx.distributed import quantized_all_gather, shard_codes

RECIPE = te_mx.recipe.MXFP8BlockScaling(one_copy_weights=True)
FP32 = {"dtype": torch.float32}


class Model(nn.Module):
    """One layer of a family between plain ones."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        splits = ([M // 2, 0, M // 2],) if isinstance(self.layer, te_mx.GroupedLinear) else ()
        return self.layer(x, *splits)


FAMILIES = {
    "Linear": lambda **given: built(te_mx.Linear, K, N, **given),
    "LayerNormLinear": lambda **given: built(te_mx.LayerNormLinear, K, N, **given),
    "LayerNormMLP": lambda **given: built(te_mx.LayerNormMLP, K, N, **given),
    "GroupedLinear": lambda **given: built(
        te_mx.GroupedLinear, 4, K, N, single_grouped_weight=True, **given
    ),
}


def splits_of(layer):
    return ([10, 0, 14, 24],) if isinstance(layer, te_mx.GroupedLinear) else ()


def step(layer, rank, recipe=None, seed=0):
    """A pass on the data of a rank."""
    x = of(M, K, seed=10 * seed + rank)
    with te_mx.autocast(recipe=recipe):
        y = layer(x, *splits_of(getattr(layer, "module", layer)))
    y.backward(
        torch.sin(torch.arange(y.numel(), device=DEVICE)).view_as(y).to(y.dtype) * (rank + 1)
    )
    return y.detach()


def each_gradients(layer, recipe=None, seed=0):
    """The gradients of each rank."""
    made = []
    for rank in range(2):
        one = copy.deepcopy(layer)
        step(one, rank, recipe, seed)
        made.append({name: p.grad for name, p in one.named_parameters()})
    return made


def mean_gradients(layer, recipe=None, seeds=(0,)):
    """The sum over micro-batches of the mean over the ranks."""
    total = None
    for seed in seeds:
        first, second = each_gradients(layer, recipe, seed)
        mean = {name: g / 2 + second[name] / 2 for name, g in first.items()}
        total = mean if total is None else {n: g + mean[n] for n, g in total.items()}
    return total


def equal(found, expected):
    wrong = {
        n: ((full(found[n]).float() - e.float()).norm() / e.float().norm()).item()
        for n, e in expected.items() if not torch.equal(full(found[n]), e)
    }  # fmt: skip
    assert not wrong, f"differ, by relative norms: {wrong}"


def sharded(layer, hybrid=False):
    shape, names = ((1, 2), ("replicate", "shard")) if hybrid else ((2,), ("shard",))
    return fully_shard(layer, mesh=init_device_mesh(DEVICE, shape, mesh_dim_names=names))


def gradients(layer):
    return {
        name: getattr(p, "main_grad", p.grad) for name, p in layer.named_parameters()
    }  # fmt: skip


def case_fsdp2():
    for family in FAMILIES.values():
        for hybrid in (False, True):
            layer = family(**FP32)
            expected = mean_gradients(layer)
            sharded(layer, hybrid)
            step(layer, dist.get_rank())
            equal(gradients(layer), expected)


def case_convert_after_sharding():
    """Layers inside of what was sharded; a layer that itself was is said to be another class."""
    before, after = fully_shard(mlp()), fully_shard(mlp(False))
    assert te_mx.convert_model(after).count("converted") == 2
    assert quantized_all_gather(after) == quantized_all_gather(before) == 2
    for model in (before, after):
        step(model, dist.get_rank(), RECIPE)
    for ours, theirs in zip(after.parameters(), before.parameters(), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad))
    alone = mlp(False)
    fully_shard(alone[1])
    report = te_mx.convert_model(alone)
    assert "FSDPLinear" in report.skipped["1"] and report.count("converted") == 1


@contextlib.contextmanager
def counted():
    """Bytes that all-gathers write."""
    sent, plain = [0], DefaultAllGather.__call__

    def gather(self, output_tensor, *args, **kwargs):
        sent[0] += output_tensor.numel() * output_tensor.element_size()
        return plain(self, output_tensor, *args, **kwargs)

    DefaultAllGather.__call__ = gather
    try:
        yield sent
    finally:
        DefaultAllGather.__call__ = plain


def trained(layer, quantized, recipe=RECIPE, policy=None):
    """Outputs and parameters of three steps, and the bytes that were gathered."""
    fully_shard(
        layer, mesh=init_device_mesh(DEVICE, (2,)), mp_policy=policy or MixedPrecisionPolicy()
    )
    if quantized:
        assert quantized_all_gather(layer, recipe=recipe) == len(layer._weight_keys)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    outs = []
    with counted() as sent:
        for i in range(3):
            outs.append(step(layer, dist.get_rank(), recipe, seed=i))
            optimizer.step()
            optimizer.zero_grad()
    return outs, [full(p.detach()) for p in layer.parameters()], sent[0]


def case_quantized_all_gather():
    """Three steps have the bits of those that gather in bf16, with 0.52 of the bytes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for family in FAMILIES.values():
        plain = trained(family(bias=False, **FP32), False, policy=policy)
        codes = trained(family(bias=False, **FP32), True, policy=policy)
        for ours, theirs in zip(codes[0] + codes[1], plain[0] + plain[1], strict=True):
            assert torch.equal(ours, theirs)
        sizes = {name: p.numel() for name, p in family(bias=False).named_parameters()}
        weights = sum(n for name, n in sizes.items() if "norm" not in name)
        times, rest = divmod(plain[2], 2 * sum(sizes.values()))
        assert times >= 3 and not rest, (plain[2], sizes)
        # One byte an element and one for 32; what is not quantized stays as it is.
        assert codes[2] == plain[2] - times * (2 * weights - weights * 33 // 32)
        assert weights < sum(sizes.values()) or codes[2] <= 0.52 * plain[2], (codes[2], plain[2])


@contextlib.contextmanager
def written(layer, shard):
    """A shard is doubled when the forward of a layer is called."""

    @torch.no_grad()
    def double(*_):
        shard.mul_(2)

    hook = layer.register_forward_pre_hook(double)
    try:
        yield
    finally:
        hook.remove()


def case_codes_of_a_step_are_made_once():
    """The first gather of a forward pass quantizes all weights of a model, and backward gathers the
    same codes; nothing outlives the step, and nothing that was written meanwhile is sent."""
    made, plain = [], shard_codes.quantize_2d

    def quantize(values, *args, **kwargs):
        made.append(tuple(values.shape))
        return plain(values, *args, **kwargs)

    def passed(model, train=True):
        """A pass, and how many weights were quantized forward and in all."""
        made.clear()
        with te_mx.autocast(recipe=RECIPE):
            y = model.train(train)(of(M, K))
        forward = len(made)
        y.backward(of(M, K, seed=2))
        return forward, len(made)

    model = nn.Sequential(*(built(te_mx.Linear, K, K, **FP32) for _ in range(3)))
    for module in (*model[:2], model):  # the last layer belongs to the whole, which stays gathered
        fully_shard(module, mesh=init_device_mesh(DEVICE, (2,)))
    shards = [layer.weight._local_tensor for layer in model]
    assert quantized_all_gather(model) == 3
    shard_codes.quantize_2d = quantize
    try:
        assert passed(model) == passed(model) == (3, 3)
        known = [s.fsdp_pre_all_gather.__closure__[0].cell_contents for s in shards]
        assert all(one._ahead is None for one in known)
        assert passed(model, train=False) == (3, 5)  # quantized when they are asked for
        with written(model[2], shards[0]):
            assert passed(model) == (3, 4)  # the first one again, for backward
        with written(model[0], shards[1]):
            assert passed(model) == (4, 5)  # again, and for backward
        shards[1].data.mul_(2)  # nobody would see the next write
        assert passed(model) == (3, 4)
    finally:
        shard_codes.quantize_2d = plain


class GatedMLP(nn.Module):
    """A block as Transformers' Llama has it."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (built(nn.Linear, K, N, False) for _ in range(2))
        self.down_proj, self.act_fn = built(nn.Linear, N, K, False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def case_fused_blocks_on_gathered_codes():
    """One step on joined codes: the bits of what gathers in bf16, and nothing that FSDP2 has not
    freed outlives forward."""
    found = []
    for codes in (False, True):
        model = nn.Sequential(nn.Identity(), GatedMLP())
        te_mx.convert_model(model, fuse=True)
        for module in (model[1], model):  # the outermost one is not freed after forward
            fully_shard(module, mesh=init_device_mesh(DEVICE, (2,)))
        assert not codes or quantized_all_gather(model) == 3
        x = of(M, K).requires_grad_()
        with te_mx.autocast():
            with torch.no_grad():
                alone = [model(x), model(x[:2])]
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, to=saved: to.append(t) or t, lambda t: t
            ):
                y = model(x)
        assert model[1]._te_mx_ran == "fused"
        if codes:
            freed = [t for t in saved if t.dtype == torch.uint8 and not t.untyped_storage().size()]
            assert len(freed) == 6, [(t.shape, t.dtype) for t in saved]  # codes and scales of three
            held = sum(t.untyped_storage().size() for t in saved if t.dtype == torch.uint8)
            assert held == K * (M + -(-M // 32)), held  # columns of x alone
        y.backward(of(M, K, seed=2))
        grads = [full(p.grad) for p in model.parameters()]
        found.append([*alone, y.detach(), x.grad, *grads])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def case_quantized_all_gather_of_formats():
    for recipe in (
        te_mx.recipe.BlockScaling(x="mxfp8_e4m3", w="mxfp4", g="mxfp8_e4m3"),
        te_mx.recipe.Float8BlockScaling(True, w_block_scaling_dim=1),
    ):
        whole, layer = built(te_mx.Linear, K, N), built(te_mx.Linear, K, N)
        sharded(layer)
        quantized_all_gather(layer, recipe=recipe)
        with te_mx.autocast(recipe=recipe):
            assert torch.equal(layer(of(M, K)), whole(of(M, K)))


def case_quantized_all_gather_is_refused():
    cases = (
        (built(te_mx.Linear, K, 33), None, "33 rows, which 2 ranks"),
        (built(te_mx.GroupedLinear, 2, K, N), None, "single_grouped_weight=True"),
        (built(te_mx.Linear, K, N), te_mx.recipe.DeepSeekV3(), "no whole blocks of 128 rows"),
    )
    for layer, recipe, said in cases:
        sharded(layer)
        refused(ValueError, said, lambda m=layer, r=recipe: quantized_all_gather(m, recipe=r))
        assert layer._gathers is None
    for bad in (None, te_mx.Linear, [layer]):
        refused(TypeError, "model must be an nn.Module", lambda m=bad: quantized_all_gather(m))
    refused(TypeError, "recipe", lambda: quantized_all_gather(layer, recipe="mxfp8"))
    plain = built(te_mx.Linear, K, N)
    refused(ValueError, "fully_shard first", lambda: quantized_all_gather(plain))
    sharded(plain)
    plain(of(M, K))
    refused(RuntimeError, "before the first forward", lambda: quantized_all_gather(plain))
    layer = built(te_mx.Linear, K, N)
    sharded(layer)
    quantized_all_gather(layer)
    refused(RuntimeError, "no recipe is active", lambda: layer(of(M, K)))


def refused(kind, said, call):
    try:
        call()
    except kind as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"not refused: {said}")


def case_loading_after_quantized_all_gather():
    """What is loaded is gathered as codes too."""
    for assign in (False, True):
        whole, layer = built(te_mx.Linear, K, N), built(te_mx.Linear, K, N)
        sharded(layer)
        quantized_all_gather(layer)
        state = {
            n: DTensor.from_local(p.to_local() * 2, p.device_mesh, p.placements)
            for n, p in layer.state_dict().items()
        }
        layer.load_state_dict(state, assign=assign)
        with torch.no_grad():
            for p in whole.parameters():
                p.mul_(2)
        with te_mx.autocast(), counted() as sent:
            assert torch.equal(layer(of(M, K)), whole(of(M, K)))
        assert K * N < sent[0] < 1.1 * K * N, sent


def case_freeze_after_sharding():
    for quantized in (False, True):
        whole, model = mlp(), mlp()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        if quantized:
            assert quantized_all_gather(model) == 2
        assert te_mx.freeze_weights(model) == 2
        refused(
            ValueError,
            "drop masters before sharding",
            lambda m=model: te_mx.freeze_weights(m, True),
        )
        with torch.no_grad(), te_mx.autocast():
            for _ in range(2):
                assert torch.equal(model(of(M, K)), whole(of(M, K)))
        assert te_mx.unfreeze_weights(model) == 2
        assert all(p.requires_grad for p in model.parameters())
        assert isinstance(model, FSDPModule)


KNOBS = ((True, False), (False, True), (True, True))


def routed(family, fuse, delay, **given):
    return FAMILIES[family](
        fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, **FP32, **given
    )


def give_main_grads(layer, fuse):
    for p in layer.parameters() if fuse else ():
        if p.dim() > 1 and not (p.dim() == 2 and p.shape[0] == 4):  # weights, not grouped biases
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)


def case_main_grad_and_delayed_under_fsdp2():
    for family in FAMILIES:
        expected = mean_gradients(FAMILIES[family](**FP32), RECIPE, (0, 1))
        for fuse, delay in KNOBS:
            for hybrid, quantized in ((False, False), (True, False), (False, True)):
                layer = routed(family, fuse, delay)
                sharded(layer, hybrid)
                if quantized:
                    quantized_all_gather(layer)
                give_main_grads(layer, fuse)
                for seed in (0, 1):
                    step(layer, dist.get_rank(), RECIPE, seed)
                    if delay:
                        layer.backward_dw()
                equal(gradients(layer), expected)


def case_main_grad_and_delayed_under_ddp():
    for family in FAMILIES:
        plain = FAMILIES[family](**FP32)
        expected = mean_gradients(plain, None, (0, 1))
        before, first_two = mean_gradients(plain), each_gradients(plain, None, 1)
        # What is there after the second gradient was added is averaged.
        averaged = {n: sum((before[n] + g[n]) / 2 for g in first_two) for n in before}
        for fuse, delay in KNOBS:
            for accumulate in (False, True):
                layer = routed(family, fuse, delay)
                give_main_grads(layer, fuse)
                ddp = DistributedDataParallel(layer)
                for seed in (0, 1):
                    first = accumulate and seed == 0
                    with ddp.no_sync() if first else contextlib.nullcontext():
                        step(ddp, dist.get_rank(), None, seed)
                        if delay:
                            layer.backward_dw()
                for name, grad in gradients(layer).items():
                    torch.testing.assert_close(grad, expected[name], rtol=2e-6, atol=2e-5)
                    if not accumulate and name in layer._weight_keys:
                        assert torch.equal(grad, averaged[name]), name


def case_fsdp2_with_tensor_parallel():
    """The second dimension of the mesh has one rank, each in turn."""
    for shape in ((1, 2), (2, 1)):
        for fuse in (False, True):
            mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp"))
            plain, model = mlp(), mlp()
            if shape == (1, 2):
                parallelize_module(plain, init_device_mesh(DEVICE, (2,)), PLAN)
            else:
                fully_shard(plain)
            parallelize_module(model, mesh["tp"], PLAN)
            if fuse:
                for layer in (model[1], model[3]):
                    layer.fuse_wgrad_accumulation = True
            fully_shard(model, mesh=mesh["dp"])
            if fuse:
                for layer in (model[1], model[3]):
                    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
            rank = 0 if shape == (1, 2) else dist.get_rank()
            for one in (plain, model):
                step(one, rank)
            for name, p in plain.named_parameters():
                q = dict(model.named_parameters())[name]
                found = getattr(q, "main_grad", q.grad)
                if fuse and hasattr(q, "main_grad"):
                    torch.testing.assert_close(
                        full(found).to(p.dtype), full(p.grad), rtol=1e-2, atol=1e-1
                    )
                else:
                    assert torch.equal(full(found), full(p.grad)), name
