"""A Llama made for decoding: few large products, a cache of a fixed size, no word to the host.

q, k and v are one product, gate and up another one. The step has the same shapes and addresses at
every token, so a CUDA graph of one step generates them all. Shape letters: B sequences, T tokens of
each, S places in the cache, D model width, H query heads and P pairs of key and value heads of
width E, G = H / P.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pieces(NamedTuple):
    """What stands between the products. attend, where there is one, is all that the attention of
    one token does between its products, and choose writes the likeliest token; without gated, an
    MLP does that itself."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    turned: Callable[..., Tensor]
    mixing: Callable[..., Tensor]
    gated: Callable[..., Tensor] | None = None
    attend: Callable[..., Tensor] | None = None
    choose: Callable[..., None] | None = None


def add_norm(x: Tensor, more: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + more, and its normalization."""
    if more is not None:
        x = x + more
    return x, norm(x)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, T, H+2P, E] turned by their positions, as many of them as sin has."""
    made, half = x * cos, x.shape[-1] // 2
    heads, to = x[:, :, : sin.shape[-2]], made[:, :, : sin.shape[-2]]
    to[..., :half].addcmul_(heads[..., half:], sin[..., :half])
    to[..., half:].addcmul_(heads[..., :half], sin[..., half:])
    return made


def mixing(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Weights of the values for scores [.., T, S]."""
    return torch.add(mask, scores, alpha=scale).softmax(-1)


def gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


EAGER = Pieces(add_norm, turned, mixing)


def compiled() -> Pieces:
    """A kernel of torch.compile each."""
    return Pieces(*(torch.compile(piece, dynamic=False) for piece in (*EAGER[:3], gated)))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x)))


class Layer(nn.Module):
    """(x, what is to be added to it) -> the same behind this layer, both [B, T, D]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.pairs, self.head = config.num_key_value_heads, head_width(config)
        self.norm1 = nn.RMSNorm(width, config.rms_norm_eps)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.pairs) * self.head, bias=False)
        self.o = nn.Linear(self.heads * self.head, width, bias=False)
        self.norm2 = nn.RMSNorm(width, config.rms_norm_eps)
        self.mlp = MLP(width, config.intermediate_size)

    def forward(
        self, x: Tensor, more: Tensor | None, at: "At", cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, h = at.pieces.add_norm(x, more, self.norm1)
        x, h = at.pieces.add_norm(x, self.o(self.attend(self.qkv(h), at, cache)), self.norm2)
        if at.pieces.gated is None:
            return x, self.mlp(h)
        return x, self.mlp.down(at.pieces.gated(self.mlp.gate_up(h)))

    def attend(self, qkv: Tensor, at: "At", cache: Tensor) -> Tensor:
        """[B, T, (H+2P)*E] -> [B, T, H*E]; keys and values go into the cache [2, B, P, S, E]."""
        b, t, _ = qkv.shape
        h, p, e = self.heads, self.pairs, self.head
        if at.pieces.attend is not None:
            return at.pieces.attend(qkv, at, cache, h // p)
        # Queries and keys turn; the cosines of values are 1.
        qkv = at.pieces.turned(qkv.view(b, t, h + 2 * p, e), at.cos, at.sin).transpose(1, 2)
        given = qkv[:, h:].view(b, 2, p, t, e).transpose(0, 1)
        if t == 1:
            cache.index_copy_(3, at.positions, given)
        else:
            cache[:, :, :, :t] = given
            q, keys, values = qkv.split([h, p, p], 1)
            mixed = F.scaled_dot_product_attention(
                q, keys, values, is_causal=True, enable_gqa=h != p
            )
            return mixed.transpose(1, 2).reshape(b, t, h * e)
        keys, values = cache
        q = qkv[:, :h].reshape(b, p, h // p * t, e)
        scores = (q @ keys.transpose(2, 3)).view(b, p, h // p, t, -1)
        weights = at.pieces.mixing(scores, at.mask, e**-0.5)
        mixed = weights.view(b, p, h // p * t, -1) @ values
        return mixed.view(b, h, t, e).transpose(1, 2).reshape(b, t, h * e)


class At:
    """Where in their sequences tokens are: positions [T], cos [T, H+2P, E], sin [T, H+P, E] and
    mask [T, S]. More than one token are a prompt, whose positions start at 0."""

    def __init__(self, model: "Decoder", positions: Tensor) -> None:
        self.positions, self.tables = positions, model.tables
        count = len(positions)
        self.pieces = model.pieces if count == 1 else EAGER
        if self.pieces.attend is not None:
            return
        rows = model.tables[:count] if count > 1 else model.tables.index_select(0, positions)
        kept = model.config.num_attention_heads + model.pairs
        both = (kept + model.pairs) * model.head, kept * model.head
        cos, sin, self.mask = rows.split([*both, model.places], 1)
        self.cos, self.sin = (one.unflatten(1, (-1, model.head)) for one in (cos, sin))


class Decoder(nn.Module):
    """tokens [B, T] at positions [T] -> logits [B, T, vocabulary]."""

    def __init__(self, config: Any, places: int) -> None:
        """places: the tokens that a sequence may have. Raises ValueError for what is no Llama."""
        super().__init__()
        check(config)
        self.pieces = EAGER  # of steps of one token
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = "meta" if config.tie_word_embeddings else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device=tied)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.config, self.pairs, self.head = config, config.num_key_value_heads, head_width(config)
        self.resize(places)

    def resize(self, places: int) -> None:
        """Sequences of so many tokens from now on, in new caches."""
        self.places, config = places, self.config
        turned = config.num_attention_heads + self.pairs
        with self.norm.weight.device:
            cos, sin = rotary(config, places)
            ones = torch.ones(places, self.pairs, self.head)
            later = torch.full((places, places), float("-inf")).triu(1)
        each = (places, turned, self.head)
        cos, sin = (table[:, None].expand(each) for table in (cos, sin))
        # What a position decides lies in one row, which one kernel reads.
        tables = torch.cat([torch.cat([cos, ones], 1).flatten(1), sin.flatten(1), later], 1)
        tables = tables.to(self.norm.weight.dtype)
        self.register_buffer("tables", tables, persistent=False)

    def new_cache(self, sequences: int) -> list[Tensor]:
        """Empty keys and values, [2, B, P, S, E] a layer."""
        shape, like = (2, sequences, self.pairs, self.places, self.head), self.norm.weight
        return [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in self.layers]

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: list[Tensor], last: bool = False
    ) -> Tensor:
        """last: the logits of the last tokens alone, [B, 1, vocabulary]."""
        at = At(self, positions)
        x, more = self.embed(tokens), None
        for layer, own in zip(self.layers, cache, strict=True):
            x, more = layer(x, more, at, own)
        if last:
            x, more = x[:, -1:], more[:, -1:]
        return self.lm_head(at.pieces.add_norm(x, more, self.norm)[1])


def head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check(config: Any) -> None:
    """Raise ValueError for a config of Transformers that is no plain Llama."""
    rope = getattr(config, "rope_parameters", None) or {}
    for what, got, expected in (
        ("model_type", config.model_type, ("llama", "mistral")),
        ("hidden_act", config.hidden_act, ("silu",)),
        ("rope_type", rope.get("rope_type", "default"), ("default",)),
        ("attention_bias", getattr(config, "attention_bias", False), (False,)),
        ("mlp_bias", getattr(config, "mlp_bias", False), (False,)),
        ("sliding_window", getattr(config, "sliding_window", None), (None,)),
    ):
        if got not in expected:
            shown = " or ".join(map(str, expected))
            raise ValueError(f"this decoder is a plain Llama: {what} must be {shown}, got {got}")


def rotary(config: Any, places: int) -> tuple[Tensor, Tensor]:
    """cos and sin [S, E] of rotary embeddings in halves, the first half of sin negative, so that
    x cos + roll(x, E / 2) sin turns x."""
    half = head_width(config) // 2
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    with torch.device("cpu"):
        frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(places, dtype=torch.float64), frequency)
    cos, sin = angle.cos(), angle.sin()
    where = torch.get_default_device()
    return torch.cat([cos, cos], 1).to(where), torch.cat([-sin, sin], 1).to(where)


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict of a LlamaForCausalLM, under the names of a Decoder."""
    made = {
        "embed.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "lm_head.weight": state.get("lm_head.weight", state["model.embed_tokens.weight"]),
    }
    layers = {name.split(".")[2] for name in state if name.startswith("model.layers.")}
    for i in sorted(layers, key=int):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        parts = {
            "norm1.weight": ["input_layernorm"], "norm2.weight": ["post_attention_layernorm"],
            "qkv.weight": [f"self_attn.{name}_proj" for name in "qkv"],
            "o.weight": ["self_attn.o_proj"], "mlp.down.weight": ["mlp.down_proj"],
            "mlp.gate_up.weight": ["mlp.gate_proj", "mlp.up_proj"],
        }  # fmt: skip
        for name, sources in parts.items():
            made[ours + name] = torch.cat([state[f"{theirs}{one}.weight"] for one in sources])
    return made
