"""A converter of torchtitan's model configs (0.3 and later): its linear layers are built as te_mx
layers with a recipe.

    from te_mx.integrations.torchtitan_converter import MXConverter
    spec = model_registry("8B", converters=[MXConverter.Config()])

Names, initialization, sharding and the state_dict stay torchtitan's. Versions before 0.3 convert
models that were built, as `te_mx.convert_model(model, recipe=...)` does. The experts of a mixture
are converted so too (integrations/torchtitan.py).

Imports torchtitan, so nothing of te_mx imports it."""

from dataclasses import dataclass, field, fields
from typing import Any

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

import te_mx
from te_mx.recipe import resolve_recipe
from te_mx.recipes.custom import settings_of


class MXLinear(te_mx.Linear, Module):
    """torchtitan's Linear, as a te_mx.Linear to which a recipe is bound."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        recipe: Any = None
        layer: str = ""  # its name in the model, which a te_mx.recipe.CustomRecipe is asked about

    def __init__(self, config: Config) -> None:
        te_mx.Linear.__init__(self, config.in_features, config.out_features, bias=config.bias)
        chosen = resolve_recipe(config.recipe).chosen
        self.__dict__["_bound"] = settings_of(chosen, (config.layer,), "linear")


class MXConverter(QuantizationConverter):
    """Replaces the config of each Linear; subclasses of torchtitan's Linear stay."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: Any = None
        """Of te_mx.recipe; None for the default one."""
        skip: list[str] = field(default_factory=lambda: ["lm_head", "output", "router"])
        """Parts of names: layers whose name has one of them stay."""

    def __init__(self, config: Config) -> None:
        resolve_recipe(config.recipe)
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The config of the model with those of its Linear layers replaced, in place.

        Raises:
            ValueError: there is no Linear to replace.
        """
        recipe = resolve_recipe(self.config.recipe).chosen
        chosen = [
            found for found in model_config.traverse(Linear.Config)
            if type(found[1]) is Linear.Config
            and not any(part in found[0].split(".") for part in self.config.skip)
            and settings_of(recipe, (found[0],), "linear") is not None
        ]  # fmt: skip
        if not chosen:
            raise ValueError(
                f"no Linear.Config to convert in {type(model_config).__qualname__}: skip is "
                f"{self.config.skip}"
            )
        for name, config, parent, attribute in chosen:
            given = {one.name: getattr(config, one.name) for one in fields(config) if one.init}
            made = MXLinear.Config(**given, recipe=self.config.recipe, layer=name)
            if parent is None:
                return made
            if isinstance(parent, list | dict):
                parent[attribute] = made
            else:
                setattr(parent, attribute, made)
        return model_config
