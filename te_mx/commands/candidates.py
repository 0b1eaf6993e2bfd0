"""The ways to run a frozen layer: every kernel that takes what it asks for, in every configuration.

A layer may ask for several ops: first one that does it all in a call, if there is such a kernel,
else the ops of its steps. The tables' word for the second is "steps"."""

import gc
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import te_mx
from te_mx.dispatch import registry
from te_mx.dispatch.kernels import Kernel, kernels
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.run import REFERENCE
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.tables import DEFAULT, FOLDER, MOST_ROWS, STEPS, Key, Row, key_of, served
from te_mx.recipe import BlockScaling

ROUTINGS = 8  # in turns: other tokens choose other experts
BLOCK = 16
_WRONG = 0.01  # of the norm of a result: far above what rounding to bf16 makes of sums


class Candidate(NamedTuple):
    """What a row of a table may say."""

    use: str
    configuration: str = ""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, self))

    def row(self, key: Key) -> Row:
        """A row that says so, of no time yet."""
        return Row(key, self.use, self.configuration, 1.0, DEFAULT, 1.0)


class Layers:
    """Frozen layers of one size, as many as no cache holds: with their parameters (kept), and with
    codes alone (plain)."""

    def __init__(self, shape: "Shape", recipe: BlockScaling, device: torch.device) -> None:
        n, k = shape.n, shape.k
        self.recipe, self.device = recipe, device
        generator = torch.Generator(device).manual_seed(0)
        self._weight = torch.randn((n, k), generator=generator, device=device).bfloat16()
        self._sets = sets_for(n * k * te_mx.formats.get(recipe.w).element.bits // 8, device)
        self.kept = [self._layer(False) for _ in range(self._sets)]

    @cached_property
    def plain(self) -> list[te_mx.Linear]:
        """Made when somebody beats the default: few need them."""
        return [self._layer(True) for _ in range(self._sets)]

    def _layer(self, drop_master: bool) -> te_mx.Linear:
        weight = self._weight
        n, k = weight.shape
        layer = te_mx.Linear(k, n, bias=False, dtype=torch.bfloat16, device="meta")
        # Several layers may share one parameter: what they make of it is their own.
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        te_mx.freeze_weights(layer, drop_master, recipe=self.recipe)
        return layer


class Experts:
    """Weights of experts of one size, as many as no cache holds, and routings of tokens to them;
    calls take turns with both."""

    def __init__(self, shape: "Shape", recipe: BlockScaling, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self._shape = shape
        n, k, experts, _ = shape.weights
        bits = te_mx.formats.get(recipe.w).element.bits
        # Of a call that reads few of many experts, the next one reads others.
        count = sets_for(experts * n * k * bits // 8, device)
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.randn((n, k), generator=generator, device=device).bfloat16()
        one = te_mx.quantize(drawn, fmt=recipe.w, scale_rule=recipe.scale_rule)
        parts = one.rowwise_data, one.rowwise_scale
        self._weights = []
        for _ in range(count):  # every expert has the same numbers, in memory of its own
            codes, scales = (part.repeat(experts, 1) for part in parts if part is not None)
            self._weights.append(
                te_mx.MXTensor((experts, n, k), recipe.w, rowwise_data=codes, rowwise_scale=scales)
            )
        self._lists: dict[int, list[te_mx.moe.AlignedBlocks]] = {}
        calls = max(count, ROUTINGS)
        self.kept = self.plain = [partial(self._run, i) for i in range(calls)]

    def _run(self, i: int, x: Tensor) -> Tensor:
        return te_mx.moe.grouped_gemm(
            x, self._weights[i % len(self._weights)], *self._routed(len(x))[i % ROUTINGS],
            top_k=self._shape.top_k, block_m=BLOCK, recipe=self.recipe,
        )  # fmt: skip

    def _routed(self, tokens: int) -> list[te_mx.moe.AlignedBlocks]:
        """The lists of some routings of so many tokens, drawn evenly."""
        if tokens not in self._lists:
            experts, top_k = self._shape.experts, self._shape.top_k
            generator = torch.Generator(self.device).manual_seed(tokens)
            draw = torch.rand((ROUTINGS, tokens, experts), generator=generator, device=self.device)
            self._lists[tokens] = [
                te_mx.moe.align_block_size(ids, BLOCK, experts)
                for ids in draw.topk(top_k, dim=-1).indices
            ]
        return self._lists[tokens]


class Weights(Protocol):
    """What a contest is about: layers called with x, as they are kept and on plain codes."""

    recipe: BlockScaling
    device: torch.device

    @property
    def kept(self) -> Sequence[Callable[[Tensor], Tensor]]: ...

    @property
    def plain(self) -> Sequence[Callable[[Tensor], Tensor]]: ...


class Contest:
    """One size, on layers as they are kept or on plain codes."""

    def __init__(self, shape: "Shape", layers: Weights, plain: bool = False) -> None:
        self.shape, self.recipe = shape, layers.recipe
        self.layers = layers.plain if plain else layers.kept
        device = layers.device
        generator = torch.Generator(device).manual_seed(1)
        self.x = torch.randn((shape.m, shape.k), generator=generator, device=device).bfloat16()

    def __call__(self, i: int) -> Tensor:
        """The result of a layer, under the choices that hold now."""
        return self.layers[i % len(self.layers)](self.x)

    def trial(self, rows: Iterable[Row]) -> "Trial":
        """The layer under the choices of these rows, and no others."""
        chosen = list(rows)

        def prepare() -> None:
            tables.try_only(chosen)
            registry.forget()

        return Trial(prepare, self)

    def problems(self) -> list[Problem]:
        """What the layer asks for, where there is a choice: the op in one call first, if there is
        one, and last an op that must have a kernel."""
        found: list[Problem] = []
        while True:
            rows = [Candidate(STEPS).row(key_of(problem)) for problem in found]
            trial = self.trial(rows)
            trial.prepare()
            with tables.watched() as asked:
                trial.call(0)
            known = [key_of(problem) for problem in found]
            fresh = [p for p in asked if self._is_mine(p) and key_of(p) not in known]
            if not fresh:
                return found
            # A look-up does not say whether K may be cut.
            found.append(fresh[0]._replace(split_k=self.recipe.split_k))
            if not is_optional(fresh[0]):
                return found

    def _is_mine(self, p: Problem) -> bool:
        if (p.m, p.n, p.k) != self.shape[:3]:
            return False
        usual = registry.default_of(p)
        # One that does not multiply by itself follows the choice for the op that does.
        return usual is not None and usual.multiplies

    def wrong(
        self, candidates: list[Candidate], row_of: Callable[[Candidate], list[Row]]
    ) -> dict[str, float]:
        """How far results are off those of the first candidate, by the names of the wrong ones."""
        results = {}
        for one in candidates:
            trial = self.trial(row_of(one))
            trial.prepare()
            results[one.name] = trial.call(0).double()
        expected = results[candidates[0].name]
        errors = {
            name: ((got - expected).norm() / expected.norm()).item()
            for name, got in results.items()
        }
        return {name: error for name, error in errors.items() if not error < _WRONG}


def is_optional(problem: Problem) -> bool:
    """Whether an op need not have a kernel, because others do the same in steps."""
    return kernels(problem.op)[-1].name != REFERENCE


def candidates_of(problem: Problem, any_bits: bool = False) -> list[Candidate]:
    """The ways to run a problem, the default first: those that leave the bits of every call as they
    are that a row of this m may serve, or all of them."""
    usual = registry.default_of(problem)
    assert usual is not None
    able = [
        kernel for kernel in kernels(problem.op)
        if kernel.name not in (usual.name, REFERENCE) and kernel.declines(problem) is None
    ]  # fmt: skip
    found = [
        Candidate(kernel.name, how)
        for kernel in (usual, *able)
        for how in ("", *kernel.configurations(problem))
        if any_bits or keeps_bits(kernel.configured(how) if how else kernel, problem)
    ]
    return [*found, Candidate(STEPS)] if any_bits and is_optional(problem) else found


def keeps_bits(kernel: Kernel, problem: Problem) -> bool:
    """Whether a row that names a kernel, configured, changes no bits: at all numbers of rows that
    it serves, whether k may be cut or not."""
    for m in served(problem.m):
        for split_k in (False, True):
            one = problem._replace(m=m, split_k=split_k)
            usual = registry.default_of(one)
            ignored = usual is None or kernel.declines(one) is not None
            if not ignored and kernel.sums(one) != usual.sums(one):  # type: ignore[union-attr]
                return False
    return True


def leave() -> None:
    """Back to the tables of this process."""
    tables.try_only(None)
    registry.forget()
    gc.collect()


# ------------------------------------------------------------------------------------------ shapes
# Sizes to tune: MxNxK as the user wrote them, or those of a model's linear layers and experts.
SHAPES = FOLDER / "shapes"  # of the models that te_mx knows by name
TOKENS = (1, 2, 4, 8, 16, 32, 64)


class Shape(NamedTuple):
    """A product of m tokens: from k features to n. names: what it is in models. experts, top_k: of
    a mixture, in which a token is sent to top_k experts of this size; else 0."""

    m: int
    n: int
    k: int
    names: tuple[str, ...] = ()
    experts: int = 0
    top_k: int = 0

    @property
    def weights(self) -> tuple[int, int, int, int]:
        """What the same weights serve."""
        return self.n, self.k, self.experts, self.top_k

    def __str__(self) -> str:
        size = f"{self.m}x{self.n}x{self.k}"
        return f"{size}, {self.top_k} of {self.experts}" if self.experts else size


# A size of weights: n, k, experts, top_k.
_Weights = tuple[int, int, int, int]


def model_names() -> list[str]:
    """The models whose shapes come with te_mx."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def parse_shape(text: str) -> tuple[int, int, int]:
    """(m, n, k) of "16x6144x2048". Raises ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text.strip())
    if found is None:
        raise ValueError(
            f"a shape is MxNxK (tokens, out features, in features), such as 16x6144x2048, "
            f"got {text!r}"
        )
    m, n, k = map(int, found.groups())
    return m, n, k


def parse_tokens(text: str) -> tuple[int, ...]:
    """The numbers of "1,2,4". Raises ValueError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= MOST_ROWS for word in words):
        raise ValueError(f"tokens are numbers from 1 to {MOST_ROWS}, such as 1,16,64, got {text!r}")
    return tuple(map(int, words))


def from_text(text: str, experts: int = 0, top_k: int = 0) -> list[Shape]:
    """Those of "1x6144x2048,16x6144x2048", of experts where they are counted."""
    if (experts > 0) != (top_k > 0) or min(experts, top_k) < 0 or top_k > experts:
        raise ValueError(
            "--experts and --top-k go together, with at most so many experts a token as there "
            f"are, got {experts} and {top_k}"
        )
    shapes = [Shape(*parse_shape(word), experts=experts, top_k=top_k) for word in text.split(",")]
    for one in shapes:
        if one.m > MOST_ROWS:
            raise ValueError(f"tables hold up to {MOST_ROWS} tokens, got {one.m}")
    return shapes


def of_models(names: Iterable[str], tokens: Iterable[int]) -> list[Shape]:
    """The projections of models at each number of tokens, each once."""
    found: dict[_Weights, list[str]] = {}
    for name in names:
        for size, label in _projections(name):
            found.setdefault(size, []).append(label)
    return [
        Shape(m, n, k, tuple(labels), experts, top_k)
        for (n, k, experts, top_k), labels in found.items()
        for m in tokens
    ]


def _projections(name: str) -> list[tuple[_Weights, str]]:
    """(the size, what it is) of a model: a name, a file of shapes, or a config of Transformers."""
    path = SHAPES / f"{name}.json" if name in model_names() else Path(name)
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
        parts, parallel = _read(model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a model is one of {', '.join(model_names())}, a file like theirs "
            f"({SHAPES}) or the config.json of a Llama-shaped model, experts included; {name}: "
            f"{type(error).__name__} {error}"
        ) from error
    made = []
    for ranks in parallel:
        for label, part in parts.items():
            n, k = part.n, part.k
            if (n if part.split == "n" else k) % ranks:
                raise ValueError(f"{name}: {part.split} of {label} does not divide by {ranks}")
            n, k = (n // ranks, k) if part.split == "n" else (n, k // ranks)
            made.append(((n, k, part.experts, part.top_k), f"{path.stem} {label} tp{ranks}"))
    return made


class _Part(NamedTuple):
    """A projection [n, k] of one GPU alone, and what tensor parallelism splits."""

    n: int
    k: int
    split: str
    experts: int = 0
    top_k: int = 0


def _read(model: dict[str, Any]) -> tuple[dict[str, _Part], list[int]]:
    """({projection: its size}, the numbers of ranks)."""
    if "projections" in model:
        parts = {
            name: _Part(
                int(part["n"]), int(part["k"]), {"n": "n", "k": "k"}[part["split"]],
                int(part.get("experts", 0)), int(part.get("top_k", 0)),
            )
            for name, part in model["projections"].items()
        }  # fmt: skip
        return parts, [int(ranks) for ranks in model.get("tensor_parallel", [1])]
    wide, heads = int(model["hidden_size"]), int(model["num_attention_heads"])
    head = int(model.get("head_dim") or wide // heads)
    pairs = int(model.get("num_key_value_heads") or heads)
    parts = {
        "qkv": _Part((heads + 2 * pairs) * head, wide, "n"),
        "o": _Part(wide, heads * head, "k"),
    }
    experts = next((int(model[name]) for name in _EXPERTS if model.get(name)), 0)
    if experts:
        inner = int(model.get("moe_intermediate_size") or model["intermediate_size"])
        top_k = int(model["num_experts_per_tok"])
        parts["experts gate_up"] = _Part(2 * inner, wide, "n", experts, top_k)
        parts["experts down"] = _Part(wide, inner, "k", experts, top_k)
    else:
        inner = int(model["intermediate_size"])
        parts["gate_up"] = _Part(2 * inner, wide, "n")
        parts["down"] = _Part(wide, inner, "k")
    return parts, [1]


# What configs of Transformers call the number of routed experts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


# ------------------------------------------------------------------------------------------ timing
# Times of a few trials that do the same, on weights that no cache holds. Trials take turns, in a
# new order every round, so that whatever else the machine does meets all of them. On CUDA each is a
# graph of a call for each set of weights; on a CPU they run in a row.
class Trial(NamedTuple):
    """prepare: makes its choices those of the process. call: is given the number of the set of
    weights that it reads."""

    prepare: Callable[[], None]
    call: Callable[[int], Any]


ROUNDS = 7
_LEAST_SECONDS = {"cuda": 1e-3, "cpu": 4e-3}  # of a round of one call
_MOST_SETS = 512
_HOPELESS = 3.0


def cache_bytes(device: torch.device) -> int:
    """The size of the last cache of a device: 32 MB of a CPU that does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 0)
        if unit and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=32 << 20)


