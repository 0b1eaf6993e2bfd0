"""Sizes to tune: MxNxK as the user wrote them, or those of a model's linear layers and experts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from te_mx.dispatch.tuned.table import MOST_ROWS
from te_mx.dispatch.tuned.tables import FOLDER

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
