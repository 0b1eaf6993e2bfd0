"""Causal language models of Transformers: by the name of a shape, a config file or a folder.

Nothing is downloaded: a shape is a config with random weights, and a folder is one on this machine.
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

LLAMA_8B_LAYERS = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "max_position_embeddings": 8192,
}  # fmt: skip
# The fields of each config that are not Transformers' defaults.
SHAPES: dict[str, dict[str, Any]] = {
    # Learns bytes on two CPU cores in seconds.
    "tiny": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256,
    },
    "small": {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 704,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 256,
    },
    "400m": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 256,
    },
    "861m": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    # Six layers of Llama-3-8B (1.6 G parameters) between a small vocabulary's ends.
    "8b-layers": LLAMA_8B_LAYERS,
    # 1.1 G parameters: four layers of Llama-3-8B, for examples/generate.py; 1b-deep is Llama-3.2-1B
    # without its long rotary embeddings, whose head has the weight of the embedding.
    "1b": {**LLAMA_8B_LAYERS, "num_hidden_layers": 4},
    "1b-deep": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    # 1.6 G parameters; a token uses two of eight experts.
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 2048, "intermediate_size": 7168,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    },
    # 1.4 G parameters in layers as wide as those of Qwen3-30B-A3B; eight of 64 experts.
    "qwen3-moe": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 32000,
    },
    "mixtral-tiny": {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256,
    },
}  # fmt: skip
# Both make logits and stay in high precision: the head over the vocabulary, routers over experts.
KEPT = {"lm_head", "gate", "router"}
OLDEST = 5


def transformers() -> ModuleType:
    """The package, imported here because it takes seconds and te_mx does not need it."""
    remedy = f'pip install "transformers>={OLDEST}"'
    try:
        import transformers as package
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise RuntimeError(
            f"these models are Transformers', which is not installed: {remedy}"
        ) from error
    if int(package.__version__.split(".")[0]) < OLDEST:
        raise RuntimeError(
            f"needs Transformers {OLDEST} or newer, found {package.__version__}: {remedy}"
        )
    return package


def config_of(which: str, **changes: Any) -> Any:
    """The config that `which` names: one of SHAPES, a config.json, or a folder that has one.

    `changes` replace fields. Raises ValueError for a name that is none of these.
    """
    if which in SHAPES:
        return transformers().AutoConfig.for_model(**{**SHAPES[which], **changes})
    path = Path(which) / "config.json" if Path(which).is_dir() else Path(which)
    if not path.is_file():
        raise ValueError(
            f"a model is one of {', '.join(SHAPES)}, a config.json or a folder with one, "
            f"got {which}, which is no file here"
        )
    try:
        fields = json.loads(path.read_text())
        fields["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no config of Transformers with a model_type") from error
    of_text = fields.get("text_config") or fields  # the part of a model that takes images too
    if "num_hidden_layers" in changes:  # lists such as layer_types say something of each layer
        count, layers = of_text.get("num_hidden_layers"), changes["num_hidden_layers"]
        lists = {k: v for k, v in of_text.items() if isinstance(v, list) and len(v) == count}
        of_text.update({k: v[:layers] for k, v in lists.items()})
    of_text.update(changes)
    try:
        return transformers().AutoConfig.for_model(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error


def has_weights(which: str) -> bool:
    """Whether `which` is a folder with a checkpoint, so that training goes on from it."""
    folder = Path(which)
    return folder.is_dir() and any(
        folder.glob(pattern) for pattern in ("*.safetensors", "pytorch_model*.bin")
    )


def build(
    config: Any,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "sdpa",
    experts: str | None = None,
    weights: str | None = None,
) -> nn.Module:
    """A causal language model on the default device, of random weights or those of a folder.

    `attention` is Transformers' implementation; "auto" is sdpa where the model has it. `experts`
    names Transformers' way to compute a mixture of experts, such as ``"grouped_mm"``.
    """
    how: dict[str, Any] = {"dtype": dtype}
    if attention != "auto":
        how["attn_implementation"] = attention
    if experts is not None:
        how["experts_implementation"] = experts
    auto = transformers().AutoModelForCausalLM
    if weights is not None:
        # Read on the CPU: Transformers would need a further package to read to a device.
        with torch.device("cpu"):
            model = auto.from_pretrained(weights, local_files_only=True, config=config, **how)
        return model.to(torch.get_default_device()).train()
    return auto.from_config(config, **how).train()


def stays(module: nn.Module, name: str) -> bool:
    """The filter_fn of te_mx.convert_model for these models: all but what makes logits."""
    return name.split(".")[-1] not in KEPT
