"""Tokens in the order of their experts and back, of ``transformer_engine.pytorch.permutation``.

In torch's own operations: differentiable, and the host waits for no device but where a size depends
on the data. The row maps are te_mx's own: int32 [tokens, experts] (or [tokens, top_k] of
map_type="index"), the permuted row of each pair, -1 where there is none."""

from typing import Any

import torch
from torch import Tensor

from te_mx.runtime.arguments import check_one_of, check_place, check_size, is_dense, shown

__all__ = [
    "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs",
    "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute",
]  # fmt: skip


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tokens of the first expert, then those of the second, ..

    Args:
        inp: [tokens, hidden].
        routing_map: "mask": int or bool [tokens, experts], not 0 where a token goes to an expert;
            "index": int [tokens, top_k], the experts of each token, 0 or more.
        num_out_tokens: rows of the result, those that are routed; fewer drop the last ones, more
            are zeros. 0 for "index": all.
        max_token_num: a hint, of no effect.
        map_type: "mask" or "index".

    Returns:
        The permuted tokens [num_out_tokens, hidden], and the row map for `moe_unpermute`.

    Raises:
        TypeError, ValueError: an argument of a wrong type, value or shape, by name.
    """
    owner = "moe_permute"
    check_one_of(f"{owner}: map_type", map_type, ("mask", "index"))
    _tokens(owner, inp)
    _integers(owner, "routing_map", routing_map, inp, map_type == "mask")
    rows = check_size(f"{owner}: num_out_tokens", num_out_tokens)
    if type(max_token_num) is not int:
        raise TypeError(f"{owner}: max_token_num must be an int, got {shown(max_token_num)}")
    if map_type == "mask":
        where = _mask_rows(routing_map)
    else:
        if rows == 0:
            rows = routing_map.numel()
        order = routing_map.reshape(-1).argsort(stable=True)
        where = torch.empty_like(order)
        where[order] = torch.arange(len(order), device=order.device)
        where = where.view(routing_map.shape)
    where = _within(owner, where, rows)
    return _gathered(inp, where, rows), where.int()


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_permute` with map_type="mask", and probabilities [tokens, experts] in the same order.

    Returns:
        Permuted tokens, permuted probabilities [num_out_tokens], the row map.

    Raises:
        TypeError, ValueError: an argument of a wrong type, value or shape, by name.
    """
    owner = "moe_permute_with_probs"
    _tokens(owner, inp)
    _integers(owner, "routing_map", routing_map, inp, True)
    _floats(owner, "probs", probs, routing_map.shape, inp)
    rows = check_size(f"{owner}: num_out_tokens", num_out_tokens)
    where = _within(owner, _mask_rows(routing_map), rows)
    return _gathered(inp, where, rows), _gathered_pairs(probs, where, rows), where.int()


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """`moe_permute_with_probs` with rows of zeros behind each expert's, up to multiples of
    `align_size`. te_mx needs none of them: its experts take any number of tokens.

    Args:
        tokens_per_expert: int [experts], how many tokens each expert has.

    Returns:
        Permuted tokens, permuted probabilities, the row map, what lies between the experts and goes
        to `moe_unpermute` as pad_offsets (None: nothing), and the padded tokens of each expert. The
        host waits for the sizes.

    Raises:
        TypeError, ValueError: an argument of a wrong type, value or shape, by name.
    """
    owner = "moe_permute_and_pad_with_probs"
    _tokens(owner, inp)
    _integers(owner, "routing_map", routing_map, inp, True)
    _floats(owner, "probs", probs, routing_map.shape, inp)
    align = check_size(f"{owner}: align_size", align_size, 1)
    if align >= 1 << 31:
        raise ValueError(f"{owner}: align_size must be less than 2^31, got {align}")
    experts = routing_map.shape[1]
    _vector(owner, "tokens_per_expert", tokens_per_expert, experts)
    counts = tokens_per_expert.to(inp.device).long()
    padded = (counts + align - 1) // align * align
    rows = int(padded.sum())
    before = (padded - counts).cumsum(0) - (padded - counts)
    offsets = None if torch.equal(padded, counts) else before
    where = _mask_rows(routing_map)
    shifted = _within(owner, torch.where(where >= 0, where + before, -1), rows)
    tokens, picked = _gathered(inp, shifted, rows), _gathered_pairs(probs, shifted, rows)
    return tokens, picked, where.int(), offsets, padded


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: Any = None,
    map_type: str = "mask", probs: Tensor | None = None, pad_offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum of each token's rows, in fp32 and rounded once.

    Args:
        inp: permuted rows [rows, hidden].
        row_id_map: of the call that permuted them.
        merging_probs: weights of the sum, of the shape of `row_id_map`; None: 1. `probs` is its
            older name.
        restore_shape: (tokens, hidden), which the row map says as well.
        map_type: as of the call that permuted them.
        pad_offsets: of `moe_permute_and_pad_with_probs`.

    Returns:
        [tokens, hidden], of inp's dtype.

    Raises:
        TypeError, ValueError: an argument of a wrong type, value or shape, by name, or both names
            of the probabilities.
    """
    owner = "moe_unpermute"
    check_one_of(f"{owner}: map_type", map_type, ("mask", "index"))
    _tokens(owner, inp)
    if not isinstance(row_id_map, Tensor) or row_id_map.dtype != torch.int32:
        raise TypeError(
            f"{owner}: row_id_map must be what moe_permute returned, got {shown(row_id_map)}"
        )
    _integers(owner, "row_id_map", row_id_map, None, False)
    check_place(f"{owner}: row_id_map", row_id_map, inp.device)
    if probs is not None and merging_probs is not None:
        raise ValueError(f"{owner}: probs is the older name of merging_probs, give one")
    name, weights = ("merging_probs", merging_probs) if probs is None else ("probs", probs)
    if weights is not None:
        _floats(owner, name, weights, row_id_map.shape, inp)
    tokens, hidden = row_id_map.shape[0], inp.shape[1]
    if restore_shape is not None and (
        not isinstance(restore_shape, tuple | list) or tuple(restore_shape) != (tokens, hidden)
    ):
        raise ValueError(
            f"{owner}: restore_shape must be (tokens, hidden) = {(tokens, hidden)}, got "
            f"{shown(restore_shape)}"
        )
    where = row_id_map.long()
    if pad_offsets is not None:
        _vector(owner, "pad_offsets", pad_offsets, row_id_map.shape[1])
        where = torch.where(where >= 0, where + pad_offsets.to(where), -1)
    columns, pair = where.shape[1], _pairs(torch.where(where < len(inp), where, -1), len(inp))
    values = inp.float()
    if weights is not None:
        flat = weights.float().reshape(-1)
        # A row that is no token's has no probability either.
        values = values * torch.cat((flat, flat.new_zeros(1)))[pair].unsqueeze(1)
    token = torch.where(pair >= 0, pair // max(columns, 1), tokens)
    out = values.new_zeros(tokens + 1, hidden).index_add(0, token, values)
    return out[:tokens].to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Runs of rows in another order.

    Args:
        inp: [rows, hidden].
        split_sizes: int [chunks], rows of each run; together all rows.
        sorted_index: int [chunks], the runs in their new order.

    Returns:
        [rows, hidden].

    Raises:
        TypeError, ValueError: an argument of a wrong type or shape, by name.
    """
    order = _chunk_order("moe_sort_chunks_by_index", inp, split_sizes, sorted_index)
    return inp.index_select(0, order)


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """`moe_sort_chunks_by_index` of rows and of their probabilities [rows].

    Raises:
        TypeError, ValueError: an argument of a wrong type or shape, by name.
    """
    owner = "moe_sort_chunks_by_index_with_probs"
    order = _chunk_order(owner, inp, split_sizes, sorted_index)
    _floats(owner, "probs", probs, inp.shape[:1], inp)
    return inp.index_select(0, order), probs.index_select(0, order)


