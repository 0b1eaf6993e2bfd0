"""fully_shard on top of ModuleParallel, on a mesh of 2 x 2: four ranks, of which one runs and the
others are torch's fake ones."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
import warnings
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
import te_mx
from te_mx.distributed import ModuleParallel

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
UNKNOWN = torch.__version__ < "2.12"  # DTensor puts no strided shards together
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

def said(activation, **how):
    # what a forward warns of, saving and loading
    model = torch.nn.Sequential(te_mx.LayerNormMLP(64, 64, bias=False, activation=activation))
    parallelize_module(model, mesh["tp"], {"0": ModuleParallel()})
    state = {} if UNKNOWN and activation == "swiglu" else model.state_dict()
    fully_shard(model, mesh=mesh["dp"], **how)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(torch.zeros(4, 64))
    told = [str(w.message) for w in found if "strided" in str(w.message)]
    for call in (model.state_dict, lambda: model.load_state_dict(state, strict=False)):
        try:
            call()
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    return told

by_columns = {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}
saved = {"gelu": said("gelu")}
refused = [said("swiglu")]
if UNKNOWN:
    refused.append(said("swiglu", **by_columns))
else:
    saved["columns"] = said("swiglu", **by_columns)
why = "need 2.12 or newer" if UNKNOWN else "shards of fc1_weight by rows"
for texts in refused:
    assert len(texts) == 3, texts
    for text in texts:
        assert why in text and "te_mx.LayerNormMLP" in text, text
assert all("strided" not in text for texts in saved.values() for text in texts), saved
assert all(len(texts) == 2 and not texts[0] for texts in saved.values()), saved
dist.destroy_process_group()
"""


def test_rows_that_no_placement_says():
    """A gated fc1 is refused where its rows would be saved in another order, and told of before."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
