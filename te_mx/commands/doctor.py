"""Say what this machine runs and why, and check it: text to paste into an issue."""

import argparse
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

import te_mx
from te_mx.backends.base import forced
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.sm90 import binding as sm90
from te_mx.backends.triton import binding as triton
from te_mx.dispatch.problem import place_of
from te_mx.dispatch.tuned.use import tables_of

OPTIONAL = (
    "numpy", "triton", "transformers", "torchao", "transformer-engine", "tqdm", "matplotlib",
    "safetensors", "ml_dtypes",
)  # fmt: skip
# What /proc/cpuinfo calls the instructions of a level.
_FLAGS = {
    "avx2": ("avx2", "fma"), "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512_bf16": ("avx512_bf16",), "amx": ("amx_tile", "amx_bf16"),
}  # fmt: skip
WRONG = "WRONG"
# m, n, k, the format of the weight. The last result takes 4 MiB: on CPUs such lie in memory that is
# used again (runtime/cpu_memory.py).
GEMMS = (
    (4, 384, 1024, "mxfp8_e4m3"), (256, 384, 1024, "mxfp8_e4m3"), (4, 384, 1024, "mxfp4"),
    (256, 384, 1024, "mxfp4"), (1024, 1024, 64, "mxfp8_e4m3"),
)  # fmt: skip
# Of the norm of the result. FP8 tensor cores keep 13 bits of their sums (docs/numerics.md).
_MOST = {"cpu": 1e-5, "cuda": 5e-3}
_TIMES = 20


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--no-gemm", action="store_true", help="look at the machine only, and run no product"
    )


def run(args: argparse.Namespace) -> int:
    sections: dict[str, Callable[[], Iterator[str]]] = {
        "versions": versions, "CPU": of_cpu, "GPUs": of_gpus, "tuned tables": tables,
        "optional packages": packages,
    }  # fmt: skip
    if not args.no_gemm:
        sections["products on each device, against fp64"] = gemms
    print(f"te_mx doctor, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC")
    wrong = 0
    for title, section in sections.items():
        print(f"\n{title}")
        try:
            for line in section():
                wrong += line.startswith(WRONG)
                print(f"  {line}", flush=True)
        except Exception as error:  # whatever is broken is what a doctor reports
            wrong += 1
            print(f"  {WRONG}: {type(error).__name__}: {error}", flush=True)
    verdict = "nothing is wrong" if not wrong else f"{wrong} of these lines say {WRONG}"
    print(f"\n{verdict}")
    return 1 if wrong else 0


def versions() -> Iterator[str]:
    yield f"python {platform.python_version()}, {platform.platform()}"
    cuda = torch.version.cuda or torch.version.hip or "none"
    yield f"torch {torch.__version__}, CUDA {cuda}, {torch.get_num_threads()} threads"
    yield f"te_mx {te_mx.__version__}, {Path(te_mx.__file__).parent}"
    for name, module, why in (
        ("_native (CPU)", cpu.native(), cpu.missing_reason()),
        ("_sm90 (Hopper)", sm90.native(), sm90.import_error()),
    ):
        if module is None:
            yield f"{name}: not here: {why}"
        else:
            path = Path(str(module.__file__))
            built = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
            by = getattr(module, "COMPILER", "a compiler that it does not name")
            nvcc = f" and nvcc {module.NVCC}" if hasattr(module, "NVCC") else ""
            yield f"{name}: {path.name}, built {built:%Y-%m-%d %H:%M} by {by}{nvcc}"
    for variable in sorted(os.environ):
        if variable.startswith("TE_MX_"):
            yield f"{variable}={os.environ[variable]}"


def of_cpu() -> Iterator[str]:
    info, flags = _cpuinfo()
    yield f"{info or platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
    if cpu.native() is None:
        yield f"{WRONG}: everything runs in plain torch: {cpu.missing_reason()}"
        return
    level = cpu.ISA_LEVELS[cpu.isa()]
    yield f"level {level}, of {', '.join(cpu.available_isa())}"
    for higher in cpu.ISA_LEVELS[cpu.isa() + 1 :]:
        if higher in _FLAGS:
            yield f"not {higher}: {_why_not(higher, flags)}"


