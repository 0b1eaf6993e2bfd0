"""What a quantization_config in config.json says of the tensors of a checkpoint."""

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from te_mx import formats

Ends = tuple[str, ...]  # of the names of codes, scales and, of NVFP4, tensor scales


class Plan(NamedTuple):
    """The format of the weights, endings of the names of their tensors, and patterns of the modules
    that keep their weights. weight_only: inputs are not quantized. experts_only: gpt-oss, whose
    linear layers keep theirs. powers: their fp32 scales are powers of two (DeepSeek-V3.1).
    reciprocal: of tensor scales the files have that. of_tensor: one fp32 scale for all codes, which
    those of blocks repeat. inputs: the name of the scale of inputs that
    files have beside codes; te_mx keeps it for them. layers: the plans of those that have one of
    their own, and then no others are quantized. only: patterns of those that are, if not all."""

    fmt: str
    ends: Ends
    kept: tuple[str, ...] = ()
    weight_only: bool = False
    experts_only: bool = False
    powers: bool = False
    reciprocal: bool = False
    of_tensor: bool = False
    inputs: str = ""
    layers: "dict[str, Plan] | None" = None
    only: tuple[str, ...] = ()

    @property
    def has_bytes(self) -> bool:
        """Whether scales are E8M0 bytes."""
        return formats.get(self.fmt).scaling.scale == "e8m0"

    def of(self, name: str) -> "Plan":
        """The plan of a layer, or of the layers inside of it (experts)."""
        layers = self.layers or {}
        inside = (one for at, one in layers.items() if at.startswith(f"{name}."))
        return layers.get(name) or next(inside, self)

    def leaves_out(self, name: str) -> bool:
        """Whether a module of this name keeps its weights. A pattern is a name, the name of
        something around it or its last part, a regular expression behind "re:" (all of the name,
        from the start), or has wildcards."""
        if self.layers and not any(
            one == name or one.startswith(f"{name}.") for one in self.layers
        ):
            return True
        chosen = not self.only or any(_matches(pattern, name) for pattern in self.only)
        return not chosen or any(_matches(pattern, name) for pattern in self.kept)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


class Style(NamedTuple):
    """How a schema is written. Endings of the names of tensors, by format, and what makes the
    config of (format, weight only, modules that stay). says_inputs: it can say that inputs are not
    quantized. has_head: its readers take output embeddings that are."""

    ends: Mapping[str, Ends]
    make: Callable[[str, bool, list[str]], dict[str, Any]]
    says_inputs: bool = False
    has_head: bool = True


SCALE, INVERSE, PACKED = ("", "_scale"), ("", "_scale_inv"), ("_packed", "_scale")


def width(fmt: str) -> int:
    """Columns of a block of a format, as others say its group_size."""
    return formats.get(fmt).scaling.block[1]


def storage(fmt: formats.Format) -> torch.dtype:
    """The dtype of codes of a format in files."""
    element = fmt.element
    return element.torch_dtype if element.bits == 8 and element.torch_dtype else torch.uint8
