"""Threads, fork and instruction-set levels of the native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from fresh import python
from native_words import GemmCall
from torch import Tensor

from te_mx import _ops as ops
from te_mx.backends.cpu import binding as cpu
from te_mx.dispatch.calls import Epilogue

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")

FORK_TIMEOUT = 60.0  # seconds; a child that waits for the parent's threads would never end


def quantized(x: Tensor) -> ops.Operand:
    return ops.quantize_2d(x, "mxfp8_e4m3@rows").row


# Fixed inputs and few outputs: in a child of fork() torch's own operators hang when they are large
# enough (32768 elements) to wake the OpenMP threads that the child lacks.
INPUTS = [(torch.randn(300, 256), torch.randn(100, 256)) for _ in range(4)]


def work(i: int = 0) -> Tensor:
    """Two quantizations and a GEMM of several items each."""
    a, b = (quantized(x) for x in INPUTS[i])
    return ops.gemm_2d(b, a, out_dtype=torch.float32).out


def with_kernel(kernel: str, a: ops.Operand, b: ops.Operand) -> tuple[Tensor, Tensor]:
    out = torch.empty(b.rows, a.rows)
    sides = a, b
    call = GemmCall(kernel, *sides, Epilogue(bias_grad="operand"), out, None)
    nbytes = call.workspace_bytes()
    scratch = torch.empty(nbytes + 64, dtype=torch.uint8)
    assert call.run(scratch[-scratch.data_ptr() % 64 :], nbytes) == kernel
    return out, call.bias_grad


@pytest.mark.parametrize("kernel", [k for k in cpu.KERNELS if cpu.kernel_available(k)])
def test_bits_do_not_depend_on_thread_count(kernel: str, threads) -> None:
    rows = 13 if kernel.endswith("stream") else 101
    a, b = quantized(torch.randn(333, 300)), quantized(torch.randn(rows, 300))
    threads(1)
    expected = with_kernel(kernel, a, b)
    for count in (2, 3, 7):
        threads(count)
        assert all(
            torch.equal(x, y) for x, y in zip(with_kernel(kernel, a, b), expected, strict=True)
        )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch may use another pool")
def test_team_is_that_of_torch(threads) -> None:
    if "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("torch was built without OpenMP")
    threads(2)
    work()
    assert cpu.native().parallel_team() == "openmp"


def test_python_threads_at_once(threads) -> None:
    threads(3)
    expected = [work(i) for i in range(4)]
    wrong: list[int] = []

    def repeat(i: int) -> None:
        for _ in range(20):
            if not torch.equal(work(i), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def in_child(body) -> int:
    """Exit code of a forked child that runs body(); -1 when it had to be killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if body() else 2
        finally:
            os._exit(code)
    end = time.monotonic() + FORK_TIMEOUT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_parallel_work_after_fork(threads) -> None:
    threads(3)
    expected = work()

    def same_in_child() -> bool:
        same = all(torch.equal(work(), expected) for _ in range(3))
        return same and cpu.native().parallel_team() == "threads"

    def same_in_grandchild() -> bool:
        return same_in_child() and in_child(same_in_child) == 0

    assert in_child(same_in_grandchild) == 0
    assert torch.equal(work(), expected)  # and the parent still works


class Products(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        torch.set_num_threads(2)  # a worker starts with one
        return work(i)


def test_data_loader_workers(threads) -> None:
    threads(2)
    expected = [work(i) for i in range(4)]
    loader = torch.utils.data.DataLoader(
        Products(), batch_size=None, num_workers=2, timeout=FORK_TIMEOUT
    )
    assert all(torch.equal(x, y) for x, y in zip(loader, expected, strict=True))


SMALL_STACKS = """
import threading, torch, te_mx
from te_mx import _ops as ops
from te_mx.backends.cpu import binding as cpu

def run():
    a, g = torch.randn(200, 300), torch.randn(64, 300)
    wide = a * torch.exp2(torch.randint(-60, 60, (200, 300)).float())
    block = "fp8_e4m3_1x128"
    plain = ("mxfp8_e4m3", {}), ("mxfp4", {}), (block, {})
    for fmt, given in (*plain, (block, {"scale_rule": "fp32"})):
        for x in (a, a.t(), a.bfloat16(), wide):
            q = te_mx.quantize(x, fmt=fmt, columnwise=True, **given)
            te_mx.gemm(q, q)
            te_mx.gemm(te_mx.quantize(x[:3], fmt=fmt, **given), q)
    for recipe in (te_mx.recipe.MXFP8BlockScaling(), te_mx.recipe.Float8BlockScaling()):
        for act in ("gelu", "swiglu"):
            m = te_mx.LayerNormMLP(300, 64, activation=act)
            with te_mx.autocast(recipe=recipe):
                m(a).sum().backward()
    x = torch.randn(64, 256)
    for fmt in ("mxfp4", "mxfp8_e4m3"):
        rule, seed = "rceil+sr", torch.zeros(1, dtype=torch.int64)
        ops.quantize_2d(x, f"{fmt}@rows", f"{fmt}@cols", rule=rule, seed=seed)

threading.stack_size(64 * 1024)
for level in cpu.available_isa():
    cpu.set_isa(level)
    torch.set_num_threads(1)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.set_num_threads(2)
    run()
print("ran")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pool may have other stacks")
def test_threads_of_small_stacks() -> None:
    """One of 64 KB alone; and those of the OpenMP team, which run the items."""
    done = subprocess.run(
        [sys.executable, "-c", SMALL_STACKS], env={**os.environ, "OMP_STACKSIZE": "64K"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.strip() == "ran", (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize("level", cpu.available_isa())
def test_environment_chooses_the_level(level: str) -> None:
    code = "from te_mx.backends.cpu.binding import ISA_LEVELS, isa; print(ISA_LEVELS[isa()])"
    result = python(code, TE_MX_CPU_ISA=level)
    assert result.stdout.strip() == level, result.stderr


def test_unknown_level_in_the_environment() -> None:
    """`import te_mx` still works; the first use of native code says what is wrong."""
    first_use = "import te_mx, torch; print('imported')\nte_mx.quantize(torch.ones(1, 32))"
    result = python(first_use, TE_MX_CPU_ISA="sse9")
    assert result.stdout == "imported\n"
    assert result.returncode != 0
    for word in ("got 'sse9'", "TE_MX_CPU_ISA", "portable, avx2", *cpu.ISA_LEVELS):
        assert word in result.stderr


@pytest.mark.skipif("amx" in cpu.available_isa(), reason="this CPU has every level")
def test_level_above_the_cpu_in_the_environment() -> None:
    result = python(
        "from te_mx.backends.cpu import binding as cpu; cpu.native()", TE_MX_CPU_ISA="amx"
    )
    assert result.returncode != 0
    assert "highest level here" in result.stderr


def test_a_level_makes_lower_kernels_available(isa: str) -> None:
    order = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
    best = [level for level in cpu.available_isa() if level in order][-1]
    top = min(order.index(best), 3) if isa == "amx_emulated" else order.index(isa)
    for kernel in cpu.KERNELS:
        needs = next((level for level in reversed(order) if kernel.startswith(level)), "portable")
        expected = order.index(needs) <= top or (isa == "amx_emulated" and needs == "amx")
        assert cpu.kernel_available(kernel) == expected, (isa, kernel)


def test_set_isa_rejects_names() -> None:
    with pytest.raises(ValueError, match="portable, avx2"):
        cpu.set_isa("sse9")
