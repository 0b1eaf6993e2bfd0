"""CustomRecipe: a function that is asked about every layer by name, and `overrides`: a recipe, and
other ones for the layers that a pattern names."""

import dataclasses
import difflib
import fnmatch
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from te_mx import formats
from te_mx.dispatch.explain import why_no_product
from te_mx.formats.scaling import is_stochastic, split_rule
from te_mx.recipes.mxfp8 import Format, checked_format
from te_mx.recipes.resolve import resolve_recipe
from te_mx.recipes.settings import ByName, Mixed, Settings, in_words
from te_mx.recipes.values import MAX_SPREAD, Recipe, check_attention, check_common
from te_mx.runtime.arguments import check_one_of, check_size, shown

MODULES = "linear", "grouped_linear"
TENSORS = ("input", "weight", "grad_output")


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a factory is asked about, as in Transformer Engine.

    module_type: "linear" or "grouped_linear". tensor_type: "input", "weight" or "grad_output".
    name: of the layer, "" for one without. A module with several weights asks about each under a
    name of its own: those of a te_mx.LayerNormMLP end in ".fc1" and ".fc2", those of experts in the
    names of their parameters."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        said = {field: value for field, value in vars(self).items() if value}
        return "|".join(f"{k}={v}" for k, v in said.items()) or "QuantizerRole()"


class Quantizer(NamedTuple):
    """How one tensor of a layer is quantized; a plain tuple, or the format alone, means the same.

    fmt: a name of te_mx.formats.names(), a short one, or a te_mx.formats.Format. rule: its scale
    rule, "" for its first one ("rceil", "pow2"); of gradients also with "+sr", rounded
    stochastically. columnwise: another format of what wgrad (of inputs and gradients) and dgrad (of
    weights) read; of wgrad also with a transform, "mxfp4+rht32:0x5b39a1c6". None for the same."""

    fmt: str | formats.Format
    rule: str = ""
    columnwise: str | formats.Format | None = None


@dataclasses.dataclass(unsafe_hash=True, repr=False)
class CustomRecipe(Recipe):
    """Every layer as a function says, which is asked about its tensors by role and name.

    Field names and roles are Transformer Engine's; what the function returns is te_mx's::

        def factory(role):
            if role.name.startswith("layers.0."):
                return None  # in high precision
            if role.name.endswith("fc2"):
                return "mxfp8"
            return "mxfp4" if role.tensor_type != "grad_output" else ("mxfp8", "floor")

    Each layer is asked about once, for its "input", "weight" and "grad_output". The function must
    return the same whenever it is asked the same. Names are those of the model that
    `te_mx.convert_model` converted, or the ``name=`` of a module; so the recipe can be bound
    (``convert_model(model, recipe=CustomRecipe(..))``), or be that of a region.

    Args:
        qfactory: ``qfactory(role: QuantizerRole)``, or where to import it from:
            "package.module:name" or "package.module.name". It returns None for high precision, a
            format or a `Quantizer` (format, rule, columnwise); or, for all three tensors alike, a
            recipe of te_mx.recipe, which the layer then runs with. None for all three leaves the
            layer in high precision; for gradients alone, its backward pass
            (``backward_override="high_precision"``).
        fp8_format: Transformer Engine's, of no effect: the factory says formats.
        fp8_dpa, fp8_mha: must be False; attention runs in the dtype of its inputs.
        backward_override: as of `MXFP8BlockScaling`.
        quantization_alignment: Transformer Engine's, of no effect: sizes need not divide.
        precision, alignment_spread, wgrad_with_hp, one_copy_weights, split_k, keep_weight_columns:
            as of `MXFP8BlockScaling`. They hold for layers that got formats; a recipe that the
            factory returned has its own.

    Raises:
        TypeError: a field has the wrong type. From the first forward of a layer, or from
            convert_model: the factory returned what is no answer.
        ValueError: a field has a value that means nothing, or there is nothing to import; or the
            formats of a layer cannot be multiplied.
        NotImplementedError: a field, or an answer, asks for something that te_mx does not do.
    """

    _kind = "custom"
    _always = ("qfactory",)

    qfactory: Callable[[QuantizerRole], Any] | str
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128
    precision: str = "adaptive"
    alignment_spread: int = MAX_SPREAD
    wgrad_with_hp: bool = False
    one_copy_weights: bool = False
    split_k: bool = False
    keep_weight_columns: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "qfactory", _imported(self.qfactory))
        object.__setattr__(self, "fp8_format", checked_format(self))
        check_size("CustomRecipe.quantization_alignment", self.quantization_alignment, 1)
        check_attention(self)
        check_common(self)
        made = _factory(self.qfactory, tuple(getattr(self, name) for name in _OPTIONS))
        object.__setattr__(self, "_factory", made)  # keeps it alive
        object.__setattr__(self, "_settings", ByName(made.key))

    def of(self, name: str, module_type: str = "linear") -> Recipe | None:
        """The recipe of the layer of this name, as for `te_mx.explain`; None in high precision.

        Raises:
            TypeError: a name that is no str.
            ValueError: another module_type than "linear" and "grouped_linear".
        """
        if not isinstance(name, str):
            raise TypeError(f"CustomRecipe.of: name must be a str, got {shown(name)}")
        check_one_of("CustomRecipe.of: module_type", module_type, MODULES)
        made: _Factory = self.__dict__["_factory"]
        settings = made._of_layer(name, module_type)
        return None if settings is None else _OfLayer(settings)

    def __reduce__(self) -> Any:
        return CustomRecipe, tuple(getattr(self, f.name) for f in dataclasses.fields(self))


