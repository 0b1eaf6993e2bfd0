"""The Hopper kernels on a CPU: the module that is built from csrc/sm90 for the emulated
multiprocessor of third_party/mxtile/emulated takes the place of the native one, and tensors of
"cuda" are made on the CPU. The tests of tests/gpu run so wherever TE_MX_EMULATED names the module,
and those of tests/emulated, whose tensors are the CPU's.

Threads, copies and tensor cores take their turns by a seed, another one for every test and every
TE_MX_EMULATED_SEED. So are the cases drawn that run: TE_MX_EMULATED_CASES of every test function,
of sizes that a CPU has time for. Launches end before they return: there are no streams, and no CUDA
graphs.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import math
import os
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import as_on_hopper
import fake_sm90
import pytest
import torch
from fake_sm90 import DTYPES, at

import te_mx
from te_mx.dispatch.fused import ACT_IDS
from te_mx.runtime import workspace

PATH, SEED, CASES = "TE_MX_EMULATED", "TE_MX_EMULATED_SEED", "TE_MX_EMULATED_CASES"
MOST_CASES, MOST_PRODUCTS, MOST_ROWS = 2, 1 << 27, 4200
_SIZE, _SHAPE = re.compile(r"\d+"), re.compile(r"\b\d+(?:(?:, |x|-)\d+)*\b")
# Of CUDA graphs, other processes, sizes for a GPU, its clock and its name.
NEED_A_GPU = (
    "test_first_use.py", "test_graphed_callables.py", "test_hostile.py",
    "test_sm90_bias_gradients.py", "test_sm90_decode_compile.py", "test_sm90_explain.py",
    "test_sm90_graphs.py", "test_sm90_large.py", "test_sm90_one_copy.py", "test_triton.py",
    "test_tuned_cuda.py", "test_two_gpus.py",
)  # fmt: skip
MAKERS: dict[Any, tuple[str, ...]] = {
    torch: (
        "arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "rand",
        "randint", "randn", "randperm", "tensor", "zeros",
    ),
    torch.Tensor: ("to",),
    workspace: ("reset",),
}  # fmt: skip
LEFT_OUT = {
    # Splits that lie on the device, where the host does not look; here they are on the host.
    "test_more_rows_than_there_are_poison_nothing",
    # Of streams before it comes to graphs; of graphs.
    "test_a_sum_stays_on_its_stream_and_in_its_capture",
    "test_a_rollout_has_the_probabilities_of_its_trainer",
    # Of sizes that their names do not tell.
    "test_a_large_x_and_a_gradient_of_sum", "test_a_graph_and_streams_give_the_same_bits",
    "test_a_layer_cuts_where_its_recipe_asks",
    "test_gemm_cuts_as_explain_says", "test_normalization_in_many_bands",
    "test_the_workspace_is_kept_to", "test_what_is_saved_for_backward_is_one_byte_an_element",
}  # fmt: skip
DEVICES = 2  # of 132 multiprocessors, and of 8, which get several blocks each


def path() -> str | None:
    """Where the module is, None where no such run is asked for."""
    return os.environ.get(PATH)


def draw(name: str) -> int:
    """A number for a test, another one for every seed."""
    return zlib.crc32(f"{os.environ.get(SEED, '0')} {name}".encode())


def chosen(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases that run, of every test function a few."""
    most = int(os.environ.get(CASES, MOST_CASES))
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    return {
        item
        for cases in functions.values()
        for item in sorted(filter(_small, cases), key=lambda item: draw(item.nodeid))[:most]
    }


def _small(item: pytest.Item) -> bool:
    """Whether the sizes that the name of a case tells are small ones."""
    shapes = [[int(size) for size in _SIZE.findall(shape)] for shape in _SHAPE.findall(item.name)]
    small = all(max(s) <= MOST_ROWS and math.prod(s) <= MOST_PRODUCTS for s in shapes)
    left_out = item.name.partition("[")[0] in LEFT_OUT
    return small and not left_out and item.get_closest_marker("slow") is None


@cache
def native() -> ModuleType:
    """The emulated module."""
    name = "_sm90"  # its init function is PyInit__sm90
    loader = importlib.machinery.ExtensionFileLoader(name, path())
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def begin(test: str) -> None:
    """`test` names what runs: the order of events depends on it."""
    machine = ctypes.CDLL(path())
    machine.simt_set_seed(ctypes.c_uint64(draw(test)))
    machine.simt_set_device(draw(test) % DEVICES)


@contextmanager
def emulated(test: str) -> Iterator[None]:
    """Tensors of "cuda" are those of a Hopper GPU, whose kernels the emulated module runs."""
    begin(test)
    module = native()
    with as_on_hopper.hopper(module) as patch:
        patch.setitem(sys.modules, "te_mx._sm90", module)
        patch.setattr(te_mx, "_sm90", module, raising=False)
        _upload_from_here(patch)
        _patch_torch(patch)
        yield


def _upload_from_here(patch: pytest.MonkeyPatch) -> None:
    upload = native().upload_ends
    patch.setattr(native(), "upload_ends", lambda *args: upload(*args[:3], 0))


# ---------------------------------------------------------------------------------- tests/emulated
class Call(NamedTuple):
    """A native call: its name, the record or what there is in place of one, what it returned."""

    name: str
    args: Any
    status: Any


# What the native module was asked for since `hopper` began.
CALLS: list[Call] = []
PRODUCTS: list[tuple[int, int, int]] = []  # m, n, k of products with weights that stand still
GATES: list[str] = []  # activations of those whose rows have a gate
_ACTS = {number: name for name, number in ACT_IDS.items()}


