"""What other libraries read as `weight` of a te_mx.Linear that has none: only codes of it are left,
or it is split into several parameters.

nn.Module would give None, on which torchao's quantize_, torch's RowwiseParallel, Transformers where
it resizes a head and modules that compute with it themselves fail without a word about the layer.
So who reads it from there gets an error that names the layer and the remedy.

peft finds what `target_parameters` names among the parameters of modules: experts list those that
they have no more when a config asks that te_mx's adapters are registered with.

What the config of a model says of its codes, and whether it is still so.

te_mx.quantization_config and te_mx.integrations.hf_quantizer give each module that holds codes the
names that these are saved under (`_saved_as`) and the quantization_config that says what they are
(`_claim`). Unfreezing ends the names and leaves the claim, which the model still makes: until all
codes are gone, or the model says anew what it holds, it would be written beside other weights."""

import dis
import inspect
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from te_mx.torch_internals import calling_frame
from te_mx.weights.freezing import Freezable

# Code that does something to the weight of any nn.Linear: modules, and functions of some.
_READERS = (
    "torchao", "torch.distributed.tensor.parallel", "torch.nn.modules.transformer",
    "torch.nn.modules.activation", "transformers.modeling_utils._get_resized_lm_head",
)  # fmt: skip


class Weight:
    """The attribute `weight` of a class of modules: the parameter, wherever nn.Module has it. It
    has no __set__, so nn.Module sets and removes it as any other."""

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        parameters = None if module is None else module.__dict__.get("_parameters")
        if parameters is None or "weight" not in parameters:
            # Python goes on to nn.Module.__getattr__: it may be a buffer.
            raise AttributeError("weight")
        weight = parameters["weight"]
        if weight is None and not torch.compiler.is_compiling():
            frame = calling_frame(1)
            reader = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}."
            for known in _READERS:
                if reader.startswith(f"{known}."):
                    raise TypeError(_why(module, known))
            for owner in frame.f_locals.values():
                if isinstance(owner, nn.Module) and any(
                    m is module for _, m in weights_read(owner)
                ):
                    raise TypeError(_why(module, f"the forward of {type(owner).__name__}"))
        return weight


def is_asked_for_targets() -> bool:
    """Whether a generator that calls this is read by peft, which looks for target_parameters of a
    config that te_mx.integrations.peft registered something with."""
    frame = calling_frame(2)
    if frame is None or frame.f_code.co_name != "_inject_parameters":
        return False
    known = getattr(frame.f_locals.get("peft_config"), "_custom_modules", None) or ()
    return any(kind.__module__.startswith("te_mx.") for kind in known)


def _why(module: Any, reader: str) -> str:
    if module._source.dropped:
        why = "only codes of its weight are left (drop_master=True)"
        remedy = "get it back first by te_mx.unfreeze_weights(model, dequantize=True)"
    else:
        why, remedy = "its weight is split (parameters_split)", "build it in one piece"
    return (
        f"{module._label()}: {why}, so {reader} has no weight to work on. Leave this layer out "
        f"there, or {remedy}"
    )


def claim(model: nn.Module, holding: Iterable[tuple[Freezable, Any]], fields: Any) -> None:
    """Let modules of a model save codes under names with the endings beside them, and `fields`, its
    quantization_config, say so of them and of no others."""
    for module in model.modules():
        module.__dict__.pop("_claim", None)
        quantizer: Any = module.__dict__.get("hf_quantizer")
        if hasattr(quantizer, "restate"):  # the one that te_mx layers were loaded by
            quantizer.restate(module, fields)
    for one, ends in holding:
        one._saved_as, one._claim = ends, fields


def take_back(model: nn.Module) -> None:
    """Where no module of a model holds codes any more: have its config say nothing of them, and
    Transformers take it for a model that was never quantized."""
    modules = [m for m in model.modules() if isinstance(m, Freezable)]
    claims = [m._claim for m in modules if m._claim is not None]
    if not claims or any(m._source.dropped for m in modules):
        return
    methods = {str(one.get("quant_method")) for one in claims}
    # Layers of a part may hold the config of all; models are what saves one.
    for one in (m for m in model.modules() if hasattr(m, "save_pretrained")):
        quantizer = one.__dict__.get("hf_quantizer")
        if quantizer is not None and _method(quantizer) in methods:
            quantizer.remove_quantization_config(one)
        config = one.__dict__.get("config")
        if config is not None and not isinstance(config, dict):
            if _method(config) in methods:
                vars(config).pop("quantization_config", None)
            if _fields(config) is None:
                vars(config).pop("_is_quantized", None)


