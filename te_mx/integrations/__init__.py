"""Layers of other libraries that run in MXFP8. Nothing here imports those libraries: a module of
theirs can only be met where they were imported already."""
