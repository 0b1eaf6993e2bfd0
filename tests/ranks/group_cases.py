"""Transformer Engine's tensor parallelism (tp_group, parallel_mode, sequence_parallel) on two
ranks, against the same sums in one process."""

from __future__ import annotations

import copy
import functools
import itertools

import halves
import torch
import torch.distributed as dist
from data_parallel_cases import refused
from node_cases import counted
from tensor_parallel_cases import DEVICE, ONE_GRAPH, K, M, N, built, of, reference, same

import te_mx

KINDS = (
    (te_mx.Linear, "column", {"parallel_mode": "column"}),
    (te_mx.Linear, "row", {"parallel_mode": "row"}),
    (te_mx.LayerNormLinear, "column", {"parallel_mode": "column"}),
    (te_mx.LayerNormMLP, "both", {"set_parallel_mode": True, "activation": "swiglu"}),
)


def shared(family, kind, given, sequence, late=False):
    """A whole layer and this rank's part of it."""
    how = {name: value for name, value in given.items() if "parallel" not in name}
    whole = built(family, K, N, **how)
    at = {"tp_size": 2} if late else {"tp_group": dist.group.WORLD}
    layer = built(family, K, N, sequence_parallel=sequence, **at, **given)
    with torch.no_grad():
        for name, value in whole.named_parameters():
            mine = halves.slices(name, value, whole, kind)[dist.get_rank()]
            getattr(layer, name).copy_(mine)
    return whole, layer


def mine(t, dim):
    return t.chunk(2, dim)[dist.get_rank()].contiguous()


def case_groups():
    for family, kind, given in KINDS:
        for sequence in (False, True):
            whole, layer = shared(family, kind, given, sequence, late=sequence)
            if sequence:
                layer.set_tensor_parallel_group(dist.group.WORLD)
            x, grad = of(M, K), of(M, K if kind == "both" else N)
            expected = reference(whole, kind, x, grad)
            x_mine = mine(x, -1) if kind == "row" else mine(x, 0) if sequence else x
            x_mine = x_mine.clone().requires_grad_()
            with te_mx.autocast():
                y = layer(x_mine)
            if kind == "column":
                y_mine, grad = mine(expected["y"], -1), mine(grad, -1)
            else:
                y_mine, grad = (mine(t, 0) if sequence else t for t in (expected["y"], grad))
            y.backward(grad)
            dx = expected["dx"]
            dx = mine(dx, -1) if kind == "row" else mine(dx, 0) if sequence else dx
            found = {"y": y.detach(), "dx": x_mine.grad}
            wanted = {"y": y_mine, "dx": dx}
            for name, p in layer.named_parameters():
                if getattr(p, "sequence_parallel", False):
                    dist.all_reduce(p.grad)  # what the trainer does
                found[name] = p.grad
                wanted[name] = halves.slices(name, expected[name], whole, kind)[dist.get_rank()]
            same(found, wanted)


def case_sums_in_place():
    """What a product has just written is summed where it lies."""
    _, layer = shared(te_mx.Linear, "row", {"parallel_mode": "row"}, False)
    x = mine(of(M, K), -1)
    with counted() as sums, te_mx.autocast():
        y = layer(x)
    assert sums == [y.shape]
    with torch.no_grad(), te_mx.autocast():
        assert torch.equal(layer(x), y)


def case_row_biases_in_parts():
    """parameters_split of a sum: one rank adds its biases, as that of a layer in one piece."""
    sizes, x = {"first": 64, "second": N - 64}, mine(of(M, K), -1)
    for sequence, returned in itertools.product((False, True), repeat=2):
        given = {"parallel_mode": "row", "return_bias": returned}
        _, layer = shared(te_mx.Linear, "row", given, sequence)
        at = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence}
        split = built(te_mx.Linear, K, N, parameters_split=sizes, **at, **given)
        split.load_state_dict({
            f"{name}_{kind}": part
            for kind, value in layer.state_dict().items()
            for name, part in zip(sizes, value.split(list(sizes.values())), strict=True)
        })  # fmt: skip
        found = []
        for one in (layer, split):
            with te_mx.autocast():
                y = one(x)
            outs = y if returned else (y,)
            sum(out.square().sum() for out in outs).backward()
            weight, bias = (
                [p.grad for name, p in one.named_parameters() if kind in name]
                for kind in ("weight", "bias")
            )
            found.append([*outs, torch.cat(weight), torch.cat(bias)])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)


