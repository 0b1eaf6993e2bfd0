"""The loss of Transformers' causal language models: convert_model(fuse=True) computes it over parts
of the tokens, bit for bit ``F.cross_entropy(logits.float(), labels)``. All logits in fp32, beside
their logarithms or their gradients, are what takes the most memory of a training step; autograd
goes back part by part, and frees each."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_mx.fusion.sequences import Fusion

_LIBRARY = "transformers.loss.loss_utils"
_PART = 1 << 25  # logits that are in fp32 at a time
_ALIGNED = 16  # tokens: every row of a part lies as it would in all of them, for kernels that look
_KNOWN = {"num_items_in_batch", "ignore_index", "shift_labels"}


def loss_in_parts(logits_TV: Tensor, labels_T: Tensor, ignore: int, reduction: str) -> Tensor:
    """The sum or mean, fp32, over tokens with another label than `ignore`."""
    counted = labels_T != ignore
    words = torch.where(counted, labels_T, 0).unsqueeze(1)
    step = max(_PART // logits_TV.shape[1] // _ALIGNED, 1) * _ALIGNED
    parts = zip(logits_TV.split(step), words.split(step), strict=True)
    picked = torch.cat([F.log_softmax(part.float(), 1).gather(1, own) for part, own in parts])
    # The sum as cross_entropy makes it.
    return F.nll_loss(picked, torch.where(counted, 0, -1), ignore_index=-1, reduction=reduction)


def _own() -> Any:
    """The function of the library, None where that is not imported."""
    return getattr(sys.modules.get(_LIBRARY), "ForCausalLMLoss", None)


def causal_lm_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """As transformers.loss.loss_utils.ForCausalLMLoss, which runs where nothing is to be gained, or
    where it is asked for more."""
    plain = torch.compiler.is_compiling() or not logits.requires_grad or not kwargs.keys() <= _KNOWN
    if plain or type(logits) is not Tensor:
        return _own()(logits, labels, vocab_size, **kwargs)
    return _in_parts(logits, labels, vocab_size, **kwargs)


def _in_parts(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None,
    ignore_index: int = -100, shift_labels: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    words = shift_labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = loss_in_parts(logits.reshape(-1, vocab_size), words, ignore_index, reduction)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _is_known() -> bool:
    """Whether the library's function still computes what `_in_parts` does."""
    made = torch.Generator("cpu").manual_seed(0)
    logits = torch.randn(1, 4, 8, generator=made, device="cpu").requires_grad_()
    labels = torch.tensor([[1, 7, -100, 3]], device="cpu")
    for more in ({}, {"num_items_in_batch": 3}, {"shift_labels": labels}):
        if not torch.equal(_own()(logits, labels, 8, **more), _in_parts(logits, labels, 8, **more)):
            return False
    return True


def _has(module: nn.Module, loss: Any) -> bool:
    """Whether it is a causal language model of Transformers with this loss."""
    settable = isinstance(getattr(type(module), "loss_function", None), property)
    causal = settable and getattr(module, "loss_type", None) == "ForCausalLM"
    return causal and module.loss_function is loss


def plan_losses(model: nn.Module) -> tuple[list[Fusion], list[nn.Module]]:
    """The report, and the models whose loss is to be computed so."""
    found: list[Fusion] = []
    models: list[nn.Module] = []
    own = _own()
    for name, module in model.named_modules() if own is not None else ():
        if _has(module, own) and _is_known():
            what = f"{type(module).__name__}: its loss goes over parts of the tokens"
            found.append(Fusion(name or "(root)", "", what, ""))
            models.append(module)
    return found, models


def give_losses(models: list[Any]) -> None:
    """Do what was planned."""
    for model in models:
        model.loss_function = causal_lm_loss


def take_losses(model: nn.Module) -> list[Fusion]:
    """The other way."""
    found = []
    for name, module in model.named_modules():
        if _has(module, causal_lm_loss):
            module.loss_function = _own()
            found.append(Fusion(name or "(root)", "", type(module).__name__, ""))
    return found
