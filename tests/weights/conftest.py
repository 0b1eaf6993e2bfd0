"""Fixtures that tests of weights and their checkpoints share."""

import pytest


@pytest.fixture
def registered():
    """te_mx's quantizer, in from_pretrained."""
    from te_mx.integrations import hf_quantizer

    hf_quantizer.register()
    yield
    hf_quantizer.unregister()
