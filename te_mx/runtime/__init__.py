"""Scratch memory, streams, and what ran."""
