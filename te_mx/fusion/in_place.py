"""convert_model(fuse=True) where layers stay where they are, in models of any making: blocks,
normalizations and attentions get a class in place, and no name changes."""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_mx._ops.stored import stored
from te_mx.fusion import fused_mlp, fused_norm, masks
from te_mx.fusion.blocks import Block, plan_blocks
from te_mx.fusion.class_swap import Reclassed, give, take_back
from te_mx.fusion.masks import Beside, Traced
from te_mx.fusion.norms import FoundNorm, plan_norms
from te_mx.fusion.sequences import Fusion
from te_mx.nn.guards import RAN, hooked
from te_mx.nn.linear import Linear

# ------------------------------------------------------------------------------------------ tables
# Rotary embeddings, whose tables of cosines and sines compiled code writes once. torch.compile
# would make them a part of every kernel that rotates queries and keys, forward and back, where two
# sines and a cosine for each element take three to five times as long as reading the tables. They
# are known by what they hold: frequencies under the name that all libraries give them, and neither
# parameters nor submodules. Whatever else that were, storing its result changes no value.
ATTRIBUTE = "_te_mx_tables"


class StoredTables(Reclassed):
    """Mixin in front of the class of a module."""

    def _te_mx_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        made = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not self.__dict__[ATTRIBUTE].is_traced():
            return made
        if type(made) is tuple and all(_is_table(one) for one in made):
            return tuple([stored(one) for one in made])
        return stored(made) if _is_table(made) else made


def _is_table(made: Any) -> bool:
    """Whether a result is one that nothing is differentiated through."""
    return isinstance(made, Tensor) and made.is_floating_point() and not made.requires_grad


_FREQUENCIES = "inv_freq"


def plan_tables(
    model: nn.Module, converts: Collection[nn.Module]
) -> tuple[list[Fusion], list[Traced]]:
    """The report and what to fuse. converts: the layers that are te_mx.Linear afterwards."""
    found: list[Fusion] = []
    tables: list[Traced] = []
    beside = next((module for module in model.modules() if module in converts), None)
    for name, module in model.named_modules():
        frequencies = module._buffers.get(_FREQUENCIES)
        if frequencies is None or frequencies.dim() != 1 or not isinstance(beside, nn.Linear):
            continue
        others = any(True for _ in module.parameters()) or module._modules
        if others or isinstance(module, Reclassed) or hooked(module):
            continue
        what = f"{type(module).__name__}: its tables are written once in compiled code"
        found.append(Fusion(name or "(root)", str(2 * len(frequencies)), what, ""))
        tables.append(Traced(module, Beside(beside)))
    return found, tables


# ----------------------------------------------------------------------------------------- outputs
# The output projection of attentions that keep their result for backward themselves: it keeps the
# same tensor instead of codes of it, 1.03 bytes an element.
# Attentions of Transformers whose backward reads their result, in the memory that the output
# projection is given: (batch, tokens, heads, width), as their kernels write it. Others (eager) keep
# something else, and codes are smaller than a tensor of its own.
_KEEPS = ("sdpa", "flash_attention_2", "flash_attention_3")
_OUTPUT = ("o_proj", "out_proj", "dense")
_INPUT = ("q_proj", "qkv_proj", "query_key_value")


def plan_outputs(
    model: nn.Module, converts: Collection[nn.Module]
) -> tuple[list[Fusion], list[nn.Module]]:
    """The report, and the layers that are to save their input itself."""
    found: list[Fusion] = []
    layers: list[nn.Module] = []
    for prefix, module in model.named_modules():
        children = module._modules
        names = [name for name in _OUTPUT if name in children]
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if not names or kind is None or not any(name in children for name in _INPUT):
            continue
        layer, name = children[names[0]], f"{prefix}.{names[0]}" if prefix else names[0]
        if not isinstance(layer, nn.Linear) or layer not in converts or kind not in _KEEPS:
            continue
        shape = f"{layer.in_features} -> {layer.out_features}"
        what = f"{type(module).__name__}: keeps the result that {kind} keeps, not codes of it"
        found.append(Fusion(name, shape, what, ""))
        layers.append(layer)
    return found, layers


