"""CUDA streams and graph capture, as far as things that are kept between calls must know them.

A tensor that te_mx makes behind the user's back (a packed form, a kept weight) is written on the
stream of the call that made it. Another stream has not waited for it, and a graph that is being
captured only records the writing."""

import threading
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from te_mx.torch_internals import raw_stream

_T = TypeVar("_T")


def _stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# The current stream of a CUDA device, by its index, as the address that native code takes.
stream: Callable[[int], int] = raw_stream or _stream


@cache
def _index(device: torch.device) -> int | None:
    """The index of a CUDA device, None of others, of which torch writes the type anew each time."""
    return device.index if device.type == "cuda" else None


def current(device: torch.device) -> int:
    """The current stream of a device as a number; 0 where there are none."""
    index = _index(device)
    return 0 if index is None else stream(index)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of the device records into a CUDA graph."""
    index = _index(device)
    if index is None:
        return False
    if capture_number is not None:  # the short way
        return capture_number(stream(index)) != 0
    if index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


# The number of the capture that a stream (as an address) records; set by a backend that can tell.
capture_number: Callable[[int], int] | None = None


def capture(device: torch.device) -> int | None:
    """A number of the CUDA graph capture that the current stream of a device belongs to, 0 for
    none; None where it belongs to one and nobody can tell which."""
    if not capturing(device):
        return 0
    return None if capture_number is None else capture_number(current(device))


def apart(device: torch.device, make: Callable[[], _T]) -> _T:
    """make(), without gradients, on the same stream; on GPUs in a thread of its own. Memory pools,
    such as those that torch.compile fills before it captures a graph, are those of a thread: what
    is made here may be kept after them."""
    if device.type != "cuda":
        with torch.no_grad():
            return make()
    on = torch.cuda.current_stream(device)
    made: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(on):
                made.append(make())
        except BaseException as error:  # raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="te_mx-apart")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


class Made(NamedTuple):
    """Where and when tensors were made that a later call may use on another stream."""

    stream: int
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> "Made":
        """After everything enqueued so far on the current stream."""
        if device.type != "cuda" or capturing(device):
            return cls(0, None)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return cls(current(device), event)

    def await_on_current_stream(self, device: torch.device, *tensors: Tensor) -> None:
        """Let the current stream wait for them, and their memory for the stream. Capture begins
        after the device was synchronized, so there is nothing to wait for in it."""
        if self.event is None or self.stream == current(device) or capturing(device):
            return
        here = torch.cuda.current_stream(device)
        here.wait_event(self.event)
        for tensor in tensors:
            tensor.record_stream(here)
