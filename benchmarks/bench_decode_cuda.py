"""Few tokens on a Hopper GPU: frozen te_mx.Linear, inputs quantized in the call, or as they are
times NVFP4, against cuBLAS in bf16; in CUDA graphs, weights from HBM. And the ways in which the
decode kernel may cut them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import te_mx
from benchmarks import peers_cuda
from benchmarks.bench_moe import MUST, ROUTINGS, routings_of
from benchmarks.gpu import GpuContext, captured
from benchmarks.row import Row, Target
from benchmarks.timing import Call, Effort, interleaved
from te_mx import formats
from te_mx.backends.base import FLOAT_DTYPES
from te_mx.backends.base import FORMATS as ELEMENTS
from te_mx.backends.sm90 import binding
from te_mx.recipe import BlockScaling, Float8BlockScaling
from te_mx.runtime.kernel_log import LAST_RUN

SHAPES = [  # K, N
    (6144, 2304),
    (2048, 6144),
    (6144, 1536),
    (1536, 6144),
    (4096, 14336),
    (14336, 4096),
    (7168, 4096),
]
TOKENS = (1, 2, 4, 8, 16, 32, 64)
FEW, MORE = Target(1.4, 2.0), Target(1.2, 1.6)
FORMATS = {  # weights: what up to 16 rows must reach, and more
    "mxfp8": (FEW, MORE),
    "mxfp4": (Target(1.8, 3.0), MORE),
    "fp8_block": (FEW, MORE),
    "nvfp4": (Target(1.8, 2.8), Target(1.4, 1.8)),
}
NAMES = {"mxfp8": "mxfp8_e4m3"}  # of formats; else the same
BITS = {"mxfp4": 4.25, "nvfp4": 4.5}  # of a weight; else 8.25
RECIPES = {
    "mxfp8": BlockScaling(x="mxfp8_e4m3", w="mxfp8_e4m3", g="mxfp8_e5m2"),
    "mxfp4": BlockScaling(x="mxfp8_e4m3", w="mxfp4", g="mxfp8_e5m2"),
    "fp8_block": Float8BlockScaling(),
}
# Of a mixture: two products of an expert, tokens that are sent to TOP_K of them.
EXPERTS, TOP_K, EXPERT_TOKENS = 128, 4, (1, 4, 16, 64)
EXPERT_SHAPES = [(6144, 1536), (768, 6144)]  # K, N
EXPERT_TARGETS = {"mxfp8": MUST["mxfp8_e4m3"], "mxfp4": MUST["mxfp4"], "fp8_block": None}
# Against Triton's dot_scaled, whose inputs are quantized before, and humming-kernels, which take
# them as they are.
PEERS = {
    "dot_scaled": ("Triton dot_scaled graph", Target(3.0, 6.0)),
    "humming": ("humming-kernels graph", Target(1.1, 1.3)),
}
SCALED_TOKENS = 1, 4, 16, 64
FAR = 0.01  # of the norm of a product: far above what both round and cut off
# Ways to cut, of csrc/include/te_mx/sm90_decode.h: CTAs of a cluster x tiles of 64 rows, by two
# warpgroups a CTA and by four.
SPLITS = {
    **{2 * c + t: f"{c + 1} x {t + 1}" for c in range(8) for t in range(2)},
    **{
        16 + 3 * c + t: f"{c + 1} x {1 << t} of four"
        for c in range(8)
        for t in range(3)
        if t > 0 or c < 4
    },
}
CALLS = 24  # of a graph, one after the other, as those of a model stand behind each other in one
COLD = 512 << 20  # weights, so that no cache holds those of 4 bits


def _short(context: GpuContext, most: int = 15) -> Effort:
    """Batches of a few graphs: there are many rows."""
    effort = context.effort
    return effort if context.quick else Effort(effort.seconds, effort.min_rounds, most, 2.0)


def dot_scaled(
    context: GpuContext, layers: list[te_mx.Linear], x: Tensor, expected: Tensor
) -> Call | None:
    """The fastest configuration of a Triton kernel around tl.dot_scaled on the very codes of frozen
    layers and those of x, captured like the others. None where there is no Triton; a configuration
    whose product is not the expected one is left out."""
    if context.device.type != "cuda":
        return None
    try:
        from benchmarks import triton_few_rows
    except ImportError as error:
        print(f"not run: Triton dot_scaled ({error})")
        return None
    given = te_mx.quantize(x).operand("rowwise")
    assert given is not None
    sides = [
        tuple(state[name].view(torch.uint8) for name in ("weight", "weight_scale"))
        for state in (layer.state_dict() for layer in layers)
    ]
    best, least = None, float("inf")
    for config in triton_few_rows.CONFIGS:
        if not triton_few_rows.takes(len(expected[0]), x.shape[1], config):
            continue

        def call(i: int, config: triton_few_rows.Config = config) -> Tensor:
            w, scale = sides[i % len(sides)]
            return triton_few_rows.gemm(given.codes, given.scales, w, scale, config)

        try:
            error = float((call(0).float() - expected.float()).norm() / expected.float().norm())
        except triton_few_rows.DOES_NOT_FIT:
            continue
        if not error < FAR:
            print(f"not run: {config} of Triton dot_scaled (its result is off by {error:.3g})")
            continue
        graphs = captured(call, len(sides), context.device, CALLS)
        seconds = interleaved({"": graphs}, Effort(0.0, 3, 3, 1.0), 1, context.clock).seconds("")
        if seconds < least:
            best, least = graphs, seconds
    return best


def call_of(layers: list[nn.Module], name: str, x: Tensor) -> Call:
    """Call i is that of layer i, in turn, under the recipe of this name, or in bf16."""
    recipe = RECIPES.get(name)

    def call(i: int) -> Tensor:
        with torch.no_grad(), te_mx.autocast(enabled=recipe is not None, recipe=recipe):
            return layers[i % len(layers)](x)

    return call


def decode(context: GpuContext) -> Iterator[Row]:
    """y = x @ w^T of bf16 x, without a bias. Where humming-kernels are installed, they compile all
    that they run of a shape before."""
    for k, n in context.pick(SHAPES, [(96, 64)]):
        sets = 2 if context.quick else -(-COLD // (n * k) // CALLS) * CALLS + CALLS
        layers = {}
        for name in ("bf16", *FORMATS):
            kind = nn.Linear if name == "bf16" else te_mx.Linear
            layers[name] = [
                kind(k, n, bias=False, dtype=torch.bfloat16, device=context.device)
                for _ in range(sets)
            ]
        for w, recipe in RECIPES.items():
            for layer in layers[w]:
                te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
        for layer in layers["nvfp4"]:
            te_mx.freeze_weights(layer, fmt="nvfp4", activations="bf16", drop_master=True)
        weight = context.randn(n, k, seed=0)
        peers = {
            w: peers_cuda.humming(w, te_mx.quantize(weight, fmt=NAMES.get(w, w)), TOKENS, sets)
            for w in peers_cuda.HUMMING
        }
        for m in context.pick(TOKENS, (2,)):
            x = context.randn(m, k, seed=m)
            calls: dict[str, Call] = {}
            for name, given in layers.items():
                call = call_of(given, name, x)
                calls[name] = captured(call, sets, context.device, CALLS)
                if name in ("mxfp8", "mxfp4") and m in SCALED_TOKENS:
                    peer = dot_scaled(context, given, x, call(0))
                    calls |= {} if peer is None else {f"dot_scaled {name}": peer}
                if (theirs := peers.get(name)) is not None:
                    calls[f"humming {name}"] = captured(
                        lambda i, theirs=theirs, x=x: theirs(i, x), sets, context.device, CALLS
                    )
            times = interleaved(calls, _short(context), warm_up=3, clock=context.clock)
            each = CALLS if context.device.type == "cuda" else 1
            for w, targets in FORMATS.items():
                seconds = times.seconds(w) / each
                nbytes = n * k * BITS.get(w, 8.25) / 8
                kernel = LAST_RUN.get(layers[w][0]._tag, "")
                yield Row(
                    f"decode {w}", f"M{m} {n} {k}", kernel, seconds * 1e6,
                    *context.bandwidth(nbytes, seconds), "cuBLAS bf16 graph",
                    times.ratio("bf16", w), targets[m > 16],
                )  # fmt: skip
                for name, (peer, must) in PEERS.items():
                    if f"{name} {w}" not in calls:
                        continue
                    us = times.seconds(f"{name} {w}") / each * 1e6
                    yield Row(
                        f"decode {w}", f"M{m} {n} {k}", kernel, seconds * 1e6,
                        *context.bandwidth(nbytes, seconds), peer,
                        times.ratio(f"{name} {w}", w), must, f"{us:.1f} us",
                    )  # fmt: skip


def groups(context: GpuContext) -> Iterator[Row]:
    """Few tokens of a mixture: a frozen te_mx.GroupedLinear, splits on the device, against torch's
    grouped_mm in bf16 on the same rows."""
    experts = context.pick([EXPERTS], [4])[0]
    for k, n in context.pick(EXPERT_SHAPES, [(96, 64)]):
        plain = context.randn(experts, n, k, seed=0)
        layers = {}
        for w, recipe in RECIPES.items():
            layers[w] = te_mx.GroupedLinear(
                experts, k, n, bias=False, dtype=torch.bfloat16, device=context.device,
                single_grouped_weight=True,
            )  # fmt: skip
            with torch.no_grad():
                layers[w].weight.copy_(plain)
            te_mx.freeze_weights(layers[w], drop_master=True, recipe=recipe)
        for tokens in context.pick(EXPERT_TOKENS, [2]):
            routings = routings_of(experts, tokens, TOP_K, str(context.device))
            splits = [ids.flatten().bincount(minlength=experts) for ids in routings]
            ends = [one.cumsum(0).to(torch.int32) for one in splits]
            x = context.randn(tokens * TOP_K, k, seed=tokens)

            def bf16(i: int, x=x, ends=ends, plain=plain) -> torch.Tensor:
                if context.device.type != "cuda":
                    return x @ plain[0].t()
                return torch._grouped_mm(x, plain.transpose(1, 2), ends[i % ROUTINGS])

            calls = {"bf16": captured(bf16, ROUTINGS, context.device, CALLS)}
            for w, recipe in RECIPES.items():

                def call(
                    i: int, layer=layers[w], recipe=recipe, x=x, splits=splits
                ) -> torch.Tensor:
                    with torch.no_grad(), te_mx.autocast(recipe=recipe):
                        return layer(x, splits[i % ROUTINGS])

                calls[w] = captured(call, ROUTINGS, context.device, CALLS)
            times = interleaved(calls, _short(context), warm_up=3, clock=context.clock)
            each = CALLS if context.device.type == "cuda" else 1
            hit = sum(len(ids.unique()) for ids in routings) / ROUTINGS
            for w, target in EXPERT_TARGETS.items():
                seconds = times.seconds(w) / each
                nbytes = hit * n * k * ((1 / 2 if w == "mxfp4" else 1) + 1 / 32)
                yield Row(
                    f"groups {w}", f"{tokens}x{TOP_K} {n} {k}", LAST_RUN.get(layers[w]._tag, ""),
                    seconds * 1e6, *context.bandwidth(nbytes, seconds), "grouped_mm bf16 graph",
                    times.ratio("bf16", w), target,
                )  # fmt: skip


def splits(context: GpuContext) -> Iterator[Row]:
    """The decode kernel alone, in every way to cut a product: the best one, beside its own choice.
    The column "kernel" has the best: CTAs of a cluster x tiles of 64 rows."""
    native = binding.native()
    assert native is not None
    w = "mxfp8_e4m3"
    for k, n in SHAPES:
        fmt = formats.get(w)
        codes, scales = fmt.quantize(context.randn(n, k, seed=1), "rceil")
        nbytes_w = codes.numel() + scales.numel()
        sets = -(-COLD // nbytes_w // CALLS) * CALLS + CALLS
        forms = [(codes.clone(), scales.clone()) for _ in range(sets)]
        for m in (1, 8, 16, 64):
            x, y = context.randn(m, k, seed=m), context.randn(m, n, seed=0)
            nbytes = native.decode_workspace(m, k, 0)
            room = torch.empty(nbytes, dtype=torch.uint8, device=context.device)
            calls: dict[str, Call] = {}
            for split, name in {-1: "own", **SPLITS}.items():
                args = native.DecodeArgs(
                    m=m, n=n, k=k, ldw=codes.stride(0),
                    w_element=ELEMENTS["e4m3"],
                    x=x.data_ptr(), ldx=k, x_dtype=FLOAT_DTYPES[x.dtype], out=y.data_ptr(), ldo=n,
                    out_dtype=FLOAT_DTYPES[y.dtype], device=0, kernel=split,
                    workspace=room.data_ptr(), workspace_bytes=nbytes,
                )  # fmt: skip

                def call(i: int, args=args, forms=forms) -> None:
                    args.w, args.w_scales = (one.data_ptr() for one in forms[i % len(forms)])
                    binding.set_execution(args, 0)
                    assert binding.supported(native.decode(args))

                calls[name] = captured(call, sets, context.device, CALLS)
            times = interleaved(calls, _short(context, 9), warm_up=1, clock=context.clock)
            order = sorted((name for name in calls if name != "own"), key=times.seconds)
            us = {name: times.seconds(name) / CALLS * 1e6 for name in calls}
            yield Row(
                f"split {w[:5]}", f"M{m} {n} {k}", order[0], us[order[0]],
                *context.bandwidth(nbytes_w, us[order[0]] / 1e6), "own",
                times.ratio("own", order[0]),
                peer_rate=", ".join(f"{name} {us[name]:.1f}" for name in ("own", *order[1:3])),
            )  # fmt: skip
