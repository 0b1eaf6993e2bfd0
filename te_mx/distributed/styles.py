"""How te_mx's modules are sharded by torch's parallelize_module, which itself knows nn.Linear."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from te_mx.nn.base import MXModule
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.nn.layernorm_linear import LayerNormLinear
from te_mx.nn.layernorm_mlp import LayerNormMLP
from te_mx.nn.linear import Linear
from te_mx.nn.tensor_parallel import BOTH, COLUMN, EXPERTS, ROW, cut_of
from te_mx.runtime.arguments import (
    check_flag,
    is_one_of,
    shown,
)
from te_mx.weights import gated_halves

MODES = (COLUMN, ROW, EXPERTS)


class ModuleParallel(ParallelStyle):
    """A style of parallelize_module for every te_mx module; torch's ColwiseParallel and
    RowwiseParallel serve te_mx.Linear too.

    LayerNormLinear is sharded along out_features; LayerNormMLP along ffn_hidden_size, fc1 by rows
    and fc2 by columns. Their normalization is on every rank. fc1 of a gated activation becomes two
    parameters, ``fc1_activated_weight`` and ``fc1_gate_weight`` (and ``_bias``), each sharded; a
    state_dict has the one ``fc1_weight`` of every LayerNormMLP.

    Args:
        mode: "column" (out_features), "row" (in_features), or "experts": the stacked weights of a
            te_mx.GroupedLinear, of which each rank runs those that it has on rows of its own. None
            is "column", where there is a choice.
        input_layouts: the placement of inputs that are plain tensors; None is Replicate(), or
            Shard(-1) for "row". Shard(0) or Shard(1), along the tokens, is sequence parallelism.
        output_layouts: that of the result; None leaves it sharded along out_features for "column"
            and is Replicate() otherwise.
        use_local_output: return a plain tensor, what this rank has.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value.
    """

    def __init__(
        self,
        mode: str | None = None,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        if not is_one_of(mode, (*MODES, None)):
            raise ValueError(
                f"ModuleParallel: mode must be one of {', '.join(map(repr, MODES))} or None, got "
                f"{shown(mode)}"
            )
        for name, value in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if value is not None and not isinstance(value, Placement):
                raise TypeError(
                    f"ModuleParallel: {name} must be a Placement or None, got {shown(value)}"
                )
        check_flag("ModuleParallel: use_local_output", use_local_output)
        self.mode = mode or "column"
        row = self.mode == "row"
        self.input_layouts = input_layouts or (Shard(-1) if row else Replicate())
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        """Called by parallelize_module.

        Raises:
            TypeError: the module is none of te_mx, or has no such mode.
        """
        if not isinstance(module, (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear)):
            raise TypeError(
                "ModuleParallel takes te_mx.Linear, LayerNormLinear, LayerNormMLP and "
                f"GroupedLinear, got {type(module).__name__}; call te_mx.convert_model first where "
                "it is an nn.Linear, or use a style of torch"
            )
        if isinstance(module, (LayerNormLinear, LayerNormMLP)) and self.mode != "column":
            raise TypeError(
                f"ModuleParallel: {type(module).__name__} is sharded one way only, got "
                f"mode={self.mode!r}"
            )
        if self.mode == "experts" and not (
            isinstance(module, GroupedLinear) and module.single_grouped_weight
        ):
            raise TypeError(
                'ModuleParallel: mode="experts" shards stacked weights, those of a '
                f"te_mx.GroupedLinear(single_grouped_weight=True), got {module._label()}"
            )
        return distribute_module(
            module, device_mesh, partial(_partition, self), partial(_prepare_input, self),
            partial(_prepare_output, self),
        )  # fmt: skip


def _partition(style: ModuleParallel, name: str, module: nn.Module, mesh: Any) -> None:
    if not isinstance(module, MXModule):
        return
    if isinstance(module, LayerNormMLP) and module._act.gated:
        gated_halves.split(module)
    for key, value in list(module.named_parameters(recurse=False)):
        stacked = isinstance(module, GroupedLinear) and (
            module.single_grouped_weight if key.startswith("weight") else module.single_grouped_bias
        )
        dim = cut_of(BOTH if isinstance(module, LayerNormMLP) else style.mode, key, stacked)
        place = [Replicate() if dim is None else Shard(dim)]
        made = distribute_tensor(value, mesh, place, src_data_rank=style.src_data_rank)
        module.register_parameter(key, nn.Parameter(made, requires_grad=value.requires_grad))
    module._forget_copies()


def _prepare_input(style: ModuleParallel, module: Any, inputs: Any, mesh: Any) -> Any:
    inp, *rest = inputs
    if style.mode != "experts" and not isinstance(inp, DTensor):
        inp = DTensor.from_local(inp, mesh, [style.input_layouts], run_check=False)
    return (inp, *rest)


def _prepare_output(style: ModuleParallel, module: Any, outputs: Any, mesh: Any) -> Any:
    if style.mode == "experts":
        return outputs
    out, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = style.output_layouts
    if wanted is None and any(place.is_partial() for place in out.placements):
        wanted = Replicate()
    if wanted is not None:
        out = out.redistribute(placements=[wanted])
    if style.use_local_output:
        out = out.to_local()
        if getattr(module, "return_layernorm_output", False):
            rest[-1] = rest[-1].to_local()
    return (out, *rest) if isinstance(outputs, tuple) else out
