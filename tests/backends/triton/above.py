"""What is above the backends, on Triton alone: in its interpreter by `make test-triton`, with the
contract tests over it, which draw from the same envelopes as for any backend; on a GPU where
TRITON_INTERPRET is not set."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import te_mx
from te_mx.commands import doctor
from te_mx.commands.main import main
from te_mx.dispatch.kernels import kernels
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.run import reference

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda:0")
R = te_mx.recipe
RECIPES = {
    "mxfp8": R.MXFP8BlockScaling(), "hybrid": R.MXFP8BlockScaling(fp8_format=R.Format.HYBRID),
    "split": R.MXFP8BlockScaling(split_k=True), "mxfp4": R.MXFP4BlockScaling(),
    "float8_block": R.Float8BlockScaling(), "deepseek": R.DeepSeekV3(),
    "nvfp4": R.NVFP4BlockScaling(),
}  # fmt: skip


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_step_under_every_recipe(recipe):
    layer = te_mx.Linear(384, 32, device=DEVICE)
    x = torch.randn(32, 384, device=DEVICE, requires_grad=True)
    with te_mx.autocast(recipe=RECIPES[recipe]):
        y = layer(x)
    y.pow(2).sum().backward()
    audit = te_mx.audit(layer).layers[0]
    assert (audit.fprop, audit.dgrad, audit.wgrad) == ("triton",) * 3
    far, exact = 0.25 if "4" in recipe else 0.06, torch.nn.functional.linear
    expected = exact(x, layer.weight, layer.bias)
    grads = torch.autograd.grad(expected.pow(2).sum(), (x, layer.weight))
    pairs = (y, expected), (x.grad, grads[0]), (layer.weight.grad, grads[1])
    for mine, other in pairs:
        assert (mine - other).norm() < 1.5 * far * other.norm()


def test_groups_are_a_loop_of_layers():
    layer, splits = te_mx.GroupedLinear(3, 64, 40, device=DEVICE), [10, 0, 30]
    x = torch.randn(40, 64, device=DEVICE)
    with te_mx.autocast():
        y = layer(x, splits)
        for i, (part, made) in enumerate(zip(x.split(splits), y.split(splits), strict=True)):
            own, names = te_mx.Linear(64, 40, device=DEVICE), ("weight", "bias")
            own.load_state_dict({name: getattr(layer, f"{name}{i}") for name in names})
            assert torch.equal(made, own(part))
    assert te_mx.audit(layer).layers[0].fprop == "triton"


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "float8_block", "nvfp4"])
def test_every_way_to_say_groups(recipe, monkeypatch):
    for op in ("gemm", "quantize", *(["gemm_rows"] if DEVICE.type == "cuda" else [])):
        monkeypatch.setattr(reference(op), "run", None, raising=False)  # nothing falls back
    counts, most, k, n = [5, 0, 16, 7], 16, 96, 40
    sizes = torch.tensor(counts, device=DEVICE)
    rows = torch.randn(len(counts), most, k, device=DEVICE)
    weights = torch.randn(len(counts), n, k, device=DEVICE)

    def packed(padded):
        return torch.cat([part[:count] for part, count in zip(padded, counts, strict=True)])

    made = {}
    owners = torch.repeat_interleave(sizes)
    for how, given in (("offs", sizes.cumsum(0)), ("index", owners), ("masked_m", sizes)):
        inp = rows if how == "masked_m" else packed(rows)
        y = te_mx.grouped_linear(inp, weights, recipe=RECIPES[recipe], **{how: given})
        made[how] = packed(y) if how == "masked_m" else y
    exact = torch.einsum("rk,rnk->rn", packed(rows), weights[owners])
    far = 0.25 if "4" in recipe else 0.06
    for y in made.values():
        assert (y - exact).norm() < far * exact.norm()
        assert torch.allclose(y, made["offs"], rtol=1e-5, atol=1e-4)


def test_fsdp2_of_one_rank_has_the_bits_of_the_plain_layer(tmp_path):
    plain, sharded = (te_mx.Linear(96, 40, device=DEVICE) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    x = torch.randn(16, 96, device=DEVICE)
    dist.init_process_group(init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh(DEVICE.type, (1,))
        fully_shard(sharded, mesh=mesh)
        grads = []
        for layer in (plain, sharded):
            with te_mx.autocast():
                made = layer(x)
            made.square().sum().backward()
            grads.append(layer.weight.grad)
            assert te_mx.audit(layer).layers[0].fprop == "triton"
        assert torch.equal(grads[0], grads[1].full_tensor())
    finally:
        dist.destroy_process_group()


def test_a_frozen_layer_has_the_bits_of_its_master():
    layer, x = te_mx.Linear(96, 40, device=DEVICE), torch.randn(5, 96, device=DEVICE)
    with torch.no_grad(), te_mx.autocast():
        before = layer(x)
        te_mx.freeze_weights(layer, drop_master=True)
        assert torch.allclose(layer(x), before, rtol=1e-6, atol=1e-6)
    assert te_mx.audit(layer).layers[0].fprop == "triton"


def test_a_mixture_runs_on_routed_rows(monkeypatch):
    """Its products are Triton's, not a product an expert."""

    def refuse(call):
        raise AssertionError("the reference runs")

    monkeypatch.setattr(reference("moe_gemm"), "run", refuse, raising=False)
    shapes = (4, 96, 64), (4, 64, 48)
    w13, w2 = (te_mx.quantize(torch.randn(*s, device=DEVICE) / 8, fmt="mxfp4") for s in shapes)
    x, scores = (torch.rand(9, width, device=DEVICE) for width in (64, 2))
    ids = (torch.stack([torch.randperm(5)[:2] for _ in range(9)]) - 1).to(DEVICE)
    y = te_mx.moe.fused_experts(x, w13, w2, scores, ids)
    v13, v2, values = w13.dequantize(), w2.dequantize(), te_mx.quantize(x).dequantize()
    want = torch.zeros(9, 64, device=DEVICE)
    for t, j in torch.cartesian_prod(torch.arange(9), torch.arange(2)).tolist():
        if (e := int(ids[t, j])) >= 0:
            gate, up = (v13[e] @ values[t]).chunk(2)
            z = te_mx.quantize(torch.nn.functional.silu(gate) * up).dequantize()
            want[t] += scores[t, j] * (v2[e] @ z)
    assert (y - want).norm() < 1e-2 * want.norm()


