"""4-bit weights in a state_dict under the names of others, for a weight called <name>:

compressed-tensors  ``<name>_packed`` [.., out, in/2] and ``<name>_scale`` [.., out, in/32]
gpt-oss             ``<name>_blocks`` [.., out, in/32, 16] and ``<name>_scales`` [.., out, in/32]

They become ``<name>`` and ``<name>_scale``, as nn/frozen_state.py reads them; te_mx saves those.
"""

from __future__ import annotations

from typing import Any

from te_mx.formats import mxfp4_checkpoints

_ENDS = {  # of codes -> of their scales, and what makes te_mx's of both
    "_packed": ("_scale", mxfp4_checkpoints.from_compressed_tensors),
    "_blocks": ("_scales", mxfp4_checkpoints.from_gpt_oss),
}


def adapt(module: Any, state_dict: Any, prefix: str, error_msgs: list[str]) -> None:
    """Give such entries of a module te_mx's names and shapes, in place; what does not fit is
    appended to the messages."""
    keys = tuple(prefix + key for key in module._weight_keys)
    for given in [name for name in state_dict if name.startswith(keys)]:
        for end, (scale_end, read) in _ENDS.items():
            name = given.removesuffix(end)
            if name == given or name.rstrip("0123456789") not in keys:  # a part of groups: weight7
                continue
            if name in state_dict:
                error_msgs.append(f"{name} and {given} are both there; keep the one that is meant")
            elif name + scale_end not in state_dict:
                error_msgs.append(f"{name}{scale_end}: missing beside {given}")
            else:
                parts = state_dict.pop(given), state_dict.pop(name + scale_end)
                try:
                    state_dict[name], state_dict[f"{name}_scale"] = read(*parts)
                except (TypeError, ValueError) as error:
                    error_msgs.append(f"{given}, {name}{scale_end}: {error}")
