"""The conformance set and its command, and what it says of other libraries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from te_mx.commands.main import main
from te_mx.conformance import cases, peers

CPU = torch.device("cpu")


def word(seed, i):
    """32 random bits, as docs/conformance.md has them."""
    h = (seed * 0x9E3779B9 + i) % 2**32
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def exponents(r, c, step):
    w = word(1, r * 160 + c)
    exponent = max(r - (0 if c % 32 == 0 else (w >> 24) % 16), 0)
    return exponent << 23 | w % 2**23 | (w >> 23 & 1) << 31


def ties(r, c, step):
    top = 0x3F800000 + (r // 3 << 18) + (r % 3 - 1) * step
    j = c // 32 * 31 + c % 32 - 1
    number = 0x3F800000 - (j // 96 << 23) + (j % 32 << 18) + (j // 32 % 3 - 1) * step
    number -= 2**23 if number > top else 0
    number = top if c % 32 == 0 else number if j < 2016 else 0
    return number | (word(2, r * 2112 + c) >> 23 & 1) << 31


def spread(r, c, step):
    total = sum(word(3, r * 300 + c).to_bytes(4, "little")) - 510
    power = word(4, r) % 33 - 24 + (10 if word(5, r * 300 + c) % 61 == 0 else 0)
    return int(np.float32(total * 2.0**power).view(np.uint32))


def special(r, c, step):
    w = word(6, r * 160 + c)
    sign, low = (w >> 23 & 1) << 31, w % 2**23
    kind = (r * 5 + c // 32) % 8
    if kind < 4:
        return (0, 1 << 31, low | sign, step | sign)[kind]
    if c % 32 == 7:
        return (0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800000 - step)[kind - 4]
    return 120 + (w >> 28) % 8 << 23 | low | sign


@pytest.mark.parametrize("rule", [exponents, ties, spread, special], ids=lambda f: f.__name__)
def test_inputs_are_what_the_page_says(rule):
    wide, narrow = (cases.make(rule.__name__, dtype) for dtype in ("fp32", "bf16"))
    rng = np.random.default_rng(0)
    for r, c in rng.integers(0, wide.shape, (999, 2)).tolist():
        assert wide.view(torch.int32)[r, c].item() % 2**32 == rule(r, c, 1)
        assert narrow.view(torch.int16)[r, c].item() % 2**16 == rule(r, c, 1 << 16) >> 16


def test_the_command_finds_that_all_agree(capsys):
    assert main(["conformance"]) == 0
    out = capsys.readouterr().out
    assert "all agree" in out and "WRONG" not in out
    assert "mxfp8_e4m3              16 of 16" in out


def test_a_wrong_byte_is_found_and_shown(monkeypatch, capsys):
    case = next(one for one in cases.cases() if one.fmt == "mxfp4")
    true = cases.made

    def off(case, name, device):
        codes, *rest = true(case, name, device)
        codes[3, 5] += name == "ties"
        return codes, *rest

    monkeypatch.setattr(cases, "made", off)
    monkeypatch.setattr(cases, "cases", lambda: (case,))
    monkeypatch.setattr(cases, "products", lambda device: iter(()))
    assert main(["conformance"]) == 1
    out = capsys.readouterr().out
    assert f"WRONG: {case}, ties" in out and "code[3, 10] is" in out and "1 cases are WRONG" in out


def test_a_product_outside_of_its_bound_is_wrong(monkeypatch):
    monkeypatch.setattr(cases, "_PAIRS", (("mxfp4", "mxfp4"),))
    exact = cases.gemm
    assert all(one.right for one in cases.products(CPU))

    def off(**given):
        made = exact(**given)
        made.out[0] += made.out.abs().max() / 16
        return made

    monkeypatch.setattr(cases, "gemm", off)
    assert not any(one.right for one in cases.products(CPU))


def test_what_torchao_differs_in(monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(cases, "INPUTS", ("ties", "spread"))
    monkeypatch.setattr(cases, "DTYPES", {"fp32": torch.float32})
    monkeypatch.setattr(peers, "_LIBRARIES", {"torchao": peers._LIBRARIES["torchao"]})
    found = {(one.fmt, one.rule, one.given): one.why for one in peers.compare(CPU)}
    assert found["mxfp8_e4m3", "floor", "ties"] is None
    assert found["nvfp4", "torchao", "spread"] is None
    # Its rceil multiplies by 1 / 448: one number above 448 rounds down.
    assert found["mxfp8_e4m3", "rceil", "ties"].scales == pytest.approx(1.04, abs=0.1)
    for rule in ("te", "modelopt", "compressed_tensors"):
        assert found["nvfp4", rule, "spread"].scales > 70
