"""Any machine as a Hopper GPU: CPU tensors are taken for those of cuda:0, and a stand-in for its
native module runs what the kernels of te_mx/backends/sm90 ask of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_sm90
import pytest
import torch
from torch import Tensor

from te_mx._ops import grouped_quantize
from te_mx.autograd import grouped, grouped_loop
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import linear as cpu_linear
from te_mx.backends.sm90 import binding, gemm
from te_mx.backends.sm90 import grouped as sm90_grouped
from te_mx.dispatch import operand_layouts, problem, registry
from te_mx.dispatch.problem import Place
from te_mx.runtime import kernel_log

HOPPER = torch.device("cuda", 0)
MULTIPROCESSORS = 132


@contextmanager
def hopper(native: ModuleType = fake_sm90) -> Iterator[pytest.MonkeyPatch]:
    """Problems on CPU tensors are problems of a Hopper GPU, which `native` runs."""
    with _anew() as patch:
        here = "cpu", None, cpu.isa()
        patch.setitem(problem._places, here, Place(HOPPER.type, HOPPER.index))
        patch.setattr(binding, "_native", native)
        patch.setattr(binding, "_problems", {HOPPER.index: None})
        patch.setattr(binding, "stream", lambda index: 0)
        patch.setattr(binding, "set_execution", lambda args, index: None)
        patch.setattr(gemm, "multiprocessors", lambda index: MULTIPROCESSORS)
        patch.setattr(torch, "mm", _mm)
        yield patch


def _mm(
    left: Tensor, right: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """torch.mm with the out_dtype that only GPUs take: sums of exact products."""
    made = torch.matmul(left.double(), right.double()).to(out_dtype or left.dtype)
    return made if out is None else out.copy_(made)


@contextmanager
def hoppers_forms() -> Iterator[None]:
    """Modules ask for operands as they do on Hopper. The reference runs them, and says so: tests
    ignore its te_mx.FallbackWarning."""
    with _anew() as patch:
        layouts = operand_layouts.wanted_layouts
        patch.setattr(binding, "_problems", {HOPPER.index: None})
        patch.setattr(
            operand_layouts, "wanted_layouts", lambda device, *rest: layouts(HOPPER, *rest)
        )
        # Which asks for no forms.
        patch.setattr(cpu_linear.Small, "accepts", lambda self, problem: "stands aside")
        yield


@contextmanager
def _anew() -> Iterator[pytest.MonkeyPatch]:
    """Kernels are chosen anew, inside and afterwards, and every fallback warns, which fails a test
    unless it asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_log, "_warned", set())
        registry.forget()
        yield patch
    registry.forget()


class _Record:
    """Fields of a native record, 0 where nothing was said."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0

    def copy(self, **fields: Any) -> _Record:
        return _Record(**self.__dict__ | fields)


class Idle(ModuleType):
    """A native module whose launches do nothing, for tests of who calls what: sizes are those of
    fake_sm90.py, `launch` is called for each."""

    def __init__(self, launch: Callable[[], None] = lambda: None) -> None:
        super().__init__("te_mx._sm90")
        self.launch = launch
        self.sequence = self.prepared = lambda *steps: SimpleNamespace(run=self._ran)

    def _ran(self, *given: Any) -> int:
        self.launch()
        return fake_sm90.OK

    def __getattr__(self, name: str) -> Any:
        found = getattr(fake_sm90, name, None)
        if isinstance(found, type) or name in HOST_ONLY or "bytes" in name:
            return found
        if name.endswith("Args"):
            return _Record
        if "workspace" in name:
            return lambda *sizes: fake_sm90.OWN_SCRATCH
        return (lambda *args: fake_sm90.OK) if name == "nvfp4_multiplies" else self._ran


# ------------------------------------------------------------------------------------------ groups
HOST_ONLY = "available", "upload_ends", "linear_offsets", "norm_partial_sums"
NATIVE = (
    "quantize_grouped", "activate_grouped", "quantize_stacked", "pack_stacked",
    "columns_of_stacked", "gemm_rows", "gemm_k",
)  # fmt: skip


@contextmanager
def hopper_with_groups() -> Iterator[list[str]]:
    """`hopper` with the grouped calls. Gives a list to which the names of native calls are added as
    they come, but of upload_ends."""
    calls: list[str] = []
    with hopper(fake_sm90) as patch:
        for name in NATIVE:
            patch.setattr(fake_sm90, name, _noted(name, calls))
        yield calls


def hide_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of groups are as on a device: whoever looks at them on the host fails, and nothing takes
    them to the device, where they are."""

    def refuse(*args: object) -> None:
        raise AssertionError("the host looked at the splits")

    for module in (grouped_quantize, sm90_grouped):
        monkeypatch.setattr(module, "known_to_host", lambda offs: False)
    for module in (grouped, grouped_loop):
        monkeypatch.setattr(module, "readable", lambda offs: False)
    for module in (sm90_grouped, grouped, grouped_loop):
        monkeypatch.setattr(module, "host_bounds", refuse)
    monkeypatch.setattr(sm90_grouped, "offs_on_device", lambda offs, device: offs)


def _noted(name: str, calls: list[str]) -> Callable[..., int]:
    run = getattr(fake_sm90, name)

    def note(*args: object) -> int:
        calls.append(name)
        return run(*args)

    return note
