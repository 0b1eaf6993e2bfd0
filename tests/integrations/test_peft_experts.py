"""LoRA of peft's target_parameters on experts of which only codes are left."""

from __future__ import annotations

import copy

import pytest
import torch
from beside_te import import_or_skip

import te_mx

peft = import_or_skip("peft")
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM  # noqa: E402

from te_mx.integrations import peft as integration  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=16)),
}
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def config(**more):
    given = {"r": 3, "target_modules": [], "init_lora_weights": False, **more}
    return peft.LoraConfig(target_parameters=TARGETS, **given)


def on_codes(kind="mixtral", activations="bf16"):
    model = MODELS[kind]()
    te_mx.convert_model(model, filter_fn=lambda module, name: name.endswith("experts"))
    fmt = "nvfp4" if kind == "gpt-oss" else "mxfp4"
    te_mx.freeze_weights(model, drop_master=True, fmt=fmt, activations=activations)
    return model


def tokens():
    return torch.randint(0, SIZES["vocab_size"], (2, 16))


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", MODELS)
def test_they_are_pefts_own_on_the_values_of_the_codes(kind, tmp_path):
    """Two adapters each; gradients, and files that either loads."""
    base = on_codes(kind)
    values = copy.deepcopy(base)
    te_mx.unfreeze_weights(values, dequantize=True)
    te_mx.revert_model(values)
    ours = peft.get_peft_model(base, integration.register(config()))
    ours.add_adapter("second", integration.register(config(lora_alpha=3, use_rslora=True)))
    ours.base_model.set_adapter(["default", "second"])
    assert sum(".experts." in name for name in trained(ours)) == len(trained(ours)) == 2 * 2 * 4
    ours.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(values, tmp_path, is_trainable=True)
    theirs.load_adapter(tmp_path / "second", "second", is_trainable=True)
    theirs.base_model.set_adapter(["default", "second"])
    ids = tokens()
    results = [model(ids, labels=ids) for model in (ours, theirs)]
    torch.testing.assert_close(*(r.logits for r in results), rtol=1e-4, atol=1e-5)
    for result in results:
        result.loss.backward()
    expected = trained(theirs)
    for name, parameter in trained(ours).items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-6)
    with torch.no_grad(), ours.disable_adapter(), theirs.disable_adapter():
        plain = ours(ids).logits
        torch.testing.assert_close(plain, theirs(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, results[0].logits, atol=1e-3)
    again = integration.register(peft.LoraConfig.from_pretrained(tmp_path))
    loaded = peft.PeftModel.from_pretrained(ours.unload(), tmp_path, config=again)
    theirs.base_model.set_adapter("default")
    torch.testing.assert_close(loaded(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_they_learn_on_quantized_inputs(checkpointing):
    base = on_codes(activations="mxfp8")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = peft.get_peft_model(base, integration.register(config(init_lora_weights=True)))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    ids, losses = tokens(), []
    for _ in range(6):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(p.grad is not None for p in trained(model).values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = model.unload().state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_experts_with_weights_are_pefts_affair():
    ids, results = tokens(), []
    for register in (lambda given: given, integration.register):
        torch.manual_seed(0)
        model = MODELS["mixtral"]()
        te_mx.convert_model(model, filter_fn=lambda module, name: name.endswith("experts"))
        adapted = peft.get_peft_model(model, register(config()))
        with torch.no_grad(), te_mx.autocast():
            results.append(adapted(ids).logits)
    assert torch.equal(*results)


def test_what_cannot_be_is_refused_by_name():
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        peft.get_peft_model(on_codes(), config(target_modules=["q_proj"]))  # not registered
    name = r"'model.layers.0.mlp.experts'"
    with pytest.raises(
        ValueError, match=rf"{name} is no linear layer .*target_parameters=\[.*up_p"
    ):
        given = peft.LoraConfig(target_modules=["experts"])
        peft.get_peft_model(on_codes(), integration.register(given))
    with pytest.raises(ValueError, match=rf"{name}: init_lora_weights='pissa' needs the weight"):
        given = config(init_lora_weights="pissa")
        peft.get_peft_model(on_codes(), integration.register(given))
    model = peft.get_peft_model(on_codes(), integration.register(config()))
    with pytest.raises(RuntimeError, match=rf"{name}: cannot merge an adapter, because only codes"):
        model.merge_and_unload()


def test_compiles_without_a_graph_break():
    model = peft.get_peft_model(on_codes(), integration.register(config()))
    experts, x = model.base_model.model.model.layers[0].mlp.experts, torch.randn(8, 64)
    index, scores = torch.randint(0, 4, (8, 2)), torch.rand(8, 2)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, index, scores), experts(x, index, scores))
