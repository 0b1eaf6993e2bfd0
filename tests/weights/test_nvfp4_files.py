"""Checkpoints of NVFP4 as ModelOpt and llm-compressor write them, with scales of inputs, layers of
several kinds and experts apart: what from_pretrained makes of the tensors, the bytes that
save_pretrained writes again, and files that are refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hf_checkpoints import WHOLE_BLOCKS, check_same, files_of, frozen, logits
from hf_models import model_of

import te_mx

transformers = pytest.importorskip("transformers", minversion="5.21")
safetensors = pytest.importorskip("safetensors.torch")
from te_mx.integrations import hf_quantizer  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning"),  # no native kernel has it
    pytest.mark.filterwarnings("ignore:this checkpoint has inputs:te_mx.ConversionWarning"),
]
AUTO = transformers.AutoModelForCausalLM
UP = "model.layers.0.mlp.up_proj"
_NUMBERS = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
CONFIGS = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_NUMBERS, "dynamic": False},
                "input_activations": {**_NUMBERS, "dynamic": "local"},
            }
        },
        "ignore": ["lm_head", "re:.*gate$"],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quantization": {
            "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.gate"],
        },
    },
}  # fmt: skip


def write(folder, writer, model_name="Llama", change=lambda files: None):
    """Files of a writer: codes and scales at random, a tensor scale a matrix of which gate and up
    have a common one, and scales of inputs. Their values by the definition, by name."""
    rng = torch.Generator().manual_seed(0)
    sizes = WHOLE_BLOCKS if model_name == "Mixtral" else {}
    model = frozen(model_name, "nvfp4", activations="bf16", sizes=sizes)
    te_mx.quantization_config(model, writer)
    model.save_pretrained(folder)
    files, values, common = {}, {}, {}
    for name, given in files_of(folder).items():
        head, _, kind = name.rpartition(".")
        if kind in ("weight_scale_2", "weight_global_scale"):
            group = head.replace("w3", "w1").replace("up_proj", "gate_proj")
            whole = common.setdefault(group, 1 / (400 + 300 * torch.rand((), generator=rng)))
            if kind == "weight_global_scale":
                files[f"{head}.input_global_scale"] = torch.rand(1, generator=rng) + 50
                given = whole.reciprocal().reshape(1)
            else:
                files[f"{head}.input_scale"], given = torch.rand((), generator=rng), whole.clone()
            values[head] = whole
        elif kind == "weight_scale":
            given = torch.randint(30, 120, given.shape, generator=rng, dtype=torch.uint8)
            given = given.view(torch.float8_e4m3fn)
        files[name] = given.clone()  # the file it is mapped to is written anew
    for head, whole in values.items():
        end = "weight_packed" if writer == "compressed-tensors" else "weight"
        whole = 1 / (1 / whole) if "packed" in end else whole
        values[head] = decoded(files[f"{head}.{end}"], files[f"{head}.weight_scale"]) * whole
    # Scales of a cache, which others have in FP8.
    kept = "k_proj.k_scale" if writer == "modelopt" else "k_scale"
    files[f"model.layers.0.self_attn.{kept}"] = torch.rand(1, generator=rng)
    change(files)
    folder.joinpath("model.safetensors").write_bytes(safetensors.save(files))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[writer]
    (folder / "config.json").write_text(json.dumps(config))
    return files, values


def decoded(codes, scales):
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()
    magnitudes = table[pairs & 7] * torch.where(pairs > 7, -1.0, 1.0)
    return magnitudes * scales.float().repeat_interleave(16, -1)


@pytest.mark.parametrize("model_name", ["Llama", "Mixtral"])
@pytest.mark.parametrize("writer", CONFIGS)
def test_files_are_read_and_written_byte_for_byte(writer, model_name, tmp_path):
    files, values = write(tmp_path / "one", writer, model_name)
    with pytest.warns(te_mx.ConversionWarning, match="leaves them as they are, which loses less"):
        loaded = AUTO.from_pretrained(tmp_path / "one")
    layer = loaded.model.layers[0]
    q_proj = layer.self_attn.q_proj
    assert q_proj._source.settings.w == "nvfp4" and "inputs as they are" in repr(q_proj)
    expected = {"model.layers.0.self_attn.q_proj": q_proj._source.values(q_proj, "weight")}
    if model_name == "Llama":
        expected[UP] = layer.mlp.up_proj._source.values(layer.mlp.up_proj, "weight")
    else:
        gate, up = layer.mlp.experts._source.values(layer.mlp.experts, "gate_up_proj")[1].chunk(2)
        expert = "model.layers.0.block_sparse_moe.experts.1"
        expected |= {f"{expert}.w1": gate, f"{expert}.w3": up}
    for name, got in expected.items():
        torch.testing.assert_close(got, values[name].to(got.dtype), rtol=0, atol=0)
    out = logits(loaded)
    loaded.load_state_dict(loaded.state_dict())
    assert torch.equal(logits(loaded), out)
    loaded.save_pretrained(tmp_path / "two")
    again = files_of(tmp_path / "two")
    check_same(again, files)
    assert {n: (t.dtype, t.shape) for n, t in again.items()} == {
        n: (t.dtype, t.shape) for n, t in files.items()
    }
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["quantization_config"] == CONFIGS[writer]
    stacked = {name: t.contiguous() for name, t in loaded.state_dict().items()}
    if model_name == "Mixtral":  # the experts of a layer in one tensor
        (tmp_path / "two" / "model.safetensors").write_bytes(safetensors.save(stacked))
        check_same(AUTO.from_pretrained(tmp_path / "two").state_dict(), stacked)
    te_mx.freeze_weights(loaded, drop_master=True, activations="nvfp4")  # as Blackwell has it
    assert 0 < (logits(loaded) - out).norm() < 0.5 * out.norm()
    te_mx.unfreeze_weights(loaded, dequantize=True)
    assert torch.equal(q_proj.weight, expected["model.layers.0.self_attn.q_proj"])


def test_layers_of_several_kinds(tmp_path):
    """MIXED_PRECISION: what is quantized, layer by layer; NVFP4 beside MXFP8 and FP8."""
    files, _ = write(tmp_path, "modelopt")
    layer = frozen("Llama").model.layers[0]
    plain, fp8 = "model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.o_proj"
    for name in [n for n in files if n.startswith((f"{UP}.", f"{plain}.", f"{fp8}."))]:
        del files[name]
    files |= {f"{UP}.{name}": t for name, t in layer.mlp.up_proj.state_dict().items()}
    files[f"{plain}.weight"] = layer.mlp.gate_proj._source.values(layer.mlp.gate_proj, "weight")
    files |= fp8_of(fp8, torch.randn(64, 64))
    tmp_path.joinpath("model.safetensors").write_bytes(safetensors.save(files))
    heads = {n.rpartition(".")[0] for n in files if n.endswith("weight_scale_2")}
    layers = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in heads}
    layers |= {UP: {"quant_algo": "MXFP8", "group_size": 32}, fp8: {"quant_algo": "FP8"}}
    config = json.loads((tmp_path / "config.json").read_text())
    says = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config["quantization_config"] = {"quant_method": "modelopt", "quantization": says}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AUTO.from_pretrained(tmp_path)
    mlp, o_proj = loaded.model.layers[0].mlp, loaded.model.layers[0].self_attn.o_proj
    assert type(mlp.gate_proj) is torch.nn.Linear and type(loaded.lm_head) is torch.nn.Linear
    assert mlp.up_proj._source.settings.w == "mxfp8_e4m3"
    assert mlp.down_proj._source.settings.w == "nvfp4"
    expected = files[f"{fp8}.weight"].float() * files[f"{fp8}.weight_scale"]
    assert torch.equal(o_proj._source.values(o_proj, "weight").float(), expected.bfloat16().float())
    out = logits(loaded)
    loaded.load_state_dict(loaded.state_dict())
    assert torch.equal(logits(loaded), out)
    loaded.save_pretrained(tmp_path / "two")
    check_same(files_of(tmp_path / "two"), files)
    again = fp8_of("", torch.randn(64, 64))  # what is saved is what is there
    o_proj.load_state_dict({name[1:]: t for name, t in again.items()})
    assert torch.equal(o_proj.state_dict()["weight_scale"], again[".weight_scale"])


def fp8_of(name, weight):
    scale = weight.float().abs().amax() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    more = {"weight_scale": scale, "input_scale": torch.rand(())}
    return {f"{name}.weight": codes, **{f"{name}.{end}": t for end, t in more.items()}}


def test_experts_of_fp8_with_a_scale_a_tensor(tmp_path):
    """Gate and up have one each; their blocks of 128 x 128 are apart."""
    model = frozen("Mixtral", sizes=WHOLE_BLOCKS)
    te_mx.unfreeze_weights(model, dequantize=True)
    model.save_pretrained(tmp_path)
    files = {name: t.clone() for name, t in files_of(tmp_path).items()}
    for name in [n for n in files if re.search(r"\.w[123]\.|proj\.", n)]:
        files |= fp8_of(name.removesuffix(".weight"), files.pop(name))
    tmp_path.joinpath("model.safetensors").write_bytes(safetensors.save(files))
    model.config.quantization_config = {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.gate"],
    }  # fmt: skip
    model.config.save_pretrained(tmp_path)
    loaded = AUTO.from_pretrained(tmp_path)
    experts = loaded.model.layers[0].mlp.experts
    both = experts._source.values(experts, "gate_up_proj")[1].chunk(2)
    for name, got in zip(("w1", "w3"), both, strict=True):
        name = f"model.layers.0.block_sparse_moe.experts.1.{name}"
        expected = files[f"{name}.weight"].float() * files[f"{name}.weight_scale"]
        assert torch.equal(got, expected.to(got.dtype))
    loaded.save_pretrained(tmp_path / "two")
    check_same(files_of(tmp_path / "two"), files)


def change_of(kind, other):
    """A change of the tensor of this kind of one layer; None removes it."""

    def change(files):
        name = next(n for n in files if n.startswith(UP) and n.endswith(kind))
        value = files.pop(name)
        if other is not None:
            files[name] = other(value)

    return change


@pytest.mark.parametrize(
    "writer, kind, other, match",
    [
        ("modelopt", "weight_scale_2", None, r"has no .*up_proj\.weight_scale_2, though"),
        ("compressed-tensors", "weight_global_scale", None, r"no .*up_proj\.weight_global_scale"),
        (
            "modelopt", "weight_scale_2", lambda t: 2 / t,
            r"up_proj\.weight_scale_2 is .* with which weights go up to .* Read as .*weight_global",
        ),
        ("compressed-tensors", "weight_global_scale", lambda t: 1 / t, "as ModelOpt.s weight_sc"),
        ("modelopt", "weight_scale", lambda t: t.float(), r"scales of nvfp4 must be float8_e4m3fn"),
        ("modelopt", "weight", lambda t: t.to(torch.bfloat16), r"codes must be uint8"),
    ],
)  # fmt: skip
def test_files_that_are_refused(writer, kind, other, match, tmp_path):
    write(tmp_path, writer, change=change_of(kind, other))
    with pytest.raises(ValueError, match=match):
        AUTO.from_pretrained(tmp_path)


def test_values_that_are_quantized_as_they_are_loaded(tmp_path):
    """Transformers' NVFP4Config, which writes no files of its own."""
    model_of("Llama").save_pretrained(tmp_path / "one")
    config = transformers.NVFP4Config(["q_proj", "lm_head"])
    loaded = AUTO.from_pretrained(tmp_path / "one", quantization_config=config)
    layer = loaded.model.layers[0].self_attn
    assert type(layer.q_proj) is type(loaded.lm_head) is torch.nn.Linear
    expected = te_mx.quantize(model_of("Llama").model.layers[0].self_attn.o_proj.weight, "nvfp4")
    codes = layer.o_proj.state_dict()["weight"]
    assert torch.equal(codes.view(torch.uint8), expected.rowwise_data.view(torch.uint8))
    loaded.save_pretrained(tmp_path / "two")
    again = AUTO.from_pretrained(tmp_path / "two")
    check_same(again.state_dict(), loaded.state_dict())
    assert torch.equal(logits(again), logits(loaded))
    with pytest.raises(ValueError, match="no files hold codes"):
        hf_quantizer.OnTheFly(config, pre_quantized=True)


