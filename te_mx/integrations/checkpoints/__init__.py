"""Checkpoints of others, one file a schema: what its quantization_config says of the tensors
(`plan`), and how te_mx writes it (`STYLES`). `tensors.py` puts them into modules."""

from typing import Any

from te_mx.integrations.checkpoints import compressed_tensors, modelopt, quark, transformers
from te_mx.integrations.checkpoints.plan import Plan

_SCHEMAS = {
    method: one
    for one in (transformers, compressed_tensors, modelopt, quark)
    for method in one.METHODS
}
METHODS = tuple(_SCHEMAS)
STYLES = compressed_tensors.STYLES | modelopt.STYLES | transformers.STYLES


def plan_of(fields: dict[str, Any]) -> Plan | str:
    """The plan of a checkpoint that te_mx reads, or why it does not."""
    method = str(fields.get("quant_method"))
    if method not in _SCHEMAS:
        return f"te_mx does not know quant_method {method!r}"
    return _SCHEMAS[method].plan(fields)
