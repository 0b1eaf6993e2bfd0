"""MultiheadAttention of Transformer Engine: its projections are te_mx layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_mx.nn.arguments import Options
from te_mx.runtime.arguments import check_flag, check_number, check_word
from te_mx.te import attention_checks
from te_mx.te.attention import DotProductAttention, SharedHeads, shared_layers, under
from te_mx.te.modules import LayerNormLinear, Linear
from te_mx.te.norms import L2Normalization, LayerNorm, RMSNorm
from te_mx.te.rotary import apply_rotary_pos_emb

_OWNER = "te_mx.MultiheadAttention"
_NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class MultiheadAttention(SharedHeads, nn.Module):
    """Projections to q, k and v, attention, and the projection back: linear layers that run in
    MXFP8 inside `te_mx.autocast`, around a DotProductAttention.

    Modules and parameters have Transformer Engine's names. Self attention: ``qkv``, or
    ``layernorm_qkv`` with a normalization (`input_layernorm`), with ``query_weight``,
    ``key_weight`` and ``value_weight``, or one ``weight`` under `fuse_qkv_params`. Cross attention:
    ``query_layer`` or ``layernorm_query``, and ``key_value``. Then ``proj``.

    Args:
        hidden_size, num_attention_heads: as of the model.
        kv_channels: width of a head; None: ``hidden_size // num_attention_heads``.
        attention_dropout: of the softmax, in training.
        layernorm_epsilon, zero_centered_gamma, normalization: of the input normalization.
        init_method, output_layer_init_method: called with the weights of the projections before
            and behind attention, instead of a normal one with standard deviation 0.023.
        layer_number: 1 or more, of no effect.
        attn_mask_type, window_size, bottom_right_diagonal, softcap, softmax_type, qkv_format: as of
            DotProductAttention.
        num_gqa_groups: heads of k and v; None: `num_attention_heads`.
        fuse_wgrad_accumulation: as of te_mx.Linear.
        params_dtype, device: of the parameters.
        return_bias: return the bias of ``proj`` instead of adding it.
        return_layernorm_output: also return the normalized input.
        input_layernorm: normalize the input.
        attention_type: "self" or "cross".
        fuse_qkv_params: one weight for q, k and v. Under `qkv_weight_interleaved` its rows are
            those of q, k and v of one group after the other; else all of q, all of k, all of v.
        rotary_pos_interleaved: as `interleaved` of apply_rotary_pos_emb.
        bias: with biases.
        set_parallel_mode, tp_group, tp_size, sequence_parallel: True: each of the ranks has its
            share of the heads; the projections are te_mx.Linear's of these arguments, "column"
            before attention and "row" behind it.
        name: shown in errors and by `te_mx.audit`.
        qk_norm_type, qk_norm_eps: None, "L2Normalization", "RMSNorm" or "LayerNorm" of each head of
            q and k (``q_norm``, ``k_norm``), behind the rotary embedding or, with
            `qk_norm_before_rope`, before it.
        transformer_engine: further arguments of Transformer Engine's class, at their defaults.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        *,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: Any = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        set_parallel_mode: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        **transformer_engine: Any,
    ) -> None:
        super().__init__()
        taken = attention_checks.CONSTRUCTORS["MultiheadAttention"]
        attention_checks.refuse(_OWNER, transformer_engine, taken)
        options = Options("MultiheadAttention", locals(), "hidden_size")
        (hidden_size,) = options.sizes
        heads, groups = attention_checks.heads(_OWNER, num_attention_heads, num_gqa_groups)
        if kv_channels is None and hidden_size % heads:
            raise ValueError(
                f"{_OWNER}: num_attention_heads must divide hidden_size={hidden_size}, got {heads}"
                "; or give kv_channels"
            )
        if kv_channels is None:
            kv_channels = hidden_size // heads
        width, _ = attention_checks.widths(_OWNER, kv_channels)
        check_number(f"{_OWNER}: layernorm_epsilon", layernorm_epsilon, 0)
        check_number(f"{_OWNER}: qk_norm_eps", qk_norm_eps, 0)
        how, column, row = shared_layers(options.how, tp_group, tp_size, sequence_parallel)
        self.tp_size = 1 if how is None else how.size
        if how is not None and qk_norm_type in _NORMS:
            raise NotImplementedError(
                f"{_OWNER}: qk_norm_type={qk_norm_type!r} has weights whose gradients nobody sums "
                "over the ranks; use 'L2Normalization' or none with set_parallel_mode=True"
            )
        self.core_attention = DotProductAttention(
            heads, width, groups, attention_dropout, qkv_format, attn_mask_type, window_size,
            bottom_right_diagonal, softcap, layer_number=layer_number,
            attention_type=attention_type, softmax_type=softmax_type, tp_size=self.tp_size,
            name=under(name, "core_attention"),
        ).to(device)  # fmt: skip
        self.num_attention_heads, self.num_gqa_groups, self.width = heads, groups, width
        self.num_attention_heads_per_partition = self.core_attention.num_attention_heads
        self.num_gqa_groups_per_partition = self.core_attention.num_gqa_groups
        self.hidden_size, self.attention_type = hidden_size, attention_type
        self.qkv_format, self.input_layernorm = qkv_format, input_layernorm
        self.return_layernorm_output, self.return_bias = return_layernorm_output, return_bias
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved, self.name = rotary_pos_interleaved, name
        self.qk_norm_before_rope = qk_norm_before_rope
        self.q_norm, self.k_norm = _head_norms(
            qk_norm_type, qk_norm_eps, width, device, params_dtype
        )

        common = {
            "bias": bias, "params_dtype": params_dtype, "device": device,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }  # fmt: skip
        before = common | {"init_method": init_method} | column
        norm = before | {
            "eps": layernorm_epsilon, "normalization": normalization,
            "return_layernorm_output": return_layernorm_output,
            "zero_centered_gamma": zero_centered_gamma,
        }  # fmt: skip
        of_q, of_k = heads * width, groups * width
        if attention_type == "self":
            sizes = {"query": of_q, "key": of_k, "value": of_k}
            parts: Any = None if fuse_qkv_params else sizes
            rows = of_q + 2 * of_k
            if input_layernorm:
                self.layernorm_qkv = LayerNormLinear(
                    hidden_size, rows, parameters_split=parts,
                    name=under(name, "layernorm_linear_qkv"), **norm,
                )  # fmt: skip
            else:
                self.qkv = Linear(
                    hidden_size, rows, parameters_split=parts, name=under(name, "linear_qkv"),
                    **before,
                )  # fmt: skip
        else:
            if input_layernorm:
                self.layernorm_query = LayerNormLinear(
                    hidden_size, of_q, parameters_split=None if fuse_qkv_params else ("query",),
                    name=under(name, "layernorm_linear_q"), **norm,
                )  # fmt: skip
            else:
                self.query_layer = Linear(hidden_size, of_q, **before)
            self.key_value = Linear(
                hidden_size, 2 * of_k,
                parameters_split=None if fuse_qkv_params else ("key", "value"),
                name=under(name, "linear_kv"), **before,
            )  # fmt: skip
        self.proj = Linear(
            of_q, hidden_size, init_method=output_layer_init_method, return_bias=return_bias,
            name=under(name, "proj"), **common, **row,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        **attention: Any,
    ) -> Any:
        """hidden_states [s, b, hidden_size] ([b, s, ..] for "bshd", [tokens, ..] for "thd") -> the
        same shape; then the bias of ``proj`` under `return_bias`, then the normalized input under
        `return_layernorm_output`.

        Args:
            encoder_output: what cross attention reads k and v from, laid out alike.
            is_first_microbatch: as of te_mx.Linear.
            rotary_pos_emb: angles of apply_rotary_pos_emb for q and k, or a pair.
            inference_params: must be None.
            attention_mask and the rest: as of DotProductAttention.forward.

        Raises:
            TypeError, ValueError: an argument of a wrong type, value or shape, or arguments that do
                not go together, by name.
            NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
        """
        owner = self._label()
        attention_checks.refuse(
            owner, {"inference_params": inference_params}, ("inference_params",)
        )
        self._check(owner, hidden_states, encoder_output)
        if is_first_microbatch is not None:
            check_flag(f"{owner}: is_first_microbatch", is_first_microbatch)
        embed = _pair(owner, rotary_pos_emb)
        q, k, v, normed = self._project(hidden_states, encoder_output, is_first_microbatch)
        if self.q_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)  # type: ignore[misc]
        if embed is not None:
            q, k = self._embedded(q, k, embed, attention)
        if self.q_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)  # type: ignore[misc]
        context = self.core_attention(
            q, k, v, attention_mask, attn_mask_type=attn_mask_type, window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention, **attention,
        )  # fmt: skip
        out = self.proj(context, is_first_microbatch=is_first_microbatch)
        outputs = out if self.return_bias else (out,)
        if self.input_layernorm and self.return_layernorm_output:
            outputs = (*outputs, normed)
        return outputs if len(outputs) > 1 else outputs[0]

    def _check(self, owner: str, hidden: Any, encoder: Any) -> None:
        dims = 2 if self.qkv_format == "thd" else 3
        attention_checks.hidden(owner, "hidden_states", hidden, dims, self.hidden_size)
        if self.attention_type == "cross":
            if encoder is None:
                raise ValueError(f"{owner}: cross attention needs encoder_output, got None")
            name = "encoder_output"
            attention_checks.tensor(owner, name, encoder, hidden.device, "hidden_states")
            attention_checks.hidden(owner, name, encoder, dims, self.hidden_size)
        elif encoder is not None:
            raise ValueError(
                f"{owner}: encoder_output goes with attention_type='cross', not 'self'"
            )

    # ---------------------------------------------------------------------------------- q, k and v
    def _project(
        self, hidden: Tensor, encoder: Tensor | None, first: bool | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q [.., heads, width], k and v [.., groups, width], and the normalized input."""
        if self.attention_type == "self":
            layer = self.layernorm_qkv if self.input_layernorm else self.qkv
            mixed, normed = _with_norm(layer(hidden, is_first_microbatch=first))
            return *self._split_qkv(mixed), normed
        layer = self.layernorm_query if self.input_layernorm else self.query_layer
        q, normed = _with_norm(layer(hidden, is_first_microbatch=first))
        mixed = self.key_value(encoder, is_first_microbatch=first)
        heads, groups = self.num_attention_heads_per_partition, self.num_gqa_groups_per_partition
        width = self.width
        if self.qkv_weight_interleaved:
            k, v = mixed.unflatten(-1, (groups, 2 * width)).chunk(2, -1)
        else:
            k, v = (x.unflatten(-1, (groups, width)) for x in mixed.chunk(2, -1))
        return q.unflatten(-1, (heads, width)), k, v, normed

    def _split_qkv(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups = self.num_attention_heads_per_partition, self.num_gqa_groups_per_partition
        width = self.width
        if self.qkv_weight_interleaved:
            each = heads // groups
            grouped = mixed.unflatten(-1, (groups, each + 2, width))
            q, k, v = grouped.split((each, 1, 1), -2)
            return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)
        q, k, v = mixed.split((heads * width, groups * width, groups * width), -1)
        k, v = k.unflatten(-1, (groups, width)), v.unflatten(-1, (groups, width))
        return q.unflatten(-1, (heads, width)), k, v

    def _embedded(
        self, q: Tensor, k: Tensor, embed: tuple[Tensor, Tensor], attention: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        layout, pairs = self.qkv_format, self.rotary_pos_interleaved
        ends = [_starts(attention, side) if layout == "thd" else None for side in ("q", "kv")]
        q = apply_rotary_pos_emb(q, embed[0], layout, None, pairs, True, ends[0])
        return q, apply_rotary_pos_emb(k, embed[1], layout, None, pairs, True, ends[1])


def _starts(attention: dict[str, Any], side: str) -> Tensor | None:
    """Where the sequences of q or of k and v start."""
    for one in (side, "q"):
        for key in (f"cu_seqlens_{one}_padded", f"cu_seqlens_{one}"):
            if attention.get(key) is not None:
                return attention[key]
    return None


def _with_norm(made: Any) -> tuple[Tensor, Tensor | None]:
    return made if isinstance(made, tuple) else (made, None)


def _pair(owner: str, embed: Any) -> tuple[Tensor, Tensor] | None:
    if embed is None:
        return None
    pair = embed if isinstance(embed, tuple) else (embed, embed)
    if len(pair) != 2:
        raise ValueError(f"{owner}: rotary_pos_emb must be one tensor or two, got {len(pair)}")
    for one in pair:
        attention_checks.angles(owner, "rotary_pos_emb", one)
    return pair[0], pair[1]


def _head_norms(
    kind: Any, eps: float, width: int, device: Any, dtype: torch.dtype | None
) -> tuple[nn.Module | None, nn.Module | None]:
    if kind is None:
        return None, None
    check_word(f"{_OWNER}: qk_norm_type", kind, ("L2Normalization", *_NORMS))
    if kind == "L2Normalization":
        return L2Normalization(eps), L2Normalization(eps)
    made = _NORMS[kind]
    q, k = (made(width, eps, params_dtype=dtype, device=device) for _ in range(2))
    return q, k
