"""The Hopper kernels on a CPU: the module that is built from csrc/sm90 for the emulated
multiprocessor of third_party/mxtile/emulated takes the place of the native one, and tensors of
"cuda" are made on the CPU. The tests of tests/gpu run so wherever TE_MX_EMULATED names the module.

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
from types import ModuleType
from typing import Any

import as_on_hopper
import pytest
import torch

import te_mx
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


@contextmanager
def emulated(test: str) -> Iterator[None]:
    """CPU tensors are those of a Hopper GPU, whose kernels the emulated module runs. `test` names
    what runs: the order of events depends on it."""
    module, machine = native(), ctypes.CDLL(path())
    machine.simt_set_seed(ctypes.c_uint64(draw(test)))
    machine.simt_set_device(draw(test) % DEVICES)
    with as_on_hopper.hopper(module) as patch:
        patch.setitem(sys.modules, "te_mx._sm90", module)
        patch.setattr(te_mx, "_sm90", module, raising=False)
        upload = module.upload_ends
        patch.setattr(module, "upload_ends", lambda *args: upload(*args[:3], 0))
        _patch_torch(patch)
        yield


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
