"""Weights that FSDP2 gathers as codes, on two ranks, against those that it gathers as values."""

from __future__ import annotations

import contextlib
import gc
import weakref

import torch
import torch.distributed as dist
from data_parallel_cases import (
    FAMILIES,
    FP32,
    RECIPE,
    equal,
    gradients,
    mean_gradients,
    refused,
    sharded,
    step,
)
from tensor_parallel_cases import DEVICE, K, M, N, built, full, of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import te_mx
from te_mx.distributed import ModuleParallel, fsdp, quantized_all_gather


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
        weights = [name for key in layer._weight_keys for name in layer._parts_of(key)]
        assert quantized_all_gather(layer, recipe=recipe) == len(weights)
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
    made, plain, plain_call = [], fsdp.rows_2d, fsdp.rows_call

    def quantize(values, *args, **kwargs):
        made.append(tuple(values.shape))
        return plain(values, *args, **kwargs)

    def call_of(values, *args):
        """On GPUs codes are made in given memory, once sizes are known."""
        call = plain_call(values, *args)

        def counted_call(values, into):
            made.append(tuple(values.shape))
            return call(values, into)

        return None if call is None else counted_call

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
    fsdp.rows_2d, fsdp.rows_call = quantize, call_of
    try:
        assert passed(model) == passed(model) == (3, 3)
        known = [s.fsdp_pre_all_gather.__closure__[0].cell_contents for s in shards]
        assert all(one._ahead is None for one in known)
        assert passed(model, train=False) == (3, 5)  # quantized when they are asked for
        with written(model[2], shards[0]):
            assert passed(model) == (3, 4)  # the first one again, for backward
        with written(model[0], shards[1]):
            assert passed(model) == (4, 5)  # again, and for backward
        shards[1].data.mul_(2)  # which no version shows: every forward pass makes its own
        assert passed(model) == (3, 3)
    finally:
        fsdp.rows_2d, fsdp.rows_call = plain, plain_call


def case_what_stands_for_a_weight_is_made_once():
    """A weight in the same memory is the same operand in every pass; another recipe is seen."""
    model = nn.Sequential(*(built(te_mx.Linear, K, K, **FP32) for _ in range(2)))
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh(DEVICE, (2,)))
    assert quantized_all_gather(model, recipe=RECIPE) == 2
    found = []
    for _ in range(2):
        with te_mx.autocast(recipe=RECIPE):
            y = model(of(M, K))
        model[0].unshard()
        found.append(model[0].weight.kept)
        model[0].reshard()
        y.backward(of(M, K, seed=2))
    assert found[0] is found[1] and found[0][0] == RECIPE.settings and found[0][1].settings.one_copy
    with te_mx.autocast(recipe=te_mx.recipe.MXFP4BlockScaling()):
        refused(RuntimeError, "was gathered as", lambda: model(of(M, K)))


