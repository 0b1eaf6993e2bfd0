"""The part of Transformer Engine's ``common`` that scripts import: its recipes."""

from te_mx.common import recipe

__all__ = ["recipe"]
