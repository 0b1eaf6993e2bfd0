"""The cost model of dispatch/cost.py against what was measured (benchmarks/results), and
convert_model(filter_fn="auto")."""

from __future__ import annotations

import json
import re
from pathlib import Path

import as_on_hopper
import pytest
import torch
from torch import nn

import te_mx
from te_mx.conversion import decisions
from te_mx.dispatch.cost import Costs, costs_of, predict, register_costs
from te_mx.recipe import BlockScaling, MXFP8BlockScaling, get_default_recipe

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# The runs that the model was fitted to, and the kernel that they measured.
H200, H100 = "nvidia-h200-2026-11-22", "nvidia-h100-2026-11-22"
XEON = "intel-xeon-emerald-rapids-2026-11-21"
RUNS = {
    H200: "sm90_adaptive", H100: "sm90_adaptive", XEON: "amx_bf16",
    "intel-xeon-avx512-bf16-2026-11-22": "avx512_bf16",
}  # fmt: skip
TIME, RATIO = 0.05, 0.08  # the error that the model may have
SMALL = 0.08  # in the time of a small layer


def rows(run: str, benchmark: str) -> list[tuple[int, int, int, float, float]]:
    """(M, N, K, microseconds, times the peer) of the rows of a benchmark in a run."""
    return [
        (*map(int, row["shape"].split()), row["us"], row["value"])
        for row in json.loads((RESULTS / f"{run}.json").read_text())["rows"]
        if row["benchmark"] == benchmark
    ]


@pytest.mark.parametrize("run", RUNS)
def test_large_layers_as_measured(run):
    kernel = RUNS[run]
    costs, measured = costs_of(kernel), rows(run, "linear fwd+bwd")
    assert costs is not None and len(measured) >= 2
    for m, n, k, microseconds, ours in measured:
        got = predict(costs, m, n, k, costs.threads)
        assert got.quantized * 1e6 == pytest.approx(microseconds, rel=TIME), (m, n, k)
        assert got.ratio == pytest.approx(ours, rel=RATIO), (m, n, k)


@pytest.mark.parametrize("run", [H200, H100])
def test_small_layers_as_measured(run):
    """In a CUDA graph the device's time counts, outside of it the host's."""
    costs = costs_of("sm90_adaptive")
    ((m, n, k, microseconds, ours),) = rows(run, "graph fwd+bwd")
    graph = predict(costs._replace(bf16_host=0.0, host=0.0), m, n, k)
    assert graph.quantized * 1e6 == pytest.approx(microseconds, rel=SMALL)
    assert graph.ratio == pytest.approx(ours, rel=RATIO)
    eager = predict(costs, m, n, k)
    assert eager == (costs.bf16_host, costs.host) and eager.ratio < 1
    if run == H200:
        assert costs.host * 1e6 == pytest.approx(rows(run, "host fwd+bwd")[0][3], rel=0.01)


def test_tiny_layers_on_the_cpu_as_measured():
    costs = costs_of("amx_bf16")
    ((m, n, k, microseconds, added),) = rows(XEON, "tiny, grad")
    got = predict(costs, m, n, k, costs.threads)
    assert got.quantized * 1e6 == pytest.approx(microseconds, rel=TIME)
    difference = (got.quantized - got.bf16) * 1e6
    assert difference == pytest.approx(added, rel=TIME)


def test_the_ratio_grows_with_the_layer():
    for kernel in ("sm90_adaptive", "amx_bf16"):
        costs = costs_of(kernel)
        ratios = [predict(costs, 4096, size, size, costs.threads).ratio for size in (64, 512, 8192)]
        assert ratios == sorted(ratios) and ratios[0] < 1.05 < ratios[-1], kernel


def test_waves_of_tiles_and_threads():
    costs = Costs(1e9, 2e9, 1e12, tile=10, units=4)
    whole, spilled = (predict(costs, 20, n, 20).bf16 for n in (20, 21))
    assert spilled > 1.3 * whole  # a fifth tile begins a second wave
    costs = Costs(1e9, 2e9, 1e12, bf16_step=1.0, step=2.0, threads=2)
    one, two = (predict(costs, 100, 100, 100, threads) for threads in (2, 4))
    assert one.bf16 - 1 == pytest.approx(2 * (two.bf16 - 1)) and one.quantized > 2


def test_costs_are_given_once():
    with pytest.raises(ValueError, match="'amx_bf16' has costs already"):
        register_costs("amx_bf16", Costs(1.0, 1.0, 1.0))


