"""A frozen weight lies once on Hopper, as the allocator counts: whatever is called, while it is
frozen, and in captured graphs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import te_mx
from te_mx.recipe import Float8BlockScaling, MXFP8BlockScaling

K, N, LAYERS = 2048, 4096, 4
BF16 = torch.bfloat16
CASES = {
    "mxfp8_e4m3": (MXFP8BlockScaling(), 1.04), "mxfp4": (MXFP8BlockScaling(), 0.54),
    "fp8_e4m3_128x128": (Float8BlockScaling(), 1.04),
}  # fmt: skip
every = pytest.mark.parametrize("fmt", CASES)


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    te_mx.workspace.reset()
    return torch.cuda.memory_allocated()


def made() -> nn.ModuleList:
    return nn.ModuleList([
        te_mx.Linear(K, N, bias=False, params_dtype=BF16, device="cuda") for _ in range(LAYERS)
    ])  # fmt: skip


def run(model: nn.ModuleList, x: torch.Tensor, recipe: object) -> list[torch.Tensor]:
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        return [layer(x) for layer in model]


@every
@pytest.mark.parametrize("drop", [True, False])
def test_bytes_a_parameter(fmt, drop):
    recipe, most = CASES[fmt]
    before = allocated()
    model, numbers = made(), LAYERS * K * N
    torch.cuda.reset_peak_memory_stats()
    te_mx.freeze_weights(model, recipe=recipe, fmt=fmt, drop_master=drop)
    peak = torch.cuda.max_memory_allocated() - before
    most += 0 if drop else 2
    if drop:  # the model in bf16 and one layer of codes, plain and as they will lie
        assert peak <= 2 * numbers + 2.2 * K * N
    for rows in (1, 16, 64, 96, 512):
        run(model, torch.randn(rows, K, device="cuda", dtype=BF16), recipe)
        assert allocated() - before <= most * numbers + (1 << 16), rows


@every
def test_a_graph_packs_nothing_and_reads_the_copy(fmt):
    """A replay takes no other memory, and gives the bits of the eager call."""
    recipe, _ = CASES[fmt]
    model = made()
    te_mx.freeze_weights(model, recipe=recipe, fmt=fmt, drop_master=True)
    for rows in (4, 200):
        x = torch.randn(rows, K, device="cuda", dtype=BF16)
        expected = run(model, x, recipe)
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        with torch.cuda.graph(graph):
            got = run(model, x, recipe)
        for y in got:
            y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@every
@pytest.mark.parametrize("rows", [96, 300])
def test_layers_behind_each_other(fmt, rows):
    """Each reads what the one before it wrote, though it asks for its weight before."""
    recipe, _ = CASES[fmt]
    model = nn.ModuleList([
        te_mx.Linear(512, 512, bias=False, params_dtype=BF16, device="cuda") for _ in range(LAYERS)
    ])  # fmt: skip
    te_mx.freeze_weights(model, recipe=recipe, fmt=fmt, drop_master=True)
    x = torch.randn(rows, 512, device="cuda", dtype=BF16)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        expected = x
        for layer in model:
            expected = layer(expected)
            torch.cuda.synchronize()
        for _ in range(3):
            got = x
            for layer in model:
                got = layer(got)
            assert torch.equal(got, expected)


@every
def test_the_state_dict_has_the_plain_bytes(fmt):
    """Those of the same weights frozen on the CPU, also after calls."""
    recipe, _ = CASES[fmt]
    model = made()
    on_cpu = nn.ModuleList([te_mx.Linear(K, N, bias=False, params_dtype=BF16) for _ in model])
    on_cpu.load_state_dict(model.state_dict())
    for one in (model, on_cpu):
        te_mx.freeze_weights(one, recipe=recipe, fmt=fmt, drop_master=True)
    run(model, torch.randn(3, K, device="cuda", dtype=BF16), recipe)
    expected = on_cpu.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value.view(torch.uint8).cpu(), expected[key].view(torch.uint8)), key
    model.load_state_dict(expected)
    assert "sm90_frozen" in repr(model) or fmt != "mxfp8_e4m3"


def test_a_graph_reads_what_was_prepacked():
    A = te_mx.quantize(torch.randn(512, K, device="cuda"), packed=True)
    plain = te_mx.quantize(torch.randn(64, K, device="cuda"))
    expected = te_mx.gemm(A, plain).out
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    with torch.cuda.graph(graph):
        got = te_mx.gemm(A, plain).out
    got.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, expected)
