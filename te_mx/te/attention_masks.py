"""Which keys each query sees, under Transformer Engine's names for masks, and biases on scores.

Masks of users are Transformer Engine's: True hides a key. In here True lets a query see it."""

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.runtime.arguments import shown

MASK_TYPES = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
    "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip
_SPELLINGS = {"causal_padding": "padding_causal"}


class Rule(NamedTuple):
    """What decides whether query i sees key j, beside tensors: ``i + o - left <= j <= i + o +
    right``, where -1 is no bound and o is 0, or with `bottom_right` keys less queries."""

    kind: str
    left: int
    right: int
    bottom_right: bool

    @property
    def padded(self) -> bool:
        return "padding" in self.kind

    def is_causal(self, queries: int, keys: int) -> bool:
        """Whether the rule is ``j <= i`` and nothing else, the mask that torch knows by name."""
        aligned = not self.bottom_right or queries == keys
        return "causal" in self.kind and not self.padded and self.left < 0 and aligned

    def of_one_sequence(self) -> "Rule":
        """The rule inside a sequence without padding."""
        kind = self.kind.removeprefix("padding").removeprefix("_") or "no_mask"
        return self._replace(kind=kind)


def check_mask_type(name: str, kind: Any) -> str:
    """A mask type in its usual spelling. Raises TypeError or ValueError by the argument's name."""
    if not isinstance(kind, str):
        raise TypeError(f"{name} must be a string, got {shown(kind)}")
    usual = kind.replace(",", "_")
    usual = _SPELLINGS.get(usual, usual)
    if usual not in MASK_TYPES:
        raise ValueError(f"{name} must be one of {', '.join(MASK_TYPES)}, got {shown(kind)}")
    return usual


def check_window(name: str, window: Any) -> tuple[int, int] | None:
    """Raise TypeError or ValueError unless a window is None or two ints of -1 and more."""
    if window is None:
        return None
    pair = isinstance(window, tuple | list) and len(window) == 2
    if not pair or not all(type(size) is int for size in window):
        raise TypeError(f"{name} must be two ints (left, right) or None, got {shown(window)}")
    if min(window) < -1 or max(window) >= 1 << 31:
        raise ValueError(
            f"{name} must be (left, right) of 0 or more, -1 for no bound, got {shown(window)}"
        )
    return window[0], window[1]


def rule(owner: str, kind: Any, window: Any, bottom_right: Any) -> Rule:
    """The rule of three arguments of a call, of which the last two may be None.

    Transformer Engine's reading: a causal mask never looks ahead, a window of (-1, 0) without a
    causal mask is none; both warn where the window says otherwise.

    Raises:
        TypeError, ValueError: by the names attn_mask_type, window_size, bottom_right_diagonal.
    """
    kind = check_mask_type(f"{owner}: attn_mask_type", kind)
    window = check_window(f"{owner}: window_size", window)
    if bottom_right is not None and type(bottom_right) is not bool:
        raise TypeError(
            f"{owner}: bottom_right_diagonal must be a bool or None, got {shown(bottom_right)}"
        )
    causal = "causal" in kind
    if causal:
        if window is not None and window[1] > 0:
            _warn(f"{owner}: window_size={window} looks ahead, attn_mask_type={kind!r} does not")
        window = (-1 if window is None else window[0], 0)
        bottom_right = kind.endswith("bottom_right")
    elif window is None or window == (-1, 0):
        if window is not None:
            _warn(f"{owner}: window_size=(-1, 0) means no window under attn_mask_type={kind!r}")
        window = (-1, -1)
    elif min(window) < 0 and max(window) >= 0:
        raise ValueError(
            f"{owner}: window_size must be (-1, -1) or two sizes of 0 or more under "
            f"attn_mask_type={kind!r}, got {window}"
        )
    left, right = window
    return Rule(kind, left, right, True if bottom_right is None else bottom_right)


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=6)


class Padding(NamedTuple):
    """Which queries [b, queries] and keys [b, keys] are tokens and no padding."""

    queries: Tensor
    keys: Tensor

    def offset(self) -> Tensor:
        """Keys less queries of each sequence, [b, 1, 1, 1]."""
        return (self.keys.sum(1) - self.queries.sum(1)).view(-1, 1, 1, 1)


def of_lengths(cumulative: Tensor, batch: int, size: int) -> Tensor:
    """Tokens [b, size] of sequences whose lengths are the steps of `cumulative` [b + 1]."""
    lengths = cumulative[1 : batch + 1] - cumulative[:batch]
    return torch.arange(size, device=cumulative.device) < lengths.unsqueeze(1)


def distance(
    rule: Rule, queries: int, keys: int, padding: Padding | None, device: torch.device
) -> Tensor:
    """j - i - o of each pair, [1 or b, 1, queries, keys]."""
    i = torch.arange(queries, device=device).view(1, 1, queries, 1)
    j = torch.arange(keys, device=device).view(1, 1, 1, keys)
    if not rule.bottom_right:
        return j - i
    return j - i - (keys - queries if padding is None else padding.offset())


def visible(
    rule: Rule, queries: int, keys: int, padding: Padding | None, hidden: Tensor | None,
    device: torch.device,
) -> Tensor | None:  # fmt: skip
    """Which keys each query sees, broadcastable to [b, heads, queries, keys]; None: all of them.

    hidden: the user's own mask, True where a key is hidden."""
    seen: list[Tensor] = []
    if rule.left >= 0 or rule.right >= 0:
        apart = distance(rule, queries, keys, padding, device)
        if rule.left >= 0:
            seen.append(apart >= -rule.left)
        if rule.right >= 0:
            seen.append(apart <= rule.right)
    if padding is not None:
        seen += [padding.queries[:, None, :, None], padding.keys[:, None, None, :]]
    if hidden is not None:
        seen.append(hidden.logical_not())
    return functools.reduce(torch.bitwise_and, seen) if seen else None


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The slopes of Press et al., "Train Short, Test Long", fp32 [heads]: powers of 2^(-8/n) for
    the largest power of two n <= heads, then every other one of 2^(-4/n)."""
    n = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    rest = [2.0 ** (-4.0 * i / n) for i in range(1, 2 * (heads - n) + 1, 2)]
    return torch.tensor(first + rest, dtype=torch.float32, device=device)


def alibi(slopes: Tensor, apart: Tensor) -> Tensor:
    """``-slope * |i + o - j|``, fp32 [1 or b, heads, queries, keys]; slopes [(b,) heads]."""
    return -slopes.float().reshape(-1, slopes.shape[-1], 1, 1) * apart.abs()
