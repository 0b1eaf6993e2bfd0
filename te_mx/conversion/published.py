"""What published recipes leave in high precision: the output head over a vocabulary, and what
chooses the experts of a mixture, as DeepSeek-V3 does (arXiv 2412.19437, section 3.3.1)."""

from __future__ import annotations

import contextlib

from torch import Tensor, nn

_HEADS = {"lm_head", "embed_out"}
_HEADS_OF_EMBEDDINGS = {"output", "head"}  # names of other things too
_GATES = {"gate", "shared_expert_gate"}  # routers where experts are beside them
_WHY = "{}: kept in high precision as published recipes do; pass filter_fn to convert it"


def kept_in(model: nn.Module) -> dict[int, str]:
    """Why an nn.Linear stays where no filter_fn was asked, by id."""
    found: dict[int, str] = {}
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    heads = []
    for owner in model.modules():
        if callable(find := getattr(owner, "get_output_embeddings", None)):
            with contextlib.suppress(NotImplementedError):
                heads.append(find())
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is not nn.Linear:  # others stay anyway, or are te_mx's, which was asked for
            continue
        head = any(module is one for one in heads)
        if what := "head" if head else _what(model, name, module, tables):
            found.setdefault(id(module), _WHY.format(what))
    return found


def _what(model: nn.Module, name: str, layer: nn.Linear, tables: list[Tensor]) -> str:
    """ "head", "router", or an empty string."""
    path = name.split(".")
    if not _HEADS.isdisjoint(path) or any(layer.weight is table for table in tables):
        return "head"
    if path[-1] in _HEADS_OF_EMBEDDINGS and any(layer.weight.shape == t.shape for t in tables):
        return "head"
    for index, part in enumerate(path):
        if part in _GATES:
            above = model.get_submodule(".".join(path[:index]))
            if any("expert" in child and child != part for child, _ in above.named_children()):
                return "router"
    return "router" if "router" in path else ""
