"""Grouped layers as on Hopper, on any machine."""

from __future__ import annotations

import fake_sm90_grouped
import pytest

from te_mx import ops
from te_mx.autograd import operands as autograd_operands
from te_mx.backends import sm90
from te_mx.ops import grouped_gemm, grouped_quantize, grouped_weights, grouped_wgrad


def ask_for_hoppers_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules ask for operands as they do on Hopper."""
    monkeypatch.setattr(
        autograd_operands, "gemm_form", lambda device, precision, spread: ops.GemmForm(
            "transposed", spread if precision == "adaptive" else ops.PLAIN
        ),
    )  # fmt: skip


def call_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go to the stand-in for the native module."""
    monkeypatch.setattr(sm90, "_native", fake_sm90_grouped)
    monkeypatch.setattr(sm90, "_problems", {None: None})
    monkeypatch.setattr(sm90, "stream", lambda index: 0)
    monkeypatch.setattr(grouped_quantize, "_on_cpu", grouped_quantize._on_cuda)
    monkeypatch.setattr(grouped_weights, "_weights_on_cpu", grouped_weights._weights_on_cuda)
    monkeypatch.setattr(grouped_weights, "_columns_on_cpu", grouped_weights._columns_on_cuda)
    monkeypatch.setattr(grouped_gemm, "_rows_on_cpu", grouped_gemm._rows_on_cuda)
    monkeypatch.setattr(grouped_wgrad, "_k_on_cpu", grouped_wgrad._k_on_cuda)
    monkeypatch.setattr(grouped_wgrad, "_into_on_cpu", grouped_wgrad._into_on_cuda)
