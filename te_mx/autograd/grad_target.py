"""Where a weight gradient goes when it does not simply go back to autograd: into main_grad of the
parameter (Transformer Engine's fuse_wgrad_accumulation), or computed later (delay_wgrad_compute).

Weight gradients that a process computes and does not own alone: what several ranks computed is
summed and cut, and what is left for this rank goes to the parameter that the optimizer sees."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from te_mx._ops import FLOAT_DTYPES, capturing
from te_mx.dispatch.linear import Into
from te_mx.torch_internals import knows_passes, pass_id, will_run

# run(out, dtype, accumulate): a GEMM, into `out` or as a new tensor of `dtype`.
Run = Callable[[Tensor | None, torch.dtype, bool], Tensor]
# (what it is, the tensor): what a GEMM reads that is not te_mx's alone, so that a GEMM that waits
# may find it overwritten. Codes are nobody else's.
Reads = tuple[tuple[str, Tensor], ...]
INPUT, OUTPUT_GRADIENT = "input", "output gradient"


class Wgrad:
    """The GEMM of one weight gradient, to be run now or later."""

    __slots__ = ("reads", "run")

    def __init__(self, run: Run, reads: Reads) -> None:
        self.run = run
        self.reads = reads

    def __call__(self, out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
        return self.run(out, dtype, accumulate)


class GroupedWgrad(Wgrad):
    """The GEMMs of several weights, as a `Wgrad` of what they are when concatenated.

    one(i, out, accumulate): the GEMM of weight i alone, into `out`; None where they only run
    together. into(outs, accumulate): all of them, each into a tensor of its own; False where that
    cannot be done, and was not."""

    __slots__ = ("into", "one")

    def __init__(
        self, run: Run, reads: Reads, one: Callable[[int, Tensor, bool], object] | None = None,
        into: Callable[[Sequence[Tensor], bool], bool] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(run, reads)
        self.one = one
        self.into = into


class Versions:
    """What a GEMM that waits will read, with versions, which autograd checks no longer."""

    __slots__ = ("_kept",)

    def __init__(self, reads: Reads) -> None:
        # An inference tensor has no version; nobody can tell whether it was written to.
        self._kept = [(what, t, t._version) for what, t in reads if not t.is_inference()]

    def check(self, label: "Label") -> None:
        """
        Raises:
            RuntimeError: one of the tensors was modified in place since.
        """
        for what, tensor, version in self._kept:
            if tensor._version != version:
                raise RuntimeError(
                    f"{label}: backward_dw() needs the {what} {tuple(tensor.shape)} of the "
                    "backward pass that left this weight gradient, but an in-place operation has "
                    f"modified it since: it is at version {tensor._version}, expected version "
                    f"{version}. Call backward_dw() before the {what} is reused, or give the layer "
                    "a clone of it"
                )


Queue = deque[Callable[[], None]]


# --------------------------------------------------------- which gradient of a weight overwrites
class Start:
    """The next gradient of a weight overwrites main_grad, and those after it add: asked for by a
    forward with is_first_microbatch=True, until that gradient or as long as its graph lives."""

    __slots__ = ("__weakref__",)


# By the id of the weight, which lives as long as a Start: a weak reference to the one that waits.
_starts: dict[int, ref[Start]] = {}
_begun = WeakIdKeyDictionary()  # weight: the backward pass that overwrote its main_grad last


def started(parameter: Tensor, again: dict[int, Start] | None) -> Start | None:
    """What a forward with is_first_microbatch=True asks for. All uses of a weight share it, so that
    one of them overwrites, whatever order their backward passes run in.

    Args:
        again: what the first run asked for of a function that runs more than once, by the id of the
            weight (te_mx/context/region.py): its other runs ask for nothing more.
    """
    key = id(parameter)
    if again is not None and key in again:
        return again[key]
    going_back = pass_id()
    if going_back != -1 and _begun.get(parameter) == going_back:
        return None  # what recomputes this forward is in a pass that has overwritten
    start = _waiting(parameter)
    if start is None:
        start = Start()
        _starts[key] = ref(start, partial(_forget_start, key))
    if again is not None:
        again[key] = start
    return start


def _waiting(parameter: Tensor) -> Start | None:
    held = _starts.get(id(parameter))
    return None if held is None else held()


def _forget_start(key: int, gone: ref[Start]) -> None:
    if _starts.get(key) is gone:
        del _starts[key]


def overwrites(parameter: Tensor, task: int) -> bool:
    """Whether a gradient that the backward pass `task` made overwrites main_grad."""
    if _starts and _waiting(parameter) is not None:
        return True
    if not parameter.__dict__.get("overwrite_main_grad"):  # a look-up in vain takes long
        return False
    return task == -1 or _begun.get(parameter) != task


def has_begun(parameter: Tensor, task: int) -> None:
    """Called when a gradient of the pass has overwritten main_grad."""
    _starts.pop(id(parameter), None)
    _begun[parameter] = task


# One for each kind of weight, kept by the weights that have used it: it goes with the last of them.
_stand_ins: WeakValueDictionary[tuple[torch.Size, torch.dtype, torch.device], Tensor]
_stand_ins = WeakValueDictionary()
_kept_by = WeakIdKeyDictionary()


class Label:
    """The name of a layer in errors, made when one is raised. A graph may outlive the layer."""

    __slots__ = ("_kind", "_layer")

    def __init__(self, layer: Any) -> None:
        self._layer, self._kind = ref(layer), type(layer)

    def __str__(self) -> str:
        layer = self._layer()
        return f"te_mx.{self._kind.__name__}" if layer is None else layer._label()


class Use(NamedTuple):
    """One backward pass that reaches the weights of a WeightGradient.

    task: which pass it is. wanted: of which weights it computes gradients. captured: whether
    torch.autograd.grad waits for one of these, which must then get a tensor."""

    task: int
    wanted: tuple[bool, ...]
    captured: bool


class WeightGradient:
    """The place of the gradient of one weight in one forward call.

    A backward pass that is for some tensors only (``torch.autograd.grad``, ``inputs=``) adds to
    main_grad of those weights that are among them. ``torch.autograd.grad`` itself gets zeros.

    Args:
        parameters: the weight, or the parameters that it is concatenated of along out_features.
        label: the layer's name in errors.
        fuse: add the gradient to ``main_grad`` of the parameters that train. A parameter with
            ``overwrite_main_grad = True`` is overwritten by the first of every backward pass.
        starts: what `started` gave for the parameters in a first micro-batch.
        queue: where to leave the GEMM for later; None runs it in the backward pass. With neither
            `fuse` nor a queue the gradient would need no place of its own.
    """

    __slots__ = ("fuse", "label", "made_in", "parameters", "queue", "starts")

    def __init__(
        self, parameters: Sequence[Tensor], label: Label, fuse: bool,
        starts: Sequence[Start | None], queue: Queue | None,
    ) -> None:  # fmt: skip
        if not knows_passes:
            raise NotImplementedError(
                f"{label}: fuse_wgrad_accumulation and delay_wgrad_compute must know what a "
                f"backward pass is for, and this PyTorch ({torch.__version__}) does not say it; "
                "build the layer without both"
            )
        self.parameters = parameters
        self.label = label
        self.fuse = fuse
        self.starts = starts
        self.queue = queue
        self.made_in = pass_id()  # a reentrant checkpoint goes back in a pass inside of this one

    def take(self, wgrad: Wgrad, dtype: torch.dtype, node: Any = None) -> Tensor | None:
        """Run or queue the GEMM; returns what backward returns for the weight. node: of the weight
        in the graph, where the caller knows it."""
        use = self._use(node)
        if True not in use.wanted:
            return None
        if self.fuse:
            self._main_grads(use)  # what is wrong with them is said before anything runs
        if self.queue is None:
            self._fuse(wgrad, use)
        elif wgrad.reads or len(self.parameters) > 1:
            self.queue.append(partial(self._finish, wgrad, dtype, Versions(wgrad.reads), use))
        else:  # nothing that autograd would record
            self.queue.append(partial(self._put, wgrad, dtype, use))
        made = self._stand_in() if self.fuse else None
        return self._zeros(use, dtype) if made is None else made

    def direct(self, node: Any) -> tuple[Into, Use] | None:
        """Where a GEMM that runs now writes the gradient, where that is main_grad of one parameter,
        for `done`; None where `take` has to decide."""
        if type(self) is not WeightGradient or self.queue is not None or len(self.parameters) != 1:
            return None
        use, parameter = self._use(node), self.parameters[0]
        if not (self.fuse and use.wanted[0] and parameter.requires_grad):
            return None
        out = self._main_grad_of(parameter)
        if out.dtype not in FLOAT_DTYPES:
            return None
        return Into(out, not overwrites(parameter, use.task)), use

    def done(self, into: Into, use: Use) -> Tensor | None:
        """Called when that GEMM runs; returns what backward returns for the weight."""
        parameter = self.parameters[0]
        if not into.accumulate:
            has_begun(parameter, use.task)
        made = self._stand_in() if "grad_added_to_main_grad" in parameter.__dict__ else None
        return self._zeros(use, parameter.dtype) if made is None and use.captured else made

    def _use(self, node: Any = None) -> Use:
        """What the backward pass that runs now is for."""
        now = pass_id()
        task = now if self.made_in == -1 else self.made_in
        if node is None or now == -1 or len(self.parameters) > 1:
            found = _reached(self.parameters)
            return Use(task, tuple(one[0] for one in found), any(one[1] for one in found))
        wanted, captured = _runs(node)
        return Use._make((task, (wanted,), captured))

    def _finish(self, wgrad: Wgrad, dtype: torch.dtype, versions: Versions, use: Use) -> None:
        """The delayed GEMM, and what autograd would have done with its result."""
        versions.check(self.label)
        with torch.no_grad():
            self._put(wgrad, dtype, use)

    def _put(self, wgrad: Wgrad, dtype: torch.dtype, use: Use) -> None:
        if self.fuse:
            self._fuse(wgrad, use)
            return
        dw_NK = wgrad.run(None, dtype, False)
        parts = [dw_NK] if len(self.parameters) == 1 else [p.clone() for p in self._parts(dw_NK)]
        for parameter, dw, wanted in zip(self.parameters, parts, use.wanted, strict=True):
            grad = parameter.grad
            if not (wanted and parameter.requires_grad):
                continue
            if grad is None:
                parameter.grad = dw
            else:
                (grad.detach() if grad.requires_grad else grad).add_(dw)

    def _fuse(self, wgrad: Wgrad, use: Use) -> None:
        grads = self._main_grads(use)
        first = grads[0]
        if len(grads) == 1 and first is not None:
            self._each(0, use, partial(wgrad, first, first.dtype))
            return
        if isinstance(wgrad, GroupedWgrad) and (one := wgrad.one) is not None:
            for i, grad in enumerate(grads):
                if grad is not None:
                    self._each(i, use, partial(one, i, grad))
            return
        if isinstance(wgrad, GroupedWgrad) and self._all_into(wgrad, grads, use):
            return
        dw_NK = wgrad(None, torch.float32, False)
        old, added = [], []
        tied = len({id(grad) for grad in grads}) < len(grads)
        for i, (grad, dw) in enumerate(zip(grads, self._parts(dw_NK), strict=True)):
            if grad is None:
                continue
            if overwrites(self.parameters[i], use.task):
                grad.copy_(dw)
                has_begun(self.parameters[i], use.task)
            elif tied:
                grad.add_(dw)
            else:
                old.append(grad)
                added.append(dw)
        if old:
            torch._foreach_add_(old, added)  # one launch for many

    def _each(self, i: int, use: Use, run: Callable[[bool], object]) -> None:
        """run(accumulate) for one parameter."""
        overwrite = overwrites(self.parameters[i], use.task)
        run(not overwrite)
        if overwrite:
            has_begun(self.parameters[i], use.task)

    def _all_into(self, wgrad: GroupedWgrad, grads: Sequence[Tensor | None], use: Use) -> bool:
        """Run the GEMMs of all weights straight into their main_grads, if they can be."""
        outs = {id(grad): grad for grad in grads if grad is not None}
        overwrite = {overwrites(parameter, use.task) for parameter in self.parameters}
        if wgrad.into is None or len(outs) < len(grads) or len(overwrite) > 1:
            return False
        if not wgrad.into(list(outs.values()), True not in overwrite):
            return False
        if True in overwrite:
            for parameter in self.parameters:
                has_begun(parameter, use.task)
        return True

    def _parts(self, dw_NK: Tensor) -> tuple[Tensor, ...]:
        return dw_NK.split([parameter.shape[0] for parameter in self.parameters])

    def _main_grads(self, use: Use) -> list[Tensor | None]:
        """main_grad of each parameter, None where there is no gradient for it."""
        grads: list[Tensor | None] = []
        for parameter, wanted in zip(self.parameters, use.wanted, strict=True):
            if not (wanted and parameter.requires_grad):
                grads.append(None)
                continue
            grads.append(self._main_grad_of(parameter))
        return grads

    def _main_grad_of(self, parameter: Tensor) -> Tensor:
        grad = getattr(parameter, "main_grad", None)
        if not isinstance(grad, Tensor):
            raise RuntimeError(
                f"{self.label}: fuse_wgrad_accumulation=True adds the weight gradient to "
                "weight.main_grad, and the weight has none; set it before backward, e.g. "
                "weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)"
            )
        if grad.shape != parameter.shape or grad.device != parameter.device:
            raise RuntimeError(
                f"{self.label}: weight.main_grad must be {tuple(parameter.shape)} on "
                f"{parameter.device} as the weight, got {tuple(grad.shape)} on {grad.device}"
            )
        known = grad.dtype in FLOAT_DTYPES or grad.dtype == parameter.dtype
        if not known or not grad.is_contiguous() or grad.is_neg():
            kind = "a negative view of " if grad.is_neg() else ""
            raise RuntimeError(
                f"{self.label}: weight.main_grad must be contiguous float32, bfloat16 or "
                f"float16, got {kind}{grad.dtype} with strides {grad.stride()}"
            )
        return grad

    def _stand_in(self) -> Tensor | None:
        """What takes the place of .grad: autograd hooks of data-parallel wrappers wait for one.

        As in Transformer Engine, only parameters that have ``grad_added_to_main_grad`` get one, and
        all of one shape share its memory; its values mean nothing, they are zero where the
        parameter has ``zero_out_wgrad``."""
        marked = [
            p for p in self.parameters if p.requires_grad and hasattr(p, "grad_added_to_main_grad")
        ]
        for parameter in marked:
            parameter.grad_added_to_main_grad = True
        if not marked:
            return None
        first = self.parameters[0]
        shape = torch.Size((sum(p.shape[0] for p in self.parameters), *first.shape[1:]))
        key = shape, first.dtype, first.device
        made = _stand_ins.get(key)
        if made is None:
            made = torch.zeros(shape, dtype=first.dtype, device=first.device)
            _stand_ins[key] = made
        _kept_by[first] = made
        if any(getattr(p, "zero_out_wgrad", False) for p in marked):
            made.zero_()
        return made.detach()

    def _zeros(self, use: Use, dtype: torch.dtype) -> Tensor | None:
        """What torch.autograd.grad gets, which does not take None: the weight part of a zero-bubble
        pipeline adds it to .grad. CUDA graphs ask for unused gradients."""
        first = self.parameters[0]
        if not use.captured or capturing(first.device):
            return None
        shape = (sum(p.shape[0] for p in self.parameters), *first.shape[1:])
        return torch.zeros(shape, dtype=dtype, device=first.device)


class _Nodes(torch.autograd.Function):
    """Its node leads to those of all its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return torch.empty(0)


