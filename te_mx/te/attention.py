"""DotProductAttention of Transformer Engine: scaled_dot_product_attention of torch where that has
what Transformer Engine puts around it, the formula written out where it has not.

Where a process group shares it, each rank has its share of the heads, and needs no other rank."""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from te_mx.nn import checks
from te_mx.nn import invariant as in_order
from te_mx.nn.tensor_parallel import BOTH, COLUMN, ROW, Shared, check_group, shared
from te_mx.runtime.arguments import check_flag, check_number, check_size, check_word
from te_mx.te import attention_checks, attention_masks
from te_mx.te.attention_checks import FORMATS, SOFTMAX_TYPES
from te_mx.te.attention_masks import Padding, Rule
from te_mx.te.modules import default_device
from te_mx.weights.state_dict import WithoutExtraState


def shared_layers(
    how: Shared | None, tp_group: Any, tp_size: Any, sequence_parallel: Any
) -> tuple[Shared | None, dict[str, Any], dict[str, Any]]:
    """How a module is shared, and the arguments of the linear layers before attention and after."""
    if how is None:
        return None, {}, {}
    given = {"tp_group": tp_group, "tp_size": tp_size, "sequence_parallel": sequence_parallel}
    return how, given | {"parallel_mode": COLUMN}, given | {"parallel_mode": ROW}


class SharedHeads:
    """Mixin of the modules, beside an nn.Module."""

    tp_size: int = 1
    name: str | None

    def _label(self) -> str:
        label = f"te_mx.{type(self).__name__}"
        return f"{label} {self.name!r}" if self.name else label

    def set_tensor_parallel_group(self: Any, tp_group: Any) -> None:
        """Share the module, and all te_mx modules in it, with the ranks of this process group.

        Raises:
            TypeError: it is no process group, and not None.
            ValueError: it has another number of ranks than the module was built for.
        """
        label = f"te_mx.{type(self).__name__}"
        check_group(label, tp_group)
        if tp_group is not None and tp_group.size() != self.tp_size:
            raise ValueError(
                f"{label}: tp_group has {tp_group.size()} ranks, and the module was built for "
                f"{self.tp_size}; give the constructor its tp_size and set_parallel_mode=True"
            )
        for child in self.children():
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)


class Scores(NamedTuple):
    """What becomes of the scores ``s = q k^T`` of one call:
    ``softmax(cap(scale * s) + bias, where seen)``, then dropout.

    causal: query i sees keys up to i. seen: bool, broadcastable to [b, heads, queries, keys], or
    None for all. bias: likewise, of a float dtype. softcap: ``cap(x) = softcap * tanh(x /
    softcap)``, none where it is 0. sink: one more score for each head [heads], which takes its
    share of the softmax and adds nothing. invariant: the bits of a query depend on its own keys,
    from the first on, and on nothing beside it."""

    scale: float
    causal: bool = False
    seen: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    softcap: float = 0.0
    sink: Tensor | None = None
    bias_inside_cap: bool = False
    invariant: bool = False


def attend(
    q: Tensor, k: Tensor, v: Tensor, how: Scores, with_max: bool = False
) -> tuple[Tensor, Tensor | None]:
    """q [b, heads, queries, d], k [b, groups, keys, d], v [b, groups, keys, e] -> [b, heads,
    queries, e]; a query that sees no key gets zeros. And `with_max` the largest score that is seen
    of each head [heads], in the dtype of the output; -inf where there is none."""
    blind = largest = None
    if how.seen is not None:
        # The softmax of no scores is NaN in some kernels: rows without any key see all of them.
        blind = ~how.seen.any(-1, keepdim=True)
        how = how._replace(seen=how.seen | blind)
    if with_max or how.softcap or how.sink is not None or how.invariant:
        out, s = _written_out(q, k, v, how)
        if with_max:
            s = s.detach() if blind is None else s.detach().masked_fill(blind, float("-inf"))
            largest = s.amax((0, 2, 3)) if s.numel() else s.new_full(s.shape[1:2], float("-inf"))
            largest = largest.to(out.dtype)
    else:
        out = _torchs(q, k, v, how)
    return (out if blind is None else out.masked_fill(blind, 0.0)), largest


