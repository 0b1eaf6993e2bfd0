"""te_mx puts a property in the place of torch's `Tensor.data`, which notes the memory that it
reaches: it must do what torch's does, and remember little."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from te_mx.runtime import exposed, replays
from te_mx.runtime.exposed import is_exposed

TORCHS = torch._C.TensorBase.data


class Plain(Tensor):
    """A subclass that does nothing."""


class Watched(Tensor):
    """A subclass that notes what it is asked for."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


# ------------------------------------------------------------------------------------ what is noted
def alias(x: Tensor) -> None:
    x.data  # noqa: B018


def of_a_view(x: Tensor) -> None:
    x[1:].data  # noqa: B018


def of_an_alias(x: Tensor) -> None:
    x.detach().data  # noqa: B018


def of_a_parameter(x: Tensor) -> None:
    nn.Parameter(x).data  # noqa: B018


def of_a_subclass(x: Tensor) -> None:
    x.as_subclass(Plain).data  # noqa: B018


def put_into_another(x: Tensor) -> None:
    torch.empty(0).data = x


def getattr_of_it(x: Tensor) -> None:
    getattr(x, "data")  # noqa: B009


@pytest.mark.parametrize(
    "reach",
    [alias, of_a_view, of_an_alias, of_a_parameter, of_a_subclass, put_into_another, getattr_of_it],
)
def test_memory_that_was_reached(reach):
    x, other = torch.randn(4, 4), torch.randn(4, 4)
    assert not is_exposed(x)
    reach(x)
    assert is_exposed(x) and is_exposed(x[2:]) and is_exposed(x.detach())
    assert not is_exposed(other) and not is_exposed(x.clone())


def test_a_tensor_that_got_other_memory():
    x, other = torch.randn(3), torch.randn(3)
    x.data = other
    assert is_exposed(x) and is_exposed(other)
    other.add_(1)  # changes x, and no version of it
    assert torch.equal(x, other) and x._version == 0


def test_an_address_that_is_used_again_is_not_exposed():
    for _ in range(100):
        x = torch.randn(1000)
        assert not is_exposed(x)
        x.data  # noqa: B018
        del x


def test_little_is_remembered(monkeypatch):
    """Of memory that is gone, nothing in the long run, and never the memory itself."""
    monkeypatch.setattr(exposed, "_noted", {})
    monkeypatch.setattr(exposed, "_limit", 64)
    monkeypatch.setattr(exposed, "_MANY", 64)
    alive = [torch.randn(2) for _ in range(50)]
    for x in alive:
        x.data  # noqa: B018
    for _ in range(1000):
        torch.randn(2).data  # noqa: B018
        assert len(exposed._noted) <= 2 * 64
    assert all(map(is_exposed, alive))
    held = torch.randn(1 << 20)
    storage = held.untyped_storage()._weak_ref()
    held.data  # noqa: B018
    del held
    gc.collect()
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


# ----------------------------------------------------------------------------- the meaning of torch
def test_the_getter_gives_what_torch_gives():
    x = torch.randn(3, 4, requires_grad=True)
    y = (x * 2).t()
    for t in (x, y, nn.Parameter(torch.randn(2)), torch.randn(2).as_subclass(Plain)):
        mine, theirs = t.data, TORCHS.__get__(t)
        assert type(mine) is type(theirs) and mine is not t
        assert mine.data_ptr() == theirs.data_ptr() and mine.stride() == theirs.stride()
        assert not mine.requires_grad and mine.grad_fn is None
        version = t._version
        mine.add_(1)
        assert t._version == version and torch.equal(t, mine)


def test_the_setter_is_that_of_torch():
    x, other = torch.randn(3, requires_grad=True), torch.randn(5)
    identity = id(x)
    x.data = other
    assert id(x) == identity and x.data_ptr() == other.data_ptr() and x.requires_grad
    for value, error in (
        (1, TypeError),
        (None, TypeError),
        (torch.eye(3).to_sparse(), RuntimeError),
    ):
        with pytest.raises(error):
            x.data = value
        with pytest.raises(error):
            TORCHS.__set__(x, value)
    with pytest.raises(RuntimeError, match="not allowed"):
        del x.data
    with pytest.raises(TypeError):
        torch.Tensor.data.__get__(3)


def test_tensors_without_memory_of_their_own():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(sparse.data.to_dense(), torch.eye(3))
    assert torch.empty(3, device="meta").data.device.type == "meta"
    with FakeTensorMode() as mode:
        fake = torch.empty(3, requires_grad=True)
        assert fake.data.fake_mode is mode and not fake.data.requires_grad
        fake.data = torch.empty(5)
        assert fake.shape == (5,)
    got = torch.func.grad(lambda x: (x * x.data).sum())(torch.full((3,), 2.0))
    assert got.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="under vmap"):  # torch's own
        torch.func.vmap(lambda x: x.data)(torch.ones(2, 3))


def test_subclasses_see_it():
    x = torch.randn(3).as_subclass(Watched)
    Watched.seen.clear()
    assert type(x.data) is Watched
    x.data = torch.zeros(3)
    assert Watched.seen == [torch.Tensor.data.__get__, torch.Tensor.data.__set__]
    assert torch.equal(torch.Tensor(x), torch.zeros(3))


def test_it_is_overridable_under_its_name():
    get = torch.Tensor.data.__get__
    assert torch.overrides.is_tensor_method_or_property(get)
    assert torch.overrides.resolve_name(get) == "torch.Tensor.data.__get__"
    assert get in torch.overrides.get_testing_overrides()


def test_function_modes_see_it():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3)
    with Mode():
        got = x.data
    assert torch.Tensor.data.__get__ in seen and got.data_ptr() == x.data_ptr()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_compiled_and_scripted_code():
    def read(x: Tensor) -> Tensor:
        return x.data * 2

    def write(x: Tensor, other: Tensor) -> Tensor:
        x.data = other
        return x * 2

    x = torch.randn(4, requires_grad=True)
    torch._dynamo.reset()
    got = torch.compile(read, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, x.detach() * 2) and not got.requires_grad
    y, other = torch.randn(4), torch.randn(4)
    got = torch.compile(write, fullgraph=True, backend="aot_eager")(y, other)
    assert torch.equal(got, other * 2) and torch.equal(y, other)
    torch._dynamo.reset()
    assert torch.equal(torch.jit.script(read)(x), x.detach() * 2)


def test_copies_and_pickles():
    x = nn.Parameter(torch.randn(3))
    assert torch.equal(copy.deepcopy(x), x)
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)


def test_it_is_put_there_once():
    mine, replay = torch.Tensor.__dict__["data"], torch.cuda.CUDAGraph.replay
    exposed.install()
    replays.install()
    assert torch.Tensor.__dict__["data"] is mine and torch.cuda.CUDAGraph.replay is replay


# -------------------------------------------------------------------------- replays of CUDA graphs
def test_replays_are_counted(monkeypatch):
    ran = []

    class Graph:
        def replay(self):
            """Run it."""
            ran.append(self)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    replays.install()
    replays.install()
    graph, before = Graph(), replays.count()
    graph.replay()
    graph.replay()
    assert ran == [graph] * 2 and replays.count() == before + 2
    assert Graph.replay.__doc__ == "Run it."
