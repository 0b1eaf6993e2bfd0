"""Rotary position embeddings (Su et al., "RoFormer"), with Transformer Engine's names.

Angles are fp32 [s, 1, 1, d]: the frequencies twice, one half after the other, or in pairs under
`interleaved`. ``y = x * cos(angle) + rotated(x) * sin(angle)``."""

from typing import Any

import torch
from torch import Tensor, nn

from te_mx.runtime.arguments import check_flag, check_number, check_size, check_word, shown
from te_mx.te import attention_checks
from te_mx.te.modules import default_device

_OWNER = "te_mx.RotaryPositionEmbedding"


class RotaryPositionEmbedding(nn.Module):
    """The angles of positions: ``module(max_seq_len)`` is fp32 [max_seq_len, 1, 1, d].

    Args:
        dim: width of a head; d is ``int(dim * rotary_percent)``, an even number.
        rotary_percent: more than 0, at most 1.
        seq_len_interpolation_factor: positions are divided by it, together with the next.
        pretrained_max_position_embeddings: sequences longer than it times the factor are divided
            by how much longer than it they are, instead.
        rotary_base: frequencies are ``rotary_base ** (-2 i / d)``.
        interleaved: angles in pairs, for `apply_rotary_pos_emb` with the same argument.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        dim = check_size(f"{_OWNER}: dim", dim, 1)
        percent = check_number(f"{_OWNER}: rotary_percent", rotary_percent)
        if not 0.0 < percent <= 1.0:
            raise ValueError(
                f"{_OWNER}: rotary_percent must be more than 0 and at most 1, got {percent}"
            )
        dim = int(dim * percent)
        if dim % 2 or not 2 <= dim < 1 << 24:
            raise ValueError(
                f"{_OWNER}: dim must be even and less than 2^24, got {dim} at "
                f"rotary_percent={percent}"
            )
        base = check_number(f"{_OWNER}: rotary_base", rotary_base)
        if base <= 0:
            raise ValueError(f"{_OWNER}: rotary_base must be more than 0, got {base}")
        factor: float | None = None
        if seq_len_interpolation_factor is not None:
            name = "seq_len_interpolation_factor"
            factor = check_number(f"{_OWNER}: {name}", seq_len_interpolation_factor)
            if factor <= 0:
                raise ValueError(f"{_OWNER}: {name} must be more than 0, got {factor}")
        self.seq_len_interpolation_factor = factor
        if pretrained_max_position_embeddings is not None:
            name = f"{_OWNER}: pretrained_max_position_embeddings"
            check_size(name, pretrained_max_position_embeddings, 1)
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        check_flag(f"{_OWNER}: interleaved", interleaved)
        self.rotary_base, self.interleaved = base, interleaved
        even = torch.arange(0, dim, 2, dtype=torch.float32, device=default_device())
        self.register_buffer("inv_freq", 1.0 / base ** (even / dim))

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of the positions offset, .., offset + max_seq_len - 1."""
        max_seq_len = check_size(f"{_OWNER}: max_seq_len", max_seq_len)
        offset = check_size(f"{_OWNER}: offset", offset)
        if max_seq_len >= 1 << 31:
            raise ValueError(f"{_OWNER}: max_seq_len must be less than 2^31, got {max_seq_len}")
        at = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        known, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if known is not None and factor is not None:
            at = at / (max_seq_len / known if max_seq_len > known * factor else factor)
        angles = torch.outer(at, self.inv_freq.float())
        twice = torch.stack((angles, angles), -1 if self.interleaved else -2)
        return twice.reshape(max_seq_len, 1, 1, -1)

    def extra_repr(self) -> str:
        return f"dim={2 * self.inv_freq.numel()}, rotary_base={self.rotary_base}"


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    **transformer_engine: Any,
) -> Tensor:
    """Turn the heads of t by the angles of their positions.

    Args:
        t: [s, b, heads, width], [b, s, heads, width] or [tokens, heads, width], as `tensor_format`
            says ("sbhd", "bshd", "thd").
        freqs: angles [s2, 1, 1, d] with s2 >= s and d <= width; what is beyond d stays. For "sbhd"
            and "bshd" also [s2, b, 1, d].
        start_positions: [b], the position of the first token of each sequence; s2 must reach.
        interleaved: pairs (x0, x1), (x2, x3), .. turn; else x_i with x_(i + d/2).
        fused: compute in fp32 and round once, forward and backward, as Transformer Engine's kernel
            does; else cos and sin are rounded to t's dtype first.
        cu_seqlens: [sequences + 1], for "thd": where sequences start. No token may come after.
        transformer_engine: cp_size and cp_rank, at their defaults.

    Returns:
        Of t's shape and dtype, contiguous.

    Raises:
        TypeError, ValueError: an argument of a wrong type, value or shape, by name.
        NotImplementedError: cp_size or cp_rank is set.
    """
    owner = "te_mx.apply_rotary_pos_emb"
    taken = attention_checks.FORWARDS["RotaryPositionEmbedding"]
    attention_checks.refuse(owner, transformer_engine, taken)
    check_word(f"{owner}: tensor_format", tensor_format, attention_checks.FORMATS)
    check_flag(f"{owner}: interleaved", interleaved)
    check_flag(f"{owner}: fused", fused)
    packed = tensor_format == "thd"
    _check(owner, t, freqs, packed)
    given = attention_checks.lengths(owner, start_positions=start_positions, cu_seqlens=cu_seqlens)
    if packed and cu_seqlens is None:
        raise ValueError(f"{owner}: tensor_format='thd' needs cu_seqlens, got None")
    if packed and start_positions is not None:
        raise NotImplementedError(f"{owner}: start_positions do not go with tensor_format='thd'")
    size = t.shape[1] if tensor_format == "bshd" else t.shape[0]
    if packed:
        starts, token = given["cu_seqlens"].to(t.device), torch.arange(size, device=t.device)
        sequence = torch.searchsorted(starts, token, right=True) - 1
        angles = freqs[token - starts.to(token.dtype)[sequence], 0]
    elif start_positions is not None:
        batch = t.shape[0] if tensor_format == "bshd" else t.shape[1]
        if len(start_positions) != batch or freqs.shape[1] != 1:
            raise ValueError(
                f"{owner}: start_positions must be [b] = [{batch}] beside freqs [s, 1, 1, d], got "
                f"[{len(start_positions)}] and {tuple(freqs.shape)}"
            )
        at = start_positions.to(t.device) + torch.arange(size, device=t.device).unsqueeze(1)
        angles = freqs[at, 0]
    else:
        if freqs.shape[0] < size or freqs.shape[1] not in (1, t.shape[tensor_format.index("b")]):
            raise ValueError(
                f"{owner}: freqs must be [s2, 1 or b, 1, d] with s2 of {size} or more, got shape "
                f"{tuple(freqs.shape)} for t {tuple(t.shape)}"
            )
        angles = freqs[:size]
    if tensor_format == "bshd":
        angles = angles.transpose(0, 1)
    dtype = torch.promote_types(t.dtype, torch.float32) if fused else t.dtype
    return _turned(t, angles, interleaved, dtype).contiguous()


def _check(owner: str, t: Any, freqs: Any, packed: bool) -> None:
    attention_checks.tensor(owner, "t", t)
    dims = 3 if packed else 4
    if t.dim() != dims or not attention_checks.is_float(t):
        raise ValueError(
            f"{owner}: t must have {dims} dimensions and a float dtype, got {shown(t)}"
        )
    attention_checks.angles(owner, "freqs", freqs)
    attention_checks.tensor(owner, "freqs", freqs, t.device, "t")
    if freqs.shape[-1] > t.shape[-1]:
        raise ValueError(
            f"{owner}: freqs must have a d of at most the width of t, {t.shape[-1]}, got "
            f"{freqs.shape[-1]}"
        )


def _turned(t: Tensor, angles: Tensor, interleaved: bool, dtype: torch.dtype) -> Tensor:
    d = angles.shape[-1]
    cos, sin = angles.float().cos().to(dtype), angles.float().sin().to(dtype)
    # x is read twice: a cast before that, so that its two gradients are added before they round.
    x, rest = t[..., :d].to(dtype), t[..., d:]
    if interleaved:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    y = (x * cos + rotated * sin).to(t.dtype)
    return torch.cat((y, rest), -1) if rest.shape[-1] else y
