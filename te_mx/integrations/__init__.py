"""Layers of other libraries that run in MXFP8. They import nothing of those libraries: a module of
theirs can only be met where they were imported already.

And plugins for other libraries, which import those, and which users import by name:
`hf_quantizer`, `lightning`, `peft`, `torchtitan_converter` and `transformers`."""