# ------------------------------------------------------------------------------------------- steps
def _mask_rows(mask: Tensor) -> Tensor:
    """The row of each pair [tokens, experts] where the mask is not 0, by experts, then tokens."""
    on = (mask != 0).T
    return torch.where(on, on.reshape(-1).cumsum(0).view(on.shape) - 1, -1).T


def _within(owner: str, where: Tensor, rows: int) -> Tensor:
    """The row of each pair, -1 for those beyond `rows`."""
    if rows >= 1 << 40:
        raise ValueError(f"{owner}: num_out_tokens={rows} rows are more than memory holds")
    return torch.where(where < rows, where, -1)


def _pairs(where: Tensor, rows: int) -> Tensor:
    """The pair that each of `rows` rows holds, -1 for none."""
    row = torch.where(where >= 0, where, rows).reshape(-1)  # the last one is nowhere
    pair = torch.full((rows + 1,), -1, device=where.device, dtype=torch.long)
    pair[row] = torch.arange(len(row), device=where.device)
    return pair[:rows]


def _gathered(inp: Tensor, where: Tensor, rows: int) -> Tensor:
    if not where.numel():
        return torch.cat((inp[:0], inp.new_zeros(rows, inp.shape[1])))  # with inp's history
    pair = _pairs(where, rows)
    taken = inp.index_select(0, pair.clamp(min=0) // where.shape[1])
    return torch.where((pair >= 0).unsqueeze(1), taken, 0)


def _gathered_pairs(values: Tensor, where: Tensor, rows: int) -> Tensor:
    if not where.numel():
        return torch.cat((values.reshape(-1)[:0], values.new_zeros(rows)))
    pair = _pairs(where, rows)
    return torch.where(pair >= 0, values.reshape(-1)[pair.clamp(min=0)], 0)


def _chunk_order(owner: str, inp: Any, split_sizes: Any, sorted_index: Any) -> Tensor:
    """The old place of each new row."""
    _tokens(owner, inp)
    _vector(owner, "split_sizes", split_sizes, None)
    _vector(owner, "sorted_index", sorted_index, len(split_sizes))
    sizes, index = split_sizes.to(inp.device).long(), sorted_index.to(inp.device).long()
    if inp.device.type == "cpu" and int(sizes.sum()) != len(inp):
        raise ValueError(
            f"{owner}: split_sizes must add up to the {len(inp)} rows of inp, got "
            f"{int(sizes.sum())}"
        )
    new = sizes[index]
    shift = (sizes.cumsum(0) - sizes)[index] - (new.cumsum(0) - new)
    moved = torch.repeat_interleave(shift, new, output_size=len(inp))
    return torch.arange(len(inp), device=inp.device) + moved


# ------------------------------------------------------------------------------------------ checks
def _floats(owner: str, name: str, value: Any, shape: Any = None, inp: Any = None) -> None:
    """Raise unless a value is a dense tensor of floats, of a shape and beside inp if given."""
    if not isinstance(value, Tensor) or not is_dense(value) or not value.is_floating_point():
        raise TypeError(f"{owner}: {name} must be a dense tensor of floats, got {shown(value)}")
    if shape is not None and (value.shape != shape or value.device != inp.device):
        raise ValueError(
            f"{owner}: {name} must be {list(shape)} on {inp.device}, got {shown(value)}"
        )


def _tokens(owner: str, inp: Any) -> None:
    _floats(owner, "inp", inp)
    if inp.dim() != 2:
        raise ValueError(f"{owner}: inp must be [tokens, hidden], got {shown(inp)}")


def _integers(owner: str, name: str, value: Any, inp: Tensor | None, mask: bool) -> None:
    kinds = (torch.int32, torch.int64) + ((torch.bool, torch.uint8, torch.int8) if mask else ())
    if not isinstance(value, Tensor) or not is_dense(value) or value.dtype not in kinds:
        raise TypeError(
            f"{owner}: {name} must be a dense tensor of ints{' or bools' if mask else ''}, got "
            f"{shown(value)}"
        )
    if value.dim() != 2 or (inp is not None and len(value) != len(inp)):
        tokens = "tokens" if inp is None else len(inp)
        raise ValueError(f"{owner}: {name} must be [{tokens}, ..], got {shown(value)}")
    if inp is not None:
        check_place(f"{owner}: {name}", value, inp.device)


def _vector(owner: str, name: str, value: Any, size: int | None) -> None:
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{owner}: {name} must be a tensor of ints, got {shown(value)}")
    if value.dim() != 1 or (size is not None and len(value) != size):
        raise ValueError(
            f"{owner}: {name} must be [{'chunks' if size is None else size}], got {shown(value)}"
        )
