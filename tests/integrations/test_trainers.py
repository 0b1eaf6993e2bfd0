"""te_mx layers in the loops of others: Transformers' Trainer, accelerate, Lightning, TRL.

A model whose layers a recipe is bound to trains in any of them; in Lightning a plugin converts it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from beside_te import import_or_skip
from hf_models import keep_head, model_of
from torch import nn

import te_mx

LAYER = "model.layers.0.mlp.up_proj"


class Counting(torch.utils.data.Dataset):
    """Sequences of the numbers that follow each other."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        tokens = torch.arange(i, i + 16) % 64
        return {"input_ids": tokens, "labels": tokens}


def bound():
    model = model_of("Llama")
    te_mx.convert_model(model, filter_fn=keep_head, recipe=te_mx.get_default_recipe())
    return model


def ran(model, name=LAYER) -> bool:
    """Whether all three GEMMs of a layer ran in MXFP8."""
    row = te_mx.audit(model)[name]
    return not {row.fprop, row.dgrad, row.wgrad} & {"never ran", "high precision"}


def trainer(model, folder, **how):
    transformers = import_or_skip("transformers")
    pytest.importorskip("accelerate")
    given = {
        "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True,
        "bf16": True, "report_to": [], "logging_steps": 1, "disable_tqdm": True, "save_steps": 2,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir=str(folder), **given | how)
    return transformers.Trainer(model, arguments, train_dataset=Counting())


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", [{}, {"gradient_checkpointing": True}], ids=["", "checkpointing"])
def test_transformers_trainer(how, tmp_path):
    one = trainer(bound(), tmp_path, **how)
    one.train()
    found = losses(one)
    assert found[-1] < found[0] - 0.5 and ran(one.model)
    plain = trainer(model_of("Llama"), tmp_path / "plain", **how)
    plain.train()
    assert found == pytest.approx(losses(plain), rel=0.02) and found != losses(plain)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_transformers_trainer_resumes(tmp_path):
    whole = trainer(bound(), tmp_path / "whole")
    whole.train()
    again = trainer(bound(), tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(again) == losses(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


@pytest.mark.parametrize("steps", [1, 2])
def test_accelerate(steps):
    accelerate = import_or_skip("accelerate")
    pytest.importorskip("transformers", minversion="5.0")
    accelerator = accelerate.Accelerator(
        mixed_precision="bf16", cpu=True, gradient_accumulation_steps=steps
    )
    model = bound()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Counting(), batch_size=4)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for batch in (b for _ in range(2) for b in loader):
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < found[0] - 0.3 and ran(prepared)
    assert accelerator.unwrap_model(prepared) is model


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trl_adapts_codes(tmp_path):
    trl, datasets = import_or_skip("trl"), pytest.importorskip("datasets")
    import peft
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from te_mx.integrations.peft import register

    words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    text = [" ".join(f"w{(i + j) % 62}" for j in range(16)) for i in range(16)]
    model = model_of("Llama")
    te_mx.convert_model(model, filter_fn=keep_head)
    te_mx.freeze_weights(model, drop_master=True, fmt="mxfp4", activations="bf16")
    before = {k: v.clone() for k, v in model.state_dict().items() if "proj" in k}
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2,
        use_cpu=True, bf16=True, report_to=[], logging_steps=1, disable_tqdm=True, max_length=32,
    )  # fmt: skip
    one = trl.SFTTrainer(
        model, args=arguments, train_dataset=datasets.Dataset.from_dict({"text": text}),
        processing_class=fast,
        peft_config=register(peft.LoraConfig(r=4, target_modules="all-linear")),
    )  # fmt: skip
    one.train()
    assert losses(one)[-1] < losses(one)[0] - 0.05
    after = one.model.unload().state_dict()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").is_file()


# ------------------------------------------------------------------------------------- Lightning
def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    )


def data():
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(*size, generator=generator) for size in ((256, 64), (64, 8)))
    return x, x @ w / 8


@pytest.fixture
def lightning():
    return import_or_skip("lightning")


def fit(lightning, plugin, epochs=6):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net(), []

        def training_step(self, batch, _):
            assert te_mx.context.region.active_region() is not None
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.losses.append(loss.item())
            return loss

        def predict_step(self, batch, _):
            return self.net(batch[0])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module, dataset = Module(), torch.utils.data.TensorDataset(*data())
    loader = torch.utils.data.DataLoader(dataset, batch_size=64)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", plugins=[plugin], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    return trainer, module, loader


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [None, te_mx.recipe.MXFP4BlockScaling()])
def test_lightning_trainer(lightning, dtype, recipe):
    from te_mx.integrations.lightning import MXPrecision

    plugin = MXPrecision(dtype, recipe=recipe, filter_fn=lambda _, name: name != "net.4")
    trainer, module, loader = fit(lightning, plugin)
    assert module.losses[-1] < 0.5 * module.losses[0] and ran(module, "net.2")
    assert type(module.net[4]) is nn.Linear and {p.dtype for p in module.parameters()} == {dtype}
    first = trainer.predict(module, loader)[0]
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        assert torch.equal(first, module.net(data()[0][:64].to(dtype)).float())
    assert (
        torch.get_default_dtype() == torch.float32 and te_mx.context.region.active_region() is None
    )


@pytest.mark.filterwarnings("ignore")
def test_fabric(lightning):
    from te_mx.integrations.lightning import FabricMXPrecision

    fabric = lightning.Fabric(accelerator="cpu", plugins=[FabricMXPrecision(torch.float32)])
    model, (x, y) = net(), data()
    plain = copy.deepcopy(model)
    te_mx.convert_model(plain)
    steps = []
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        loss = (wrapped(x) - y).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(loss.item())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for expected in steps:
        with te_mx.autocast():
            loss = (plain(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == expected


@pytest.mark.filterwarnings("ignore")
def test_what_the_plugin_refuses(lightning):
    from te_mx.integrations.lightning import MXPrecision

    with pytest.raises(ValueError, match="weights_dtype must be one of"):
        MXPrecision(torch.int8)
    with pytest.raises(TypeError, match="fuse"):
        MXPrecision(fuse=1)
    with pytest.raises((TypeError, ValueError), match="recipe"):
        MXPrecision(recipe="fp8")
    layers = MXPrecision(convert=False).convert_module(net())
    assert type(layers[0]) is nn.Linear and layers[0].weight.dtype == torch.bfloat16