def case_models_are_not_held():
    """A model whose weights were gathered as codes goes when nobody has it."""
    model = nn.Sequential(*(built(te_mx.Linear, K, K, **FP32) for _ in range(2)))
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh(DEVICE, (2,)))
    quantized_all_gather(model, recipe=RECIPE)
    with te_mx.autocast(recipe=RECIPE):
        model(of(M, K)).backward(of(M, K, seed=2))
    left = [weakref.ref(model[0]), weakref.ref(model[0].weight._local_tensor)]
    del model, module
    gc.collect()
    assert [ref() for ref in left] == [None, None]


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
            scales = K * -(-M // 32) if DEVICE == "cpu" else 0  # words in the tiles of Hopper
            assert held == K * M + scales, held  # columns of x alone
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
    refused(ValueError, "recipe", lambda: quantized_all_gather(layer, recipe="fp8"))
    plain = built(te_mx.Linear, K, N)
    refused(ValueError, "fully_shard first", lambda: quantized_all_gather(plain))
    sharded(plain)
    plain(of(M, K))
    refused(RuntimeError, "before the first forward", lambda: quantized_all_gather(plain))
    layer = built(te_mx.Linear, K, N)
    sharded(layer)
    quantized_all_gather(layer)
    refused(RuntimeError, "no recipe is active", lambda: layer(of(M, K)))


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


def case_layers_of_different_recipes():
    """Each is gathered as its own codes, one in high precision as values; gradients are the mean of
    those of the ranks. A LayerNormMLP whose weights differ is gathered as values alone."""
    eight = te_mx.recipe.MXFP8BlockScaling(one_copy_weights=True)
    four = te_mx.recipe.MXFP4BlockScaling(one_copy_weights=True)
    recipe = te_mx.recipe.overrides(eight, {"a": None, "c": four, "mlp.fc2": four})

    def model(*others):
        linears = [built(te_mx.Linear, K, K, bias=False, name=name) for name in "abc"]
        return nn.Sequential(*linears, *others)

    expected = mean_gradients(model(), recipe)
    sharing = model()
    for layer in (*sharing, sharing):
        sharded(layer)
    assert quantized_all_gather(sharing, recipe=recipe) == 2
    step(sharing, dist.get_rank(), recipe)
    equal(gradients(sharing), expected)

    mlp = built(te_mx.LayerNormMLP, K, N, bias=False, name="mlp")
    expected = mean_gradients(mlp, recipe)
    refused(ValueError, "have different recipes", lambda: _gathered_as(recipe))
    refused(ValueError, "whose tensor scale needs the largest", lambda: _gathered_as("nvfp4"))
    step(sharded(mlp), dist.get_rank(), recipe)
    equal(gradients(mlp), expected)

    split = built(te_mx.LayerNormMLP, K, N, bias=False, name="mlp")
    parallelize_module(split, init_device_mesh(DEVICE, (2,)), ModuleParallel())
    with te_mx.autocast(recipe=recipe):
        said = "its weights run with different recipes"
        refused(NotImplementedError, said, lambda: split(of(M, K)))


def _gathered_as(recipe):
    mlp = built(te_mx.LayerNormMLP, K, N, bias=False, name="mlp")
    quantized_all_gather(sharded(mlp), recipe=recipe)


def case_a_snapshot_of_sharded_weights():
    """Sharded by rows, by columns, by both; codes are those of the whole, gathered as codes."""

    def model():
        return nn.Sequential(*(built(te_mx.Linear, K, K, name=name) for name in "ab"))

    expected = te_mx.rollout.snapshot(model(), recipe=RECIPE)
    mesh = init_device_mesh(DEVICE, (2,))
    split = model()
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for one in (sharded(model()), split):
        found = te_mx.rollout.snapshot(one, recipe=RECIPE)
        assert found.keys() == expected.keys()
        assert te_mx.rollout.digest(found) == te_mx.rollout.digest(expected)


def case_a_snapshot_for_an_engine_that_two_ranks_share():
    """From FSDP2 to parts of a tensor-parallel engine, as parts of the same codes."""
    sizes, rank = {"a": (K, N), "b": (N, K), "mlp": (K, N)}, dist.get_rank()
    mlp, recipes = {"activation": "swiglu"}, (RECIPE, te_mx.recipe.MXFP4BlockScaling())

    def model(**how):
        a, b, c = how.get("a", {}), how.get("b", {}), mlp | how.get("mlp", {})
        return nn.Sequential(
            built(te_mx.Linear, *sizes["a"], name="a", **a),
            built(te_mx.Linear, *sizes["b"], name="b", **b),
            built(te_mx.LayerNormMLP, *sizes["mlp"], name="mlp", **c),
        )

    group = {"tp_group": dist.group.WORLD}
    how = {"a": "column", "b": "row"}
    shared = {name: group | {"parallel_mode": mode} for name, mode in how.items()}
    shared["mlp"] = group | {"set_parallel_mode": True}
    for recipe in recipes:
        whole, engine = model(), model(**shared)
        for one in (whole, engine):
            te_mx.freeze_weights(one, drop_master=True, recipe=recipe)
        sent = te_mx.rollout.snapshot(sharded(model()), recipe=recipe, like=engine)
        te_mx.rollout.load_(engine, sent)
        assert te_mx.rollout.digest(engine) == te_mx.rollout.digest(sent)
        rows = whole.state_dict()["0.weight"].view(torch.uint8)
        assert torch.equal(sent["0.weight"].view(torch.uint8), rows.chunk(2)[rank])
        x = of(M, K)
        with torch.no_grad(), te_mx.autocast(recipe=recipe):
            found, expected = engine(x).float(), whole(x).float()
        assert (found - expected).norm() < 1e-2 * expected.norm()
    odd = built(te_mx.Linear, 96, N, name="odd")
    like = built(te_mx.Linear, 96, N, name="odd", parallel_mode="row", **group)
    said = r"2 ranks cut blocks of mxfp8_e4m3 along dimension 1, which must divide by 64"
    refused(ValueError, said, lambda: te_mx.rollout.snapshot(odd, recipe=RECIPE, like=like))