def test_codes_that_mean_something_else(tmp_path):
    """Zero points of zeros say nothing; columns in another order are refused."""
    zeros = torch.zeros(96, 4).to(torch.float8_e4m3fn)
    files, values = write(
        tmp_path,
        "compressed-tensors",
        change=lambda f: f.update({f"{UP}.weight_zero_point": zeros}),
    )
    up = AUTO.from_pretrained(tmp_path).model.layers[0].mlp.up_proj
    assert torch.equal(up._source.values(up, "weight"), values[UP].to(up._source.dtypes["weight"]))
    files[f"{UP}.weight_g_idx"] = torch.arange(64)
    tmp_path.joinpath("model.safetensors").write_bytes(safetensors.save(files))
    with pytest.raises(ValueError, match=r"up_proj\.weight_g_idx: .* with an order of columns"):
        AUTO.from_pretrained(tmp_path)


def test_versions_that_would_cast(tmp_path, monkeypatch):
    """Transformers before 5.21 casts to the dtype of a placeholder."""
    monkeypatch.delattr(hf_quantizer.HfQuantizer, "get_new_dtype")
    monkeypatch.setattr(
        hf_quantizer.TeMxQuantizer, "get_new_dtype", lambda self, c, p, dtype: dtype
    )
    files, _ = write(tmp_path / "one", "modelopt")
    AUTO.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    check_same(files_of(tmp_path / "two"), files)
    write(
        tmp_path / "one",
        "modelopt",
        change=change_of("weight_scale", lambda t: t.view(torch.uint8)),
    )
    with pytest.raises(ValueError, match=r"up_proj\.weight_scale must be F8_E4M3 .* got U8"):
        AUTO.from_pretrained(tmp_path / "one")


