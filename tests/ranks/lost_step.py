"""Cases in which ranks lose step, and one that finds them in step again."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def case_fails_on_one():
    assert dist.get_rank() == 0, "as rank 1 must"
    dist.all_reduce(torch.ones(1))


def case_one_waits():
    assert dist.get_rank() == 0, "as rank 1 must"
    time.sleep(1000)


def case_in_step():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