class Noted:
    """The emulated module, whose calls are noted; a sequence is one."""

    def __getattr__(self, name: str) -> Any:
        found = CUBLAS.get(name) or getattr(native(), name)
        return found if isinstance(found, type) else _noted(name, found)

    def prepared(self, name: str, record: Any, *more: Any) -> SimpleNamespace:
        return SimpleNamespace(run=_noted(name, native().prepared(name, record, *more).run))

    def sequence(self, steps: Any, *more: Any) -> SimpleNamespace:
        apart = CUBLAS.keys() & {step[0] for step in steps}
        made = (fake_sm90 if apart else native()).sequence(steps, *more)
        return SimpleNamespace(run=_noted("sequence", made.run))


def _noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        before = len(CALLS)
        made = run(*args)
        del CALLS[before:]  # of a sequence
        _note(name, args[0] if args else None, made)
        return made

    return call


def _multiplies(args: Any) -> int:
    """cublasLt adds a bias in bf16 alone."""
    numbers = args.out_dtype, args.bias_dtype if args.bias else args.out_dtype
    types = {DTYPES[number] for number in numbers}
    wrong = torch.float16 in types or (args.bias and types != {torch.bfloat16})
    return fake_sm90.UNSUPPORTED if wrong else fake_sm90.OK


def _multiply(args: Any) -> int:
    def values(side: str, rows: int) -> torch.Tensor:
        k_first = getattr(args, f"{side}_k_first")
        shape = (args.k, rows) if k_first else (rows, args.k)
        made = at(getattr(args, side), shape, torch.bfloat16)
        return (made.t() if k_first else made).float()

    made = values("lhs", args.m) @ values("rhs", args.n).t()
    if args.factors:
        factor, *numbers = at(args.factors, (3,), torch.float32)
        assert numbers == [0.0, 1.0]
    else:
        wholes = [at(one, (), torch.float32) for one in (args.of_lhs, args.of_rhs) if one]
        factor = math.prod(wholes)
    made = made * factor
    if args.bias:
        made = made + at(args.bias, (args.n,), DTYPES[args.bias_dtype]).float()
    out = at(args.out, (args.m, args.n), DTYPES[args.out_dtype])
    out.copy_(made + out.float() if args.accumulate else made)
    return fake_sm90.OK


# What cuBLAS multiplies, of which there is no emulation.
CUBLAS = {"nvfp4_multiplies": _multiplies, "nvfp4_multiply": _multiply}


def _note(name: str, args: Any, status: Any) -> None:
    CALLS.append(Call(name, args, status))
    if name in ("decode", "nvfp4_product") and status == 0:
        PRODUCTS.append((args.m, args.n, args.k))
        if args.gate:
            GATES.append(_ACTS[args.x_act])


def called(*names: str) -> list[str]:
    """Names of the calls of some kinds, as they came."""
    return [call.name for call in CALLS if call.name in names]


@contextmanager
def hopper() -> Iterator[pytest.MonkeyPatch]:
    """CPU tensors are taken for those of a Hopper GPU, as by as_on_hopper.hopper; the emulated
    kernels run."""
    with as_on_hopper.hopper(Noted()) as patch:
        _upload_from_here(patch)
        for noted in (CALLS, PRODUCTS, GATES):
            noted.clear()
        yield patch


def on_cpu(value: Any) -> Any:
    """A device in place of that of Hopper; all else stays."""
    if isinstance(value, str) and value in ("cuda", "cuda:0"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def _patch_torch(patch: pytest.MonkeyPatch) -> None:
    # No mode of torch: te_mx does otherwise where one watches.
    for owner, names in MAKERS.items():
        for name in names:
            patch.setattr(owner, name, _elsewhere(getattr(owner, name)))
    patch.setattr(torch.Tensor, "cuda", lambda x, *where: x)
    stream = _Stream()
    for name in ("synchronize", "set_sync_debug_mode", "empty_cache"):
        patch.setattr(torch.cuda, name, _nothing)
    patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "current_stream", lambda *of: stream)
    patch.setattr(torch.cuda, "Stream", _Stream)
    patch.setattr(torch.cuda, "stream", nullcontext)
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(torch, "autocast", _Autocast)
    patch.setattr(torch.cuda, "CUDAGraph", _Missing)
    patch.setattr(torch.cuda, "Event", _Missing)
    for name in ("make_graphed_callables", "_sleep", "memory_allocated"):
        patch.setattr(torch.cuda, name, partial(_missing, name))
    patch.setattr(torch, "compile", partial(_missing, "compile"))


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, on_cpu(device))


class _Autocast(torch.autocast):
    def __init__(self, device: Any, *args: Any, **named: Any) -> None:
        super().__init__(on_cpu(device), *args, **named)


def _elsewhere(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*args: Any, **named: Any) -> Any:
        return make(*map(on_cpu, args), **{name: on_cpu(value) for name, value in named.items()})

    return made


class _Stream:
    cuda_stream = 0

    def __init__(self, *of: object) -> None:
        self.wait_stream = self.synchronize = _nothing


class _Missing:
    def __init__(self, *args: object, **named: object) -> None:
        _missing("CUDAGraph, Event")

    def replay(self) -> None:
        """te_mx counts its calls."""


def _nothing(*args: object) -> None:
    pass


def _missing(name: str, *args: object, **named: object) -> None:
    pytest.skip(f"{name} of torch is not emulated")
