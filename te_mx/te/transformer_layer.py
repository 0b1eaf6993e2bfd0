"""TransformerLayer of Transformer Engine: attention and an MLP, each with a norm and a residual."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_mx.context.region import output_dtype
from te_mx.nn.arguments import Options
from te_mx.runtime.arguments import check_flag, check_word
from te_mx.te import attention_checks, attention_masks
from te_mx.te.attention import SharedHeads, under
from te_mx.te.modules import LayerNormMLP
from te_mx.te.multihead_attention import MultiheadAttention
from te_mx.te.norms import LayerNorm, RMSNorm

_OWNER = "te_mx.TransformerLayer"


class TransformerLayer(SharedHeads, nn.Module):
    """``h = x + dropout(attention(norm(x)))``, ``y = h + dropout(mlp(norm(h)))``.

    Its linear layers run in MXFP8 inside `te_mx.autocast`, each with the normalization or
    activation before it; attention itself runs in the dtype of its inputs. Modules and parameters
    have Transformer Engine's names: ``self_attention`` (a MultiheadAttention), ``inter_attention``
    in decoders, ``layernorm_mlp``, and ``layernorm`` under `output_layernorm`.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads: as of the model.
        num_gqa_groups: heads of k and v; None: `num_attention_heads`.
        layernorm_epsilon, zero_centered_gamma, normalization: of all normalizations.
        hidden_dropout: of what is added to the residual, in training.
        attention_dropout: of the softmax, in training.
        init_method: called with the weights of the projections to q, k and v and of fc1, instead of
            a normal one with standard deviation 0.023; output_layer_init_method: with those of
            ``proj`` and fc2.
        layer_number: 1 or more, of no effect.
        kv_channels: width of a head; None: ``hidden_size // num_attention_heads``.
        self_attn_mask_type, window_size, bottom_right_diagonal, softcap, softmax_type: as of
            DotProductAttention, for self attention; the first three with ``enc_dec_`` before them
            (enc_dec_attn_mask_type) for cross attention.
        params_dtype, device: of the parameters.
        fuse_wgrad_accumulation: as of te_mx.Linear, with a main_grad for each weight.
        apply_residual_connection_post_layernorm: residuals are the normalized inputs.
        output_layernorm: normalize the output instead of the input of self attention.
        parallel_attention_mlp: ``y = x + dropout(attention(norm(x)) + mlp(norm(x)))``, each with a
            normalization of its own.
        layer_type: "encoder", or "decoder" with cross attention to `encoder_output`.
        drop_path_rate: of rows along the first dimension of what is added to the residual, 0 to 1.
        fuse_qkv_params, qkv_weight_interleaved, rotary_pos_interleaved, qk_norm_type, qk_norm_eps,
            qk_norm_before_rope: as of MultiheadAttention.
        bias: with biases.
        activation, activation_params: as of te_mx.LayerNormMLP.
        attn_input_format: "sbhd", "bshd" or "thd", the dimensions of the input.
        set_parallel_mode, tp_group, tp_size, sequence_parallel: True: the ranks share heads and
            `ffn_hidden_size`, as of MultiheadAttention and te_mx.LayerNormMLP.
        name: shown in errors and by `te_mx.audit`.
        transformer_engine: further arguments of Transformer Engine's class, at their defaults.

    Raises:
        TypeError, ValueError: a wrong type or value, by name, or arguments that disagree.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: Any = None,
        attn_input_format: str = "sbhd",
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
        taken = attention_checks.CONSTRUCTORS["TransformerLayer"]
        attention_checks.refuse(_OWNER, transformer_engine, taken)
        Options("TransformerLayer", locals())
        check_word(f"{_OWNER}: layer_type", layer_type, ("encoder", "decoder"))
        check_word(f"{_OWNER}: attn_input_format", attn_input_format, attention_checks.FORMATS)
        post = apply_residual_connection_post_layernorm
        if parallel_attention_mlp and (post or output_layernorm or layer_type == "decoder"):
            raise ValueError(
                f"{_OWNER}: parallel_attention_mlp=True goes with layer_type='encoder', without "
                "apply_residual_connection_post_layernorm and output_layernorm"
            )
        self.hidden_dropout = attention_checks.probability(
            f"{_OWNER}: hidden_dropout", hidden_dropout
        )
        self.drop_path_rate = attention_checks.probability(
            f"{_OWNER}: drop_path_rate", drop_path_rate, certain=True
        )
        attention_masks.check_mask_type(f"{_OWNER}: self_attn_mask_type", self_attn_mask_type)
        attention_masks.check_mask_type(f"{_OWNER}: enc_dec_attn_mask_type", enc_dec_attn_mask_type)
        attention_masks.check_window(f"{_OWNER}: enc_dec_window_size", enc_dec_window_size)
        if enc_dec_bottom_right_diagonal is not None:
            check_flag(f"{_OWNER}: enc_dec_bottom_right_diagonal", enc_dec_bottom_right_diagonal)
        self.layer_type, self.name, self.layer_number = layer_type, name, layer_number
        self.parallel_attention_mlp = parallel_attention_mlp
        self.output_layernorm = output_layernorm
        self.apply_residual_connection_post_layernorm = post
        common: dict[str, Any] = {
            "init_method": init_method, "output_layer_init_method": output_layer_init_method,
            "bias": bias, "params_dtype": params_dtype, "device": device,
            "normalization": normalization, "zero_centered_gamma": zero_centered_gamma,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation, "return_layernorm_output": post,
            "return_bias": not parallel_attention_mlp, "set_parallel_mode": set_parallel_mode,
            "tp_group": tp_group, "tp_size": tp_size, "sequence_parallel": sequence_parallel,
        }  # fmt: skip
        attention = common | {
            "kv_channels": kv_channels, "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon, "layer_number": layer_number,
            "num_gqa_groups": num_gqa_groups, "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved, "qkv_format": attn_input_format,
            "rotary_pos_interleaved": rotary_pos_interleaved, "softmax_type": softmax_type,
            "qk_norm_type": qk_norm_type, "qk_norm_eps": qk_norm_eps, "softcap": softcap,
            "qk_norm_before_rope": qk_norm_before_rope,
        }  # fmt: skip
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, attn_mask_type=self_attn_mask_type,
            window_size=window_size, bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm, attention_type="self",
            name=under(name, "self_attention"), **attention,
        )  # fmt: skip
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size, num_attention_heads, attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal, input_layernorm=True,
                attention_type="cross", name=under(name, "inter_attention"), **attention,
            )  # fmt: skip
        self.tp_size = self.self_attention.tp_size
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation,
            activation_params=activation_params, name=under(name, "layernorm_mlp"), **common,
        )  # fmt: skip
        if output_layernorm:
            made = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = made(
                hidden_size, eps=layernorm_epsilon, params_dtype=params_dtype, device=device,
                zero_centered_gamma=zero_centered_gamma,
                sequence_parallel=(sequence_parallel and self.tp_size > 1) or None,
            )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        **attention: Any,
    ) -> Tensor:
        """hidden_states [s, b, hidden_size] ([b, s, ..] for "bshd", [tokens, ..] for "thd") -> the
        same shape, in torch.autocast's dtype where that is on.

        Args:
            attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal: as of
                DotProductAttention.forward, for self attention.
            encoder_output: [s2, b, hidden_size], in decoders.
            enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size,
                enc_dec_bottom_right_diagonal: the same for cross attention.
            attention: is_first_microbatch (as of te_mx.Linear), checkpoint_core_attention,
                rotary_pos_emb, core_attention_bias_type, core_attention_bias, alibi_slopes,
                cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded and softcap,
                as of MultiheadAttention.forward. In self attention those of q are also k's and v's.

        Raises:
            TypeError, ValueError: an argument of a wrong type, value or shape, or arguments that do
                not go together, by name.
            NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
        """
        owner = self._label()
        dims = 2 if self.self_attention.qkv_format == "thd" else 3
        size = self.self_attention.hidden_size
        attention_checks.hidden(owner, "hidden_states", hidden_states, dims, size)
        if self.layer_type == "encoder" and encoder_output is not None:
            raise ValueError(f"{owner}: encoder_output goes with layer_type='decoder'")
        first = attention.get("is_first_microbatch")
        x = hidden_states.to(output_dtype(hidden_states))
        post = self.apply_residual_connection_post_layernorm
        own = {k: v for k, v in attention.items() if not k.startswith("cu_seqlens_kv")}
        for kind in ("", "_padded"):
            if f"cu_seqlens_q{kind}" in own:
                own[f"cu_seqlens_kv{kind}"] = own[f"cu_seqlens_q{kind}"]
        made = self.self_attention(
            x, attention_mask, attn_mask_type=self_attn_mask_type, window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal, **own,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            return self._added(made + self.layernorm_mlp(x, first), None, x)
        # Without an input normalization self attention has no normalized input to return.
        x = self._added(made[0], made[1], made[2] if len(made) > 2 else x)
        if self.layer_type == "decoder":
            made = self.inter_attention(
                x, enc_dec_attn_mask, encoder_output, attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal, **attention,
            )  # fmt: skip
            x = self._added(made[0], made[1], made[2] if post else x, drop_path=False)
        made = self.layernorm_mlp(x, first)
        x = self._added(made[0], made[1], made[2] if post else x)
        return self.layernorm(x) if self.output_layernorm else x

    def _added(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, drop_path: bool = True
    ) -> Tensor:
        """``residual + dropout(x + bias)``."""
        if bias is not None:
            x = x + bias.to(x.dtype)
        x = F.dropout(x, self.hidden_dropout, self.training)
        if drop_path and self.drop_path_rate and self.training:
            keep = 1.0 - self.drop_path_rate
            kept = (torch.rand(x.shape[:1], device=x.device) < keep).view(-1, *[1] * (x.dim() - 1))
            x = torch.where(kept, x / (keep or 1.0), 0.0)  # a rate of 1 keeps none, and no NaN
        return residual + x
