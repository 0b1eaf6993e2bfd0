"""Runs one malformed call and says what is wrong with what came of it.

A call passes when it is refused by te_mx itself, or gives what the value means, or does what plain
torch does. Refused means: one of the error types below, raised by a `raise` in te_mx, with a
message that names the argument; and nothing that the caller holds has changed.
"""

from __future__ import annotations

import dis
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from malformed import Bad, Kind, UsersError
from torch import Tensor, nn

import te_mx
from te_mx.context.region import current_recipe

OURS = Path(te_mx.__file__).parent
ERRORS = (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError)
# Of sizes that no memory holds: what torch says then is said as well as it can be.
NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|Storage size calculation overflowed|"
    r"integer multiplication overflow|Trying to create tensor with negative dimension"
)
LOADING = re.compile(r"Error\(s\) in loading state_dict for|Expected state_dict to be dict-like")


class Call(NamedTuple):
    """One public callable, a valid call of it, and of what kind each argument is.

    make(device): what is called; a module or tensors that it works on can be its `watched`.
    arguments(device): a valid call. kinds: the malformations, by argument. covers: the public name,
    where that is not `name`. plain(device): the same in plain torch, for calls that promise it.
    says: how errors name an argument, where not by its name.
    """

    name: str
    make: Callable[[str], Callable[..., Any]]
    arguments: Callable[[str], dict[str, Any]]
    kinds: Mapping[str, Kind]
    covers: str = ""
    plain: Callable[[str], Callable[..., Any]] | None = None
    says: Mapping[str, str] = {}

    def cases(self) -> Iterator[tuple[str, Bad | None]]:
        """(argument, malformation); first the valid call."""
        yield "", None
        for argument, kind in self.kinds.items():
            for bad in kind.bads:
                yield argument, bad


class Outcome(NamedTuple):
    """What came of a call."""

    result: Any
    error: Exception | None


def complaint(call: Call, argument: str, bad: Bad | None, device: str) -> str:
    """What is wrong with the outcome of a call, or an empty string."""
    torch.manual_seed(0)
    function, arguments = call.make(device), call.arguments(device)
    if bad is not None:
        arguments[argument] = bad.make(arguments[argument], arguments)
    held = [*arguments.values(), *getattr(function, "watched", ())]
    before = [list(_bytes(one)) for one in held]
    outcome = _run(function, arguments)
    if device == "cuda":
        torch.cuda.synchronize()
    if current_recipe() is not None:
        return "a recipe stayed active"
    if bad is None:
        return "" if outcome.error is None else f"the valid call fails: {_shown(outcome.error)}"
    if outcome.error is None:
        return _of_result(call, argument, bad, device, outcome.result)
    wrong = _of_error(outcome.error, call.says.get(argument, argument))
    if wrong and call.plain is not None and _plain(call, argument, bad, device).error is not None:
        wrong = ""  # plain torch refuses it as well, in its own words
    if not wrong and [list(_bytes(one)) for one in held] != before:
        wrong = "refused, but something was changed before"
    return wrong


def _run(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    try:
        return Outcome(function(**arguments), None)
    except Exception as error:
        return Outcome(None, error)


def _plain(call: Call, argument: str, bad: Bad, device: str) -> Outcome:
    """The call in plain torch."""
    assert call.plain is not None
    torch.manual_seed(0)
    arguments = call.arguments(device)
    arguments[argument] = bad.make(arguments[argument], arguments)
    return _run(call.plain(device), arguments)


# ------------------------------------------------------------------------------------------ results
def _of_result(call: Call, argument: str, bad: Bad, device: str, result: Any) -> str:
    expected = None if call.plain is None else _plain(call, argument, bad, device)
    if bad.means is not None and (expected is None or expected.error is not None):
        torch.manual_seed(0)
        function, arguments = call.make(device), call.arguments(device)
        arguments[argument] = bad.means(arguments[argument])
        expected = _run(function, arguments)
    if expected is None:
        return "taken in silence"
    if expected.error is not None:
        return f"taken in silence; expected {_shown(expected.error)}"
    # torch adds products of sparse tensors in any order on a GPU: its own bits differ by the call.
    alike = close if device == "cuda" and bad.label == "sparse" else same
    return "" if alike(result, expected.result) else "taken, with another result than it stands for"


def close(x: dict[str, Tensor], y: dict[str, Tensor]) -> bool:
    """Whether two results in fp32 are the same up to the order of sums."""
    return x.keys() == y.keys() and all(
        x[key].shape == y[key].shape and torch.allclose(x[key], y[key], rtol=1e-5, atol=1e-5)
        for key in x
    )


def same(x: Any, y: Any) -> bool:
    """Whether two results are the same, tensors bit for bit."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            return False
        return x.is_meta or list(_bytes(x)) == list(_bytes(y))
    if isinstance(x, te_mx.MXTensor) and isinstance(y, te_mx.MXTensor):
        return x.equal(y) if x.device.type != "meta" else x.shape == y.shape
    if isinstance(x, nn.Module) and isinstance(y, nn.Module):
        return _parameters(x) == _parameters(y)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return bool(x == y)


def _parameters(module: nn.Module) -> list[Any]:
    return [(name, p.shape, p.dtype, p.device) for name, p in module.named_parameters()]


def _bytes(value: Any) -> Iterator[Any]:
    """What tells whether something that a caller holds has changed."""
    if isinstance(value, nn.Module):
        yield [(name, type(module)) for name, module in value.named_modules()]
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield name, *_bytes(tensor.detach())
    elif isinstance(value, te_mx.MXTensor):
        yield from _bytes(list(value._parts()))
    elif isinstance(value, dict):
        yield from _bytes(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _bytes(each)
    elif isinstance(value, Tensor) and not nn.parameter.is_lazy(value) and _small(value):
        x = value.detach().as_subclass(Tensor).resolve_neg().resolve_conj().cpu().contiguous()
        yield x.dtype, x.shape, bytes(x.view(-1).view(torch.uint8).numpy())


def _small(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and not x.is_meta and x.numel() < 2**20


# ------------------------------------------------------------------------------------------- errors
def _of_error(error: Exception, word: str) -> str:
    """What is wrong with an error, or an empty string."""
    if isinstance(error, UsersError):
        return ""
    if NO_MEMORY.search(str(error)) and isinstance(error, RuntimeError):
        return ""
    if not isinstance(error, ERRORS) or isinstance(error, UnicodeError):
        return f"an error of a type that says nothing: {_shown(error)}"
    message = str(error)
    if not _is_ours(error) and not LOADING.match(message):
        return f"not te_mx's own error: {_shown(error)}"
    if not re.search(rf"(?<!\w)(?:{word})(?!\w)", message):
        return f"the message does not name {word}: {_shown(error)}"
    if "tensor(" in message:
        return f"the message prints a tensor: {_shown(error)}"
    if len(message) > 1000:
        return f"a message of {len(message)} characters: {_shown(error)}"
    return ""


def _is_ours(error: Exception) -> bool:
    """Whether a `raise` in te_mx raised it, and not an operation on something malformed."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    assert last is not None
    at = frame.f_code.co_code[last.tb_lasti]
    return OURS in Path(frame.f_code.co_filename).parents and dis.opname[at] == "RAISE_VARARGS"


def _shown(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"
