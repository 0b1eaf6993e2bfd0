"""The arguments that constructors share, and those of Transformer Engine that te_mx does not have.

Of these one table for every module: each is accepted at its default, so that code written for
Transformer Engine constructs and calls te_mx modules unchanged, and refused by name when it is set.
tests/compat holds the table to the list of Transformer Engine's arguments."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from te_mx.nn import checks
from te_mx.nn.tensor_parallel import BOTH, part, ranks_of, shared
from te_mx.runtime.arguments import check_default


class Absent(NamedTuple):
    """The default in Transformer Engine, and why te_mx has only that."""

    default: Any
    reason: str


_PARALLEL = "ranks share a grouped layer as DTensors, see docs/distributed.md"
_USERBUFFERS = "te_mx has no overlapped communication (userbuffers)"

ABSENT: dict[str, Absent] = {
    "sequence_parallel": Absent(False, _PARALLEL),
    "tp_group": Absent(None, _PARALLEL),
    "tp_size": Absent(1, _PARALLEL),
    "parallel_mode": Absent(None, _PARALLEL),
    "return_layernorm_output_gathered": Absent(
        False, "ranks return what they normalized of their own tokens"
    ),
    "symmetric_ar_type": Absent(None, "sums over ranks are torch's own"),
    "get_rng_state_tracker": Absent(None, "weights are drawn from torch's generator"),
    "rng_tracker_name": Absent(None, "weights are drawn from torch's generator"),
    "ub_overlap_ag": Absent(False, _USERBUFFERS),
    "ub_overlap_rs": Absent(False, _USERBUFFERS),
    "ub_overlap_rs_dgrad": Absent(False, _USERBUFFERS),
    "ub_bulk_dgrad": Absent(False, _USERBUFFERS),
    "ub_bulk_wgrad": Absent(False, _USERBUFFERS),
    "ub_name": Absent(None, _USERBUFFERS),
    "fp8_output": Absent(False, "modules return high-precision tensors"),
    "fp8_grad": Absent(False, "gradients are high-precision tensors"),
    "out": Absent(None, "its kernels write a new tensor; copy the result where it is wanted"),
    "dgrad_out": Absent(None, "its kernels write a new tensor; a hook on the input can copy it"),
}

_LINEAR = (
    "get_rng_state_tracker", "rng_tracker_name", "ub_overlap_ag", "ub_overlap_rs",
    "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_name", "symmetric_ar_type",
)  # fmt: skip

# Which of them the constructor of a module takes.
CONSTRUCTORS: dict[str, frozenset[str]] = {
    "Linear": frozenset(_LINEAR),
    "LayerNormLinear": frozenset(
        [*(set(_LINEAR) - {"rng_tracker_name"}), "return_layernorm_output_gathered"]
    ),
    "LayerNormMLP": frozenset(
        [*(set(_LINEAR) - {"rng_tracker_name", "ub_name"}), "return_layernorm_output_gathered"]
    ),
    "GroupedLinear": frozenset(
        [
            "sequence_parallel", "tp_group", "tp_size", "get_rng_state_tracker", "rng_tracker_name",
            "parallel_mode", "ub_overlap_ag", "ub_overlap_rs", "ub_name",
        ]
    ),
}  # fmt: skip


def refuse_given(
    owner: str, given: Mapping[str, Any], taken: Collection[str],
    absent: Mapping[str, Absent] = ABSENT, unused: Collection[str] = (),
) -> None:  # fmt: skip
    """Check arguments that are not in the signature of a call of Transformer Engine's, of which it
    takes these, some of no effect.

    Raises:
        TypeError: a name that Transformer Engine's call does not take either.
        NotImplementedError: an argument of Transformer Engine that is set, by name.
    """
    for name, value in given.items():
        if name not in taken:
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}")
        if name not in unused:
            check_default(f"{owner}: {name}", value, *absent[name])


def refuse(module: str, name: str, value: Any) -> None:
    """Raise NotImplementedError unless the value is the default of an argument that is absent."""
    check_default(f"te_mx.{module}: {name}", value, *ABSENT[name])


_FLAGS = (
    "bias", "return_bias", "return_layernorm_output", "fuse_wgrad_accumulation",
    "delay_wgrad_compute", "save_original_input", "checkpoint", "set_parallel_mode",
    "single_grouped_weight", "single_grouped_bias", "zero_centered_gamma", "input_layernorm",
    "fuse_qkv_params", "qkv_weight_interleaved", "qk_norm_before_rope", "rotary_pos_interleaved",
    "output_layernorm", "parallel_attention_mlp", "apply_residual_connection_post_layernorm",
)  # fmt: skip
_FUNCTIONS = "init_method", "output_layer_init_method"
_KEPT = (
    "return_bias", "return_layernorm_output", "fuse_wgrad_accumulation", "save_original_input",
    "checkpoint", "name", *_FUNCTIONS,
)  # fmt: skip


class Options:
    """The arguments of a constructor, of which each that modules share is checked by its name:
    before a parameter is made.

    Args:
        kind: the module, as te_mx.<kind>.
        given: the arguments by name, as ``locals()`` of the constructor has them.
        sizes: names of those that are sizes; `sizes` are their values.

    `given` has them all, `device` and `dtype` say where parameters are made, `how` between which
    ranks the module is shared (tensor_parallel.py), in a `mode`.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name.
        NotImplementedError: an argument of Transformer Engine that te_mx does not have is set.
    """

    def __init__(self, kind: str, given: Mapping[str, Any], *sizes: str) -> None:
        self._owner, self.given = f"te_mx.{kind}", dict(given)

        def some(names: "Iterable[str]") -> "dict[str, Any]":
            return {name: given[name] for name in names if name in given}

        if kind in CONSTRUCTORS:
            refuse_given(self._owner, given["transformer_engine"], CONSTRUCTORS[kind])
        self.sizes = checks.sizes(self._owner, **some(sizes))
        checks.flags(self._owner, **some(_FLAGS))
        checks.functions(self._owner, **some(_FUNCTIONS))
        checks.check_name(self._owner, given["name"])
        dtypes = given.get("dtype"), given["params_dtype"]
        self.device, self.dtype = checks.parameter_place(self._owner, given["device"], *dtypes)
        self.mode = BOTH if given.get("set_parallel_mode") else given.get("parallel_mode")
        size, sequence = given.get("tp_size", 1), given.get("sequence_parallel", False)
        self.how = shared(self._owner, self.mode, given.get("tp_group"), size, sequence)

    def part(self, mode: str, name: str, size: int) -> int:
        """What this rank has of a size that is shared in this mode."""
        return part(self._owner, self.how, mode, name, size)

    def ranks(self, mode: str) -> int:
        """How many ranks share what is shared in this mode."""
        return ranks_of(self.how, mode)

    def keep(self, module: Any) -> None:
        """Set the attributes of a module that are arguments of its constructor as they are."""
        for name in _KEPT:
            if name in self.given:
                setattr(module, name, self.given[name])
