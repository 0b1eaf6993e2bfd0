"""Epilogues when every CTA computes many blocks: what one block leaves in shared memory, the
staging, the bias and the barriers, must not show in the next."""

from __future__ import annotations

import math

import pytest
import sm90_bounds as bounds
import sm90_calls as calls
import torch

# More blocks than CTAs, and ends of blocks inside and outside D. One step of k, and many.
SHAPES = ((4100, 4104, 128), (3001, 4520, 640))


@pytest.fixture(params=SHAPES, ids=str)
def problem(request):
    """(run, fp32 sums, a random [M, N])."""
    m, n, k = request.param
    a, b = (calls.data(r, k, "gaussian", torch.float32, 5) for r in (m, n))
    sides = calls.operand(a, "e4m3"), calls.operand(0.1 * b, "e4m3")

    def run(**arguments):
        return calls.gemm(*sides, request.param, **arguments)

    return run, run(out_dtype=torch.float32), torch.randn(m, n, device="cuda")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", calls.full_configs())
def test_many_blocks_for_each_cta(problem, config, out_dtype):
    run, sums, noise = problem
    n = sums.shape[1]
    bias = torch.randn(n + 1, device="cuda").bfloat16()
    for shift in (0, 1):  # words of two numbers, and not
        added = sums + bias[shift : n + shift].float()
        got = run(bias=bias[shift : n + shift], out_dtype=out_dtype, config=config)
        assert torch.equal(got, added.to(out_dtype))
    for side in (torch.bfloat16, torch.float32):
        aux = torch.full_like(sums, math.nan, dtype=side)
        got = run(
            bias=bias[shift : n + shift], gelu="tanh", aux=aux, out_dtype=out_dtype, config=config
        )
        assert torch.equal(aux, added.to(side))
        want = bounds.gelu(added, "tanh")
        bounds.assert_close(got, want, 2e-6 * (1 + added.double().abs()))

        want = sums.double() * bounds.dgelu(noise.to(side), "tanh")
        slack = 2e-6 * sums.double().abs()
        sum_of_columns = torch.full((n,), math.nan, device="cuda")
        arguments = {"gelu": "tanh", "gelu_in": noise.to(side), "config": config}
        got = run(out_dtype=out_dtype, bias_grad=sum_of_columns, **arguments)
        bounds.assert_close(got, want, slack)
        stored = bounds.summed_as_stored(got, noise.to(side))
        bounds.assert_bias_gradient(sum_of_columns, got, want, slack, stored)

        old = torch.randn_like(sums).to(out_dtype)
        again = run(out=old.clone(), accumulate=True, **arguments)
        close = slack + 2.0**-22 * (want.abs() + old.double().abs())
        bounds.assert_close(again, want + old.double(), close)
