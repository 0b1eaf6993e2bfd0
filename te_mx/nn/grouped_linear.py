"""te_mx.GroupedLinear: one linear layer for each expert of a mixture, in one call.

m_splits of grouped layers: rows of every group, as a list or an int tensor."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from te_mx.autograd import weight_parts
from te_mx.autograd.grouped import GroupedCall, Groups, NoGroups, grouped_plain, one_by_one
from te_mx.autograd.saved import flatten
from te_mx.context.region import output_dtype
from te_mx.dispatch.groups import INDEX_DTYPES, readable
from te_mx.nn import checks
from te_mx.nn.arguments import Options, refuse
from te_mx.nn.base import MXModule
from te_mx.runtime.arguments import check_size, shown
from te_mx.weights.grouped import StackedWeight, convert_state_dict, parameter_names
from te_mx.weights.state_dict import SCALES, WHOLE


def groups_of(
    m_splits: Sequence[int] | Tensor, num_gemms: int, rows: int, device: torch.device,
    label: Callable[[], str],
) -> Groups:  # fmt: skip
    """End offsets of splits, checked where the host can look at them without waiting.

    Raises ValueError or TypeError for splits that are not those of num_gemms groups of `rows` rows.
    """
    if isinstance(m_splits, Tensor):
        if m_splits.dtype not in INDEX_DTYPES:
            raise TypeError(
                f"{label()}: m_splits must be int32 or int64, got {m_splits.dtype}; use .long()"
            )
        if m_splits.shape != (num_gemms,):
            raise ValueError(
                f"{label()}: m_splits must have one entry for each of {num_gemms} groups, got "
                f"shape {tuple(m_splits.shape)}"
            )
        if m_splits.device != device and m_splits.device.type != "cpu":
            if device.type != "cpu" or m_splits.is_meta:
                raise ValueError(
                    f"{label()}: inp is on {device} and m_splits on {m_splits.device}; move "
                    "m_splits to that device, or to the CPU"
                )
            m_splits = m_splits.cpu()
        if readable(m_splits):
            check_splits(m_splits.tolist(), num_gemms, rows, label)
        return Groups(m_splits.cumsum(0))
    splits = _listed(m_splits, label)
    check_splits(splits, num_gemms, rows, label)
    return Groups(torch.tensor(list(accumulate(splits)), dtype=torch.int64, device="cpu"))


def _listed(m_splits: Iterable[int], label: Callable[[], str]) -> list[int]:
    """Splits that are no tensor as ints. Raises TypeError for what is no row of integers."""
    other = isinstance(m_splits, str | bytes | Mapping | Set) or getattr(m_splits, "ndim", 1) != 1
    if other or not isinstance(m_splits, Iterable):
        raise TypeError(
            f"{label()}: m_splits must be a list of ints or an int tensor, got {shown(m_splits)}"
        )
    splits = list(m_splits)
    if all(type(split) is int for split in splits):
        return splits
    return [check_size(f"{label()}: m_splits[{i}]", split) for i, split in enumerate(splits)]


def check_splits(splits: list[int], num_gemms: int, rows: int, label: Callable[[], str]) -> None:
    """Raise ValueError unless splits are rows of num_gemms groups among `rows` rows."""
    if len(splits) != num_gemms:
        raise ValueError(
            f"{label()}: m_splits must have one entry for each of {num_gemms} groups, got "
            f"{len(splits)}"
        )
    if min(splits, default=0) < 0:
        raise ValueError(f"{label()}: m_splits must be 0 or more, got {splits}")
    if sum(splits) > rows:
        raise ValueError(
            f"{label()}: m_splits {splits} add up to {sum(splits)} rows, inp has {rows}; pass the "
            "rows of all groups, one group after the other"
        )


class GroupedLinear(StackedWeight, MXModule, nn.Module):
    """``num_gemms`` linear layers: rows of group i are ``x @ weight_i.T + bias_i``.

    Inside `te_mx.autocast`, in the formats of its recipe (MXFP8 by default), bit for bit a loop of
    `te_mx.Linear` over the groups, but for gradients that are rounded stochastically (they draw
    once for all groups); exactly a loop of nn.Linear outside. All groups are quantized and
    multiplied in one call each.

    Splits need no padding: a group may have any number of rows, none included, and blocks of rows
    (32, or 128 in blockwise FP8) never reach into the next group.

    Args:
        num_gemms: groups (experts), 1 or more.
        in_features, out_features: of every group; any sizes.
        bias: with biases.
        device, dtype: of the parameters; dtype is fp32, bf16 or fp16.
        single_grouped_weight: False holds parameters ``weight0`` ... [out, in], as Transformer
            Engine names them; True one parameter ``weight`` [num_gemms, out, in]. A state_dict of
            either kind loads into both.
        single_grouped_bias: the same for ``bias0`` ... [out] or ``bias`` [num_gemms, out]; None
            follows single_grouped_weight.
        init_method: called with the weight [out, in] of each group after the default
            initialization, which is that of nn.Linear.
        return_bias: return ``(y, biases)`` without adding them: a list, the stacked parameter, or
            None for a layer without biases.
        params_dtype: Transformer Engine's name for `dtype`.
        name: shown in errors and by `te_mx.audit`.
        fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input: as for te_mx.Linear; one
            `backward_dw` computes the gradients of all groups. Outside te_mx.autocast the first two
            need m_splits that the host knows.
        use_grouped_tensor: which of its paths Transformer Engine takes; of no effect: te_mx has
            one, for splits that the host knows and for those that it does not.
        transformer_engine: further arguments of Transformer Engine's GroupedLinear, at their
            defaults; see docs/compatibility.md.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """

    init_method: Callable[[Tensor], Any] | None

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        use_grouped_tensor: bool | None = None,
        **transformer_engine: Any,
    ) -> None:
        super().__init__()
        owner = "te_mx.GroupedLinear"
        if single_grouped_bias is None:
            single_grouped_bias = single_grouped_weight
        options = Options("GroupedLinear", locals(), "num_gemms", "in_features", "out_features")
        num_gemms, in_features, out_features = options.sizes
        if num_gemms < 1:
            raise ValueError(f"{owner}: num_gemms must be 1 or more, got {num_gemms}")
        if use_grouped_tensor is not None:
            checks.flags(owner, use_grouped_tensor=use_grouped_tensor)
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias
        options.keep(self)
        device, dtype = options.device, options.dtype
        self._weight_names = parameter_names("weight", num_gemms, single_grouped_weight)
        self._bias_names = parameter_names("bias", num_gemms, single_grouped_bias) if bias else ()
        # Group by group, then what is stacked: Transformer Engine's order, which the states of an
        # optimizer follow.
        wanted = {*self._weight_names, *self._bias_names}
        weight, added = (out_features, in_features), (out_features,)
        groups = range(num_gemms)
        for key, shape in (
            *(pair for i in groups for pair in ((f"weight{i}", weight), (f"bias{i}", added))),
            ("weight", (num_gemms, *weight)),
            ("bias", (num_gemms, *added)),
        ):
            if key in wanted:
                value = torch.empty(shape, device=device, dtype=dtype)
                self.register_parameter(key, nn.Parameter(value))
        self._finish_building()
        if delay_wgrad_compute:
            self._start_delaying()

    def _initialize(self) -> None:
        """Group by group nn.Linear's default initialization, then `init_method` on the weight."""
        weights, biases = self.weights(), self.biases()
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        for i, weight in enumerate(weights):
            if weight.numel():
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            if biases:
                nn.init.uniform_(biases[i], -bound, bound)
            if self.init_method is not None:
                self.init_method(weight)

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: None = None,
        dgrad_out: None = None,
    ) -> Any:
        """inp [..., in_features] -> [..., out_features], and the biases under `return_bias`.

        Args:
            inp: fp32, bf16 or fp16; its rows (leading dimensions flattened) are grouped: first
                those of group 0, then those of group 1, and so on.
            m_splits: rows of every group, a list or an int tensor [num_gemms]. Their sum may be
                less than the rows of inp: what lies behind is 0 in the result and gets no gradient.
                A tensor on a GPU is never read by the host, so a captured CUDA graph can be
                replayed with other splits; there, splits beyond the rows are cut off.
            is_first_microbatch: as for te_mx.Linear.
            out, dgrad_out: Transformer Engine's; must be None.

        Raises:
            ValueError: splits, inp or a parameter do not fit: shapes, devices.
            TypeError: the dtype of `inp`, of a parameter or of m_splits is none that it takes.
            RuntimeError, NotImplementedError: as for te_mx.Linear.
        """
        for given, value in (("out", out), ("dgrad_out", dgrad_out)):
            if value is not None:
                refuse("GroupedLinear", given, value)
        settings, made = self._enter(inp, is_first_microbatch, m_splits)
        if settings is None:
            return made
        groups = self._groups(inp, m_splits)
        self._check_kind(inp)
        if not self.num_gemms:
            return self._run_none(inp, is_first_microbatch)
        source, names = self._source, self._weight_names
        weights, biases = self._held(*names), self._held(*self._bias_names)
        source.check(self, names[0], weights[0], self._shape_of_each("weight"), inp.device)
        held = weights, () if self.return_bias else biases
        try:
            y = source.grouped(self, "weight", inp, groups, held, settings, is_first_microbatch)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            # Ops look at every parameter before they read one. Doing so here too would cost as much
            # again for many groups, so this only says which one they refused.
            self._check_groups(inp.device)
            raise
        return (y, self._returned(biases)) if self.return_bias else y

    def _groups(self, inp: Tensor, m_splits: Sequence[int] | Tensor) -> Groups:
        self._check_shape(inp, "in_features", self.in_features)
        rows = inp.numel() // self.in_features if self.in_features else flatten(inp).shape[0]
        return groups_of(m_splits, self.num_gemms, rows, inp.device, self._label)

    def _run_none(self, inp: Tensor, first: bool | None) -> Any:
        """The forward of a rank that has none of the experts (ModuleParallel)."""
        (weight,), biases = self._held(*self._weight_names), self._held(*self._bias_names)
        grad_target = self._source.grad_target(self, (weight,), first) if self._routed() else None
        added = None if self.return_bias or not biases else biases[0]
        out = NoGroups.apply(inp, weight, added, output_dtype(inp), grad_target)
        return (out, self._returned(biases)) if self.return_bias else out

    def _check_groups(self, device: torch.device) -> None:
        """Check the weights and the biases of all groups, as far as a forward reads them."""
        shape = self._shape_of_each("weight")
        for name in self._weight_names:
            self._source.check(self, name, getattr(self, name), shape, device)
        shape = self._shape_of_each("bias")
        for name in () if self.return_bias else self._bias_names:
            self._check_parameter(name, getattr(self, name), shape, device)

    def _shape_of_each(self, kind: str) -> tuple[int, ...]:
        """The shape of every parameter that holds weights or biases."""
        if kind == "weight":
            shape: tuple[int, ...] = (self.out_features, self.in_features)
            return (self.num_gemms, *shape) if self.single_grouped_weight else shape
        shape = (self.out_features,)
        return (self.num_gemms, *shape) if self.single_grouped_bias else shape

    def _like_weights(self, biases: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Biases stacked or not as the weights are."""
        if not biases or self.single_grouped_weight == self.single_grouped_bias:
            return biases
        return (weight_parts.stack(biases),) if self.single_grouped_weight else biases[0].unbind(0)

    def _returned(self, biases: tuple[Tensor, ...]) -> Any:
        if not biases:
            return None
        return biases[0] if self.single_grouped_bias else list(biases)

    def _high_precision(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, first: bool | None
    ) -> Any:
        groups = self._groups(inp, m_splits)
        if not self.num_gemms:
            self._check_kind(inp)
            return self._run_none(inp, first)
        held = tuple(getattr(self, name) for name in self._weight_names)
        biases = tuple(getattr(self, name) for name in self._bias_names)
        added = () if self.return_bias else self._like_weights(biases)
        grad_target = self._source.grad_target(self, held, first) if self._routed() else None
        if grad_target is None:
            stacked = self.single_grouped_weight
            weights = held[0] if stacked else held
            each = added[0].unbind(0) if stacked and added else added
            y = grouped_plain(flatten(inp), groups, weights, each)
            out = y.view(*inp.shape[:-1], y.shape[1])
        else:
            call = GroupedCall(
                groups.capacity, None, inp.dtype, len(added) > 0, grad_target=grad_target
            )
            out = one_by_one(inp, groups.offs, (*held, *added), call)
        return (out, self._returned(biases)) if self.return_bias else out

    # ----------------------------------------------------------------------------- checks and names
    def _described(self) -> str:
        one = ", single_grouped_weight=True" if self.single_grouped_weight else ""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}{one}"
        )

    # ---------------------------------------------------------------------------------- checkpoints
    def _adapt_state_dict(self, state_dict: Any, prefix: str, error_msgs: list[str]) -> None:
        groups, name = self.num_gemms, f"{prefix}weight"
        for end in (*SCALES, WHOLE):
            convert_state_dict(state_dict, name + end, groups, True, error_msgs)
        # Codes are held in one stack, whatever the parameters are.
        scales = any(name + end in state_dict for end in SCALES)
        stacked = self.single_grouped_weight or scales or self._source.saved is not None
        convert_state_dict(state_dict, name, groups, stacked, error_msgs)
        if self._bias_names:
            stacked = self.single_grouped_bias
            convert_state_dict(state_dict, f"{prefix}bias", groups, stacked, error_msgs)
