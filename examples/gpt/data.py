"""Text to train on, as bytes: what every machine has, the sources of the running Python's standard
library, or the text files of a folder."""

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
ENDINGS = (".py", ".md", ".rst", ".txt")  # of the files of a folder that is given
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    train: Tensor  # uint8
    val: Tensor  # uint8
    files: int


def _is_validation(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 256 * VALIDATION_SHARE


def files_of(folder: str = "") -> tuple[Path, list[str]]:
    """A folder and the names of its text files, sorted: the .py files of the standard library, or
    those of `folder` with one of ENDINGS.

    Raises FileNotFoundError where one side would have none.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    endings, skip = (ENDINGS, set()) if folder else ((".py",), SKIP)
    names = []
    for inside, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in skip]
        paths = (Path(inside, name) for name in files if name.endswith(endings))
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    names.sort()
    if not {True, False} <= {_is_validation(name) for name in names}:
        raise FileNotFoundError(
            f"--text is a folder with many {', '.join(ENDINGS)} files, {folder} has {len(names)}"
            if folder
            else "the text to train on is the source of Python's standard library, and "
            f"{root} has {len(names)} .py files of it: use a Python that comes with them, or --text"
        )
    return root, names


def load(folder: str = "") -> Text:
    """Every file of files_of; a hash of the name sends a whole file to one side."""
    root, names = files_of(folder)
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
