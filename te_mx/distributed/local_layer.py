"""A module as one rank sees it: what it has of the parameters, with sizes to match, and everything
else the module's own. The forward of the family runs on it, so a rank does what one process would
do with a smaller layer."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from te_mx import formats
from te_mx.context.region import is_tracing
from te_mx.recipes.settings import Settings


def local_layer(module: Any, held: Mapping[str, Tensor | None], **attributes: Any) -> Any:
    """A copy of a module with other parameters and attributes. It shares what the module keeps, but
    what is written to the copy alone is gone with it."""
    if not is_tracing():
        module._tag_now()
        module._wgrad_queue()
    copy = object.__new__(type(module))  # fully_shard gives its classes another __new__
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_parameters"] = dict(held)
    copy.__dict__["_local"] = module
    copy.__dict__.update(attributes)
    return copy


def call(module: Any, layer: Any, inp: Any, *args: Any) -> Any:
    """The forward of a local layer of a module."""
    return type(module).forward(layer, inp, *args)


def check_whole_blocks(
    label: str, settings: Settings | None, name: str, size: int, ranks: int
) -> None:
    """Raise ValueError where a dimension of a weight, cut for `ranks` ranks, is not cut between
    blocks: scales, and so results, would be others than those of the whole layer."""
    if settings is None or ranks == 1:
        return
    used, piece = (settings.x, settings.w, settings.g), -(-size // ranks)
    block = max(max(formats.get(fmt).scaling.block) for fmt in used)
    if piece % block and piece < size:
        unit = block * ranks
        raise ValueError(
            f"{label}: {ranks} ranks cut {name}={size} into pieces of {piece}, which are no whole "
            f"blocks of {block}: their scales would not be those of the whole layer. Pad {name} to "
            f"{-(-size // unit) * unit}, use other numbers of ranks, or run the layer under "
            "te_mx.autocast(enabled=False)"
        )
