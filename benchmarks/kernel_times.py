"""Which kernels of the device a step spends its time in, by kind and one by one."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

TOP = 40
NAME_WIDTH = 100
FUSED = "norm and elementwise"
# The first kind whose pattern is in a kernel's name. What Inductor fused is first, because such a
# name lists operators; attention comes before the products it is made of.
KINDS = {
    FUSED: r"^triton_",
    "te_mx gemm": r"te_mx::[^<]*\b(gemm_kernel|finish_kernel|reduce_columns)",
    "te_mx quantize": r"te_mx::",
    "communication": r"nccl",
    "attention": r"flash|fmha|sdpa|attention",
    "optimizer": r"adam|multi_tensor_apply|_foreach_",
    "bf16 gemm": r"gemm|cutlass|nvjet|cublas|splitk|aten::(mm|addmm|bmm|_?grouped_mm)$",
    "copy": r"memcpy|memset|catarray|copy_",
}
ELEMENTWISE = (
    r"elementwise|reduce|norm|softmax|nll_loss|index|gather|scatter|embedding|sort|scan|aten::"
)
OTHER = "other"
# Ranges around kernels, which would count them twice.
RANGES = re.compile(r"#|^Torch-Compiled Region|^CompiledF")


@dataclass(frozen=True)
class Kernel:
    name: str
    calls: int
    us: float

    @property
    def kind(self) -> str:
        patterns = [*KINDS.items(), (FUSED, ELEMENTWISE)]
        found = (kind for kind, text in patterns if re.search(text, self.name, re.IGNORECASE))
        return next(found, OTHER)


@dataclass(frozen=True)
class Span:
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    end: float


def apart(spans: Iterable[Span]) -> list[Kernel]:
    """Kernels by name, each with the time that it adds to those that started before.

    A kernel that is let in early (programmatic dependent launch) waits for its predecessor until
    that ends, and its span begins with the wait: a sum of spans counts the time twice.
    """
    times: dict[str, list[float]] = {}
    busy_until = float("-inf")
    for span in sorted(spans, key=lambda one: (one.start, one.end)):
        added = max(0.0, span.end - max(span.start, busy_until))
        times.setdefault(span.name, []).append(added)
        busy_until = max(busy_until, span.end)
    return [Kernel(name, len(each), sum(each)) for name, each in times.items()]


def of(step: Callable[[], object], device: torch.device) -> list[Kernel]:
    """The kernels of one step, the longest first: the time that each adds. On a CPU the operators
    and their own time."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    if on_gpu:
        runs = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
        kernels = apart(
            Span(run.name, run.time_range.start, run.time_range.end)
            for run in runs
            if not getattr(run, "is_user_annotation", False) and not RANGES.search(run.name)
        )
    else:
        kernels = [
            Kernel(event.key, event.count, event.self_cpu_time_total)
            for event in recorded.key_averages()
            if event.device_type == DeviceType.CPU and not RANGES.search(event.key)
        ]
    return sorted((k for k in kernels if k.us > 0 or on_gpu), key=lambda k: -k.us)


def table(title: str, kernels: list[Kernel], step_seconds: float) -> str:
    """Kinds and their share first, then the longest kernels. `step_seconds` is of a step that
    nobody recorded: what kernels do not fill of it, the device waited."""
    total = sum(k.us for k in kernels)
    lines = [
        "",
        f"{title}: {total / 1e3:.1f} ms in {sum(k.calls for k in kernels)} kernels, "
        f"a step takes {step_seconds * 1e3:.1f} ms",
    ]
    for kind in [*KINDS, OTHER]:
        alike = [k for k in kernels if k.kind == kind]
        us = sum(k.us for k in alike)
        if alike:
            calls = sum(k.calls for k in alike)
            lines.append(f"  {us / 1e3:9.2f} ms {100 * us / total:5.1f} %  {calls:5} x  {kind}")
    lines.append("")
    for k in kernels[:TOP]:
        name = k.name if len(k.name) <= NAME_WIDTH else k.name[: NAME_WIDTH - 2] + ".."
        time = f"{k.us / 1e3:9.3f} ms {100 * k.us / total:5.1f} %"
        lines.append(f"  {time}  {k.calls:5} x  {k.kind:20}  {name}")
    return "\n".join([*lines, ""])
