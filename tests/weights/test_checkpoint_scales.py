"""Scales of checkpoints that are no uint8: the same bytes as float8_e8m0fnu, powers of two in
floating dtypes, and what is refused rather than rounded."""

from __future__ import annotations

import json

import pytest
import torch
from hf_checkpoints import WHOLE_BLOCKS, check_same, files_of, frozen, gpt_oss, logits
from hf_models import keep_head, model_of

import te_mx

# Older ones are refused such files, as below.
transformers = pytest.importorskip("transformers", minversion="5.21")
safetensors = pytest.importorskip("safetensors.torch")
from te_mx.integrations import hf_quantizer  # noqa: E402
from te_mx.integrations.checkpoints.tensors import scale_bytes  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")
AUTO = transformers.AutoModelForCausalLM
E8M0 = torch.float8_e8m0fnu
LAYER = "model.layers.0.mlp.up_proj"


def as_dtype(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What bytes stand for, in another dtype."""
    same = scales.view(E8M0)
    return same if dtype == E8M0 else same.to(dtype)


def rewrite(folder, change) -> None:
    """Have the files of a folder hold what `change` makes of each of their scales."""
    files = {
        name: change(name, value) if "weight_scale" in name or name.endswith("_scales") else value
        for name, value in files_of(folder).items()
    }
    folder.joinpath("model.safetensors").write_bytes(safetensors.save(files))


def write(folder, model_name="Llama", style="mxfp8", fmt=None):
    model = frozen(model_name, fmt, sizes=WHOLE_BLOCKS if model_name == "Mixtral" else {})
    te_mx.quantization_config(model, style)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", [E8M0, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model_name", ["Llama", "Mixtral"])
@pytest.mark.parametrize(
    "style, fmt",
    [
        ("mxfp8", None), ("modelopt", None), ("compressed-tensors", None),
        ("compressed-tensors", "mxfp4"),
    ],
)  # fmt: skip
def test_scales_load_as_the_same_bytes(style, fmt, model_name, dtype, tmp_path):
    model = write(tmp_path, model_name, style, fmt)
    rewrite(tmp_path, lambda _, scales: as_dtype(scales, dtype))
    loaded = AUTO.from_pretrained(tmp_path)
    check_same(loaded.state_dict(), model.state_dict())
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("dtype", [torch.uint8, E8M0, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model_name", ["Llama", "Mixtral"])
def test_scales_of_square_blocks_that_are_powers_of_two(model_name, dtype, tmp_path):
    """DeepSeek-V3.1's config, and scales of one byte: inputs are quantized in the same way."""
    recipe = te_mx.recipe.Float8BlockScaling()
    model = model_of(model_name, **(WHOLE_BLOCKS if model_name == "Mixtral" else {})).eval()
    te_mx.convert_model(model, filter_fn=lambda m, n: keep_head(m, n) and not n.endswith("gate"))
    te_mx.freeze_weights(model, drop_master=True, recipe=recipe)
    te_mx.quantization_config(model, "fp8")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"scale_fmt": "ue8m0", "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if dtype == torch.uint8:
        rewrite(tmp_path, lambda _, scales: scales.to(E8M0).view(torch.uint8))
    else:
        rewrite(tmp_path, lambda _, scales: scales.to(dtype))
    loaded = AUTO.from_pretrained(tmp_path)
    assert {m._source.settings for m in loaded.modules() if isinstance(m, te_mx.Linear)} == {
        recipe.settings
    }
    check_same(loaded.state_dict(), model.state_dict())
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    again = AUTO.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))


def test_scales_that_are_no_powers_of_two_load_as_they_are(tmp_path):
    """What the config says of scales is how inputs are quantized; the values of weights are in the
    file."""
    model = frozen("Llama", recipe=te_mx.recipe.DeepSeekV3())
    te_mx.quantization_config(model, "fp8")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AUTO.from_pretrained(tmp_path)
    check_same(loaded.state_dict(), model.state_dict())
    assert not torch.equal(logits(loaded), logits(model))
    assert (logits(loaded) - logits(model)).norm() < 0.1 * logits(model).norm()


def test_codes_of_what_the_model_keeps_in_fp32(tmp_path, monkeypatch):
    """They would load as values; a checkpoint that leaves the layer out loads."""
    model = write(tmp_path)
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules", ["up_proj"])
    with pytest.raises(ValueError, match=f"^{LAYER}: the checkpoint holds codes.*'up_proj'"):
        AUTO.from_pretrained(tmp_path)
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules", None)
    assert torch.equal(logits(AUTO.from_pretrained(tmp_path)), logits(model))
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules", ["lm_head"])
    assert torch.equal(logits(AUTO.from_pretrained(tmp_path)), logits(model))


