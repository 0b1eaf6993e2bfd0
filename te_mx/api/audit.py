"""te_mx.audit: what every linear layer of a model ran last."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from te_mx.api.memory import Recorded, Saved, recorded, saved_by
from te_mx.autograd.linear_recipe import GEMMS
from te_mx.context.region import current_recipe
from te_mx.dispatch.problem import INVARIANT
from te_mx.fusion.class_swap import Reclassed
from te_mx.nn.base import MXModule
from te_mx.nn.guards import RAN
from te_mx.nn.invariant import InvariantLinear
from te_mx.recipes.settings import Mixed
from te_mx.runtime.arguments import check_flag, check_module, shown
from te_mx.runtime.kernel_log import LAST_RUN, was_read
from te_mx.runtime.report import table
from te_mx.te.attention import DotProductAttention
from te_mx.te.multihead_attention import MultiheadAttention
from te_mx.te.norms import _Norm
from te_mx.te.rotary import RotaryPositionEmbedding
from te_mx.te.transformer_layer import TransformerLayer
from te_mx.weights.freezing import lies

HIGH_PRECISION, NEVER, UNASKED = "high precision", "never ran", "not needed"
COMPILED = "compiled: not recorded"
_ALL_HIGH = (HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION)


class LayerAudit(NamedTuple):
    """One layer: the kernel that each GEMM ran on last, "high precision", "compiled: not recorded",
    "not needed", or "never ran". saved: bytes kept for backward, and how many of them something
    else keeps too; None where they were not asked for. lies: in which formats and layouts codes of
    a frozen weight lie now, and the bytes a parameter that they take; empty where there are
    none."""

    name: str
    kind: str
    fprop: str
    dgrad: str
    wgrad: str
    weight: str
    saved: Saved | None = None
    lies: str = ""


class AuditReport:
    """What `audit` found: iterable, printable as a table. `memory` is what was recorded of the
    whole model, with what lies outside of its layers, and `dependent` the modules whose result may
    depend on their neighbours, and why; None where it was not asked for."""

    def __init__(
        self, layers: list[LayerAudit], memory: Recorded | None = None,
        dependent: list[tuple[str, str]] | None = None,
    ) -> None:  # fmt: skip
        self.layers = layers
        self.memory = memory
        self.dependent = dependent

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerAudit]:
        return iter(self.layers)

    def __getitem__(self, name: str) -> LayerAudit:
        for layer in self.layers:
            if layer.name == name:
                return layer
        names = ", ".join(layer.name for layer in self.layers[:3])
        more = ", ..." if len(self.layers) > 3 else ""
        raise KeyError(f"no linear layer is named {shown(name)}; there are {names or 'none'}{more}")

    def __str__(self) -> str:
        if not self.dependent:
            return self._table()
        return f"{self._table()}\n{table(['may depend on its neighbours', 'why'], self.dependent)}"

    def _table(self) -> str:
        header = ["layer", "class", "fprop", "dgrad", "wgrad", "weight"]
        rows = [
            (*layer[:5], f"{layer.weight}, {layer.lies}" if layer.lies else layer.weight)
            for layer in self.layers
        ]
        if self.memory is None:
            return table(header, rows)
        saved = [layer.saved or ("", "") for layer in self.layers]
        shown = table(
            [*header, "saved bytes", "of them shared"],
            [(*row, *more) for row, more in zip(rows, saved, strict=True)],
        )
        layers, elsewhere = self.memory
        return f"{shown}\nkept for backward: {layers} bytes by layers, {elsewhere} elsewhere"

    __repr__ = __str__


def audit(model: nn.Module, memory: bool = False, invariant: bool = False) -> AuditReport:
    """Say for every linear layer of `model` on which kernel its GEMMs ran last.

    ``fprop``, ``dgrad`` and ``wgrad`` hold the name of the kernel, "high precision" after a forward
    outside autocast (and for every layer that is no te_mx.Linear), "weight only" where codes
    are decoded, or "never ran". ``weight`` says whether the layer is frozen, and the format where
    that is not mxfp8_e4m3; ``lies`` the formats and layouts in which codes of a frozen weight lie
    now ("mxfp8_e4m3@sm90:8 + mxfp8_e4m3@cols"), and how many bytes a parameter all of them take.
    The table has both in one column. A gradient that nobody needs is "not needed": that of a weight
    which does not require one, or of an input, such as the first layer's, where backward ran
    without.

    A te_mx.GroupedLinear runs groups of few rows on other kernels than groups of many; it shows
    all, joined by " + ".

    MLP blocks and normalizations that convert_model(fuse=True) fused have rows of their own beside
    those of their layers: ``kind`` says whether they ran fused the last time, or why not.

    A te_mx.LayerNormLinear is one row, a te_mx.LayerNormMLP two: ``<name>.fc1``, ``<name>.fc2``.

    Code compiled by torch.compile does not record, but for few rows on frozen weights: a number per
    layer inside the graph would make every layer compile anew. A layer that ran in such code only,
    in MXFP8, is told by the weight that was read, and says "compiled: not recorded"; where its
    weight is computed (parameters_split, parametrizations, FSDP) or it ran in high precision,
    "never ran" stays. Run once without torch.compile to see what runs; compiled code runs the same
    kernels.

    Args:
        model: the model, or a part of it.
        memory: add the bytes that each layer kept for backward, as `te_mx.record_saved` recorded
            them: a storage that several keep is counted for each, and also as shared; in the last
            line once. The bytes of a te_mx.LayerNormMLP stand in its first row.
        invariant: say in `dependent` which modules may give a row other bits beside other rows
            under the recipe that is active or bound: te_mx's at another precision, products and
            attention of torch, and every class that te_mx does not know, unless it has an attribute
            ``invariant = True``. What such a class calls in its forward is not seen.

    Raises:
        TypeError: `model` is no nn.Module, or a flag no bool.
        RuntimeError: `memory` is True, and nothing was recorded of this model.
    """
    check_module(model)
    check_flag("memory", memory)
    check_flag("invariant", invariant)
    totals = recorded(model) if memory else None
    if memory and totals is None:
        raise RuntimeError(
            f"memory=True: nothing was recorded of this {type(model).__name__}; run a forward "
            "inside `with te_mx.record_saved(model):` first"
        )
    layers = []
    for name, m in model.named_modules():
        saved = saved_by(m) if memory else None
        if isinstance(m, MXModule):
            rows = _audit_module(name or "(root)", m)
            layers += [rows[0]._replace(saved=saved), *rows[1:]]
        elif isinstance(m, Reclassed):
            kind = f"{type(m).__name__}: {m.__dict__.get(RAN, NEVER) or HIGH_PRECISION}"
            layers.append(LayerAudit(name or "(root)", kind, "", "", "", "", saved))
        elif isinstance(m, nn.Linear):
            kind = f"{type(m).__module__.split('.')[0]}.{type(m).__name__}"
            layers.append(LayerAudit(name or "(root)", kind, *_ALL_HIGH, "master", saved))
    return AuditReport(layers, totals, _dependent(model) if invariant else None)


# What computes a row of its own, or nothing at all; the activations of torch are not among it,
# which round fp32 in two ways on CPUs.
_BY_ROWS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Embedding, nn.Identity, nn.LayerNorm,
    nn.RMSNorm, nn.ReLU, nn.Softmax, nn.LogSoftmax, nn.Flatten, nn.Unflatten, nn.Dropout,
    InvariantLinear, TransformerLayer, MultiheadAttention, RotaryPositionEmbedding, _Norm,
)  # fmt: skip

_DRAW = nn.Dropout, TransformerLayer, DotProductAttention  # in training, at these rates
_DRAWN = "p", "hidden_dropout", "drop_path_rate", "attention_dropout"


def _dependent(model: nn.Module) -> list[tuple[str, str]]:
    """Modules of a model that may give a row other bits beside other rows, and why."""
    ambient, found = current_recipe(), []
    for name, m in model.named_modules():
        why = ""
        if isinstance(m, MXModule):
            settings = m._chosen(ambient, name)
            each = settings.each if isinstance(settings, Mixed) else (settings,)
            said = {"high precision" if one is None else one.precision for one in each}
            others = sorted(said - {INVARIANT})
            why = f"runs at precision {', '.join(others)}" if others else ""
            if not m._source.quantizes_inputs:
                why = "multiplies inputs as they are, in torch"
        elif m.training and isinstance(m, _DRAW) and any(map(vars(m).get, _DRAWN)):
            why = "draws by place"
        elif getattr(m, "invariant", False) is True or isinstance(m, _BY_ROWS):
            continue
        elif isinstance(m, nn.Linear):
            why = "is a product of torch; te_mx.InvariantLinear is one that is not"
        elif hasattr(m, "invariant"):
            why = "runs torch's attention; set its invariant=True"
        else:
            why = f"{type(m).__name__}: te_mx does not know what its forward does"
        if why:
            found.append((name or "(root)", why))
    return found


def _audit_module(name: str, module: MXModule) -> list[LayerAudit]:
    """The linear steps of a module: "name", or "name.fc1" and "name.fc2"."""
    kind, keys = f"te_mx.{type(module).__name__}", module._weight_keys
    steps = [name] if len(keys) == 1 else [f"{name}.{key.removesuffix('_weight')}" for key in keys]
    source, rows = module._source, []
    weight = source.words() or "master"
    for i, step in enumerate(steps):
        ran = _ALL_HIGH
        if module._seen is not None or source.alone is not None:
            first = module._tag + len(GEMMS) * i
            fprop, dgrad, wgrad = (
                LAST_RUN.get(first + gemm, NEVER) if module._tag >= 0 else NEVER
                for gemm in range(len(GEMMS))
            )
            ran = fprop, dgrad, wgrad
            if set(ran) == {NEVER} and any(was_read(t) for t in _weights(module, keys[i])):
                ran = COMPILED, COMPILED, COMPILED
            elif fprop != NEVER:
                ran = fprop, *_unasked(module, keys[i], dgrad, wgrad)
        rows.append(LayerAudit(step, kind, *ran, weight, lies=lies(module, keys[i])))
    return rows


def _unasked(module: MXModule, key: str, dgrad: str, wgrad: str) -> tuple[str, str]:
    """dgrad and wgrad of a step whose fprop ran, with the reason of the one that did not."""
    if wgrad == NEVER and not any(t.requires_grad for t in _weights(module, key)):
        wgrad = UNASKED
    if dgrad == NEVER and wgrad not in (NEVER, UNASKED):
        dgrad = UNASKED
    return dgrad, wgrad


def _weights(module: MXModule, key: str) -> list[Tensor]:
    """The memory that code which runs a module reads of one of its weights."""
    found = module._source.read(module, key)
    return [tensor for tensor in found if type(tensor) in (Tensor, nn.Parameter)]
