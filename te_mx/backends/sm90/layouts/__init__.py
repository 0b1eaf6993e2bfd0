"""How operands lie for the kernels of Hopper, in plain torch; registered here."""

from te_mx.backends.sm90.layouts.factors import SM90_FACTOR_K, SM90_FACTOR_ROWS, SM90_FACTORS
from te_mx.backends.sm90.layouts.frozen import SM90_FROZEN
from te_mx.backends.sm90.layouts.groups import SM90Columns, SM90Rows
from te_mx.backends.sm90.layouts.nvfp4 import SM90_NVFP4, SM90_VALUES
from te_mx.backends.sm90.layouts.tiles import SM90Tiles
from te_mx.layouts import register, register_family

for _layout in (
    SM90_FACTORS, SM90_FACTOR_ROWS, SM90_FACTOR_K, SM90_FROZEN, SM90_NVFP4, *SM90_VALUES,
):  # fmt: skip
    register(_layout)
register_family("sm90", SM90Tiles)
register_family("sm90_rows", SM90Rows)
register_family("sm90_k", SM90Columns)

__all__ = [
    "SM90_FACTORS", "SM90_FACTOR_K", "SM90_FACTOR_ROWS", "SM90_FROZEN", "SM90_NVFP4", "SM90_VALUES",
]  # fmt: skip