def _reached(parameters: Sequence[Tensor]) -> list[tuple[bool, bool]]:
    """Of each parameter, whether the backward pass that runs now is for its gradient too, and
    whether torch.autograd.grad waits for that."""
    if pass_id() == -1 or torch.compiler.is_compiling():
        return [(parameter.requires_grad, False) for parameter in parameters]
    with torch.enable_grad():
        link: Any = _Nodes.apply(*parameters)
    if link.grad_fn is None:
        return [(False, False)] * len(parameters)
    edges = link.grad_fn.next_functions
    return [(False, False) if node is None else _runs(node) for node, _ in edges]


def _runs(node: Any) -> tuple[bool, bool]:
    try:
        return will_run(node), False
    except RuntimeError:  # torch's answer for leaves that torch.autograd.grad waits for
        return True, True


def refuse_graph(grad_targets: Iterable[WeightGradient | None]) -> None:
    """Under create_graph=True: raise NotImplementedError where there is a grad_target."""
    for grad_target in grad_targets:
        if grad_target is not None:
            raise NotImplementedError(
                f"{grad_target.label}: got create_graph=True, but with fuse_wgrad_accumulation or "
                "delay_wgrad_compute weight gradients are no part of a graph; build the layer "
                "without them"
            )


class Owner(Protocol):
    """Whom the gradient of one weight belongs to.

    parameter: what the optimizer has. reached: whether autograd goes from what the forward ran with
    to a parameter of the module, and so knows what backward passes for some tensors only are for.
    """

    parameter: Tensor
    reached: bool

    def reduced(self, dw: Tensor) -> Tensor:
        """What this rank has of the gradient, like the parameter; a collective operation."""


