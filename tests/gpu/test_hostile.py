"""The malformed calls of tests/hostile on CUDA tensors: refused as on the CPU, and nothing that ran
on the GPU failed. Every call is followed by a wait for the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))

import run_calls
from public_calls import CALLS

# What te_mx.moe is given in them only the device knows: docs/moe.md.
LISTS = (
    "topk_ids", "expert_map", "sorted_token_ids", "expert_ids", "num_tokens_post_padded",
    "expert_num_tokens",
)  # fmt: skip


@pytest.fixture(scope="module")
def complaints() -> dict[str, list[str]]:
    return run_calls.run_all("cuda")


def unread(name: str, complaint: str) -> bool:
    """Whether a complaint is that nobody looked at a list on the device."""
    given = complaint.partition(":")[0]
    return name.startswith("te_mx.moe.") and given in LISTS and "taken in silence" in complaint


@pytest.mark.parametrize("name", [call.name for call in CALLS])
def test_malformed_calls(name, complaints):
    assert [one for one in complaints[name] if not unread(name, one)] == []
