"""What scripts import from ``transformer_engine.pytorch.fp8``, the older name of
``transformer_engine.pytorch.quantization``.
"""

from te_mx.pytorch.quantization import *  # noqa: F403
from te_mx.pytorch.quantization import __all__ as __all__
