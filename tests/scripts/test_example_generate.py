"""examples/generate.py on tiny models: the decoder is Transformers' Llama, three precisions run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import generate  # noqa: E402  (the examples are no package)
from llama import decoding, models  # noqa: E402
from llama.decoder import Decoder, from_transformers  # noqa: E402

from te_mx.backends.cpu import binding as cpu  # noqa: E402
from te_mx.backends.cpu.gemm import PANELS  # noqa: E402

FIELDS = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
          "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
          "vocab_size": 120}  # fmt: skip


class Bar:
    """Stands in for tqdm."""

    steps = 0

    def update(self, count: int) -> None:
        self.steps += count


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_is_the_llama_of_transformers(tied: bool) -> None:
    """At once, and token by token through its cache."""
    config = transformers.AutoConfig.for_model(
        "llama", **FIELDS, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    theirs = models.build(config, dtype=torch.float32, attention="eager").eval()
    for value in theirs.parameters():
        torch.nn.init.normal_(value, 0.2 if value.dim() == 1 else 0, 0.2)
    ours = Decoder(config, 12).eval()
    ours.load_state_dict(from_transformers(theirs.state_dict()))
    assert (ours.lm_head.weight is ours.embed.weight) == tied
    tokens = torch.randint(120, (3, 12))
    with torch.no_grad():
        expected = theirs(tokens).logits
        whole = ours(tokens, torch.arange(12), ours.new_cache(3))
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
        cache = ours.new_cache(3)
        parts = [ours(tokens[:, :5], torch.arange(5), cache)]
        parts += [ours(tokens[:, i : i + 1], torch.tensor([i]), cache) for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


def test_generation_is_greedy_and_starts_anew() -> None:
    settings = decoding.DecodeSettings("bf16", "tiny", prompt=4, tokens=6, batches=(2,))
    model = decoding.build(settings)
    prompt = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])
    state = decoding.Generation(model, prompt, quantized=False)
    runs = []
    for _ in range(2):
        state.start(prompt)
        for _ in range(5):
            state.step()
        runs.append(state.all.clone())
    assert torch.equal(*runs) and torch.equal(runs[0][:, :4], prompt)
    grown = prompt
    for _ in range(6):  # the whole sequence anew for every token, without a cache
        logits = model(grown, torch.arange(grown.shape[1]), model.new_cache(2))
        grown = torch.cat([grown, logits[:, -1:].argmax(-1)], 1)
    assert (grown == runs[0]).float().mean() > 0.7  # bf16 sums in another order may tip a choice
    assert torch.equal(grown[:, 4], runs[0][:, 4])


def test_compiled_pieces_are_the_same_functions(monkeypatch) -> None:
    compiled = []

    def compile(function, **how):
        compiled.append(function.__name__)
        return torch._dynamo.optimize("eager")(function)

    monkeypatch.setattr(torch, "compile", compile)
    tokens = []
    for chosen in (False, True):
        settings = decoding.DecodeSettings(
            "mxfp8", "tiny", tokens=6, batches=(2,), repeats=1, compile=chosen
        )
        tokens.append(decoding.run(settings, None, Bar())["tokens"])
    assert tokens[0] == tokens[1]
    assert compiled == ["add_norm", "turned", "mixing", "gated"]


def test_precisions_choose_alike_on_the_decode_kernels() -> None:
    def run(mode: str, expected=None, **more) -> tuple[dict, Bar]:
        settings = decoding.DecodeSettings(mode, "tiny", tokens=12, batches=(3,), repeats=2, **more)
        bar = Bar()
        return decoding.run(settings, expected, bar), bar

    plain, bar = run("bf16")
    assert bar.steps == 2 * 11 and plain["kernels"] == {}
    assert plain["agreement"] > 0.9 and plain["alike_until"] == 12
    assert [len(one) for one in plain["tokens"]] == [28] * 3
    assert plain["parameters"] == 43200 + 2 * 256 * 64
    for mode, least in (("mxfp8", 0.7), ("mxfp4", 0.4)):  # a chance choice is right 1 in 256 times
        kept, _ = run(mode, plain["tokens"])
        assert kept["agreement"] > least and 0 <= kept["alike_until"] <= 12
        dropped, _ = run(mode, plain["tokens"], drop_master=True)
        assert dropped["tokens"] == kept["tokens"]
        if cpu.missing_reason() is None:
            level = cpu.ISA_LEVELS[cpu.isa()]
            assert set(kept["kernels"]) <= {f"{level}_stream", PANELS[level]}
            assert sum(kept["kernels"].values()) == 4
        headed, _ = run(mode, plain["tokens"], head=True)
        assert sum(headed["kernels"].values()) == 5


@pytest.mark.parametrize("head", [False, True])
def test_a_head_that_is_the_embedding_lies_once(head: bool, tmp_path) -> None:
    """In every precision; a quantized one leaves the embedding what it is."""
    where = tmp_path / "config.json"
    where.write_text(json.dumps({**models.SHAPES["tiny"], "tie_word_embeddings": True}))
    settings = decoding.DecodeSettings("mxfp8", str(where), tokens=6, drop_master=True, head=head)
    model = decoding.build(settings)
    embedding = model.embed.weight.clone()
    decoding.quantize(model, settings)
    assert torch.equal(model.embed.weight, embedding)
    assert (model.lm_head.weight is model.embed.weight) != head
    plain = decoding.run(decoding.DecodeSettings("bf16", str(where), tokens=6), None, Bar())
    record = decoding.run(settings, plain["tokens"], Bar())
    assert plain["parameters"] == record["parameters"] == 43200 + 256 * 64
    assert record["agreement"] > 0.5


def test_the_script_writes_a_table_a_record_and_a_plot(tmp_path, monkeypatch, capsys) -> None:
    asked = []

    def child(command: list[str]) -> int:
        asked.append(command[2:])
        return generate.main(command[2:])

    monkeypatch.setattr(generate.subprocess, "call", child)
    options = ["--config", "tiny", "--tokens", "6", "--repeats", "1", "--out", str(tmp_path)]
    options += ["--batches", "1,3", "--prefill", "40"]
    assert generate.main(options) == 0
    assert [command[-2] for command in asked] == list(decoding.MODES)
    record = json.loads((tmp_path / "run.json").read_text())
    assert list(record["runs"]) == list(decoding.MODES) and record["speedup"]["bf16"] == 1.0
    assert (tmp_path / "generate.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    sizes = ("batch 1, tokens/s", "batch 3, tokens/s", "prompt of 40, tokens/s")
    for words in (*sizes, "bf16", "mxfp8", "mxfp4", "chooses bf16's token", "memory in use"):
        assert words in said
    assert said.splitlines()[-1].startswith("next: ")
    assert generate.main([*options, "--only", "mxfp4"]) == 0  # whose bf16 run is still there
    assert json.loads((tmp_path / "run.json").read_text())["speedup"] == {"mxfp4": None}
    monkeypatch.setattr(generate.subprocess, "call", lambda command: 1)
    assert generate.main(options) == generate.FAILED
    assert "the bf16 run failed with status 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--config", "mixtral-tiny"], "model_type must be llama or mistral, got mixtral"),
        (["--config", "nothing"], "a model is one of"),
        (["--device", "cuda:77"], "torch finds"),
        (["--device", "tpu"], "--device must be"),
    ],
)
def test_what_cannot_run_is_said(arguments, why, tmp_path, capsys) -> None:
    assert generate.main([*arguments, "--out", str(tmp_path)]) == generate.WRONG_USE
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("words", ["0", "1,1", "two"])
def test_sizes_are_different_numbers(words, capsys) -> None:
    with pytest.raises(SystemExit):
        generate.parse(["--batches", words])
    assert f"different numbers from 1 on, as in 1,8, got '{words}'" in capsys.readouterr().err


def test_rotary_embeddings_of_other_kinds_are_refused(tmp_path) -> None:
    fields = {**FIELDS, "model_type": "llama",
              "rope_parameters": {"rope_type": "linear", "factor": 2.0}}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="rope_type must be default, got linear"):
        decoding.build_on_meta(decoding.DecodeSettings("bf16", str(path)))


def test_it_says_how_it_is_used(run_script, capsys) -> None:
    assert run_script("generate.py", "--tokens", "1") == 2
    assert "--tokens must be at least 2" in capsys.readouterr().err