def test_gate_and_up_with_scales_of_their_own(tmp_path, caplog):
    def change(files):
        files["model.layers.0.block_sparse_moe.experts.1.w3.weight_scale_2"] *= 2

    write(tmp_path, "modelopt", "Mixtral", change)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        AUTO.from_pretrained(tmp_path)
    assert "parts of expert 1, gate and up, have tensor scales" in str(caught.value) + caplog.text


def test_layers_that_others_multiply_as_one_share_a_tensor_scale():
    model = frozen("Llama", "nvfp4", activations="bf16")
    layer = model.model.layers[0]
    for group in (
        [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        [layer.mlp.gate_proj, layer.mlp.up_proj],
    ):
        assert len({float(one.state_dict()["weight_scale_2"]) for one in group}) == 1
    for fmt in ("nvfp4", "nvfp4_16x16"):  # rows as of one matrix
        pair = torch.nn.ModuleDict({name: te_mx.Linear(64, 48) for name in ("w1", "w3")})
        both = torch.cat([one.weight.detach() for one in pair.values()])
        te_mx.freeze_weights(pair, drop_master=True, fmt=fmt, activations="bf16")
        made = torch.cat([one._source.values(one, "weight") for one in pair.values()])
        assert torch.equal(made, te_mx.quantize(both, fmt).dequantize(torch.float32))
    apart = torch.nn.ModuleDict({name: te_mx.Linear(64, 48) for name in ("w1", "w3")})
    for one in apart:
        how = {"fmt": "nvfp4", "activations": "bf16"}
        te_mx.freeze_weights(
            apart, drop_master=True, filter_fn=lambda _, n, one=one: n == one, **how
        )
    with pytest.raises(ValueError, match=r"^w1, w3: readers of 'modelopt' multiply them as one"):
        te_mx.quantization_config(apart, "modelopt")