def check_saved(module: Any) -> None:
    """Raise RuntimeError where transformers or diffusers save a module in a model whose config says
    something else of it: their from_pretrained would misread codes or look for them.

    Only the stack tells: a layer does not know its model. Adapters alone may be saved, and so may a
    model whose config names a quantization of somebody else."""
    frame = calling_frame(1)
    while frame is not None and frame.f_code.co_name != "save_pretrained":
        frame = frame.f_back
    model = frame and frame.f_locals.get("self")
    if not isinstance(model, nn.Module) or getattr(model, "peft_config", None):
        return
    fields, holds = _fields(getattr(model, "config", None)), module._source.dropped
    if holds and fields is None:
        raise RuntimeError(
            f"{module._label()} holds codes (drop_master=True), which "
            f"{type(model).__name__}.save_pretrained writes and from_pretrained loads as "
            "plain weights. Save them with torch.save(model.state_dict(), path), to load "
            "with load_state_dict into a model of te_mx layers; say in the config what "
            "they are, te_mx.quantization_config(model, style); or get weights back "
            "first: te_mx.unfreeze_weights(model, dequantize=True)"
        )
    if fields is None or module._saved_as is not None:
        return
    if module._claim == fields or (
        holds and any(getattr(m, "_claim", None) == fields for m in model.modules())
    ):
        what = f"holds other codes, {module._source.settings.w}," if holds else "holds weights"
        raise RuntimeError(
            f"{module._label()} {what} since it was frozen or unfrozen by itself, and the "
            f"quantization_config of {type(model).__name__}, {fields.get('quant_method')!r}, was "
            "made before that. Make it anew, te_mx.quantization_config(model, style), or get all "
            "weights back, which removes it: te_mx.unfreeze_weights(model, dequantize=True)"
        )


def _fields(config: Any) -> dict[str, Any] | None:
    """The quantization_config of a config as in config.json, or None."""
    if isinstance(config, dict):
        said = config.get("quantization_config")
    else:
        said = getattr(config, "quantization_config", None)
    if said is None or isinstance(said, dict):
        return said
    return said.to_dict() if hasattr(said, "to_dict") else dict(vars(said))


def _method(owner: Any) -> str | None:
    """The quant_method that a config or a quantizer of Transformers names."""
    fields = _fields(owner)
    return None if fields is None else str(fields.get("quant_method"))


# ---------------------------------------------------------------------------------- weight readers
# Modules that compute with the weight of a layer below them and do not call it, such as the fast
# path of nn.TransformerEncoderLayer: their code says so, where it reads ``self.<layer>.weight`` in
# forward or in a method that forward calls.
_known: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def weights_read(owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules below this one whose weight its forward reads, each with its name."""
    kind = type(owner)
    if kind.__module__.startswith("te_mx."):
        return
    if kind not in _known:
        _known[kind] = frozenset(_paths(kind))
    for path in sorted(_known[kind]):
        try:
            yield path, owner.get_submodule(path)
        except AttributeError:  # of other instances
            continue


def reads_now(owner: nn.Module) -> bool:
    """Whether such a forward gets to where it reads: the fast path can be turned off."""
    return not isinstance(owner, nn.TransformerEncoderLayer) or (
        torch.backends.mha.get_fastpath_enabled()
    )


def _paths(kind: type) -> Iterator[str]:
    """P of every ``self.P.weight`` in forward and in what it calls on self."""
    seen, names = {"forward"}, ["forward"]
    while names:
        method = inspect.unwrap(getattr(kind, names.pop(), None))  # type: ignore[arg-type]
        code = getattr(method, "__code__", None)
        if code is None or not code.co_varnames:
            continue
        for chain in _chains(code, code.co_varnames[0]):
            if len(chain) > 1 and chain[-1] == "weight":
                yield ".".join(chain[:-1])
            elif len(chain) == 1 and chain[0] not in seen:
                seen.add(chain[0])
                names.append(chain[0])


def _chains(code: CodeType, me: str) -> Iterator[tuple[str, ...]]:
    """(a, b, ..) of every ``me.a.b..`` in a function and those inside of it, shorter ones first."""
    chain: tuple[str, ...] | None = None
    for step in dis.get_instructions(code):
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            last: Any = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
            chain = () if last == me else None
        elif chain is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, step.argval)
            yield chain
        else:
            chain = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _chains(inner, me)
