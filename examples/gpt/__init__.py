"""The parts of examples/train_gpt.py: model, data, training loop, report."""