# --------------------------------------------------------------------------------- filter_fn="auto"
@pytest.fixture
def fast_device(monkeypatch):
    """Costs of an AMX CPU for whatever kernel this machine runs."""
    monkeypatch.setattr(decisions, "costs_of", lambda kernel: costs_of("amx_bf16"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def model() -> nn.Module:
    return nn.ModuleDict({"small": nn.Linear(16, 16), "large": nn.Linear(2048, 1024)})


def test_small_layers_stay_and_the_report_says_so(fast_device):
    net = model()
    dry = te_mx.convert_model(net, filter_fn="auto", dry_run=True)
    report = te_mx.convert_model(net, filter_fn="auto")
    assert dry.skipped == report.skipped and dry.converted == report.converted == ["large"]
    assert type(net["small"]) is nn.Linear and type(net["large"]) is te_mx.Linear
    (note,) = report.skipped.values()
    assert re.match(r"too small to gain: 0\.\d\dx of bf16 predicted at 8192 tokens \(\w+ on", note)
    large = next(layer for layer in report if layer.name == "large")
    assert re.match(r"1\.\d\dx of bf16 predicted at 8192 tokens", large.note)
    assert te_mx.convert_model(model(), filter_fn="auto", tokens=32, dry_run=True).converted == []


def test_the_kernel_of_the_recipe_counts():
    """On a Hopper GPU: 2048 features gain, 1024 wait for the host, "exact" was not measured."""
    net = nn.ModuleList([nn.Linear(size, size, bias=False) for size in (1024, 2048, 4096)])
    with as_on_hopper.hopper():
        report = te_mx.convert_model(net, filter_fn="auto", dry_run=True)
        assert report.converted == ["1", "2"] and "sm90_adaptive" in report.skipped["0"]
        more = te_mx.convert_model(net, filter_fn="auto", tokens=65536, dry_run=True)
        assert more.converted == ["0", "1", "2"]
        exact = MXFP8BlockScaling(precision="exact")
        report = te_mx.convert_model(net, filter_fn="auto", recipe=exact, dry_run=True)
        assert report.converted == [] and "of sm90_exact" in report.skipped["2"]


def test_in_fusions_and_beside_bound_recipes(fast_device):
    net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), te_mx.Linear(16, 16))
    report = te_mx.convert_model(net, filter_fn="auto", fuse=True, recipe=get_default_recipe())
    assert report.fused == [] and type(net[1]) is nn.Linear
    assert "too small to gain" in report.skipped["1"]
    assert net[2]._bound is not None  # what is te_mx's already is bound, however small


def test_nothing_is_known():
    net = nn.Sequential(nn.Linear(4096, 4096, device="meta"))
    recipe = BlockScaling(x="mxfp6_e2m3", w="mxfp6_e2m3", g="mxfp8_e5m2")
    with pytest.warns(te_mx.ConversionWarning, match="converted nothing: .* no gain is known: of"):
        report = te_mx.convert_model(net, filter_fn="auto", recipe=recipe)
    assert "reference on" in report.skipped["0"] and type(net[0]) is nn.Linear


def test_an_accelerator_that_is_not_there(monkeypatch):
    """A torch that was built for CUDA, on a machine without a driver."""
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    cuda = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator",
        lambda check_available=False: None if check_available else cuda,
    )  # fmt: skip
    net = nn.Sequential(nn.Linear(4096, 4096, device="meta"))
    report = te_mx.convert_model(net, filter_fn="auto", dry_run=True)
    assert "on cpu" in str(report) and "cuda" not in str(report)


def test_a_slow_device_gains_nothing(monkeypatch):
    monkeypatch.setattr(decisions, "costs_of", lambda kernel: costs_of("avx512_bf16"))
    net = nn.Sequential(nn.Linear(4096, 4096, device="meta"))
    assert te_mx.convert_model(net, filter_fn="auto", dry_run=True).converted == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"filter_fn": "automatic"}, ValueError), ({"filter_fn": 3}, TypeError),
     ({"filter_fn": "auto", "tokens": 0}, ValueError), ({"tokens": 1.5}, TypeError)],
    ids=str,
)  # fmt: skip
def test_arguments(arguments, error):
    net = model()
    with pytest.raises(error, match=r"(filter_fn|tokens) must be"):
        te_mx.convert_model(net, **arguments)
    assert type(net["large"]) is nn.Linear
