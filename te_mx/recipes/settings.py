"""Settings: a recipe as the plain tuple that modules read and torch.compile guards on by value."""

from functools import lru_cache
from typing import Any, NamedTuple

from te_mx import formats
from te_mx.dispatch.problem import ENCODED, INVARIANT

_FLAGS = "wgrad_hp", "one_copy", "split_k", "keep_columns"


class Settings(NamedTuple):
    """What a forward does.

    x, w, g: names of the formats of inputs, weights and output gradients; x_col, w_col, g_col:
    those of their columnwise operands (of wgrad, dgrad and wgrad), g_rule and w_rule: the rules of
    gradients and of weights; "" for the same. backward: None runs the backward GEMMs on quantized
    operands, "high_precision" and "dequantized" do not; wgrad_hp runs wgrad alone in high
    precision. one_copy: dgrad starts from the rowwise codes of the weight. keep_columns: forward
    makes dgrad's operand of w. precision, spread, split_k: how GEMMs multiply."""

    x: str
    w: str
    g: str
    scale_rule: str
    precision: str
    spread: int
    backward: str | None
    wgrad_hp: bool = False
    one_copy: bool = False
    split_k: bool = False
    keep_columns: bool = False
    x_col: str = ""
    w_col: str = ""
    g_col: str = ""
    g_rule: str = ""
    w_rule: str = ""

    @property
    def formats(self) -> str:
        """The formats of the roles, as errors name a recipe."""
        same = self.x == self.w == self.g
        return self.x if same else f"x {self.x}, w {self.w}, g {self.g}"

    @property
    def x_columns(self) -> str:
        """The format of inputs in wgrad."""
        return self.x_col or self.x

    @property
    def w_columns(self) -> str:
        """The format of weights in dgrad."""
        return self.w_col or self.w

    @property
    def g_columns(self) -> str:
        """The format of output gradients in wgrad."""
        return self.g_col or self.g

    @property
    def backward_precision(self) -> str:
        """That of dgrad and wgrad: "invariant" and "fp8" are about forward."""
        return "adaptive" if self.precision in (INVARIANT, ENCODED) else self.precision

    @property
    def gradient_rule(self) -> str:
        """How output gradients are quantized: a scale rule, perhaps with "+sr"."""
        return self.g_rule or self.scale_rule

    @property
    def weight_rule(self) -> str:
        """How weights are quantized of which only codes stay."""
        return self.rule_of(self.w)

    @property
    def weight_columns_rule(self) -> str:
        """How the columns of a weight are, for dgrad. Codes of one format may run in a region of
        another, whose rule theirs does not know."""
        return self.rule_of(self.w_columns)

    def rule_of(self, fmt: str) -> str:
        """The scale rule of weights, or the first one of a format that does not know it."""
        rule, scaling = self.w_rule or self.scale_rule, formats.get(fmt).scaling
        return rule if scaling.knows(rule) else scaling.rules[0]

    @property
    def is_uniform(self) -> bool:
        """Whether each role has one format, and all have one rule."""
        return not (self.x_col or self.w_col or self.g_col or self.g_rule or self.w_rule)


class ByName(NamedTuple):
    """What stands for settings that differ by layer: the number of the factory of a `CustomRecipe`,
    which `te_mx.recipes.custom.settings_of` asks about a module."""

    key: int


class Mixed(NamedTuple):
    """Settings of a module with several weights that run with different ones, each None in high
    precision, in the order of its weight keys."""

    each: tuple[Settings | None, ...]

    @property
    def formats(self) -> str:
        """The formats of the roles of each weight."""
        return "; ".join("high precision" if one is None else one.formats for one in self.each)


def in_words(settings: Settings) -> str:
    """Settings as a string, for graphs on disks, which hold no objects. Traceable by Dynamo."""
    words = ["yes" if value is True else value for value in settings]
    return "|".join(["" if word is None or word is False else str(word) for word in words])


@lru_cache(maxsize=256)
def of_words(words: str) -> Settings:
    """The other way."""
    return read(words)


def read(words: str) -> Settings:
    """The same, traceable by Dynamo."""
    given: dict[str, Any] = dict(zip(Settings._fields, words.split("|"), strict=True))
    given["spread"] = int(given["spread"])
    given["backward"] = given["backward"] or None
    given.update({name: given[name] == "yes" for name in _FLAGS})
    return Settings(**given)
