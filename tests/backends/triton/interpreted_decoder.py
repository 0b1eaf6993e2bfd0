"""The kernels of examples/llama/kernels.py in Triton's interpreter, as test_triton.py runs them: on
CPU tensors in fp32 and fp16, as it multiplies no bf16. usage: python interpreted_decoder.py case"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path += [str(Path(sys.prefix, "aside_triton")), str(Path(__file__).parents[3] / "examples")]

from llama import decoding, kernels
from llama.decoder import EAGER, At, Decoder, add_norm, gated

FIELDS = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 96, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 120, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
FAST = EAGER._replace(
    add_norm=kernels.add_norm, gated=kernels.gated, attend=kernels.attend, choose=kernels.choose
)


def attentions_of(model: Decoder, dtype: torch.dtype, places: tuple[int, ...], near: dict) -> None:
    for position in places:
        qkv = torch.randn(2, 1, 320, dtype=dtype)
        cache = torch.randn(2, 2, 2, 200, 32, dtype=dtype)
        at, kept = At(model, torch.tensor([position])), cache.clone()
        kept[:, :, :, position:] = float("nan")  # nothing there is read
        made = kernels.attend(qkv, at, kept, 3)
        expected = model.layers[0].attend(qkv.clone(), at, cache)
        torch.testing.assert_close(made, expected, **near)
        so_far = slice(position + 1)
        torch.testing.assert_close(kept[:, :, :, so_far], cache[:, :, :, so_far], **near)
        assert kept[:, :, :, position + 1 :].isnan().all()


def test_pieces():
    """Each against the functions of decoder.py, at the borders of what it looks at together."""
    torch.manual_seed(0)
    for dtype, room in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
        near = {"rtol": room, "atol": room}
        model = Decoder(SimpleNamespace(**FIELDS), 200).to(dtype).requires_grad_(False)
        wide = dtype == torch.float32
        kernels.LEAST_PLACES = 512
        attentions_of(model, dtype, (1, 63, 65) if wide else (0, 64, 130), near)
        kernels.LEAST_PLACES = 50  # in four parts
        attentions_of(model, dtype, (0, 2, 199) if wide else (64, 130), near)
        assert not kernels.zeros(4, torch.device("cpu")).any()
        norm = model.norm
        norm.weight.normal_(1, 0.2)
        x, more = torch.randn(2, 5, 1, 96, dtype=dtype)
        for added in (more, None):
            for one, other in zip(
                kernels.add_norm(x, added, norm), add_norm(x, added, norm), strict=True
            ):
                torch.testing.assert_close(one, other, **near)
        h = torch.randn(5, 1, 2 * 1100, dtype=dtype)
        torch.testing.assert_close(kernels.gated(h), gated(h), **near)
        logits = torch.randn(5, 1, 20000, dtype=dtype)
        logits[2, 0, 7] = logits[2, 0, 50] = logits[2, 0, 19000] = 9  # the first of the largest
        token, tokens = torch.zeros(5, 1, dtype=torch.long), torch.full((5, 20), -1)
        kernels.choose(logits, token, tokens, torch.tensor([4]))
        assert torch.equal(token[:, 0], logits[:, 0].argmax(-1)) and token[2] == 7
        assert torch.equal(tokens[:, 4], token[:, 0]) and (tokens >= 0).sum() == 5


def test_generation():
    """The same tokens as with the functions of decoder.py."""
    model = Decoder(SimpleNamespace(**FIELDS), 14).eval().requires_grad_(False)
    decoding.randomize(model, 0)
    prompt, made = torch.randint(120, (2, 5)), []
    for model.pieces in (EAGER, FAST):
        state = decoding.Generation(model, prompt, quantized=False)
        for _ in range(8):
            state.step()
        made.append(state.all)
    assert torch.equal(*made)


def test_heads():
    """What tensor cores multiply, in whole halves."""
    torch.version.cuda = "13.0"
    fit = [width for width in (16, 32, 48, 64, 80, 96, 128, 256, 512) if kernels.fit(width)]
    assert fit == [32, 64, 128, 256]


for _case in sys.argv[1:]:
    globals()[f"test_{_case}"]()