@dataclasses.dataclass(unsafe_hash=True, repr=False)
class _OfLayer(Recipe):
    """What one layer of a CustomRecipe runs with."""

    layer: Settings

    def __post_init__(self) -> None:
        object.__setattr__(self, "_settings", self.layer)


_OPTIONS = (
    "precision", "alignment_spread", "backward_override", "wgrad_with_hp", "one_copy_weights",
    "split_k", "keep_weight_columns",
)  # fmt: skip


# ---------------------------------------------------------------------------- the layers of a model
class _Factory:
    """A function, and what it said of the layers that were asked about. Settings hold its number
    alone, which torch.compile can guard on."""

    def __init__(self, function: Callable[[QuantizerRole], Any], options: tuple[Any, ...]) -> None:
        self.function, self.options = function, options
        self.key = next(_keys)
        self.said: dict[tuple[tuple[str, ...], str], Settings | Mixed | None] = {}
        _alive[self.key] = self

    def of(self, names: tuple[str, ...], kind: str) -> Settings | Mixed | None:
        """What a module of this kind runs with, whose weights have these names."""
        asked = names, kind
        if asked not in self.said:
            each = tuple([self._of_layer(name, kind) for name in names])
            alike = all(one == each[0] for one in each)
            self.said[asked] = each[0] if alike else Mixed(each)
        return self.said[asked]

    def _of_layer(self, name: str, kind: str) -> Settings | None:
        answers = [self.function(QuantizerRole(kind, tensor, name)) for tensor in TENSORS]
        where = f"CustomRecipe: of {name!r} qfactory said " + ", ".join(
            f"{tensor} {shown(answer)}" for tensor, answer in zip(TENSORS, answers, strict=True)
        )
        if any(isinstance(answer, Recipe) for answer in answers):
            first = answers[0]
            if any(answer != first for answer in answers) or first.custom():
                raise ValueError(
                    f"{where}: a recipe holds for all three tensors of a layer, and is no "
                    "CustomRecipe; return the same one for each, or formats"
                )
            return first.settings
        if answers[0] is None and answers[1] is None:
            if answers[2] is not None:
                raise ValueError(
                    f"{where}: without a quantized input and weight there is nothing to multiply "
                    "gradients with; return None for all three"
                )
            return None
        if answers[0] is None or answers[1] is None:
            raise NotImplementedError(
                f"{where}: products of one quantized operand are not supported; return None for "
                "both, or a format for both"
            )
        return self._of_formats(where, answers)

    def _of_formats(self, where: str, answers: list[Any]) -> Settings:
        """The settings of formats that were said."""
        plain_backward = answers[2] is None
        x, w, g = (_read(where, answer) for answer in (*answers[:2], answers[2] or answers[0]))
        (x_fmt, rule, x_col), (w_fmt, w_rule, w_col), (g_fmt, g_rule, g_col) = x, w, g
        if w_rule != rule and formats.get(w_fmt).scaling.knows(rule):
            raise NotImplementedError(
                f"{where}: inputs and weights have one scale rule, got {rule!r} and {w_rule!r}"
            )
        if is_stochastic(rule) or is_stochastic(w_rule):
            raise NotImplementedError(f"{where}: gradients alone are rounded stochastically")
        transforms = [formats.get(fmt or "mxfp8").transform for fmt in (x_col, w_col, g_col)]
        if transforms[1] is not None or transforms[0] != transforms[2]:
            raise ValueError(
                f"{where}: a transform belongs to both sides of wgrad, to columnwise of input and "
                "of grad_output alike, and to nothing else"
            )
        for one, other in (
            (x_fmt, w_fmt),
            (g_fmt, w_col or w_fmt),
            (g_col or g_fmt, x_col or x_fmt),
        ):
            if (why := why_no_product(one, other)) is not None:
                raise ValueError(f"{where}: no kernel multiplies {one!r} with {other!r}: {why}")
        precision, spread, backward, *flags = self.options
        if plain_backward and backward is None:
            backward = "high_precision"
        made = Settings(x_fmt, w_fmt, g_fmt, rule, precision, spread, backward, *flags)
        if backward is not None:
            return made
        return made._replace(
            x_col=x_col, w_col=w_col, g_col=g_col, g_rule="" if g_rule == rule else g_rule
        )


