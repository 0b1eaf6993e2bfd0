"""Checkpoints of Transformer Engine hold `_extra_state` of modules that have none in te_mx."""

from __future__ import annotations

from typing import Any


class WithoutExtraState:
    """Mixin, before nn.Module: loads state_dicts with an ``_extra_state`` of this module, which is
    ignored, under strict=True too."""

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key = prefix + "_extra_state"
        if key in unexpected_keys:
            unexpected_keys.remove(key)
