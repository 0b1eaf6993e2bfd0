"""Text that every machine has: the sources of the running Python's standard library, as bytes."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Folders that some distributions leave out or fill themselves: with them the text would differ.
SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    train: Tensor  # uint8
    val: Tensor  # uint8
    files: int


def _is_validation(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 256 * VALIDATION_SHARE


def stdlib_files() -> tuple[Path, list[str]]:
    """The folder of the standard library, and its .py files in the order of names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIP]
        paths = (Path(folder, name) for name in files if name.endswith(".py"))
        names += [path.relative_to(root).as_posix() for path in paths]
    names.sort()
    if not {True, False} <= {_is_validation(name) for name in names}:
        raise FileNotFoundError(
            f"the text to train on is the source of Python's standard library, and {root} has "
            f"{len(names)} .py files of it: use a Python that comes with them"
        )
    return root, names


def load_stdlib() -> Text:
    """Every .py file; a hash of the name sends a whole file to one side."""
    root, names = stdlib_files()
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name in names:
        parts[_is_validation(name)].append((root / name).read_bytes() + b"\0")
    train, val = (
        torch.frombuffer(bytearray(b"".join(parts[k])), dtype=torch.uint8) for k in (False, True)
    )
    return Text(train, val, len(names))


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(context + 1)].long()  # (B, T+1)
    return window[:, :-1], window[:, 1:]


def train_batch(
    text: Text, seed: int, step: int, batch: int, context: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, context] of a step.

    A function of (seed, step) alone, so that a resumed run and a run in another precision see the
    same data.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text.train) - context - 1, (batch,), generator=generator)
    return _windows(text.train, starts, context)


def val_batches(
    text: Text, batches: int, batch: int, context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same evenly spaced windows of the validation files every time."""
    last = len(text.val) - context - 1
    starts = torch.linspace(0, last, batches * batch).long().view(batches, batch)
    for row in starts:
        yield _windows(text.val, row, context)
