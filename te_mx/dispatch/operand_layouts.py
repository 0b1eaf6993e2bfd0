"""In which layouts a layer asks for its operands, so that its kernels take them as they are."""

from typing import NamedTuple

import torch

from te_mx.dispatch.kernels import derive, derived
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import pick_problem
from te_mx.runtime import compiled


class OperandLayouts(NamedTuple):
    """Specs of rowwise and columnwise copies: of a matrix, and of the tokens of several groups."""

    row: str
    col: str


@compiled.constant
def wanted_layouts(
    device: torch.device, op: str, lhs: str, rhs: str, precision: str, spread: int, rule: str
) -> str:
    """ "<row> <col> <right col> <right row>": layouts that the kernel of an op wants for two
    formats of a large problem.

    A plain function of constants that returns one."""
    many = 1 << 10
    problem = Problem(
        op, place_of(device), f"{lhs}@any", f"{rhs}@any", many, many, many, 0, precision,
        spread=spread, rule=rule,
    )  # fmt: skip
    return " ".join(pick_problem(problem).preferred_layouts(problem))


def operand_layouts(
    device: torch.device, fmt: str, other: str, precision: str, spread: int, op: str = "gemm",
    rule: str = "rceil", right: bool = False,
) -> OperandLayouts:  # fmt: skip
    """Specs for the operands of format `fmt`, with scales by a rule, in products with those of
    format `other`: as left operands, or as right ones. Rules that a device's quantizer does not
    know get layouts that all write."""
    sides = (other, fmt) if right else (fmt, other)
    asked = device, op, *sides, precision, spread, rule
    if torch.compiler.is_compiling():
        return _operand_layouts(fmt, compiled.wanted_layouts(*asked), right)
    key = *asked, right
    found = derived().get(key)
    if found is None:
        found = _operand_layouts(fmt, wanted_layouts(*asked), right)
        if device.type != "cuda" or device.index is not None:
            derive(key, found)
    return found


def _operand_layouts(fmt: str, layouts: str, right: bool) -> OperandLayouts:
    row, col, right_col, right_row = layouts.split(" ")
    return OperandLayouts(
        f"{fmt}@{(right and right_row) or row}", f"{fmt}@{(right and right_col) or col}"
    )
