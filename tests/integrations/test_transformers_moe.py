"""Models of Transformers with experts in stacked parameters: converted in place, in MXFP8 inside of
te_mx.autocast, what they were outside."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from fresh import python
from torch import nn

import te_mx
from te_mx.runtime import cpu_memory

transformers = pytest.importorskip("transformers", minversion="5.0")

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Every way to hold experts: halves of gate and up or interleaved, transposed, with biases, clamped
# gates, scores in fp32 or in the model's dtype, shared experts beside.
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16},
    "GptOss": {"num_local_experts": 4, "head_dim": 16},
    "DeepseekV3": {
        "n_routed_experts": 4, "moe_intermediate_size": 48, "first_k_dense_replace": 0,
        "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip


def model_of(family: str, implementation: str = "eager", **more) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family], **more})
    config._experts_implementation = implementation
    made = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # large enough to matter beside the residual stream
        for name, parameter in made.named_parameters():
            if "experts" in name:
                parameter.normal_(std=0.1)
    return made.eval()


def tokens() -> torch.Tensor:
    return torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(1))


def experts_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0].mlp.experts


def only_experts(module: nn.Module, name: str) -> bool:
    return name.endswith("experts")


def loss_and_gradients(
    model: nn.Module, run: nn.Module | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = (model if run is None else run)(tokens(), use_cache=False).logits
    logits.float().square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.detach() - exact.detach()).norm() / exact.detach().norm())


# ------------------------------------------------------------------------------------ whole models
@pytest.mark.parametrize("family", FAMILIES)
def test_outside_of_autocast_it_is_what_it_was(family):
    model = model_of(family)
    before, gradients = loss_and_gradients(model)
    names, class_before = list(model.state_dict()), type(experts_of(model))
    report = te_mx.convert_model(model, filter_fn=lambda *_: True)
    assert report.share >= 0.95 and "model.layers.0.mlp.experts" in report.converted
    assert list(model.state_dict()) == names and isinstance(experts_of(model), class_before)
    logits, again = loss_and_gradients(model)
    assert torch.equal(logits, before)
    assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())
    # What the config names is asked at every call, as before.
    model.set_experts_implementation("batched_mm")
    batched, _ = loss_and_gradients(model)
    assert model.config._experts_implementation == "batched_mm"
    assert te_mx.revert_model(model).count("reverted") == len(report)
    assert type(experts_of(model)) is class_before
    assert torch.equal(batched, loss_and_gradients(model)[0])
    assert "_converted" not in experts_of(model).__dict__


@pytest.mark.parametrize("family", FAMILIES)
def test_error_against_the_model_in_fp32(family):
    """The experts alone are converted, so the routes are the same. Each of two products in a row
    loses 3 to 4 % with both operands in E4M3."""
    model = model_of(family)
    before, exact = loss_and_gradients(model)
    te_mx.convert_model(model, filter_fn=only_experts)
    with te_mx.autocast():
        logits, gradients = loss_and_gradients(model)
    assert 0 < relative(logits, before) < 0.08
    ours = [name for name in exact if ".experts." in name]
    assert len(ours) >= 2
    for name in ours:
        assert 0 < relative(gradients[name], exact[name]) < 0.12, name


def test_which_experts_and_what_the_report_says():
    model = model_of("Mixtral", num_hidden_layers=2)

    def keep(module: nn.Module, name: str) -> bool:
        return name not in ("lm_head", "model.layers.1.mlp.experts")

    dry = te_mx.convert_model(model, filter_fn=keep, dry_run=True)
    assert not isinstance(experts_of(model), te_mx.nn.base.MXModule)
    report = te_mx.convert_model(model, filter_fn=keep)
    assert report.share == dry.share and report.converted == dry.converted
    rows = {row.name: row for row in report}
    first = rows["model.layers.0.mlp.experts"]
    assert first == (first.name, "converted", "4 x 64 -> 192 -> 64", "MixtralExperts")
    assert report.skipped["model.layers.1.mlp.experts"] == "MixtralExperts; excluded by filter_fn"
    assert report.left[0].name == "model.layers.1.mlp.experts.gate_up_proj"
    with te_mx.autocast():
        loss_and_gradients(model)
    ran = te_mx.audit(model)
    for key in ("gate_up_proj", "down_proj"):
        row = ran[f"model.layers.0.mlp.experts.{key}"]
        assert row.kind == "te_mx.MixtralExperts"
        assert not {"never ran", "high precision"} & {row.fprop, row.dgrad, row.wgrad}
    again = te_mx.convert_model(model)
    assert again.skipped["model.layers.0.mlp.experts"] == "MixtralExperts; already runs in te_mx"


def test_copies_and_checkpoints(tmp_path):
    model = model_of("GptOss", "grouped_mm")
    te_mx.convert_model(model)
    with te_mx.autocast():
        logits = loss_and_gradients(model)[0]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(loss_and_gradients(other)[0], logits)
            assert type(experts_of(other)) is type(experts_of(model))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "te_mx" not in json.dumps(config)
    loaded = transformers.GptOssForCausalLM.from_pretrained(tmp_path)
    assert not isinstance(experts_of(loaded), te_mx.nn.base.MXModule)
    te_mx.convert_model(loaded)
    with te_mx.autocast():
        assert torch.equal(loss_and_gradients(loaded.eval())[0], logits)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
def test_recomputation_and_training():
    model = model_of("Mixtral")
    te_mx.convert_model(model)
    model.train()
    with te_mx.autocast():
        logits, gradients = loss_and_gradients(model)
        model.gradient_checkpointing_enable()
        again, recomputed = loss_and_gradients(model)
    assert torch.equal(again, logits)
    assert all(torch.equal(recomputed[name], g) for name, g in gradients.items())


@pytest.mark.parametrize(("family", "backend"), [("Mixtral", "eager"), ("GptOss", "aot_eager")])
def test_compiled(family, backend, monkeypatch):
    monkeypatch.setattr(cpu_memory, "LEAST", 0)  # as of large gradients, which lie in used memory
    model = model_of(family, "grouped_mm")
    te_mx.convert_model(model, fuse=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with te_mx.autocast():
        logits, gradients = loss_and_gradients(model)
        again, traced = loss_and_gradients(model, compiled)
    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(traced[name], gradient, rtol=1e-3, atol=1e-5)


def test_importing_te_mx_imports_neither_library():
    code = (
        "import sys, torch, te_mx; te_mx.convert_model(torch.nn.Linear(4, 4));"
        "print([name for name in ('transformers', 'torchtitan') if name in sys.modules])"
    )
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr
