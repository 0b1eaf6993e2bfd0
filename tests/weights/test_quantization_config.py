"""Checkpoints of others: what te_mx.quantization_config writes, and what from_pretrained makes of
it, of files that others wrote, and of those that te_mx does not take.

Transformers' own reader of MXFP8, which dequantizes on a CPU, is the oracle of names and values.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings

import pytest
import torch
from hf_checkpoints import STYLES, WHOLE_BLOCKS, check_same, files_of, frozen, gpt_oss, logits
from hf_models import keep_head, model_of
from torch import nn

import te_mx
from te_mx.integrations.checkpoints import Plan, plan_of

transformers = pytest.importorskip("transformers", minversion="5.0")
safetensors = pytest.importorskip("safetensors.torch")
from te_mx.integrations import hf_quantizer  # noqa: E402

AUTO = transformers.AutoModelForCausalLM
# No native kernel of a CPU has 6 bits and NVFP4.
on_reference = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")


@on_reference
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("model_name", ["Llama", "Mixtral"])
@pytest.mark.parametrize("style", STYLES)
def test_what_is_written_loads_as_the_same_codes(model_name, style, tmp_path):
    fmt, names = STYLES[style]
    more = {"sizes": WHOLE_BLOCKS} if model_name == "Mixtral" else {}
    if fmt == "nvfp4":
        more["activations"] = "bf16"
    if style == "fp8":
        more["recipe"] = te_mx.recipe.DeepSeekV3()
    model = frozen(model_name, None if style == "fp8" else fmt, **more)
    made = te_mx.quantization_config(model, style.split()[0])
    assert "lm_head" in str(made) and json.loads(json.dumps(made)) == made
    model.save_pretrained(tmp_path / "one")
    layer = "model.layers.0.self_attn.q_proj."
    files = files_of(tmp_path / "one")
    assert {layer + name for name in names} == {name for name in files if name.startswith(layer)}
    if model_name == "Mixtral":  # one expert after the other, as others have them
        expert = "model.layers.0.block_sparse_moe.experts.1.w2."
        assert {expert + n for n in names} == {n for n in files if n.startswith(expert)}
    loaded = AUTO.from_pretrained(tmp_path / "one")
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, te_mx.Linear)
    assert type(loaded.lm_head) is nn.Linear
    check_same(loaded.state_dict(), model.state_dict())
    with te_mx.autocast(recipe=more.get("recipe")):
        assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "two")  # what was loaded is saved as it was
    check_same(files_of(tmp_path / "two"), files)
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["quantization_config"] == made


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_a_head_of_codes(style, tmp_path):
    model = with_head().eval()
    te_mx.quantization_config(model, style)
    model.save_pretrained(tmp_path)
    loaded = AUTO.from_pretrained(tmp_path)
    check_same(loaded.state_dict(), model.state_dict())
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("model_name", ["Llama", "Mixtral", "Qwen3Moe"])
def test_transformers_reads_the_same_values(model_name, tmp_path, recwarn):
    sizes = {"num_local_experts": 2, "num_experts": 4} if "M" in model_name else {}
    sizes |= {"moe_intermediate_size": 64, "num_experts_per_tok": 2} if sizes else {}
    model = frozen(model_name, sizes=sizes)
    te_mx.quantization_config(model, "mxfp8")
    model.save_pretrained(tmp_path)
    theirs = AUTO.from_pretrained(tmp_path)
    assert type(theirs.model.layers[0].self_attn.q_proj) is nn.Linear
    te_mx.unfreeze_weights(model, dequantize=True)
    check_same(theirs.state_dict(), model.state_dict())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("nested", [False, True])
def test_modelopt_files_are_read_byte_for_byte(nested, tmp_path):
    """ModelOpt's names, its config in both of its forms, and scales by its formula in float64."""
    model = model_of("Llama")
    state, expected = model.state_dict(), {}
    for name in [n for n in state if n.endswith("proj.weight")]:
        blocks = state[name].double().unflatten(-1, (-1, 32))
        powers = torch.ceil(torch.log2(blocks.abs().amax(-1) / 448)).clamp(min=-127)
        codes = (blocks / powers.exp2().unsqueeze(-1)).flatten(-2).float()
        state[name] = codes.to(torch.float8_e4m3fn)
        state[f"{name}_scale"] = (powers + 127).to(torch.uint8)
        expected |= {n: state[n] for n in (name, f"{name}_scale")}
    tmp_path.joinpath("model.safetensors").write_bytes(safetensors.save(state))
    says = {"quant_algo": "MXFP8", "exclude_modules" if nested else "ignore": ["lm_head"]}
    says = {"quantization": says} if nested else says
    model.config.quantization_config = {"quant_method": "modelopt", **says}
    model.config.save_pretrained(tmp_path)
    loaded = AUTO.from_pretrained(tmp_path)
    found = loaded.state_dict()
    check_same({name: found[name] for name in expected}, expected)
    te_mx.convert_model(model, filter_fn=keep_head)
    te_mx.freeze_weights(model, drop_master=True)  # and they are what te_mx makes
    check_same({name: model.state_dict()[name] for name in expected}, expected)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("saved", [False, True])
def test_modelopt_files_with_hf_quant_config_alone(saved, tmp_path):
    """Nobody reads that file; what docs/integrations.md does with it."""
    model = frozen("Llama")
    te_mx.quantization_config(model, "modelopt")
    model.save_pretrained(tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    del plain["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    quantization = {"quant_algo": "MXFP8", "group_size": 32, "exclude_modules": ["lm_head"]}
    says = {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(says))
    folder = str(tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    with open(f"{folder}/hf_quant_config.json") as file:
        config.quantization_config = {"quant_method": "modelopt", **json.load(file)}
    if saved:
        config.save_pretrained(folder)
    loaded = AUTO.from_pretrained(folder, **({} if saved else {"config": config}))
    check_same(loaded.state_dict(), model.state_dict())
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.usefixtures("registered")
def test_scales_of_compressed_tensors_at_7_4ths_of_a_power_of_two(tmp_path):
    """Its scale is one higher than te_mx's exactly where a block's largest is 1.75 * 2^k. Read as
    it is; freezing anew gives te_mx's bytes for the same values."""
    model = frozen("Llama")
    made = te_mx.quantization_config(model, "compressed-tensors")
    layer = model.model.layers[0].mlp.up_proj
    values = torch.randint(-7, 8, (96, 64)).to(torch.bfloat16) * 32
    values[:, ::32] = 448.0  # 1.75 * 2^8
    theirs = (values / 2).to(torch.float8_e4m3fn), torch.full((96, 2), 128, dtype=torch.uint8)
    layer.load_state_dict({"weight": theirs[0], "weight_scale": theirs[1]})
    model.save_pretrained(tmp_path)
    assert made["format"] == "mxfp8-quantized"
    loaded = AUTO.from_pretrained(tmp_path)
    layer = loaded.model.layers[0].mlp.up_proj
    check_same(layer.state_dict(), {"weight": theirs[0], "weight_scale": theirs[1]})
    te_mx.unfreeze_weights(loaded, dequantize=True)
    assert torch.equal(layer.weight, values)
    te_mx.freeze_weights(loaded, drop_master=True)
    state = layer.state_dict()
    assert (state["weight_scale"] == 127).all() and torch.equal(
        state["weight"].float(), values.float()
    )


@pytest.mark.usefixtures("registered")
def test_a_block_that_reaches_from_gate_into_up(tmp_path):
    """Others have a scale for gate and one for up where te_mx's stack has one for both."""
    model = frozen("Mixtral", recipe=te_mx.recipe.DeepSeekV3(), sizes={"num_local_experts": 2})
    with pytest.raises(ValueError, match=r"mlp\.experts: gate_up_proj: a block .* into up"):
        te_mx.quantization_config(model, "fp8")
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model.config.save_pretrained(tmp_path)
    tmp_path.joinpath("model.safetensors").write_bytes(safetensors.save({}))
    with pytest.raises(ValueError, match="gate and up have 96 rows each, no whole blocks"):
        AUTO.from_pretrained(tmp_path)


@pytest.mark.usefixtures("registered")
def test_gpt_oss(tmp_path):
    model, kept = gpt_oss()
    tmp_path.joinpath("model.safetensors").write_bytes(safetensors.save(kept))
    model.config.save_pretrained(tmp_path)
    loaded = AUTO.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "again")
    check_same(files_of(tmp_path / "again"), kept)
    loaded.load_state_dict(loaded.state_dict())
    te_mx.convert_model(model, filter_fn=lambda _, name: name.endswith("experts"))
    model.load_state_dict(kept)
    te_mx.freeze_weights(model, activations="bf16")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("how", [{}, {"device_map": "cpu"}, {"dtype": torch.float32}], ids=str)
def test_shards_devices_dtypes_and_weights_again(how, tmp_path):
    if "device_map" in how:
        pytest.importorskip("accelerate")
    model = frozen("Llama", sizes={"tie_word_embeddings": True})
    te_mx.quantization_config(model, "modelopt")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    loaded = AUTO.from_pretrained(tmp_path, **how)
    layer = model.model.layers[0].mlp.up_proj
    check_same(loaded.model.layers[0].mlp.up_proj.state_dict(), layer.state_dict())
    if "dtype" not in how:
        assert torch.equal(logits(loaded), logits(model))
    loaded.dequantize()
    te_mx.unfreeze_weights(model, dequantize=True)
    weight = loaded.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == how.get("dtype", torch.bfloat16)
    assert torch.equal(weight, layer.weight.to(weight.dtype))
    assert not hasattr(loaded.config, "quantization_config")


@pytest.mark.usefixtures("registered")
def test_a_layer_that_the_files_do_not_have_quantized(tmp_path):
    model = frozen("Llama")
    made = te_mx.quantization_config(model, "mxfp8")
    made["modules_to_not_convert"] = ["lm_head"]
    model.save_pretrained(tmp_path)
    files = files_of(tmp_path)
    del files["model.layers.0.mlp.up_proj.weight_scale_inv"]
    tmp_path.joinpath("model.safetensors").write_bytes(safetensors.save(files))
    with pytest.raises(ValueError, match=r"no model\.layers\.0\.mlp\.up_proj\.weight_scale_inv"):
        AUTO.from_pretrained(tmp_path)


@on_reference
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4"])
def test_quark(fmt, tmp_path):
    """Two names whatever the bits; te_mx's codes are packed as Quark packs them."""
    model = frozen("Llama", fmt, activations="bf16")
    state = {name.replace("_e3m2", ""): t for name, t in model.state_dict().items()}
    tmp_path.joinpath("model.safetensors").write_bytes(safetensors.save(state))
    dtype = {"mxfp8_e4m3": "fp8_e4m3", "mxfp6_e3m2": "fp6_e3m2", "mxfp4": "fp4"}[fmt]
    model.config.quantization_config = quark(dtype=dtype)
    model.config.save_pretrained(tmp_path)
    loaded = AUTO.from_pretrained(tmp_path)
    assert loaded.model.layers[0].mlp.up_proj._source.settings.w == fmt
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "two")
    check_same(files_of(tmp_path / "two"), state)


def test_without_registering_they_are_nobodys(tmp_path):
    before = dict(hf_quantizer.auto.AUTO_QUANTIZER_MAPPING)
    hf_quantizer.register()
    hf_quantizer.register()
    assert before != hf_quantizer.auto.AUTO_QUANTIZER_MAPPING
    hf_quantizer.unregister()
    assert before == hf_quantizer.auto.AUTO_QUANTIZER_MAPPING


@pytest.mark.usefixtures("registered")
def test_what_te_mx_does_not_take_goes_to_transformers():
    from_dict = hf_quantizer.auto.AutoQuantizationConfig.from_dict
    for size in (64, 64, 32):  # once for each reason
        fields = {"quant_method": "fp8", "weight_block_size": [size, size]}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert type(from_dict(fields)).__name__ == "FineGrainedFP8Config"
            again = [str(one.message) for one in said if one.category is te_mx.ConversionWarning]
            from_dict(fields)
        assert len(said) == len(again) <= 1
        if again:
            assert re.search(
                rf"to Transformers.*weight_block_size is .{size}, {size}., not", again[0]
            )
    with pytest.raises(ValueError, match="reads no modelopt checkpoint"):
        from_dict({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})


def group(**more):
    return {"config_groups": {"group_0": {"targets": ["Linear"], **more}}}


def quark(**more):
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    config = {"weight": weight | more, "input_tensors": None}
    return {"quant_method": "quark", "global_quant_config": config, "exclude": ["lm_head"]}


BLOCKS = "fp8_e4m3_128x128"
CT = {"quant_method": "compressed-tensors"}
NV = {**CT, "format": "nvfp4-pack-quantized"}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
PLANS = [
    ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "mxfp8_e4m3"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_e4m3_128x128"),
    ({"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, "mxfp8_e4m3"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, BLOCKS),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, None),
    ({"quant_method": "fp8"}, None),
    ({"quant_method": "fp8", "weight_block_size": [1, 32]}, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "dequantize": True}, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, None),
    ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, None),
    ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized", **group()}, "mxfp8_e4m3"),
    ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, None),
    ({**CT, "format": "mxfp6-pack-quantized", **group()}, "mxfp6_e2m3"),
    ({**NV, **group(weights={"group_size": 16})}, "nvfp4"),
    ({**NV, **group(weights={"group_size": 32})}, None),
    ({**NV, "config_groups": {"NVFP4A16": ["Linear"]}}, "nvfp4"),
    ({**NV, "config_groups": {"NVFP4": []}}, None),
    ({**NV, **group(weights={"symmetric": False})}, None),
    ({**NV, **group(), "transform_config": {"config_groups": {"R3": {}}}}, None),
    ({**NV, **group(), "sparsity_config": {"format": "sparse-24-bitmask"}}, None),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, None),
    ({**MIXED, "quantized_layers": {"a": {"quant_algo": "NVFP4"}}}, "nvfp4"),
    ({**MIXED, "quantized_layers": {"a": {"quant_algo": "FP8"}}}, BLOCKS),
    ({**MIXED, "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}}, None),
    (MIXED, None),
    (quark(), "mxfp4"),
    (quark(dtype="fp8_e4m3"), "mxfp8_e4m3"),
    (quark(dtype="fp6_e3m2"), "mxfp6_e3m2"),
    (quark(dtype="int8"), None),
    (quark(scale_format="float32"), None),
    ({"quant_method": "quark", "global_quant_config": {"weight": None}}, None),
    ({**quark(), "layer_quant_config": {"lm_head": {"weight": None}}}, None),
    ({**quark(), "export": {"weight_format": "fake_quantized"}}, None),
    ({"quant_method": "modelopt", "quant_algo": None}, None),
    ({"quant_method": "modelopt", "quant_algo": "mxfp8"}, "mxfp8_e4m3"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "awq"}, None),
]


@pytest.mark.parametrize("fields, fmt", PLANS)
def test_plans(fields, fmt):
    plan = plan_of(fields)
    assert (plan.fmt if isinstance(plan, Plan) else None) == fmt
    assert isinstance(plan, str) == (fmt is None)  # the reason


def test_a_plan_for_each_layer():
    layers = {"a.experts.0.up": "MXFP8", "a.experts.1.up": "MXFP8", "a.q": "NVFP4"}
    each = {name: {"quant_algo": algo} for name, algo in layers.items()}
    plan = plan_of({**MIXED, "quantized_layers": each})
    assert [plan.of(name).fmt for name in ("a.experts", "a.q")] == ["mxfp8_e4m3", "nvfp4"]
    assert [plan.leaves_out(name) for name in ("a.experts", "a.q", "a.k")] == [False, False, True]
    plan = plan_of(
        {**NV, "config_groups": {"NVFP4": ["re:.*mlp.*", "a.q"]}, "ignore": ["a.mlp.up"]}
    )
    left = [plan.leaves_out(name) for name in ("a.mlp.down", "a.mlp.up", "a.q", "a.k")]
    assert left == [False, True, False, True] and plan.inputs == "input_global_scale"


@pytest.mark.parametrize(
    "pattern, name, expected",
    [
        ("lm_head", "lm_head", True),
        ("model.layers.0", "model.layers.0.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("gate", "model.layers.0.mlp.gate", True),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.0.self_attn.q_proj", False),
        ("*self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("model.vision*", "model.layers.0.self_attn.q_proj", False),
    ],
)
def test_patterns_of_what_is_left_out(pattern, name, expected):
    assert Plan("mxfp8_e4m3", ("", "_scale"), (pattern,)).leaves_out(name) == expected


def layers(*sizes: int):
    model = nn.Sequential(*(te_mx.Linear(a, 32) for a in sizes))
    te_mx.freeze_weights(model, drop_master=True)
    return model


def mixed():
    model = nn.Sequential(te_mx.Linear(32, 32), te_mx.Linear(32, 32))
    te_mx.freeze_weights(model, drop_master=True, filter_fn=lambda _, name: name == "0")
    te_mx.freeze_weights(model, drop_master=True, fmt="mxfp4", filter_fn=lambda _, n: n == "1")
    return model


def weight_only(*names: str):
    model = nn.Sequential(te_mx.Linear(32, 32), te_mx.Linear(32, 32))
    te_mx.freeze_weights(
        model, drop_master=True, activations="bf16", filter_fn=lambda _, name: name in names
    )
    te_mx.freeze_weights(model, drop_master=True)
    return model


def with_head(**more):
    model = model_of("Llama", **more)
    te_mx.convert_model(model, filter_fn=lambda *_: True)
    te_mx.freeze_weights(model, drop_master=True)
    return model


def grouped():
    model = nn.Sequential(te_mx.GroupedLinear(2, 32, 32))
    te_mx.freeze_weights(model, drop_master=True)
    return model


@pytest.mark.parametrize(
    "make, style, match",
    [
        (lambda: layers(32), "awq", "style must be one of"),
        (lambda: layers(32), "fp8", "'fp8' has fp8_e4m3_128x128, the layers hold mxfp8_e4m3"),
        (lambda: layers(32, 40), "mxfp8", "1: weight has 40 columns"),
        (lambda: nn.Sequential(te_mx.Linear(32, 32)), "mxfp8", "no layer holds codes"),
        (mixed, "mxfp8", "several formats"),
        (grouped, "mxfp8", "0: is a GroupedLinear"),
        (lambda: weight_only("0", "1"), "modelopt", "means inputs that are quantized"),
        (lambda: weight_only("1"), "compressed-tensors", r"in some layers \(1\)"),
        (with_head, "mxfp8", "lm_head: output embeddings stay in high precision"),
        (lambda: with_head(tie_word_embeddings=True), "modelopt", "lm_head: .* are tied to"),
    ],
)
def test_refusals_change_nothing(make, style, match):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        te_mx.quantization_config(model, style)
    check_same(model.state_dict(), before)


def test_names_go_with_copies_and_end_with_unfreezing():
    model = layers(32)
    te_mx.quantization_config(model, "mxfp8")
    again = copy.deepcopy(model)
    assert "0.weight_scale_inv" in again.state_dict()
    other = layers(32)
    other.load_state_dict(again.state_dict())
    assert "0.weight_scale" in other.state_dict()
    te_mx.unfreeze_weights(again, dequantize=True)
    te_mx.freeze_weights(again, drop_master=True)
    assert "0.weight_scale" in again.state_dict()


def test_bytes_of_a_checkpoint(tmp_path):
    """33 bytes for 32 elements of every converted layer, 2 for the rest."""
    model = frozen("Llama")
    te_mx.quantization_config(model, "mxfp8")
    model.save_pretrained(tmp_path)
    sizes = {n: t.nbytes for n, t in files_of(tmp_path).items() if ".mlp." in n}
    elements = 3 * 64 * 96
    assert sum(sizes.values()) == math.ceil(elements * 33 / 32)
