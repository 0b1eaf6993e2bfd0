#!/usr/bin/env python
"""A trainer and an engine that generates: do both give a token the same probability?

    python examples/rollout.py                                # a tiny Llama and a mixture, on a CPU
    python examples/rollout.py --device cuda --width 1024 --layers 8 --batches 1,7,32,128

Each way of multiplying (plain, MXFP8 "adaptive", MXFP8 "invariant") trains one step, sends the
weights to an engine (te_mx.rollout) and generates with a KV cache at several batch sizes. Then the
trainer computes the probabilities of the same tokens in one forward. Printed: the largest
difference of log-probabilities, KL, and how many tokens have the same bits. On a GPU models decode
in CUDA graphs, which the new weights do not have captured again; a plain mixture's splits are read
by the host, so it has none.
"""

import argparse
import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_mx
from te_mx.pytorch import DotProductAttention
from te_mx.recipe import MXFP8BlockScaling

WAYS = ("plain", "adaptive", "invariant")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def gated(h: Tensor) -> Tensor:
    """silu(gate) * up in fp32. torch's silu rounds fp32 in two ways on CPUs, its exp in one."""
    gate, up = h.float().chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(h.dtype)


class Experts(nn.Module):
    """Two of several experts for each token, added up in the order of their ranks."""

    def __init__(
        self, width: int, inner: int, experts: int, head: type[nn.Linear], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, dtype=dtype)
        self.router = head(width, experts, bias=False, dtype=dtype)
        made = {"bias": False, "params_dtype": dtype}
        self.gate_up = te_mx.GroupedLinear(experts, width, 2 * inner, **made)
        self.down = te_mx.GroupedLinear(experts, inner, width, **made)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x).flatten(0, 1)
        weights, ids = self.router(z).float().softmax(-1).topk(2)
        order = ids.flatten().argsort(stable=True)
        experts = torch.arange(self.router.out_features, device=ids.device)
        splits = (ids.flatten() == experts[:, None]).sum(1)  # no GPU waits for the host
        y = self.down(gated(self.gate_up(z[order // 2], splits)), splits)
        slots = torch.empty_like(y).index_copy(0, order, y).unflatten(0, (-1, 2))
        made = slots[:, 0] * weights[:, :1] + slots[:, 1] * weights[:, 1:]
        return made.to(x.dtype).view_as(x)


class Block(nn.Module):
    def __init__(
        self, width: int, heads: int, mixture: bool, invariant: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        made = {"bias": False, "params_dtype": dtype}
        self.heads = heads
        self.qkv = te_mx.LayerNormLinear(width, 3 * width, normalization="RMSNorm", **made)
        self.attention = DotProductAttention(
            heads, width // heads, qkv_format="bshd", attn_mask_type="arbitrary",
            invariant=invariant,
        )  # fmt: skip
        self.out = te_mx.Linear(width, width, **made)
        if mixture:
            head = te_mx.InvariantLinear if invariant else nn.Linear
            self.mlp: nn.Module = Experts(width, 2 * width, 4, head, dtype)
        else:
            self.mlp = te_mx.LayerNormMLP(
                width, 2 * width, normalization="RMSNorm", activation="swiglu", **made
            )

    def forward(self, x: Tensor, turn: Tensor, keys: Callable, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = (rotated(one, turn) for one in (q, k))
        k, v = keys(k, v)
        x = x + self.out(self.attention(q, k, v, hidden))
        return x + self.mlp(x)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    cos, sin = turn[0, :, None], turn[1, :, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, args: argparse.Namespace, mixture: bool, invariant: bool) -> None:
        super().__init__()
        dtype = DTYPES[args.dtype]
        self.embed = nn.Embedding(args.vocabulary, args.width, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(args.width, args.heads, mixture, invariant, dtype) for _ in range(args.layers)
        )
        self.norm = nn.RMSNorm(args.width, dtype=dtype)
        head = te_mx.InvariantLinear if invariant else nn.Linear
        self.head = head(args.width, args.vocabulary, bias=False, dtype=dtype)
        pairs = args.width // args.heads // 2
        # A table: functions of one place need not round as those of many do.
        turns = torch.outer(torch.arange(args.length), 1e4 ** (-torch.arange(pairs) / pairs))
        self.register_buffer("turns", torch.stack((turns.cos(), turns.sin())), persistent=False)

    def forward(self, tokens: Tensor, at: Tensor, caches: list | None = None) -> Tensor:
        """Log-probabilities [B, T, vocabulary] of tokens [B, T] at places [T]; the caches have the
        keys and values of the places before, and get those of these."""
        x, turn = self.embed(tokens), self.turns[:, at]
        places = at if caches is None else torch.arange(caches[0][0].shape[1], device=at.device)
        hidden = (places > at[:, None])[None, None]
        for i, block in enumerate(self.blocks):

            def keys(k: Tensor, v: Tensor, i: int = i) -> tuple[Tensor, Tensor]:
                if caches is None:
                    return k, v
                return tuple(
                    c.index_copy_(1, at, new) for c, new in zip(caches[i], (k, v), strict=True)
                )

            x = block(x, turn, keys, hidden)
        return self.head(self.norm(x)).float().log_softmax(-1)


class Engine:
    """A frozen model, its cache for one batch size, and on a GPU the graph of one token."""

    def __init__(self, model: Llama, args: argparse.Namespace, batch: int, graphs: bool) -> None:
        shape = batch, args.length, args.heads, args.width // args.heads
        room = [
            torch.zeros(shape, dtype=DTYPES[args.dtype], device=args.device)
            for _ in range(2 * args.layers)
        ]
        self.model, self.caches = model, list(zip(room[::2], room[1::2], strict=True))
        self.graph = None
        if graphs:
            self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=args.device)
            self.at = torch.zeros(1, dtype=torch.long, device=args.device)
            self.step(self.tokens, self.at)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.made = self.model(self.tokens, self.at, self.caches)

    def step(self, tokens: Tensor, at: Tensor) -> Tensor:
        if self.graph is None or tokens.shape[1] > 1:
            return self.model(tokens, at, self.caches)
        self.tokens.copy_(tokens)
        self.at.copy_(at)
        self.graph.replay()
        return self.made.clone()

    def generate(self, prompt: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, prompt + count], and the log-probabilities [B, count, vocabulary] that the
        generated ones were drawn from."""
        every, first = prompt, prompt.shape[1]
        said, new, at = [], prompt, torch.arange(first, device=prompt.device)
        for i in range(count):
            said.append(self.step(new, at)[:, -1])
            new = torch.multinomial(said[-1].exp(), 1)
            every, at = torch.cat([every, new], 1), torch.tensor([first + i], device=prompt.device)
        return every, torch.stack(said, 1)


def run(way: str, mixture: bool, args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    recipe = None if way == "plain" else MXFP8BlockScaling(precision=way)
    region = {"enabled": recipe is not None, "recipe": recipe}
    trainer = Llama(args, mixture, way == "invariant").to(args.device)
    frozen = copy.deepcopy(trainer)
    if recipe is not None:
        te_mx.freeze_weights(frozen, drop_master=True, recipe=recipe)
    graphs = args.device.startswith("cuda") and not (mixture and recipe is None)
    with torch.no_grad(), te_mx.autocast(**region):
        engines = {batch: Engine(frozen, args, batch, graphs) for batch in args.batches}

    text = torch.randint(args.vocabulary, (4, args.length + 1), device=args.device)
    places = torch.arange(args.length, device=args.device)
    with te_mx.autocast(**region):
        said = trainer(text[:, :-1], places)
    F.nll_loss(said.flatten(0, 1), text[:, 1:].flatten()).backward()
    torch.optim.SGD(trainer.parameters(), lr=0.3).step()

    if recipe is None:
        frozen.load_state_dict(trainer.state_dict())
        sent = float(DTYPES[args.dtype].itemsize)
    else:
        weights = te_mx.rollout.snapshot(trainer, recipe=recipe)
        te_mx.rollout.load_(frozen, weights)
        agree = te_mx.rollout.digest(frozen) == te_mx.rollout.digest(trainer, recipe=recipe)
        assert agree, "the engine has other weights than the trainer"
        whole = sum(one.numel() for one in trainer.parameters())
        sent = sum(one.nbytes for one in weights.values()) / whole
    for batch, engine in engines.items():
        prompt = torch.randint(args.vocabulary, (batch, args.prompt), device=args.device)
        with torch.no_grad(), te_mx.autocast(**region):
            every, theirs = engine.generate(prompt, args.tokens)
        with te_mx.autocast(**region):
            ours = trainer(every[:, :-1], places[:-1]).detach()[:, args.prompt - 1 :]
        new = every[:, args.prompt :, None]
        mine, its = ours.gather(2, new), theirs.gather(2, new)
        kl = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
        same, most = int((mine == its).sum()), (mine - its).abs().max().item()
        print(
            f"{'mixture' if mixture else 'dense':<8}{way:<10}{batch:>5}{most:>12.3g}{kl:>12.3g}"
            f"{f'{same} of {its.numel()}':>16}{sent:>19.2f}",
            flush=True,
        )


def sizes(given: str) -> list[int]:
    return [int(one) for one in given.split(",")]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cpu")
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--vocabulary", type=int, default=256)
    p.add_argument("--prompt", type=int, default=7, help="tokens before those generated")
    p.add_argument("--tokens", type=int, default=12, help="tokens to generate")
    p.add_argument("--batches", type=sizes, default=[1, 7, 32], metavar="N,..")
    p.add_argument("--ways", default=",".join(WAYS), help="some of them (default: all)")
    p.add_argument(
        "--dtype", choices=DTYPES, help="of parameters (default: float32, bfloat16 on a GPU)"
    )
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    args.length = args.prompt + args.tokens
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    if unknown := set(args.ways.split(",")) - set(WAYS):
        p.error(f"--ways: {', '.join(sorted(unknown))} is none of {', '.join(WAYS)}")
    if args.width % (2 * args.heads) or math.prod(args.batches) < 1:
        p.error("--width must be a multiple of twice --heads, and --batches positive")
    titles = f"{'model':<8}{'way':<10}{'batch':>5}{'largest':>12}{'KL':>12}{'same bits':>16}"
    print(titles + f"{'bytes a parameter':>19}", flush=True)
    for mixture in (False, True):
        for way in args.ways.split(","):
            run(way, mixture, args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