def test_fp8_in_blocks_of_1_x_32(tmp_path):
    """The same files as of mxfp8, said in other words."""
    model = write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"quant_method": "fp8", "weight_block_size": [1, 32]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rewrite(tmp_path, lambda _, scales: as_dtype(scales, E8M0))
    check_same(AUTO.from_pretrained(tmp_path).state_dict(), model.state_dict())


def test_experts_of_gpt_oss(tmp_path):
    model, kept = gpt_oss()
    loaded = []
    for dtype in (torch.uint8, E8M0, torch.float32):
        folder = tmp_path / str(dtype)  # tensors that were loaded are mapped to their file
        model.config.save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(safetensors.save(kept))
        if dtype != torch.uint8:
            rewrite(folder, lambda _, scales, dtype=dtype: as_dtype(scales, dtype))
        loaded.append(AUTO.from_pretrained(folder, dtype=torch.bfloat16).state_dict())
    for other in loaded[1:]:
        check_same(other, loaded[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
def test_other_scales_are_refused_by_name(dtype, tmp_path):
    write(tmp_path)

    def change(name, scales):
        return torch.full_like(scales, 3, dtype=dtype) if LAYER in name else scales

    rewrite(tmp_path, change)
    got = f"got {dtype}" + (" with 3.0" if dtype.is_floating_point else "")
    with pytest.raises(
        ValueError, match=rf"{LAYER}\.weight_scale_inv: scales must be .*{got}; .*dequantize"
    ):
        AUTO.from_pretrained(tmp_path)


def test_scales_of_one_expert_among_those_of_others(tmp_path, caplog):
    """Tensors that are merged: each by its own dtype, and no byte becomes a number by the way."""
    model = write(tmp_path, "Mixtral")

    def one(name, scales):
        return as_dtype(scales, torch.float32) if "experts.1." in name else scales

    rewrite(tmp_path, one)
    check_same(AUTO.from_pretrained(tmp_path).state_dict(), model.state_dict())
    rewrite(tmp_path, lambda name, s: torch.full(s.shape, 3.0) if "experts.1.w2" in name else s)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        AUTO.from_pretrained(tmp_path)
    assert "scales must be E8M0 bytes" in str(caught.value) + caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2], ids=str)
def test_codes_in_another_dtype_are_refused(dtype, tmp_path):
    write(tmp_path)
    files = files_of(tmp_path)
    files[f"{LAYER}.weight"] = files[f"{LAYER}.weight"].to(dtype)
    tmp_path.joinpath("model.safetensors").write_bytes(safetensors.save(files))
    with pytest.raises(ValueError, match=rf"{LAYER}: .*codes must be float8_e4m3fn, got {dtype}"):
        AUTO.from_pretrained(tmp_path)


def test_versions_that_would_cast_refuse(tmp_path, monkeypatch):
    model = write(tmp_path)
    monkeypatch.delattr(hf_quantizer.HfQuantizer, "get_new_dtype")
    monkeypatch.setattr(
        hf_quantizer.TeMxQuantizer, "get_new_dtype", lambda self, c, p, dtype: None, raising=True
    )
    check_same(AUTO.from_pretrained(tmp_path).state_dict(), model.state_dict())
    files = files_of(tmp_path)
    for name, dtype in ((f"{LAYER}.weight", "BF16"), (f"{LAYER}.weight_scale_inv", "F8_E8M0")):
        value = files[name]
        other = value.to(torch.bfloat16) if dtype == "BF16" else value.view(E8M0)
        folder = tmp_path / dtype
        model.config.save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(safetensors.save(files | {name: other}))
        with pytest.raises(ValueError, match=f"{name} must be .* got {dtype}; install 5.21"):
            AUTO.from_pretrained(folder)


def test_every_byte():
    """All 256 as float8_e8m0fnu; but NaN as numbers; the smallest are subnormal in bf16."""
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(scale_bytes("s", every.view(E8M0)), every)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(scale_bytes("s", as_dtype(every[:255], dtype)), every[:255])
    for wrong in (0.0, -1.0, float("nan"), float("inf"), 1.5):
        with pytest.raises(ValueError, match=f"^s: .* with {wrong}"):
            scale_bytes("s", torch.tensor([1.0, wrong]))
    with pytest.raises(ValueError, match="with"):
        scale_bytes("s", torch.tensor([2.0**128], dtype=torch.float64))