def _cpuinfo() -> tuple[str, set[str]]:
    """(the model's name, the flags) of the first CPU; empty where the system does not say."""
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if path.exists():
        for line in path.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    return fields.get("model name", ""), set(fields.get("flags", "").split())


def _why_not(level: str, flags: set[str]) -> str:
    if level in cpu.available_isa():
        return f"TE_MX_CPU_ISA={os.environ.get('TE_MX_CPU_ISA', '')} asks for a lower level"
    missing = [flag for flag in _FLAGS[level] if flag not in flags]
    if missing:
        return f"the CPU does not have {', '.join(missing)}"
    return "the CPU has it; the system does not allow it, or this build was made without it"


def of_gpus() -> Iterator[str]:
    count = torch.cuda.device_count()
    if not count:
        built = "torch is built without CUDA" if torch.version.cuda is None else "torch finds none"
        yield built
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = properties.total_memory / 2**30
        yield (
            f"cuda:{index} {properties.name}, capability {capability}, "
            f"{properties.multi_processor_count} multiprocessors, {memory:.0f} GiB, "
            f"driver {_driver()}"
        )
        yield from _kernels(index, (properties.major, properties.minor) == (9, 0))


def _kernels(index: int, hopper: bool) -> Iterator[str]:
    """Which kernels a GPU runs, and what nobody verified."""
    why = sm90.problem(index)
    if why is None:
        yield f"cuda:{index} runs the Hopper kernels"
        return
    missing = triton.missing()
    ran = f"Triton's kernels, and cuBLAS's where torch has them ({why})"
    if missing is not None:
        ran = f"plain torch, which is slow: {why}; Triton {missing}"
    asked = forced and missing is None
    yield f"{f'{WRONG}: ' if hopper and not asked else ''}cuda:{index} runs {ran}"
    if not hopper:
        yield (
            "the authors have had no such GPU: its kernels were compiled, and run in an interpreter"
        )
        yield f"python -m te_mx conformance --device cuda:{index} verifies them"


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    words = text.splitlines()[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def _devices() -> list[torch.device]:
    indices = range(torch.cuda.device_count())
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in indices)]


def tables() -> Iterator[str]:
    for device in _devices():
        found = tables_of(place_of(device))
        for path, rows, mine in found:
            yield f"{device}: {path}, {mine} of {rows} rows are for this device"
        if not found:
            yield f"{device}: none, every choice is the default"


def packages() -> Iterator[str]:
    for name in OPTIONAL:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name}: not installed"


@dataclass(frozen=True)
class Checked:
    """What ran, how far it is off, and how long it took."""

    sizes: str
    kernel: str
    error: float
    most: float
    us: float

    @property
    def right(self) -> bool:
        """Whether the result is what the codes stand for, NaN being wrong."""
        return self.error <= self.most

    def __str__(self) -> str:
        off = f"off by {self.error:.1e} of the norm, at most {self.most:.0e}"
        return f"{self.sizes} on {self.kernel}: {off}; {self.us:.0f} us a call"


def checked(device: torch.device, m: int, n: int, k: int, w: str) -> Checked:
    """The product of m rows in MXFP8 with a weight [n, k] in format w."""
    generator = torch.Generator().manual_seed(m)
    x, weight = (torch.randn(rows, k, generator=generator).to(device) for rows in (m, n))
    b, a = te_mx.quantize(x), te_mx.quantize(weight, fmt=w)
    lhs, rhs = b.operand("rowwise"), a.operand("rowwise")
    assert lhs is not None and rhs is not None
    expected = lhs.values(torch.float64) @ rhs.values(torch.float64).T
    got = te_mx.gemm(A=a, B=b, out_dtype=torch.float32).out
    error = ((got.double() - expected).norm() / expected.norm()).item()
    kernel = te_mx.explain(a, b).kernel
    took = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        te_mx.gemm(A=a, B=b, out_dtype=torch.float32)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    sizes = f"[{m}, {k}] mxfp8_e4m3 x [{n}, {k}] {w}"
    return Checked(sizes, kernel, error, _MOST[device.type], 1e6 * sorted(took)[_TIMES // 2])


def gemms() -> Iterator[str]:
    for device in _devices():
        for sizes in GEMMS:
            made = checked(device, *sizes)
            line = f"{device}: {made}"
            yield line if made.right else f"{WRONG}: {line}"
