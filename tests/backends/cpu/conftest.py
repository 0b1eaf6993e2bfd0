"""Kernels and instruction-set levels of this machine, for the tests of native kernels."""

import pytest
from gemm_calls import AVAILABLE, KERNELS, at_level


@pytest.fixture(params=KERNELS, ids=lambda pair: "-".join(pair))
def kernel(request: pytest.FixtureRequest):
    """Every kernel, at the level that brings it."""
    yield from at_level(*request.param)


@pytest.fixture(params=AVAILABLE)
def level(request: pytest.FixtureRequest):
    yield from at_level(request.param, request.param)
