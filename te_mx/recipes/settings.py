"""Settings: a recipe as the plain tuple that modules read and that torch.compile guards on by
value."""

from __future__ import annotations

from typing import NamedTuple


class Settings(NamedTuple):
    """What a forward does.

    x, w, g: names of the formats of inputs, weights and output gradients. backward: None runs the
    backward GEMMs on quantized operands, "high_precision" and "dequantized" do not; wgrad_hp runs
    wgrad alone in high precision. one_copy: dgrad starts from the rowwise codes of the weight.
    keep_columns: dgrad's operand of the weight is made in forward. precision, spread, split_k: how
    GPUs multiply.
    """

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