_keys = itertools.count()
_alive: weakref.WeakValueDictionary[int, _Factory] = weakref.WeakValueDictionary()


@lru_cache(maxsize=32)
def _factory(function: Callable[[QuantizerRole], Any], options: tuple[Any, ...]) -> _Factory:
    """One for each function and its options: equal recipes ask once, and share compiled code."""
    return _Factory(function, options)


def settings_of(
    chosen: Settings | ByName | None, names: tuple[str, ...], kind: str
) -> Settings | Mixed | None:
    """What a module of this kind runs with under settings that may differ by name."""
    return _alive[chosen.key].of(names, kind) if isinstance(chosen, ByName) else chosen


def words_of(key: int, names: tuple[str, ...], kind: str) -> str:
    """The same as one string, for code that is traced: "" for high precision."""
    made = _alive[key].of(names, kind)
    each = made.each if isinstance(made, Mixed) else (made,)
    return "\n".join(["" if one is None else in_words(one) for one in each])


def _read(where: str, answer: Any) -> tuple[str, str, str]:
    """(format, rule, columnwise format, "" for the same) of one tensor."""
    given = answer if isinstance(answer, tuple) else (answer,)
    if not 1 <= len(given) <= 3:
        raise TypeError(f"{where}: an answer is (format, rule, columnwise), got {shown(answer)}")
    fmt, rule, columnwise = Quantizer(*given)
    row = _format(where, fmt, False)
    scaling = formats.get(row).scaling
    if rule in ("", None):
        rule = scaling.rules[0]
    if not scaling.takes(rule):
        raise ValueError(f"{where}: {row} has rules {scaling.shown_rules}, got {shown(rule)}")
    col = "" if columnwise is None else _format(where, columnwise, True)
    if col and not formats.get(col).scaling.knows(split_rule(rule)[0]):
        raise ValueError(f"{where}: {col} does not know the rule {rule!r} of {row}")
    return row, rule, "" if col == row else col