def sets_for(nbytes: int, device: torch.device) -> int:
    """How many copies of weights of so many bytes to take turns with: twice the last cache."""
    return max(2, min(_MOST_SETS, -(-2 * cache_bytes(device) // max(nbytes, 1))))


def microseconds(
    trials: dict[str, Trial], sets: int, device: torch.device, rounds: int = ROUNDS
) -> dict[str, float]:
    """The median time of a call of each; of one several times slower than the best, one time."""
    make = _graph if device.type == "cuda" else _loop
    repeat = {name: make(trial, sets, device) for name, trial in trials.items()}
    clock = _event_seconds if device.type == "cuda" else _wall_seconds
    once = {}
    for name, (ready, run) in repeat.items():
        ready()
        once[name] = max(clock(run), 1e-9)
    least = _LEAST_SECONDS[device.type]
    times = {name: max(1, round(least / seconds)) for name, seconds in once.items()}
    found = {name: [seconds / sets] for name, seconds in once.items()}
    order = [name for name in trials if once[name] < _HOPELESS * min(once.values())]
    for name in order:
        found[name].clear()
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            ready, run = repeat[name]
            ready()
            found[name].append(clock(run, times[name]) / times[name] / sets)
    return {name: 1e6 * statistics.median(seconds) for name, seconds in found.items()}


# What goes before a timed run, and the run: a call on every set.
_Repeat = tuple[Callable[[], Any], Callable[[], None]]


def _loop(trial: Trial, sets: int, device: torch.device) -> _Repeat:
    def ready() -> None:
        trial.prepare()
        trial.call(0)

    def run() -> None:
        for i in range(sets):
            trial.call(i)

    return ready, run


def _wall_seconds(run: Callable[[], None], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return time.perf_counter() - start


def _graph(trial: Trial, sets: int, device: torch.device) -> _Repeat:
    """A CUDA graph of the call on every set of weights, one after the other; a replay goes before
    timed ones, so that the GPU has work while they are launched."""
    trial.prepare()
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in (0, 1, *range(sets)):  # twice some, and all that a layer makes at its first
                trial.call(i)
        torch.cuda.current_stream().wait_stream(side)
        gc.collect()  # a graph that is destroyed during a capture ends it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(sets):
                trial.call(i)
    return graph.replay, graph.replay


def _event_seconds(run: Callable[[], None], times: int = 1) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