def test_compiled_has_the_bits_of_eager():
    layer, x = te_mx.Linear(64, 40, device=DEVICE), torch.randn(20, 64, device=DEVICE)

    def step(x):
        with te_mx.autocast():
            return layer(x)

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))


def test_explained_before_and_said_after(capsys, monkeypatch):
    said = te_mx.explain(m=16, n=64, k=8192, device=DEVICE)
    assert said.kernel == "triton" and said.parts > 1 and "parts" in said.note
    assert kernels("gemm")[-1].name == "reference"
    monkeypatch.setattr(doctor, "GEMMS", ((4, 40, 64, "mxfp8_e4m3"), (40, 40, 64, "mxfp4")))
    monkeypatch.setattr(doctor, "_TIMES", 1)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.count("triton") >= 2


@pytest.mark.parametrize("op", ["quantize", "dequantize", "act_quantize"])
def test_more_rows_than_a_launch_has_are_declined(op):
    kernel = next(one for one in kernels(op) if one.name == "triton")
    place = place_of(DEVICE)
    for rows, declined in ((1 << 20, False), ((1 << 20) + 1, True)):
        problem = Problem(op, place, "mxfp8_e4m3@rows", "", rows, 64, dtype=torch.float32)
        assert ("rows" in (kernel.accepts(problem) or "")) == declined