class OwnedGradient(WeightGradient):
    """The place of the gradient of one weight: ``main_grad`` or ``grad`` of its owners.

    Args:
        weights: what the forward ran with.
        owners: one for each of them.
        label, fuse, starts, queue: as of WeightGradient.
    """

    __slots__ = ("owners",)

    def __init__(
        self, weights: Sequence[Tensor], owners: Sequence[Owner], label: Label, fuse: bool,
        starts: Sequence[Start | None], queue: Queue | None,
    ) -> None:  # fmt: skip
        super().__init__(weights, label, fuse, starts, queue)
        self.owners = owners

    def take(self, wgrad: Wgrad, dtype: torch.dtype, node: Any = None) -> Tensor | None:
        use = self._use(node)
        for weight, owner, wanted in zip(self.parameters, self.owners, use.wanted, strict=True):
            if weight.requires_grad and not wanted and not owner.reached:
                raise NotImplementedError(
                    f"{self.label}: a backward pass for some tensors only (torch.autograd.grad, "
                    "backward(inputs=..), the input part of a zero-bubble pipeline) does not say "
                    "whether its weight, a DTensor, is one of them; run a whole backward pass, "
                    "such as Schedule1F1B does, or build the layer without fuse_wgrad_accumulation "
                    "and delay_wgrad_compute"
                )
        if not any(use.wanted):
            return None
        for owner in self.owners:
            if self.fuse and owner.parameter.requires_grad:
                self._main_grad(owner)  # what is wrong with it is said before anything runs
        versions = Versions(wgrad.reads)
        if self.queue is None:
            self._finish(wgrad, dtype, versions, use)
        else:
            self.queue.append(partial(self._finish, wgrad, dtype, versions, use))
        return self._zeros(use, dtype)

    def _put(self, wgrad: Wgrad, dtype: torch.dtype, use: Use) -> None:
        dw_NK = wgrad(None, torch.float32 if self.fuse else dtype, False)
        parts = [dw_NK] if len(self.owners) == 1 else [p.clone() for p in self._parts(dw_NK)]
        for owner, dw, wanted in zip(self.owners, parts, use.wanted, strict=True):
            if not (wanted and owner.parameter.requires_grad):
                continue
            mine, parameter = owner.reduced(dw), owner.parameter
            if self.fuse:
                self._add_to_main(owner, mine, use)
            elif parameter.grad is None:
                parameter.grad = mine.to(parameter.dtype)
            else:
                parameter.grad += mine

    def _add_to_main(self, owner: Owner, mine: Tensor, use: Use) -> None:
        main, parameter = self._main_grad(owner), owner.parameter
        if not hasattr(main, "to_local") and hasattr(mine, "to_local"):
            mine = mine.to_local()
        if overwrites(parameter, use.task):
            main.copy_(mine)
            has_begun(parameter, use.task)
        else:
            main.add_(mine)
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True

    def _main_grad(self, owner: Owner) -> Tensor:
        parameter = owner.parameter
        main = getattr(parameter, "main_grad", None)
        if not isinstance(main, Tensor):
            raise RuntimeError(
                f"{self.label}: fuse_wgrad_accumulation=True adds the weight gradient to "
                "main_grad of the parameter that the optimizer has, and it has none; set it before "
                "backward, e.g. weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) "
                "for the weights of model.parameters()"
            )
        held = parameter if hasattr(main, "to_local") else _local(parameter)
        if main.shape != held.shape or main.device != held.device:
            raise RuntimeError(
                f"{self.label}: main_grad must be like the parameter, {_kind(parameter)} "
                f"{tuple(parameter.shape)}, or like what this rank has of it, a plain tensor "
                f"{tuple(_local(parameter).shape)}, on {parameter.device}; got {_kind(main)} "
                f"{tuple(main.shape)} on {main.device}"
            )
        return main


def _kind(tensor: Tensor) -> str:
    return "a DTensor" if hasattr(tensor, "to_local") else "a plain tensor"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
