"""Choices that were measured: a table a device, in csv files beside this one, and those of users.

`python -m te_mx tune` writes them (docs/tuning.md), the registry asks `follow` about every problem
that it decides."""
