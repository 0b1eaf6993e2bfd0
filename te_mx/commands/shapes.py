"""Sizes to tune: MxNxK as the user wrote them, or those of a model's linear layers."""

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
    """A product of m tokens: from k features to n. names: what it is in models."""

    m: int
    n: int
    k: int
    names: tuple[str, ...] = ()


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


def from_text(text: str) -> list[Shape]:
    """Those of "1x6144x2048,16x6144x2048"."""
    shapes = [Shape(*parse_shape(word)) for word in text.split(",")]
    for one in shapes:
        if one.m > MOST_ROWS:
            raise ValueError(f"tables hold up to {MOST_ROWS} tokens, got {one.m}")
    return shapes


def of_models(names: Iterable[str], tokens: Iterable[int]) -> list[Shape]:
    """The projections of models at each number of tokens, each once."""
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        for size, label in _projections(name):
            found.setdefault(size, []).append(label)
    return [Shape(m, n, k, tuple(labels)) for (n, k), labels in found.items() for m in tokens]


def _projections(name: str) -> list[tuple[tuple[int, int], str]]:
    """((n, k), what it is) of a model: a name, a file of shapes, or a config of Transformers."""
    path = SHAPES / f"{name}.json" if name in model_names() else Path(name)
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
        parts, parallel = _read(model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a model is one of {', '.join(model_names())}, a file like theirs "
            f"({SHAPES}) or the config.json of a Llama-shaped model; {name}: "
            f"{type(error).__name__} {error}"
        ) from error
    made = []
    for ranks in parallel:
        for part, (n, k, split) in parts.items():
            if (n if split == "n" else k) % ranks:
                raise ValueError(f"{name}: {split} of {part} does not divide by {ranks}")
            size = (n // ranks, k) if split == "n" else (n, k // ranks)
            made.append((size, f"{path.stem} {part} tp{ranks}"))
    return made


def _read(model: dict[str, Any]) -> tuple[dict[str, tuple[int, int, str]], list[int]]:
    """({projection: (n, k, what tensor parallelism splits)}, the numbers of ranks)."""
    if "projections" in model:
        parts = {
            name: (int(part["n"]), int(part["k"]), {"n": "n", "k": "k"}[part["split"]])
            for name, part in model["projections"].items()
        }
        return parts, [int(ranks) for ranks in model.get("tensor_parallel", [1])]
    wide, inner, heads = (
        int(model[name]) for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head = int(model.get("head_dim") or wide // heads)
    pairs = int(model.get("num_key_value_heads") or heads)
    return {
        "qkv": ((heads + 2 * pairs) * head, wide, "n"),
        "o": (wide, heads * head, "k"),
        "gate_up": (2 * inner, wide, "n"),
        "down": (wide, inner, "k"),
    }, [1]
