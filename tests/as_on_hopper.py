"""Grouped layers as on Hopper, on any machine."""

from __future__ import annotations

from collections.abc import Callable

import fake_sm90_grouped
import pytest

from te_mx import ops
from te_mx.autograd import grouped_operands
from te_mx.autograd import operands as autograd_operands
from te_mx.backends import sm90, sm90_grouped
from te_mx.ops import grouped_gemm, grouped_quantize, grouped_weights, grouped_wgrad


def ask_for_hoppers_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules ask for operands as they do on Hopper."""
    monkeypatch.setattr(
        autograd_operands, "gemm_form", lambda device, precision, spread: ops.GemmForm(
            "transposed", spread if precision == "adaptive" else ops.PLAIN
        ),
    )  # fmt: skip


NATIVE = (
    "quantize_grouped", "quantize_stacked", "pack_stacked", "columns_of_stacked", "gemm_rows",
    "gemm_k",
)  # fmt: skip


def call_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors go to the stand-in for the native module. Returns a list to which the names of
    native calls are added as they come, but of upload_ends."""
    monkeypatch.setattr(sm90, "_native", fake_sm90_grouped)
    monkeypatch.setattr(sm90, "_problems", {None: None})
    monkeypatch.setattr(sm90, "stream", lambda index: 0)
    monkeypatch.setattr(sm90, "set_execution", lambda args, index: None)
    monkeypatch.setattr(grouped_quantize, "_on_cpu", grouped_quantize._on_cuda)
    monkeypatch.setattr(grouped_weights, "_weights_on_cpu", grouped_weights._weights_on_cuda)
    monkeypatch.setattr(grouped_weights, "_columns_on_cpu", grouped_weights._columns_on_cuda)
    monkeypatch.setattr(grouped_gemm, "_rows_on_cpu", grouped_gemm._rows_on_cuda)
    monkeypatch.setattr(grouped_wgrad, "_k_on_cpu", grouped_wgrad._k_on_cuda)
    monkeypatch.setattr(grouped_wgrad, "_into_on_cpu", grouped_wgrad._into_on_cuda)
    calls: list[str] = []
    for name in NATIVE:
        monkeypatch.setattr(fake_sm90_grouped, name, _noted(name, calls))
    return calls


def hide_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of groups are as on a device: whoever looks at them on the host fails."""

    def refuse(*args: object) -> None:
        raise AssertionError("the host looked at the splits")

    for module in (grouped_quantize, grouped_gemm, grouped_wgrad):
        monkeypatch.setattr(module, "known_to_host", lambda offs: False)
        monkeypatch.setattr(module, "host_bounds", refuse)


def hide_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and nothing takes them to the device, where they are."""
    hide_ends(monkeypatch)
    for module in (sm90_grouped, grouped_operands):
        monkeypatch.setattr(module, "offs_on_device", lambda offs, device: offs)


def _noted(name: str, calls: list[str]) -> Callable[..., int]:
    run = getattr(fake_sm90_grouped, name)

    def note(*args: object) -> int:
        calls.append(name)
        return run(*args)

    return note
