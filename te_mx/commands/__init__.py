"""The commands of `python -m te_mx`: tune, doctor, explain, conformance."""