def _torchs(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
    mask = how.seen
    if how.bias is not None:
        seen = mask
        if how.causal:
            ones = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            seen = ones.tril() if seen is None else seen & ones.tril()
        mask = how.bias if seen is None else how.bias.masked_fill(~seen, float("-inf"))
        mask = mask.to(q.dtype)
    grouped = k.shape[1] != q.shape[1]
    if grouped and mask is not None:  # kernels that take a mask want as many heads
        k, v, grouped = _spread(k, q), _spread(v, q), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=how.dropout, is_causal=how.causal and mask is None,
        scale=how.scale, enable_gqa=grouped,
    )  # fmt: skip


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Each group once for every head that reads it."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _written_out(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, Tensor]:
    """The formula in fp32, with all scores in memory, and these."""
    k, v = _spread(k, q), _spread(v, q)
    product = in_order.product if how.invariant else torch.matmul
    s = product(q.float(), k.float().transpose(-1, -2)) * how.scale
    if how.bias is not None and how.bias_inside_cap:
        s = s + how.bias.float()
    if how.softcap:
        s = how.softcap * torch.tanh(s / how.softcap)
    if how.bias is not None and not how.bias_inside_cap:
        s = s + how.bias.float()
    if how.causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, float("-inf"))
    if how.seen is not None:
        s = s.masked_fill(~how.seen, float("-inf"))
    sink = None
    if how.sink is not None:
        sink = how.sink.float().view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
    if how.invariant:
        most = s.amax(-1, keepdim=True)
        most = most if sink is None else torch.maximum(most, sink)
        p = torch.exp(s - most)
        total = in_order.sum_of_keys(p)[..., None]
        p = p / (total if sink is None else total + torch.exp(sink - most))
    elif sink is not None:
        p = torch.cat((s, sink), -1).softmax(-1)[..., :-1]
    else:
        p = s.softmax(-1)
    p = F.dropout(p, how.dropout) if how.dropout else p
    return product(p, v.float()).to(v.dtype), s


_OWNER = "te_mx.DotProductAttention"


