"""A model says in its config what its codes are for as long as it holds them, and no longer."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from beside_te import import_or_skip
from hf_checkpoints import WHOLE_BLOCKS, check_same, files_of, frozen, logits
from torch import nn

import te_mx

transformers = import_or_skip("transformers")
pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.usefixtures("registered")
AUTO = transformers.AutoModelForCausalLM
ONE = "model.layers.0.mlp.up_proj"


def claimed(folder, how, model_name="Llama", style="mxfp8"):
    """A model whose config calls it quantized: as quantization_config left it, or loaded."""
    model = frozen(model_name, sizes=WHOLE_BLOCKS if model_name == "Mixtral" else {})
    te_mx.quantization_config(model, style)
    model.save_pretrained(folder)
    return model if how == "written" else AUTO.from_pretrained(folder)


def said(folder):
    """The quantization_config of a folder."""
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


def says_nothing(model) -> bool:
    return (
        not hasattr(model.config, "quantization_config")
        and not hasattr(model, "hf_quantizer")
        and not getattr(model, "is_quantized", False)
        and not hasattr(model, "quantization_method")
        and not hasattr(model.config, "_is_quantized")
    )


both = pytest.mark.parametrize("how", ["written", "loaded"])


@both
@pytest.mark.parametrize("model_name", ["Llama", "Mixtral"])
def test_unfreezing_takes_the_claim_back(how, model_name, tmp_path):
    model = claimed(tmp_path / "codes", how, model_name)
    te_mx.unfreeze_weights(model, dequantize=True)
    assert says_nothing(model)
    model.save_pretrained(tmp_path / "weights")
    assert said(tmp_path / "weights") is None
    files = files_of(tmp_path / "weights")
    assert {value.dtype for value in files.values()} == {torch.bfloat16}
    again = AUTO.from_pretrained(tmp_path / "weights")
    assert type(again.model.layers[0].self_attn.q_proj) is nn.Linear
    check_same(again.state_dict(), model.state_dict())


@both
def test_and_the_trainer_trains(how, tmp_path):
    pytest.importorskip("accelerate")
    model = claimed(tmp_path / "codes", how)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trained"), max_steps=1, use_cpu=True, report_to=[],
        disable_tqdm=True, per_device_train_batch_size=1,
    )  # fmt: skip
    row = torch.arange(16)
    data = [{"input_ids": row, "labels": row}]
    te_mx.unfreeze_weights(model, dequantize=True)
    before = model.get_submodule(ONE).weight.detach().clone()
    with te_mx.autocast():
        transformers.Trainer(model, arguments, train_dataset=data).train()
    assert not torch.equal(model.get_submodule(ONE).weight, before)


@both
@pytest.mark.parametrize("model_name", ["Llama", "Mixtral"])
def test_another_format_has_another_label(how, model_name, tmp_path):
    model = claimed(tmp_path / "codes", how, model_name)
    te_mx.unfreeze_weights(model, dequantize=True)
    te_mx.freeze_weights(model, drop_master=True, fmt="mxfp4")
    with pytest.raises(RuntimeError, match=r"holds codes .* te_mx\.quantization_config"):
        model.save_pretrained(tmp_path / "refused")
    made = te_mx.quantization_config(model, "compressed-tensors")
    model.save_pretrained(tmp_path / "four")
    assert said(tmp_path / "four") == made and made["format"] == "mxfp4-pack-quantized"
    again = AUTO.from_pretrained(tmp_path / "four")
    check_same(again.state_dict(), model.state_dict())
    assert torch.equal(logits(again), logits(model))


@both
@pytest.mark.parametrize("model_name", ["Llama", "Mixtral"])
def test_another_style_of_the_same_codes(how, model_name, tmp_path):
    """What was loaded under one label, saved under another one and back, and unfrozen then."""
    model = claimed(tmp_path / "codes", how, model_name, "modelopt")
    for style in ("mxfp8", "modelopt"):
        made = te_mx.quantization_config(model, style)
        model.save_pretrained(tmp_path / style)
        assert said(tmp_path / style) == made
        check_same(AUTO.from_pretrained(tmp_path / style).state_dict(), model.state_dict())
        if how == "loaded":
            assert model.hf_quantizer.quantization_config.to_dict() == made
            assert model.quantization_method == style
    check_same(files_of(tmp_path / "modelopt"), files_of(tmp_path / "codes"))
    te_mx.unfreeze_weights(model, dequantize=True)
    assert says_nothing(model)


@both
@pytest.mark.parametrize("refrozen", [False, True])
def test_a_part_that_was_unfrozen_is_no_more_what_the_config_says(how, refrozen, tmp_path):
    model = claimed(tmp_path / "codes", how)
    layer = model.get_submodule(ONE)
    te_mx.unfreeze_weights(layer, dequantize=True)
    assert hasattr(model.config, "quantization_config")
    if refrozen:
        te_mx.freeze_weights(layer, drop_master=True, fmt="mxfp4")
    got = "other codes, mxfp4," if refrozen else "weights"
    with pytest.raises(RuntimeError, match=rf"holds {got}.*'mxfp8', was made before"):
        model.save_pretrained(tmp_path / "refused")
    copied = copy.deepcopy(model)
    if not refrozen:  # one of the remedies
        made = te_mx.quantization_config(model, "mxfp8")
        assert ONE in made["modules_to_not_convert"]
        model.save_pretrained(tmp_path / "relabelled")
        again = AUTO.from_pretrained(tmp_path / "relabelled")
        check_same(again.state_dict(), model.state_dict())
    te_mx.unfreeze_weights(copied, dequantize=True)  # and the other
    assert says_nothing(copied)
    copied.save_pretrained(tmp_path / "weights")
    assert said(tmp_path / "weights") is None


@both
def test_one_layer_after_the_other(how, tmp_path):
    model = claimed(tmp_path / "codes", how)
    for module in list(model.modules()):
        if isinstance(module, te_mx.Linear):
            te_mx.unfreeze_weights(module, dequantize=True)
    with pytest.raises(RuntimeError, match="holds weights"):
        model.save_pretrained(tmp_path / "refused")
    assert te_mx.unfreeze_weights(model) == 0
    assert says_nothing(model)
    # The head, with nothing in the way.
    assert te_mx.convert_model(model, filter_fn=lambda *_: True).share == 1
    te_mx.revert_model(model)
    assert not any("_claim" in vars(module) for module in model.modules())


def test_the_model_inside_of_one_with_a_head(tmp_path):
    """It shares the config, not the quantizer, which the whole gives up when it is asked."""
    model = claimed(tmp_path / "codes", "loaded")
    te_mx.unfreeze_weights(model.model, dequantize=True)
    model.save_pretrained(tmp_path / "weights")
    assert said(tmp_path / "weights") is None
    te_mx.unfreeze_weights(model)
    assert says_nothing(model)


def test_more_codes_than_the_config_says(tmp_path):
    model = claimed(tmp_path / "codes", "written")
    te_mx.convert_model(model, filter_fn=lambda *_: True)
    te_mx.freeze_weights(model, drop_master=True)
    with pytest.raises(RuntimeError, match=r"lm_head.*holds other codes, mxfp8_e4m3"):
        model.save_pretrained(tmp_path / "refused")


def test_codes_of_another_format_that_are_loaded(tmp_path):
    model = claimed(tmp_path / "codes", "loaded")
    other = frozen("Llama", "mxfp4")
    model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="holds other codes, mxfp4"):
        model.save_pretrained(tmp_path / "refused")


def test_what_others_say_stays(tmp_path):
    """A config that the user wrote, and a part of a model that holds the config of all."""
    model = frozen("Llama")
    model.config.quantization_config = {"quant_method": "ours"}
    te_mx.unfreeze_weights(model, dequantize=True)
    assert model.config.quantization_config == {"quant_method": "ours"}
    model.save_pretrained(tmp_path)
    assert said(tmp_path) == {"quant_method": "ours"}
    model = claimed(tmp_path / "codes", "written")
    attention = model.model.layers[0].self_attn
    assert attention.config is model.config
    te_mx.unfreeze_weights(attention, dequantize=True)
    assert model.config.quantization_config["quant_method"] == "mxfp8"
    model.config.quantization_config = {"quant_method": "ours"}
    model.save_pretrained(tmp_path / "edited")  # what it says now is the user's
    assert said(tmp_path / "edited") == {"quant_method": "ours"}


def test_adapters_on_a_model_that_was_loaded(tmp_path):
    peft = import_or_skip("peft")
    model = claimed(tmp_path / "codes", "loaded")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    te_mx.unfreeze_weights(adapted, dequantize=True)
    assert says_nothing(model)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert said(tmp_path / "merged") is None


def test_dequantize_of_transformers(tmp_path):
    model = claimed(tmp_path / "codes", "loaded")
    model.dequantize()
    assert says_nothing(model)
