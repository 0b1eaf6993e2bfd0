"""Whoever changes a frozen weight whose master was kept gets the changed weight, and a kept copy is
never served for another parameter.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import te_mx
from te_mx.weights import frozen


def frozen_layer() -> te_mx.Linear:
    layer = te_mx.Linear(40, 40)
    te_mx.freeze_weights(layer)
    return layer


def run(layer, x, grad=False):
    with torch.set_grad_enabled(grad), te_mx.autocast():
        return layer(x)


def expected(layer, x):
    """What a layer gives that cannot have kept anything."""
    other = te_mx.Linear(40, 40, dtype=layer.weight.dtype)
    with torch.no_grad():
        other.weight.copy_(layer.weight)
        other.bias.copy_(layer.bias)
    return run(other, x)


def merge_lora(layer):
    """As peft merges with safe_merge=True."""
    merged = layer.weight.data.clone()
    merged += torch.randn(40, 3) @ torch.randn(3, 40)
    layer.weight.data = merged


def merge_in_place(layer):
    with torch.no_grad():
        layer.weight.addmm_(torch.randn(40, 3), torch.randn(3, 40))


def through_a_view(layer):
    with torch.no_grad():
        layer.weight[7].detach().fill_(3.0)


def in_inference_mode(layer):
    with torch.inference_mode():
        layer.weight.add_(1)


def foreach(layer):
    with torch.no_grad():
        torch._foreach_mul_([layer.weight], 2)


def optimizer_step(layer):
    layer.weight.grad = torch.randn_like(layer.weight)
    torch.optim.AdamW([layer.weight], 0.1).step()


def swapped_twice(layer):
    """The second memory may lie where the first one was."""
    for _ in range(2):
        layer.weight.data = layer.weight.data + 1


def there_and_back(layer):
    layer.bfloat16().float()


def transposed_in_place(layer):
    layer.weight.data = layer.weight.data.t()


def other_rows_of_one_memory(layer):
    whole = torch.randn(80, 40)
    layer.weight.data = whole[:40]
    run(layer, torch.randn(5, 40))
    layer.weight.data = whole[40:]


def assigned(layer):
    layer.load_state_dict(te_mx.Linear(40, 40).state_dict(), assign=True)


def loaded_in_place(layer, folder):
    other = te_mx.Linear(40, 40)
    dcp.save(other.state_dict(), checkpoint_id=folder, no_dist=True)
    dcp.load(layer.state_dict(), checkpoint_id=folder, no_dist=True)
    assert torch.equal(layer.weight, other.weight)


def new_parameter(layer):
    layer.weight = nn.Parameter(torch.randn(40, 40), requires_grad=False)


def swap_tensors(layer):
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.randn(40, 40)))


CHANGES = [
    merge_lora, merge_in_place, through_a_view, in_inference_mode, foreach, optimizer_step,
    swapped_twice, there_and_back, transposed_in_place, other_rows_of_one_memory, assigned,
    loaded_in_place, new_parameter, swap_tensors,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.distributed is.*")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, grad, tmp_path):
    layer, x = frozen_layer(), torch.randn(5, 40, requires_grad=grad)
    before = run(layer, x, grad)
    change(*((layer, tmp_path) if change is loaded_in_place else (layer,)))
    for _ in range(2):  # made again, and kept again
        after = run(layer, x, grad)
        assert torch.equal(after, expected(layer, x)) and not torch.equal(after, before)
    layer = copy.deepcopy(layer)
    assert torch.equal(run(layer, x), after)
    merge_in_place(layer)
    assert torch.equal(run(layer, x), expected(layer, x))


def test_the_same_bytes_as_something_else():
    """A view of another shape or dtype under the same parameter."""
    x = torch.randn(5, 40)
    layer = te_mx.Linear(40, 40, bias=False)
    te_mx.freeze_weights(layer)
    layer.weight.data = layer.weight.data[:20]
    with pytest.raises(ValueError, match=r"weight must have shape \(40, 40\), got \(20, 40\)"):
        run(layer, x)
    half = te_mx.Linear(40, 40, bias=False, dtype=torch.float16)
    te_mx.freeze_weights(half)
    before = run(half, x)
    half.weight.data = half.weight.data.view(torch.bfloat16)
    after = run(half, x)
    te_mx.unfreeze_weights(half)
    assert torch.equal(after, run(half, x)) and not torch.equal(after, before)


def test_an_alias_counts_for_itself():
    """The version of one parameter says nothing of writes through another one."""
    layer, x = frozen_layer(), torch.randn(5, 40)
    run(layer, x)
    old, version = layer.weight, layer.weight._version
    layer.weight = nn.Parameter(old.data, requires_grad=False)
    with torch.no_grad():
        for _ in range(version):
            layer.weight.add_(0)
        old.add_(1)
    assert layer.weight._version == version and torch.equal(run(layer, x), expected(layer, x))


def test_an_address_that_returns_is_no_proof():
    """Memory that is freed and taken again has the old address, size and version."""
    layer, x, memory = frozen_layer(), torch.randn(5, 40), torch.randn(40, 40).numpy()
    layer.weight.data = torch.from_numpy(memory)
    run(layer, x)
    address, version = layer.weight.data_ptr(), layer.weight._version
    memory *= 2
    layer.weight.data = torch.from_numpy(memory)
    assert (layer.weight.data_ptr(), layer.weight._version) == (address, version)
    assert torch.equal(run(layer, x), expected(layer, x))


def test_training_on_is_seen_whatever_the_optimizer_counts():
    """torch counts no writes of fused optimizers."""
    layer, x = frozen_layer(), torch.randn(5, 40)
    layer.requires_grad_()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, fused=True)
    for _ in range(3):
        run(layer, x, grad=True).square().sum().backward()
        optimizer.step()
        assert torch.equal(run(layer, x), expected(layer, x))


def test_a_parameter_in_the_place_of_a_dead_one():
    layer, x = frozen_layer(), torch.randn(5, 40)
    run(layer, x)
    for _ in range(5):
        del layer.weight
        layer.weight = nn.Parameter(torch.randn(40, 40), requires_grad=False)
        assert torch.equal(run(layer, x), expected(layer, x))
    assert not layer._source.kept  # nothing is held for a parameter that is gone
    te_mx.freeze_weights(layer)
    kept = layer._source.kept["weight"]
    assert torch.equal(run(layer, x), expected(layer, x)) and layer._source.kept["weight"] is kept


def test_a_borrowed_weight_is_quantized_and_not_kept():
    """functional_call lends tensors for one forward, as FSDP does; the next ones may lie in the
    same memory with other values."""
    layer, x = frozen_layer(), torch.randn(5, 40)
    own, kept = run(layer, x), layer._source.kept["weight"]
    borrowed = {"weight": torch.randn(40, 40)}
    for _ in range(3):
        with torch.no_grad(), te_mx.autocast():
            got = torch.func.functional_call(layer, borrowed, (x,))
            other = te_mx.Linear(40, 40)
            other.weight.copy_(borrowed["weight"])
            other.bias.copy_(layer.bias)
            assert torch.equal(got, other(x))
        borrowed["weight"].data.mul_(-1)  # a write that torch does not count
    assert layer._source.kept["weight"] is kept and torch.equal(run(layer, x), own)


def test_parameters_of_inference_mode_are_quantized_every_time():
    """torch counts no writes to them."""
    with torch.inference_mode():
        layer, x = te_mx.Linear(40, 40), torch.randn(5, 40)
        te_mx.freeze_weights(layer)
        for _ in range(2):
            layer.weight.mul_(-2)
            assert torch.equal(run(layer, x), expected(layer, x))


@pytest.mark.parametrize("kind", ["parametrized", "hook", "split", "stacked"])
def test_a_change_of_what_a_weight_is_made_of(kind):
    if kind == "stacked":
        layer = te_mx.GroupedLinear(2, 40, 40, bias=False, single_grouped_weight=True)
    elif kind == "split":
        layer = te_mx.Linear(40, 40, bias=False, parameters_split={"q": 10, "kv": 30})
    elif kind == "hook":
        with pytest.warns(FutureWarning, match="weight_norm"):
            layer = nn.utils.weight_norm(te_mx.Linear(40, 40, bias=False))
    else:
        layer = nn.utils.parametrizations.weight_norm(te_mx.Linear(40, 40, bias=False))
    args = torch.randn(5, 40), *([[2, 3]] if kind == "stacked" else [])
    te_mx.freeze_weights(layer)
    with torch.no_grad(), te_mx.autocast():
        for parameter in layer.parameters():
            before = layer(*args)
            parameter.mul_(-2)
            after = layer(*args)
            assert not torch.equal(after, before)
            te_mx.unfreeze_weights(layer)
            assert torch.equal(layer(*args), after)
            te_mx.freeze_weights(layer)


def test_a_weight_that_is_parametrized_after_it_was_frozen():
    layer, x = frozen_layer(), torch.randn(5, 40)
    before = run(layer, x)
    nn.utils.parametrizations.weight_norm(layer)
    layer.parametrizations.weight.original0.data.mul_(2)
    assert not torch.equal(run(layer, x), before)


def test_copies_follow_their_own_parameters():
    layer, x = frozen_layer(), torch.randn(5, 40)
    before = run(layer, x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(run(other, x), before)
        assert other._source.kept
        merge_in_place(other)
        assert torch.equal(run(other, x), expected(other, x))
    assert torch.equal(run(layer, x), before)


def test_what_a_graph_reads_outlives_a_change(monkeypatch):
    """A captured graph holds addresses, not tensors."""
    layer, x = frozen_layer(), torch.randn(5, 40)
    kept = layer._source.kept["weight"]
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "capturing", lambda device: True)
        run(layer, x)
        run(layer, x)
    merge_in_place(layer)
    run(layer, x)
    assert layer._source.kept["weight"] is not kept
    assert len(layer._source.in_graphs) == 1 and layer._source.in_graphs[0] is kept


def test_a_change_while_capturing_is_seen(monkeypatch):
    layer, x = frozen_layer(), torch.randn(5, 40)
    merge_in_place(layer)
    monkeypatch.setattr(frozen, "capturing", lambda device: True)
    assert torch.equal(run(layer, x), expected(layer, x))
    assert not layer._source.kept  # what is made in a capture has no values yet
