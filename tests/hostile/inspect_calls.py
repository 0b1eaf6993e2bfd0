"""The table of te_mx.inspect and its report."""

from __future__ import annotations

import os
from typing import Any

import torch
from judge import Call
from malformed import (
    COUNT,
    FLAG,
    MODULE,
    OPTIONAL_FUNCTION,
    OPTIONAL_WORD,
    TEXT,
    UPPER_CASE,
    changed,
    other_than,
    values,
)
from other_calls import _late, model, on_model

import te_mx


def report(device: str) -> Any:
    return te_mx.inspect(model(device), torch.ones(4, 64, device=device), fmt="mxfp4")


# What a model makes of lists, dicts and other tensors is its own affair.
INSPECTED = (
    Call(
        "te_mx.inspect", on_model(te_mx.inspect, model),
        lambda d: {"model": model(d), "batch": torch.ones(4, 64, device=d), "fmt": None,
                   "loss_fn": lambda y: y.sum(), "gradients": True,
                   "filter_fn": lambda module, name: True, "scale_rule": "even",
                   "alignment_spread": 8, "max_elements": 4096, "progress": False},
        {"model": MODULE | changed(None, meta=lambda m: m.to("meta")),
         "batch": other_than("a list", "a dict", "a tensor"), "fmt": other_than("None"),
         "loss_fn": OPTIONAL_FUNCTION, "gradients": FLAG,
         "filter_fn": OPTIONAL_FUNCTION | values(that_raises_late=lambda: _late),
         "scale_rule": OPTIONAL_WORD | UPPER_CASE, "alignment_spread": COUNT | values(nine=9),
         "max_elements": COUNT.but("None", "huge") | values(zero=0), "progress": FLAG},
    ),
    Call(
        "te_mx.InspectionReport.worst", lambda d: report(d).worst,
        lambda d: {"n": 3, "fmt": "mxfp4", "role": "x"},
        {"n": COUNT.but("huge"), "fmt": OPTIONAL_WORD | UPPER_CASE,
         "role": OPTIONAL_WORD | UPPER_CASE},
    ),
    Call(
        "te_mx.InspectionReport.to_json", lambda d: report(d).to_json,
        lambda d: {"path": os.devnull}, {"path": TEXT | values(a_pair=lambda: ("a", "b"))},
    ),
)  # fmt: skip