def marks(module):
    """Transformer Engine's attributes, by parameter: sequence_parallel, or what ranks share."""
    found = {}
    for name, p in module.named_parameters():
        whole, cut = getattr(p, "sequence_parallel", None), getattr(p, "partition_dim", None)
        assert (whole is None) != (cut is None), (name, whole, cut)
        assert cut is None or (p.tensor_model_parallel is True and p.partition_stride == 1)
        found[name] = cut if whole is None else whole
    return found


def case_marks_of_parameters():
    """As Transformer Engine sets them, wherever parameters are made anew."""
    parts = {"parameters_split": ("a", "b")}
    for family, given, expected in (
        (te_mx.Linear, {"parallel_mode": "column"}, {"weight": 0, "bias": 0}),
        (te_mx.Linear, {"parallel_mode": "row"}, {"weight": 1, "bias": True}),
        (te_mx.Linear, {"parallel_mode": "row", **parts},
         {"a_weight": 1, "b_weight": 1, "a_bias": True, "b_bias": True}),
        (te_mx.LayerNormLinear, {"parallel_mode": "column"},
         {"layer_norm_weight": True, "layer_norm_bias": True, "weight": 0, "bias": 0}),
        (te_mx.LayerNormMLP, {"set_parallel_mode": True, "normalization": "RMSNorm"},
         {"layer_norm_weight": True, "fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1,
          "fc2_bias": True}),
    ):  # fmt: skip
        for sequence in (True, False):
            given = {**given, "tp_group": dist.group.WORLD, "sequence_parallel": sequence}
            wanted = {k: sequence if v is True else v for k, v in expected.items()}
            layer = family(K, N, device=DEVICE, **given)
            late = family(K, N, device="meta", **given)
            late.to_empty(device=DEVICE).reset_parameters()
            loaded = family(K, N, device="meta", **given)
            loaded.load_state_dict(layer.state_dict(), assign=True)
            for one in (layer, late, loaded, copy.deepcopy(layer), layer.bfloat16()):
                assert marks(one) == wanted, marks(one)
        alone = family(K, N, **{**given, "tp_group": None})  # tp_size=1 shares with nobody
        assert marks(alone) == wanted
        assert not hasattr(next(family(K, N).parameters()), "partition_dim")
    norm = te_mx.pytorch.RMSNorm(K, sequence_parallel=True, device="meta").to_empty(device=DEVICE)
    assert norm.weight.sequence_parallel is True


def case_groups_and_knobs():
    """main_grad, delayed gradients and micro-batches are those of a layer of this size."""
    for family, kind, given in KINDS:
        knobs = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, **given}
        _, plain = shared(family, kind, given, False)
        _, layer = shared(family, kind, knobs | {"dtype": torch.bfloat16}, False)
        for name in layer._weight_keys:
            p = getattr(layer, name)
            p.main_grad = torch.zeros_like(p)
        x = of(M, K // 2 if kind == "row" else K)
        for one, first in ((plain, None), (layer, True)):
            with te_mx.autocast():
                y = one(x, is_first_microbatch=first)
            y.backward(torch.ones_like(y))
        assert layer._source.kept
        layer.backward_dw()
        for name in layer._weight_keys:
            assert torch.equal(getattr(layer, name).main_grad, getattr(plain, name).grad)


def gradients(module):
    """Of all parameters, with those summed that a trainer sums."""
    for p in module.parameters():
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad)
    return {name: p.grad for name, p in module.named_parameters()}


# Of every rank the whole; sums over tokens outside the layers that ranks share.
OUTSIDE = ("proj.bias", "fc2_bias", "layernorm.weight", "layernorm.bias")


