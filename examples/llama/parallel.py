"""train_llama.py in several processes, started by torchrun: weights sharded by fully_shard (FSDP2),
or layers split between the ranks (tensor parallelism).

Under FSDP2 every rank has its rows of each batch, and in MXFP8 the ranks gather weights as codes.
Under tensor parallelism all have the same rows. A checkpoint is one file with whole tensors.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpt.train import MAX_NORM
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import te_mx
from llama import train

KINDS = ("fsdp", "tp")
# Of each decoder layer; whoever reads a split result sums, so two modules make a pair.
PLAN = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel),
    "self_attn.o_proj": RowwiseParallel,
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
    "mlp.down_proj": RowwiseParallel,
}


def launched() -> bool:
    """Whether torchrun, or a launcher like it, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def start(device: str) -> str:
    """Join the other processes, unless that is done; the device of this one."""
    if device.startswith("cuda"):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device


def why_not(settings: train.LlamaSettings, ranks: int) -> str | None:
    """Why so many ranks cannot train this model together."""
    config = settings.config()
    if settings.parallel == "fsdp" and settings.batch % ranks:
        return f"--batch {settings.batch} does not divide by {ranks} ranks"
    if settings.parallel == "tp":
        if config.model_type != "llama":
            return f"--parallel tp knows the layers of llama, not of {config.model_type}"
        for name in ("num_attention_heads", "num_key_value_heads"):
            if getattr(config, name) % ranks:
                return f"{name} {getattr(config, name)} does not divide by {ranks} ranks"
    return None


def any_of(stop: bool) -> bool:
    """Whether any rank says so."""
    flag = torch.tensor(float(stop), device=_device())
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


class ParallelTrainer(train.LlamaTrainer):
    """All ranks make the same model from the seed, and keep their parts of it."""

    def make_model(self) -> nn.Module:
        s = self.settings
        if s.device.startswith("cuda"):  # an earlier run of this process is over
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model = super().make_model()
        mesh = init_device_mesh(_device(), (dist.get_world_size(),))
        layers = model.model.layers
        if s.parallel == "tp":
            for layer in layers:
                plan = {name: style() for name, style in PLAN.items()}
                parallelize_module(layer, mesh, plan)
            return model
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if s.mode == "mxfp8" and s.gather_codes:
            te_mx.distributed.quantized_all_gather(model)
        return model

    def make_optimizer(self, **how: bool) -> torch.optim.Optimizer:
        # Sharded and plain parameters do not go through one fused call.
        return super().make_optimizer(foreach=False, fused=False)

    def batch(self) -> tuple[Tensor, Tensor]:
        tokens, targets = super().batch()
        if self.settings.parallel == "tp":
            return tokens, targets
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return tokens[rank::ranks], targets[rank::ranks]

    def clip_gradients(self) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        squares = [g.float().square().sum() for g in grads]
        squares = [t.full_tensor() if isinstance(t, DTensor) else t for t in squares]
        norm = torch.stack(squares).sum().sqrt()
        scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0).item()
        for grad in grads:
            grad.mul_(scale)

    def value_of(self, loss: Tensor) -> float:
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()

    def kernels(self) -> dict[str, int]:
        return {}  # those of parts of layers

    # --------------------------------------------------------------------------- one whole file
    def model_state(self) -> dict:
        return whole.get_model_state_dict(self.model, options=_WHOLE)

    def load_model_state(self, state: dict) -> None:
        whole.set_model_state_dict(self.model, state, options=_WHOLE)

    def optimizer_state(self) -> dict:
        return whole.get_optimizer_state_dict(self.model, self.optimizer, options=_WHOLE)

    def load_optimizer_state(self, state: dict) -> None:
        whole.set_optimizer_state_dict(self.model, self.optimizer, state, options=_WHOLE)

    def write(self, state: dict, path: Path) -> None:
        if dist.get_rank() == 0:
            super().write(state, path)
        dist.barrier()

    @property
    def title(self) -> str:
        return f"{super().title}, {self.settings.parallel} on {dist.get_world_size()} ranks"


_WHOLE = whole.StateDictOptions(full_state_dict=True, cpu_offload=True)
