"""Where a weight gradient goes when it does not simply go back to autograd: into main_grad of the
parameter (Transformer Engine's fuse_wgrad_accumulation), or computed later (delay_wgrad_compute).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from te_mx._ops import FLOAT_DTYPES

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
    cannot be done, and was not.
    """

    __slots__ = ("into", "one")

    def __init__(
        self,
        run: Run,
        reads: Reads,
        one: Callable[[int, Tensor, bool], object] | None = None,
        into: Callable[[Sequence[Tensor], bool], bool] | None = None,
    ) -> None:
        super().__init__(run, reads)
        self.one = one
        self.into = into


class Versions:
    """What a GEMM that waits will read, and its versions now: autograd's own check ends with the
    backward pass."""

    __slots__ = ("_kept",)

    def __init__(self, reads: Reads) -> None:
        # An inference tensor has no version; nobody can tell whether it was written to.
        self._kept = [(what, t, t._version) for what, t in reads if not t.is_inference()]

    def check(self, label: str) -> None:
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

# One for each kind of weight, kept by the weights that have used it: it goes with the last of them.
_stand_ins: WeakValueDictionary[tuple[torch.Size, torch.dtype, torch.device], Tensor]
_stand_ins = WeakValueDictionary()
_kept_by = WeakIdKeyDictionary()


class WeightGradient:
    """The place of the gradient of one weight in one forward call.

    Args:
        parameters: the weight, or the parameters that it is concatenated of along out_features.
        label: the layer's name in errors.
        fuse: add the gradient to ``main_grad`` of the parameters that train.
        overwrite: write main_grad instead of adding to it, for the first micro-batch of a step. A
            parameter with ``overwrite_main_grad = True`` asks for it at every backward.
        queue: where to leave the GEMM for later; None runs it in the backward pass. With neither
            `fuse` nor a queue the gradient would need no place of its own.
    """

    __slots__ = ("fuse", "label", "overwrite", "parameters", "queue")

    def __init__(
        self,
        parameters: Sequence[Tensor],
        label: str,
        fuse: bool,
        overwrite: bool,
        queue: Queue | None,
    ) -> None:
        self.parameters = parameters
        self.label = label
        self.fuse = fuse
        self.overwrite = overwrite
        self.queue = queue

    def take(self, wgrad: Wgrad, dtype: torch.dtype) -> Tensor | None:
        """Run or queue the GEMM; returns what backward returns for the weight."""
        if self.fuse:
            self._main_grads()  # what is wrong with them is said before anything runs
        if self.queue is not None:
            versions = Versions(wgrad.reads)
            self.queue.append(lambda: self._finish(wgrad, dtype, versions))
        else:
            self._fuse(wgrad)
        return self._stand_in() if self.fuse else None

    @torch.no_grad()
    def _finish(self, wgrad: Wgrad, dtype: torch.dtype, versions: Versions) -> None:
        """The delayed GEMM, and what autograd would have done with its result."""
        versions.check(self.label)
        if self.fuse:
            self._fuse(wgrad)
            return
        dw_NK = wgrad(None, dtype, False)
        parts = [dw_NK] if len(self.parameters) == 1 else [p.clone() for p in self._parts(dw_NK)]
        for parameter, dw in zip(self.parameters, parts, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = dw
            else:
                parameter.grad += dw

    def _fuse(self, wgrad: Wgrad) -> None:
        grads = self._main_grads()
        first = grads[0]
        if len(grads) == 1 and first is not None:
            wgrad(first, first.dtype, not self._overwrites(self.parameters[0]))
            return
        if isinstance(wgrad, GroupedWgrad) and wgrad.one is not None:
            for i, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
                if grad is not None:
                    wgrad.one(i, grad, not self._overwrites(parameter))
            return
        if isinstance(wgrad, GroupedWgrad) and self._all_into(wgrad, grads):
            return
        dw_NK = wgrad(None, torch.float32, False)
        old, added = [], []
        for parameter, grad, dw in zip(self.parameters, grads, self._parts(dw_NK), strict=True):
            if grad is None:
                continue
            if self._overwrites(parameter):
                grad.copy_(dw)
            else:
                old.append(grad)
                added.append(dw)
        if old:
            torch._foreach_add_(old, added)  # one launch for many

    def _all_into(self, wgrad: GroupedWgrad, grads: Sequence[Tensor | None]) -> bool:
        """Run the GEMMs of all weights straight into their main_grads, if they can be."""
        outs = [grad for grad in grads if grad is not None]
        overwrite = {self._overwrites(parameter) for parameter in self.parameters}
        if wgrad.into is None or len(outs) < len(grads) or len(overwrite) > 1:
            return False
        return wgrad.into(outs, not overwrite.pop())

    def _overwrites(self, parameter: Tensor) -> bool:
        return self.overwrite or getattr(parameter, "overwrite_main_grad", False)

    def _parts(self, dw_NK: Tensor) -> tuple[Tensor, ...]:
        return dw_NK.split([parameter.shape[0] for parameter in self.parameters])

    def _main_grads(self) -> list[Tensor | None]:
        """main_grad of each parameter, None where it does not train."""
        grads: list[Tensor | None] = []
        for parameter in self.parameters:
            if not parameter.requires_grad:
                grads.append(None)
                continue
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
            known = grad.dtype in (*FLOAT_DTYPES, parameter.dtype)
            if not known or not grad.is_contiguous() or grad.is_neg():
                kind = "a negative view of " if grad.is_neg() else ""
                raise RuntimeError(
                    f"{self.label}: weight.main_grad must be contiguous float32, bfloat16 or "
                    f"float16, got {kind}{grad.dtype} with strides {grad.stride()}"
                )
            grads.append(grad)
        return grads

    def _stand_in(self) -> Tensor | None:
        """What takes the place of .grad: autograd hooks of data-parallel wrappers wait for one.

        As in Transformer Engine, only parameters that have ``grad_added_to_main_grad`` get one, and
        all of one shape share its memory; its values mean nothing, they are zero where the
        parameter has ``zero_out_wgrad``.
        """
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


def refuse_graph(sinks: Iterable[WeightGradient | None]) -> None:
    """Under create_graph=True: raise NotImplementedError where a weight gradient goes to a sink."""
    for sink in sinks:
        if sink is not None:
            raise NotImplementedError(
                f"{sink.label}: got create_graph=True, but with fuse_wgrad_accumulation or "
                "delay_wgrad_compute weight gradients are no part of a graph; build the layer "
                "without them"
            )