# ------------------------------------------------------------------------------------------ losses
# The loss of Transformers' causal language models: convert_model(fuse=True) computes it over parts
# of the tokens, bit for bit ``F.cross_entropy(logits.float(), labels)``. All logits in fp32,
# beside their logarithms or their gradients, are what takes the most memory of a training step;
# autograd goes back part by part, and frees each.
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


def take_losses(model: nn.Module) -> list[Fusion]:
    """The other way."""
    found = []
    for name, module in model.named_modules():
        if _has(module, causal_lm_loss):
            module.loss_function = _own()
            found.append(Fusion(name or "(root)", "", type(module).__name__, ""))
    return found


class InPlace(NamedTuple):
    """What is to be fused once the linear layers are converted."""

    blocks: list[Block]
    norms: list[FoundNorm]
    outputs: list[nn.Module]
    tables: list[Traced]
    losses: list[Any]
    masks: list[Traced]
    layers: list[Traced]


NOTHING = InPlace([], [], [], [], [], [], [])
# Classes that blocks, norms and others get, the attribute that holds the plan of a module,
# and those that it gets in use.
_CLASSES: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (fused_mlp.FusedBlock, fused_mlp.ATTRIBUTE, (RAN,)),
    (fused_norm.FusedNorm, fused_norm.ATTRIBUTE, (RAN, fused_norm.READ)),
    (StoredTables, ATTRIBUTE, ()),
    (masks.SaysNothing, masks.ATTRIBUTE, ()),
    (masks.LeavesMask, masks.ATTRIBUTE, ()),
)


def plan_in_place(
    model: nn.Module, why_not: Callable[[nn.Linear], str], keeps: Callable[[nn.Module, str], bool],
    unlike: Callable[[Sequence[str]], str], taken: Collection[nn.Module],
) -> tuple[list[Fusion], InPlace]:  # fmt: skip
    """The report and what `fuse_in_place` is to do; arguments as of fuse.plan_fusions. taken:
    layers that become part of another module."""
    stays: dict[nn.Linear, bool] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            other = module in taken or keeps(module, name)
            other = other or (type(module) is not Linear and bool(why_not(module)))
            stays[module] = stays.get(module, False) or other
    converts = {module for module, other in stays.items() if not other}
    found, blocks = plan_blocks(model, converts, why_not, unlike)
    modules = {block.module for block in blocks}
    normalizations, norms = plan_norms(model, converts, modules)
    attentions, outputs = plan_outputs(model, converts)
    rotary, tables = plan_tables(model, converts)
    losses, models = plan_losses(model) if converts else ([], [])
    unmasked, *masked = masks.plan_masks(model, converts)
    plan = InPlace(blocks, norms, outputs, tables, models, *masked)
    return found + normalizations + attentions + rotary + unmasked + losses, plan


def fuse_in_place(plan: InPlace) -> None:
    """Fuse what was planned."""
    for layer in plan.outputs:
        layer.keeps_given_input = True  # type: ignore[assignment]
    for model in plan.losses:
        model.loss_function = causal_lm_loss
    all_found: tuple[list[Any], ...] = (
        plan.blocks, plan.norms, plan.tables, plan.masks, plan.layers
    )  # fmt: skip
    for found, (mixin, attribute, _) in zip(all_found, _CLASSES, strict=True):
        for module, its_plan in found:
            module.__dict__[attribute] = its_plan
            give(module, mixin)


def unfuse_in_place(model: nn.Module) -> list[Fusion]:
    """Give back the classes that modules had."""
    found = take_losses(model)
    for mixin, attribute, others in _CLASSES:
        for name, module in model.named_modules():
            if isinstance(module, mixin):
                reason = take_back(module, attribute, *others)
                found.append(Fusion(name or "(root)", "", type(module).__name__, reason))
    return found