class DotProductAttention(SharedHeads, WithoutExtraState, nn.Module):
    """``softmax(scale * q k^T + bias, where seen) v`` for each head, in the dtype of q, k and v,
    inside and outside of te_mx.autocast.

    Args:
        num_attention_heads: heads of q.
        kv_channels: width of a head, or a pair: that of q and k, that of v.
        num_gqa_groups: heads of k and v, a divisor of `num_attention_heads`; None: as many.
        attention_dropout: of the softmax, in training.
        qkv_format: "sbhd", "bshd" or "thd" (sequences one after the other: one attention each, and
            the host waits for their lengths).
        attn_mask_type: "no_mask", "causal", "padding", "padding_causal", "arbitrary", and
            "causal_bottom_right", "padding_causal_bottom_right", whose last query sees all.
        window_size: (left, right): query i sees keys ``i - left <= j <= i + right``, -1: all.
        bottom_right_diagonal: whether windows and ALiBi are counted from the last query and the
            last key. None: for masks that are not causal.
        softcap: scores are ``softcap * tanh(scores / softcap)``; 0 for none.
        layer_number: 1 or more, of no effect.
        attention_type: "self" or "cross": whether q and k have one padding mask.
        softmax_scale: None is ``1 / sqrt(width of q)``.
        softmax_type: "vanilla", "off-by-one" (a score of 0 takes part) or "learnable" (one for each
            head does). ``softmax_offset`` [heads] has these: None, zeros, a parameter.
        return_max_logit: also return the largest score that is seen of each head [heads], in the
            dtype of the output.
        invariant: what a query gets has the same bits whatever other queries and sequences are
            beside it, and however many keys that it does not see are behind those that it does
            (docs/invariance.md). In fp32, without tensor cores: slow. The attribute may be set.
        tp_group, tp_size: ranks that share the heads, of which q, k and v hold this rank's.
        sequence_parallel: of no effect: q, k and v have all tokens.
        name: shown in errors.
        transformer_engine: further arguments of Transformer Engine's class, at their defaults.

    With a softcap, a sink or `return_max_logit` all scores are in memory at once, in fp32.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        *,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        invariant: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        name: str | None = None,
        **transformer_engine: Any,
    ) -> None:
        super().__init__()
        taken = attention_checks.CONSTRUCTORS["DotProductAttention"]
        attention_checks.refuse(_OWNER, transformer_engine, taken)
        how = shared(_OWNER, BOTH, tp_group, tp_size, sequence_parallel)
        self.tp_size = 1 if how is None else how.size
        self.num_attention_heads, self.num_gqa_groups = heads, _ = attention_checks.heads(
            _OWNER, num_attention_heads, num_gqa_groups, self.tp_size
        )
        self.kv_channels = attention_checks.widths(_OWNER, kv_channels)
        self.attention_dropout = attention_checks.probability(
            f"{_OWNER}: attention_dropout", attention_dropout
        )
        check_word(f"{_OWNER}: qkv_format", qkv_format, FORMATS)
        check_word(f"{_OWNER}: attention_type", attention_type, ("self", "cross"))
        check_word(f"{_OWNER}: softmax_type", softmax_type, SOFTMAX_TYPES)
        self.qkv_format, self.attention_type = qkv_format, attention_type
        attention_masks.rule(_OWNER, attn_mask_type, window_size, bottom_right_diagonal)
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softcap = check_number(f"{_OWNER}: softcap", softcap, 0)
        if layer_number is not None:
            check_size(f"{_OWNER}: layer_number", layer_number, 1)
        self.layer_number, self.softmax_type = layer_number, softmax_type
        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(self.kv_channels[0] or 1)
        self.softmax_scale = check_number(f"{_OWNER}: softmax_scale", softmax_scale)
        check_flag(f"{_OWNER}: return_max_logit", return_max_logit)
        self.return_max_logit = return_max_logit
        check_flag(f"{_OWNER}: invariant", invariant)
        self.invariant = invariant
        checks.check_name(_OWNER, name)
        self.name = name
        self.softmax_offset: Tensor | None
        made = None if softmax_type == "vanilla" else torch.zeros(heads, device=default_device())
        if softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", made, persistent=False)
        else:
            offset = None if made is None else nn.Parameter(made)
            self.register_parameter("softmax_offset", offset)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        **transformer_engine: Any,
    ) -> Any:
        """q [s, b, heads, d], k [s2, b, groups, d] and v [s2, b, groups, e] -> [s, b, heads * e];
        "bshd" has b before s, "thd" has [tokens, heads, d] -> [tokens, heads * e]. A query that
        sees no key, as those of padding, gets zeros.

        Args:
            attention_mask: bool, True hides. Padding: [b, 1, 1, s], or the masks of q and of k
                where they differ; "arbitrary": broadcastable to [b, heads, s, s2]. Not looked at
                under other mask types.
            cu_seqlens_q, cu_seqlens_kv: int [b + 1], the sums of the lengths so far: for "thd", and
                for padding instead of a mask. None for k: as q.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: where the sequences of "thd" start, if there
                is padding between them.
            attn_mask_type, window_size, bottom_right_diagonal, softcap: instead of the module's.
            checkpoint_core_attention: keep q, k and v for backward, and run this again there.
            core_attention_bias_type: "no_bias", "pre_scale_bias" (before `softmax_scale`),
                "post_scale_bias" or "alibi".
            core_attention_bias: broadcastable to [b, heads, s, s2]; for "thd" s and s2 are those of
                the longest sequences, or more.
            alibi_slopes: [heads] or [b, heads]; None: those of the paper.
            transformer_engine: Transformer Engine's further arguments, at their defaults.

        Raises:
            TypeError, ValueError: an argument of a wrong type, value or shape, or arguments that do
                not go together, by name.
            NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
        """
        owner = self._label()
        if transformer_engine:
            taken = attention_checks.FORWARDS["DotProductAttention"]
            attention_checks.refuse(owner, transformer_engine, taken)
        layout = self.qkv_format if qkv_format is None else qkv_format
        check_word(f"{owner}: qkv_format", layout, FORMATS)
        check_flag(f"{owner}: checkpoint_core_attention", checkpoint_core_attention)
        rule = attention_masks.rule(
            owner,
            self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            self.window_size if window_size is None else window_size,
            self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
        )
        attention_checks.operands(owner, self, layout, query_layer, key_layer, value_layer)
        biased = core_attention_bias_type
        attention_checks.bias(
            owner, biased, core_attention_bias, alibi_slopes, self, query_layer.device
        )
        cap = self.softcap if softcap is None else check_number(f"{owner}: softcap", softcap, 0)
        run = functools.partial(
            self._run, rule=rule, softcap=cap, biased=biased, slopes=alibi_slopes
        )
        lengths = attention_checks.lengths(
            owner, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        )  # fmt: skip
        call: Any
        given: tuple[Any, ...]
        if layout == "thd":
            attention_checks.packed(owner, rule, lengths)
            call = functools.partial(self._packed, run=run, lengths=lengths)
            given = (query_layer, key_layer, value_layer)
        else:
            order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
            given = tuple(x.permute(order) for x in (query_layer, key_layer, value_layer))
            shape = (*given[0].shape[:3], given[1].shape[2])
            if core_attention_bias is not None:
                attention_checks.fits(owner, "core_attention_bias", core_attention_bias, shape)
            device = query_layer.device
            padding, hidden = _masks(owner, rule, attention_mask, lengths, shape, device)
            call = functools.partial(run, padding=padding, hidden=hidden)
        given = (*given, core_attention_bias)
        if checkpoint_core_attention and torch.is_grad_enabled():
            call = functools.partial(checkpoint, call, use_reentrant=False)
        out, largest = call(*given)
        if layout == "sbhd":
            out = out.permute(2, 0, 1, 3)
        elif layout == "bshd":
            out = out.permute(0, 2, 1, 3)
        out = out.flatten(-2)
        return (out, largest) if self.return_max_logit else out

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """The offset of older versions is [1, heads, 1, 1]."""
        key = prefix + "softmax_offset"
        given = state_dict.get(key)
        if isinstance(given, Tensor) and given.dim() == 4 and given.numel() == given.shape[1]:
            state_dict[key] = given.view(-1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, rule: Rule, softcap: float,
        biased: str, slopes: Tensor | None, padding: Padding | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """q [b, heads, s, d], k and v [b, groups, s2, .] -> [b, heads, s, e]."""
        queries, keys, device = q.shape[-2], k.shape[-2], q.device
        causal = rule.is_causal(queries, keys)
        seen = None
        if not causal:
            seen = attention_masks.visible(rule, queries, keys, padding, hidden, device)
        if biased == "pre_scale_bias":
            assert bias is not None
            bias = bias * self.softmax_scale
        elif biased == "alibi":
            if slopes is None:
                slopes = attention_masks.alibi_slopes(self.num_attention_heads, device)
            apart = attention_masks.distance(rule, queries, keys, padding, device)
            bias = attention_masks.alibi(slopes, apart)
        sink = None if self.softmax_offset is None else self.softmax_offset.view(-1)
        how = Scores(
            self.softmax_scale, causal, seen, bias,
            self.attention_dropout if self.training else 0.0, softcap, sink,
            biased == "pre_scale_bias", self.invariant,
        )  # fmt: skip
        return attend(q, k, v, how, self.return_max_logit)

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, run: Any,
        lengths: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """q [tokens, heads, d], k and v [tokens, groups, .] -> [tokens, heads, e]: every sequence
        by itself, zeros between them."""
        owner, slopes, heads = self._label(), run.keywords["slopes"], self.num_attention_heads
        of_q = attention_checks.places(owner, lengths, "q", q.shape[0])
        of_k = attention_checks.places(owner, lengths, "kv", k.shape[0])
        attention_checks.packed_bias(owner, bias, slopes, heads, of_q, of_k)
        alone = functools.partial(run, rule=run.keywords["rule"].of_one_sequence())
        made, done = [], 0
        largest = q.new_full((heads,), float("-inf")) if self.return_max_logit else None
        for i, ((start, stop), (first, last)) in enumerate(zip(of_q, of_k, strict=True)):
            parts = (q[start:stop], k[first:last], v[first:last])
            own = slopes
            if slopes is not None and slopes.dim() == 2 and len(slopes) > 1:
                own = slopes[i : i + 1]
            added = None if bias is None else _of_sequence(bias, i, stop - start, last - first)
            out, most = alone(*(x.transpose(0, 1).unsqueeze(0) for x in parts), added, slopes=own)
            if largest is not None:
                largest = torch.maximum(largest.to(most.dtype), most)
            made += [out.new_zeros(start - done, *out.shape[1::2])] if start > done else []
            made.append(out.squeeze(0).transpose(0, 1))
            done = stop
        width = self.kv_channels[1]
        if not made:  # what a backward pass of no sequences goes to
            made.append(q[:0, :, :1].expand(0, heads, width))
        # torch.autocast has a dtype of its own.
        made.append(made[-1].new_zeros(q.shape[0] - done, heads, width))
        return torch.cat(made), largest

    def extra_repr(self) -> str:
        return (
            f"num_attention_heads={self.num_attention_heads}, kv_channels={self.kv_channels}, "
            f"num_gqa_groups={self.num_gqa_groups}, qkv_format={self.qkv_format!r}, "
            f"attn_mask_type={self.attn_mask_type!r}"
        )


def under(name: str | None, part: str) -> str | None:
    """The name of a part of a module."""
    return None if name is None else f"{name}.{part}"


def _of_sequence(bias: Tensor, index: int, queries: int, keys: int) -> Tensor:
    """What of a bias [sequences, heads, queries, keys], or of one that is broadcast to that, is for
    the scores of one sequence."""
    bias = bias.view((1,) * (4 - bias.dim()) + bias.shape)
    bias = bias[index : index + 1] if bias.shape[0] > 1 else bias
    bias = bias[:, :, :queries] if bias.shape[2] > 1 else bias
    return bias[..., :keys] if bias.shape[3] > 1 else bias


def _masks(
    owner: str, rule: Rule, mask: Any, lengths: dict[str, Tensor], shape: tuple[int, ...],
    device: torch.device,
) -> tuple[Padding | None, Tensor | None]:  # fmt: skip
    """The tokens that are no padding, and the user's own mask, for scores of this shape."""
    batch, _, queries, keys = shape
    if rule.kind == "arbitrary":
        return None, attention_checks.arbitrary(owner, mask, shape, device)
    if not rule.padded:
        return None, None
    if mask is not None:
        return attention_checks.padding(owner, mask, batch, queries, keys, device), None
    attention_checks.sequences(owner, lengths, batch, device)
    of_q = lengths["cu_seqlens_q"]
    of_k = lengths.get("cu_seqlens_kv", of_q)
    return Padding(
        attention_masks.of_lengths(of_q, batch, queries),
        attention_masks.of_lengths(of_k, batch, keys),
    ), None