def part_of(name, value, rank=None):
    """What a rank, None for this one, has of a parameter of a TransformerLayer."""
    rank = dist.get_rank() if rank is None else rank
    if name.endswith(OUTSIDE) or "layer_norm" in name:
        return value
    cut = int(name.endswith(("proj.weight", "fc2_weight")))
    return value.chunk(2, cut)[rank].contiguous()


def in_parts(parts, x, *args, **given):
    """The forward of attention or an MLP as two ranks run it: the sum of what their parts make, the
    bias, and the normalized tokens as they return them under sequence parallelism."""
    x = x.view_as(x)  # where gradients of the parts add up before others come
    first, last = (part(x, *args, **given) for part in parts)
    if not isinstance(first, tuple):
        return first + last
    z = [torch.cat([one.chunk(2)[0], other.chunk(2)[1]])
         for one, other in zip(first[2:], last[2:], strict=True)]  # fmt: skip
    return (first[0] + last[0], first[1], *z)


def trained(module, dtype, quantized, sequence=False):
    """y, dx and the gradients after one pass of a TransformerLayer; with `sequence` this rank's
    tokens are its input."""
    inputs = [of(32, 2, 128, seed=j).to(dtype) for j in (1, 2, 3)]
    x, encoder, grad = (mine(t, 0) if sequence else t for t in inputs)
    x.requires_grad_()
    given = {"encoder_output": encoder} if module.layer_type == "decoder" else {}
    with te_mx.autocast(enabled=quantized):
        y = module(x, **given)
    y.backward(grad)
    made = {"y": y.detach(), "dx": x.grad, **gradients(module)}
    module.zero_grad()
    return made


