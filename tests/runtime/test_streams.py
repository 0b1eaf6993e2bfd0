"""What is kept between calls, and CUDA streams and graph capture: the decisions, on any machine."""

import pytest
import torch

import te_mx
from te_mx import _ops as ops
from te_mx.runtime import streams
from te_mx.weights import frozen, source


def test_on_the_cpu_there_is_nothing_to_wait_for():
    cpu = torch.device("cpu")
    assert streams.current(cpu) == 0 and not streams.capturing(cpu)
    made = streams.Made.now(cpu)
    made.await_on_current_stream(cpu, torch.empty(1))
    assert made == (0, None)


@pytest.fixture
def stream(monkeypatch):
    """Says which stream is current; the arithmetic runs on the CPU as ever."""
    now = {"stream": 1, "capturing": False}
    monkeypatch.setattr(streams, "current", lambda device: now["stream"])
    monkeypatch.setattr(streams, "capturing", lambda device: now["capturing"])
    for states in (source, frozen):
        monkeypatch.setattr(states, "capturing", lambda device: now["capturing"])
    return now


def kept(t: te_mx.MXTensor) -> int:
    return sum(form is not None for _, form in t._packs.values())


def test_a_packed_form_belongs_to_its_stream(stream):
    w, x = te_mx.quantize(torch.randn(40, 70)), te_mx.quantize(torch.randn(33, 70))
    want = te_mx.gemm(w, x).out
    te_mx.gemm(w, x)
    assert kept(w) == 1
    stream["stream"] = 2
    assert torch.equal(te_mx.gemm(w, x).out, want) and kept(w) == 1
    assert torch.equal(te_mx.gemm(w, x).out, want) and kept(w) == 2


def test_nothing_is_kept_or_used_while_a_graph_is_captured(stream):
    w, x = te_mx.quantize(torch.randn(40, 70)), te_mx.quantize(torch.randn(33, 70))
    assert ops.kept_form(w.operand("rowwise"), "rhs", ops.Mode()).packed is not None
    stream["capturing"] = True
    for _ in range(3):
        te_mx.gemm(w, x)
    assert not w._packs
    stream["capturing"] = False
    te_mx.gemm(w, x)
    te_mx.gemm(w, x)
    stream["capturing"] = True
    assert kept(w) == 1
    operand = w.kept_operand("rowwise", "rhs", ops.Mode())
    assert operand is not None and operand.packed is None


def test_weights_kept_for_microbatches_are_not_used_in_a_graph(stream):
    layer, x = te_mx.Linear(64, 48), torch.randn(8, 64)
    with te_mx.autocast():
        first = layer(x, is_first_microbatch=True)
        before = layer._source.kept["weight"]
        with torch.no_grad():
            layer.weight.mul_(2)
            layer.bias.mul_(2)
        stream["capturing"] = True
        captured = layer(x, is_first_microbatch=False)
    assert torch.equal(captured, 2 * first)
    assert layer._source.kept["weight"] is before


def test_a_frozen_weight_made_before_the_capture_serves_it(stream):
    layer, x = te_mx.Linear(64, 48), torch.randn(8, 64)
    te_mx.freeze_weights(layer)
    with te_mx.autocast(), torch.no_grad():
        want = layer(x)
        kept = layer._source.kept
        weight = kept["weight"]
        stream["capturing"] = True
        assert torch.equal(layer(x), want) and kept["weight"] is weight
        kept.clear()
        assert torch.equal(layer(x), want) and not kept
