"""The commands of `python -m te_mx`: tune and doctor."""
