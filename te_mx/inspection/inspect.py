"""te_mx.inspect: a forward and a backward of a model, and what formats make of its tensors."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from te_mx import formats as all_formats
from te_mx.conversion.report import matrices_of
from te_mx.formats import Format
from te_mx.formats.format import every_name
from te_mx.inspection.collect import Layer, Watch, layers_of, untouched
from te_mx.inspection.report import About, InspectionReport, readings_of
from te_mx.recipe import MAX_SPREAD
from te_mx.runtime.arguments import check_flag, check_module, check_size, shown

# One of each width and family, and E5M2 for gradients: a table that can be read.
USUAL = "mxfp8_e4m3", "mxfp8_e5m2", "fp8_e4m3_1x128", "mxfp6_e2m3", "mxfp4"
STAND_IN = "half the sum of squares of the output, a stand-in"


def inspect(
    model: nn.Module,
    batch: Any,
    fmt: Iterable[str] | str | None = None,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    gradients: bool = True,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    scale_rule: str | None = None,
    alignment_spread: int = MAX_SPREAD,
    max_elements: int | None = None,
    progress: bool = True,
) -> InspectionReport:
    """Say what quantizing to each format would do to the inputs, weights and output gradients of
    the linear layers of `model`, before anything is converted.

    Runs one forward and backward in high precision, in the mode (train or eval) that the model is
    in, plain or converted, and quantizes what every nn.Linear and te_mx layer multiplies with the
    formats' specification in plain torch, on the device where it lies, in both directions: for the
    GEMM fprop x and w, for dgrad g and w, for wgrad x and g. Calls of one layer add up, as do the
    groups of a te_mx.GroupedLinear. Parameters that are frozen are treated as if they trained.

    The model is the same afterwards: no parameter, .grad, buffer or hook is changed, and random
    numbers of torch and of Python go on as if nothing had run. What a module changes beside these,
    such as a counter in a plain attribute, is its own.

    Only numbers are kept. Memory: that of a training step without the gradients of parameters, and
    a copy of the buffers. Time: some 50 ns for each element, format and direction on two cores of a
    CPU, so that the weights of a model of 1e9 parameters take about eight minutes for five formats.
    `max_elements` bounds it.

    Args:
        batch: what the model takes: a dict is passed as keywords, a tuple or list as positions, a
            tensor alone.
        fmt: one or several of `te_mx.formats.names()`, which may be passed whole; None for
            "mxfp8_e4m3", "mxfp8_e5m2", "fp8_e4m3_1x128", "mxfp6_e2m3" and "mxfp4".
        loss_fn: ``loss_fn(output)`` -> the scalar that backward starts from. None: the output's
            ``loss`` (that of a Hugging Face model that was given labels), or the output itself if
            it is a scalar, or half the sum of squares of its first tensor. The last one stands in
            where there is no loss, and its gradients are not those of training; the report says so.
        gradients: False runs no backward, and reads x and w for fprop only.
        filter_fn: ``filter_fn(module, name)`` is False for layers to leave out.
        scale_rule: how scales are chosen; None for "rceil", or the first rule of a format without.
        alignment_spread: that of the recipe, for the classes of Hopper's tiles, see
            docs/numerics.md.
        max_elements: read at most about so many elements of a tensor for each direction, in stripes
            of 128 rows that lie evenly over it (one stripe at least); None reads everything.
        progress: show a bar if tqdm is installed and stderr is a terminal.

    Returns:
        An `InspectionReport`: print it, or see its ``table``, ``worst``, ``to_json``, ``to_png``.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name; a model without linear
            layers, or with parameters that have no values; a loss that is no scalar.
        RuntimeError: a layer has no high-precision weight (te_mx.unfreeze_weights gives it one
            back); or no gradient can reach a layer; torch's own, for
            ``torch.utils.checkpoint(use_reentrant=True)``, which takes no part in autograd.grad.
    """
    check_module(model)
    if not isinstance(batch, Tensor | Mapping | tuple | list):
        raise TypeError(
            f"inspect: batch must be a tensor, tuple, list or dict, got {shown(batch)}; put what "
            "the model takes into a tuple"
        )
    rules = _rules(fmt, scale_rule)
    for name, function in (("loss_fn", loss_fn), ("filter_fn", filter_fn)):
        if function is not None and not callable(function):
            raise TypeError(f"inspect: {name} must be a function, got {shown(function)}")
    check_flag("inspect: gradients", gradients)
    check_flag("inspect: progress", progress)
    spread = check_size("inspect: alignment_spread", alignment_spread)
    if spread > MAX_SPREAD:
        raise ValueError(f"inspect: alignment_spread must be in 0..{MAX_SPREAD}, got {spread}")
    most = None if max_elements is None else check_size("inspect: max_elements", max_elements, 1)
    layers, skipped = layers_of(model, filter_fn or (lambda module, name: True))
    if not layers:
        raise ValueError(_no_layers(model, skipped, filter_fn is not None))

    with _bar(layers, gradients, progress) as seen:
        watch = Watch(layers, rules, spread, most, gradients, seen)
        loss, origin = _run(model, batch, loss_fn, watch, gradients)
    about = About(
        type(getattr(model, "_orig_mod", model)).__name__,  # torch.compile's wrapper has one
        {str(fmt): rule for fmt, rule in rules.items()}, loss, origin, spread, most,
        *_missing(layers, watch, gradients), skipped,
        matrices_of(model, [layer.module for layer in layers]),
    )  # fmt: skip
    return InspectionReport(readings_of(watch.sums, layers, tuple(rules)), about)


# ---------------------------------------------------------------------------------------- arguments
def _rules(names: Any, rule: Any) -> dict[Format, str]:
    """The formats, each with its scale rule."""
    usual = names is None
    if isinstance(names, str):
        names = (names,)
    elif not usual and not (isinstance(names, Iterable) and not isinstance(names, Tensor)):
        raise TypeError(f"inspect: fmt must be names of formats, got {shown(names)}")
    listed = list(USUAL if usual else names)
    known = ", ".join(every_name())
    if not listed:
        raise ValueError(f"inspect: fmt must name one or more of {known}, got none")
    rules: dict[Format, str] = {}
    for name in listed:
        try:
            fmt = all_formats.get(name)
        except ValueError:
            wrong = ValueError if isinstance(name, str) else TypeError
            raise wrong(f"inspect: fmt must be among {known}, got {shown(name)}") from None
        if fmt.transform is not None:
            raise ValueError(f"inspect: fmt must be among {known}, got {shown(name)}")
        has = fmt.scaling
        every = map(all_formats.get, all_formats.names())
        elsewhere = usual and any(one.scaling.knows(rule) for one in every)
        if rule is not None and not has.knows(rule) and not elsewhere:
            raise ValueError(
                f"inspect: scale_rule must be one of {has.shown_rules} for {fmt}, got {shown(rule)}"
            )
        wanted = rule or "rceil"
        rules[fmt] = wanted if has.knows(wanted) else has.rules[0]
    return rules


def _no_layers(model: nn.Module, skipped: dict[str, str], filtered: bool) -> str:
    kind = type(model).__name__
    if skipped:
        name, reason = next(iter(skipped.items()))
        return f"inspect: no linear layer of model {kind} can be read; {name!r}: {reason}"
    why = "that filter_fn keeps" if filtered else "(nn.Linear or a te_mx layer) inside"
    left = ", ".join(f"{m.name} ({m.kind})" for m in matrices_of(model)[:3])
    held = f"; its matrices are {left}" if left else ""
    return f"inspect: model must have a linear layer {why}, {kind} has none{held}"


# ---------------------------------------------------------------------------------------------- run
def _run(
    model: nn.Module, batch: Any, loss_fn: Any, watch: Watch, gradients: bool
) -> tuple[float | None, str]:
    """Run the model and, for gradients, backward. Returns the loss and what it is."""
    with (
        untouched(model), torch.inference_mode(False),
        # What was compiled runs as it is written: the products inside of a graph cannot be read.
        # Importing _dynamo for that takes seconds.
        torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules
        else nullcontext(),
        torch.set_grad_enabled(gradients), watch,
    ):  # fmt: skip
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        if not gradients:
            return None, "no backward"
        loss, origin = _loss(output, loss_fn)
        if not loss.requires_grad:
            raise RuntimeError(
                "inspect: no gradient can reach a linear layer: the loss does not depend on "
                "one, or the model computes under torch.no_grad; pass gradients=False"
            )
        watch.gradients_of(loss)
    return float(loss.detach()), origin


def _loss(output: Any, loss_fn: Any) -> tuple[Tensor, str]:
    if loss_fn is not None:
        return _scalar(loss_fn(output), "loss_fn must return"), "loss_fn"
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return _scalar(own, "the loss of the output must be"), "the loss of the output"
    if isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point():
        return output.reshape(()), "the output"
    first = next(_tensors(output), None)
    if first is None:
        raise TypeError(
            f"inspect: the model returned {shown(output)}, without a tensor of floats to start "
            "backward from; pass loss_fn, or gradients=False"
        )
    return first.float().square().sum() / 2, STAND_IN


def _scalar(loss: Any, must: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise TypeError(f"inspect: {must} a scalar tensor of floats, got {shown(loss)}")
    return loss.reshape(())


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of floats in an output, in order."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping | tuple | list):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(each)


def _missing(
    layers: list[Layer], watch: Watch, gradients: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Steps that never ran, and those that ran and got no gradient."""
    steps = [step for layer in layers for step in layer.steps]
    ran = {role: {step for step, own, _ in watch.sums if own == role} for role in "xg"}
    never = tuple(step for step in steps if step not in ran["x"])
    without = tuple(step for step in steps if step in ran["x"] - ran["g"])
    return never, without if gradients else ()


@contextmanager
def _bar(layers: list[Layer], gradients: bool, wanted: bool) -> Iterator[Callable[[], Any]]:
    """What is called after each product of a forward, and after each gradient."""
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        wanted = False
    if not wanted:
        yield lambda: None
        return
    steps = sum(len(layer.steps) for layer in layers) * (2 if gradients else 1)
    # Layers that run more than once, or never, end beside the total. None: only on a terminal.
    with tqdm(total=steps, desc="te_mx.inspect", unit="tensor", disable=None) as bar:
        yield bar.update