def close(found, expected, rtol, atol):
    """Equal but for the order of sums."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol,
            msg=lambda said, at=name: f"{at}: {said}",
        )  # fmt: skip


def case_transformer_layers_that_ranks_share():
    """In fp64 a rank has its part of what one process has. Quantized, where a sum in another order
    may become another code, it has the bits of the same parts in one process."""
    options = (
        {"num_gqa_groups": 2}, {"layer_type": "decoder"}, {"fuse_qkv_params": True},
        {"output_layernorm": True, "normalization": "RMSNorm"}, {"parallel_attention_mlp": True},
        {"apply_residual_connection_post_layernorm": True, "softmax_type": "learnable"},
    )  # fmt: skip
    made, (hidden, ffn, heads) = te_mx.pytorch.TransformerLayer, (128, 256, 4)
    for i, option in enumerate(options):
        sequence = bool(i % 2)
        how = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": DEVICE, **option}
        torch.manual_seed(1)
        whole = made(hidden, ffn, heads, **how)
        layer = made(
            hidden, ffn, heads, set_parallel_mode=True, tp_size=2, sequence_parallel=sequence, **how
        )
        layer.set_tensor_parallel_group(dist.group.WORLD)
        how |= {"num_gqa_groups": option.get("num_gqa_groups", heads) // 2}
        how |= {"kv_channels": hidden // heads}
        parts = [made(hidden, ffn // 2, heads // 2, **how) for _ in range(2)]
        with torch.no_grad():
            for name, p in whole.named_parameters():
                if "bias" in name or "offset" in name:
                    p.normal_(0, 0.5)
                layer.get_parameter(name).copy_(part_of(name, p))
                for rank, part in enumerate(parts):
                    summed = rank and name.endswith(("proj.bias", "fc2_bias"))
                    part.get_parameter(name).copy_(part_of(name, p, rank) * (not summed))

        found = trained(layer, torch.float32, True, sequence)
        alike = copy.deepcopy(whole)
        blocks = [n for n, _ in whole.named_children() if n != "layernorm"]
        for name in blocks:
            several = [getattr(part, name) for part in parts]
            getattr(alike, name).forward = functools.partial(in_parts, several)
        expected = trained(alike, torch.float32, True)
        of_ranks = [gradients(part) for part in parts]
        for name in found.keys() & of_ranks[0].keys():
            if name.startswith("layernorm."):
                continue
            one, other = (grads[name] for grads in of_ranks)
            cut = not (name.endswith(OUTSIDE) or "layer_norm" in name)
            expected[name] = other if cut and dist.get_rank() else one
            expected[name] = one + other if "layer_norm" in name else expected[name]
        if sequence:
            expected |= {name: mine(expected[name], 0) for name in ("y", "dx")}
        outside = {name: expected.pop(name) for name in list(expected) if name.endswith(OUTSIDE)}
        close({name: found.pop(name) for name in outside}, outside, 1e-5, 1e-5)
        same(found, expected)

        expected = trained(whole.double(), torch.float64, False)
        found = trained(layer.double(), torch.float64, False, sequence)
        for name, value in expected.items():
            if name not in ("y", "dx"):
                expected[name] = part_of(name, value)
            elif sequence:
                expected[name] = mine(value, 0)
        close(found, expected, 1e-12, 1e-12)


def compiles(layer, x, backend="aot_eager"):
    """Compiled in one graph, the layer gives what it gives eagerly, bit for bit. Before torch 2.12
    it runs between graphs."""
    compiled = torch.compile(layer, backend=backend, fullgraph=ONE_GRAPH)
    if not ONE_GRAPH:
        one = torch.compile(layer, backend=backend, fullgraph=True)
        refused(torch._dynamo.exc.Unsupported, "compiled from PyTorch 2.12 on", lambda: one(x))
    found = []
    for one in (compiled, layer):
        its = x.clone().requires_grad_()
        with te_mx.autocast():
            y = one(its)
        y.backward(torch.ones_like(y))
        found.append([y.detach(), its.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def case_groups_compiled():
    _, layer = shared(te_mx.LayerNormMLP, "both", KINDS[3][2], False)
    compiles(layer, of(M, K))


def case_groups_refused():
    x, world, here = of(M, K), dist.group.WORLD, {"device": DEVICE}
    layer = te_mx.Linear(K, N, parallel_mode="column", tp_size=2, **here)
    refused(RuntimeError, "call layer.set_tensor_parallel_group", lambda: layer(x.float()))
    layer.set_tensor_parallel_group(world)
    refused(RuntimeError, "also of a copy", lambda: copy.deepcopy(layer)(x.float()))
    whole = te_mx.Linear(K, N, **here)
    refused(ValueError, "was built for 1", lambda: whole.set_tensor_parallel_group(world))
    refused(TypeError, "process group", lambda: whole.set_tensor_parallel_group([0, 1]))
    given = {"parallel_mode": "column", "tp_group": world, **here}
    refused(ValueError, "must divide by tp_size=2", lambda: te_mx.Linear(K, 33, **given))
    cut = te_mx.Linear(K, 96, **given)
    with te_mx.autocast():
        refused(ValueError, "out_features=96 into pieces of 48", lambda: cut(x.float()))
    report = te_mx.revert_model(torch.nn.Sequential(cut))
    assert "no process group" in report.skipped["0"], report
    parts = {"query": 65, "key": 63}
    refused(ValueError, "parameters_split must divide by tp_size=2",
            lambda: te_mx.Linear(K, 128, parameters_split=parts, **given))  # fmt: skip
    given["parallel_mode"] = "row"
    refused(NotImplementedError, '"row"', lambda: te_mx.LayerNormLinear(K, N, **given))
    whole = te_mx.pytorch.TransformerLayer(64, 64, 2, device=DEVICE)
    refused(ValueError, "was built for 1", lambda: whole.set_tensor_parallel_group(world))
    given = {"set_parallel_mode": True, "tp_group": world, "device": DEVICE}
    attention = te_mx.pytorch.MultiheadAttention
    refused(ValueError, "num_gqa_groups=1 must divide", lambda: attention(
        64, 2, num_gqa_groups=1, **given))  # fmt: skip
    refused(NotImplementedError, "qk_norm_type='RMSNorm'", lambda: attention(
        64, 2, qk_norm_type="RMSNorm", **given))  # fmt: skip
    alibi = attention(64, 2, **given)
    refused(ValueError, "pass alibi_slopes", lambda: alibi(
        of(4, 1, 64).float(), core_attention_bias_type="alibi"))  # fmt: skip