def _format(where: str, given: Any, transform: bool) -> str:
    """The name of a registered format."""
    if isinstance(given, formats.Format):
        given = given.name
    if not isinstance(given, str):
        raise TypeError(
            f"{where}: a factory returns None, a format by name or as a te_mx.formats.Format, "
            "(format, rule, columnwise), or a recipe object"
        )
    try:
        found = formats.get(given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if found.transform is not None and not transform:
        raise ValueError(f"{where}: {given!r} is a transform, which columnwise formats have alone")
    return found.name


def _imported(given: Any) -> Callable[[QuantizerRole], Any]:
    """The function that a path names, or the function itself."""
    if not isinstance(given, str):
        if not callable(given) or isinstance(given, type):
            raise TypeError(
                "CustomRecipe.qfactory must be a function of a te_mx.recipe.QuantizerRole, or its "
                f"import path, got {shown(given)}"
            )
        return given
    module, colon, name = given.partition(":")
    if not colon:
        module, _, name = given.rpartition(".")
    try:
        found: Any = importlib.import_module(module) if module and name else None
        for part in name.split(".") if found is not None else ():
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"CustomRecipe.qfactory={given!r}: {error}") from error
    if not callable(found) or isinstance(found, type):
        raise ValueError(
            f"CustomRecipe.qfactory={given!r} must name a function, as 'package.module:name' or "
            "'package.module.name'"
        )
    return found


# -------------------------------------------------------------------------------- overrides by name
@dataclasses.dataclass(frozen=True)
class ByPattern:
    """The factory of `overrides`: the recipe of the first pattern that a name matches."""

    base: Recipe | None
    patterns: tuple[tuple[str, Recipe | None], ...]

    def __call__(self, role: QuantizerRole) -> Recipe | None:
        found = self.pattern(role.name)
        return self.base if found is None else dict(self.patterns)[found]

    def pattern(self, name: str) -> str | None:
        """The first pattern that matches a name."""
        return next((p for p, _ in self.patterns if fnmatch.fnmatchcase(name, p)), None)

    def check_used(self, names: Iterable[str]) -> None:
        """Raise ValueError where a pattern is the first to match none of these names."""
        known = list(names)
        for pattern, _ in self.patterns:
            if any(fnmatch.fnmatchcase(name, pattern) for name in known):
                continue
            near = difflib.get_close_matches(pattern.replace("*", ""), known, n=4, cutoff=0.2)
            among = f"; near are {', '.join(near)}" if near else ""
            raise ValueError(
                f"overrides: the pattern {pattern!r} matches none of the {len(known)} layers "
                f"of the model{among}"
            )


def overrides(recipe: Any, patterns: Mapping[str, Any]) -> CustomRecipe:
    """A recipe, and other ones for layers by name: ``overrides("mxfp4_all", {"model.layers.0.*":
    None, "*.down_proj": "mxfp8"})``.

    Args:
        recipe: what `te_mx.autocast` takes, for the layers that no pattern matches; None leaves
            these in high precision.
        patterns: recipes, or None for high precision, by patterns of whole names as of `fnmatch`
            (``*`` any characters, dots too, ``?`` one, ``[01]`` one of some). The first one that
            matches counts.

    Returns:
        A `CustomRecipe`. `te_mx.convert_model` refuses one with a pattern that no layer matches;
        in a region a pattern may match nothing.

    Raises:
        TypeError, ValueError, NotImplementedError: no recipe, no pattern, or a CustomRecipe.
    """
    if not isinstance(patterns, Mapping) or not all(isinstance(key, str) for key in patterns):
        raise TypeError(
            f"overrides: patterns must be a dict of recipes by str, got {shown(patterns)}"
        )
    base = _part("recipe", recipe)
    others = [(name, _part(f"patterns[{name!r}]", one)) for name, one in patterns.items()]
    return CustomRecipe(ByPattern(base, tuple(others)))


def _part(label: str, given: Any) -> Recipe | None:
    """A recipe of some layers; None in high precision."""
    if given is None:
        return None
    try:
        found = resolve_recipe(given)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"overrides: {label}: {error}") from None
    if found.custom():
        raise ValueError(
            f"overrides: {label} is a CustomRecipe, which says by itself what each layer is; "
            "write one"
        )
    return found.__copy__()
