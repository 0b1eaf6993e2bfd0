"""The benchmark runner on tiny sizes: every benchmark gives rows."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import fresh
import pytest
import torch

import te_mx
from benchmarks import __main__ as runner
from benchmarks import (
    bench_gemm_cuda,
    bench_host_cuda,
    bench_linear_cuda,
    bench_triton_cuda,
    gpu,
    kernel_times,
    peers_cuda,
)
from benchmarks.gpu import Gpu, GpuContext
from benchmarks.models import CAUSAL, Workload, tokens_of
from benchmarks.row import line

ROOT = Path(__file__).parents[2]
PEERS = {
    "gemm": {"F.linear bf16", "dequantize + bf16"},
    "backward_gemm": {"torch.mm bf16", "dequantize + bf16"},
    "linear": {"nn.Linear bf16"},
    "thin": {"nn.Linear bf16"},
    "gemm_blockwise": {"F.linear bf16", "torch.mm bf16"},
    "linear_blockwise": {"nn.Linear bf16"},
    "gemm_mxfp4": {"F.linear bf16"},
    "linear_mxfp4": {"nn.Linear bf16"},
    "layernorm_mlp": {"LayerNorm + nn.Linear bf16", "LayerNorm + te_mx.Linear"},
    "fused_steps": {"one after the other"},
    "decode": {"nn.Linear bf16", "dequantize + F.linear"},
    "weights_only": {"nn.Linear bf16", "dequantize + F.linear"},
    "quantize": {"memcpy of as many bytes", "torchao eager to_mx"},
    "overhead": {"added to nn.Linear bf16"},
    "import": {"after import torch"},
    "workspace": {"allocation per call"},
    "grouped": {"loop of nn.Linear bf16", "loop of te_mx.Linear"},
    "moe_decode": {"loop of F.linear bf16"},
}


@pytest.mark.parametrize("name", runner.BENCHMARKS)
def test_benchmark_runs_and_names_its_peer(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "rows.json"
    assert runner.main([name, "--quick", "--threads", "1", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    there = {peer for peer in PEERS[name] if "torchao" not in peer or find_spec("torchao")}
    assert {row["peer"] for row in record["rows"]} == there
    for row in record["rows"]:
        assert row["us"] > 0
        # A difference or a ratio of tiny calls is noise; it only has to be a number.
        assert isinstance(row["value"], float)
    printed = capsys.readouterr().out
    assert record["machine"]["cpu"] in printed and "measured limits" in printed
    assert printed.count("\n") >= 4 + len(record["rows"])


# What must be reached and what is aimed at, row by row, as the project asks for them.
CUDA_ROWS = {
    "gemm_cuda": {"gemm": (1.4, 1.7)},
    "blockwise_cuda": {
        "fprop fp32": (1.5, 1.75),
        **dict.fromkeys(
            (f"wgrad {rule}{add}" for rule in ("pow2", "fp32") for add in ("", " +=")), (1.2, 1.45)
        ),
        **dict.fromkeys(
            (f"quantize {blocks}" for blocks in ("1x128", "128x128", "1x128 aligned")), (0.85, 0.93)
        ),
        **dict.fromkeys((f"linear f+b {of}" for of in ("pow2", "fp32", "pow2 kept")), (1.35, 1.5)),
        **dict.fromkeys(
            (
                f"grouped {kind} f+b {rule}"
                for kind in ("even", "zipf")
                for rule in ("pow2", "fp32")
            ),
            (1.3, 1.55),
        ),
    },
    "mxfp4_cuda": {
        **dict.fromkeys(
            (
                f"{x} x mxfp4{how}"
                for x in ("mxfp4", "mxfp8")
                for how in ("", " unpacked before", " prepacked")
            ),
            (1.1, 1.5),
        ),
        **{
            f"{kind} {fmt}": (1.4, 1.7)
            for kind in ("contiguous", "masked")
            for fmt in ("mxfp4", "mxfp8")
        },
        "linear fwd+bwd fp4": (1.4, 1.7),
    },
    "quantize_mxfp4_cuda": {
        "quantize both": (0.8, 0.9),
        **dict.fromkeys(("transformed", "random"), (0.7, None)),
        **dict.fromkeys(("quantize 4 bits", "unpack")),
    },
    "decode_cuda": {
        "decode mxfp8": (1.4, 2.0),
        "decode mxfp4": (1.8, 3.0),
        "decode fp8_block": (1.4, 2.0),
        "decode nvfp4": (1.8, 2.8),
    },
    "frozen_cuda": {"frozen mxfp8": (1.2, 1.8), "frozen mxfp4": (1.0, 1.6)},
    "triton_cuda": {
        **{f"Triton {fmt} both": (0.7, None) for fmt in bench_triton_cuda.BOTH},
        "Triton mxfp8_e4m3 x mxfp8_e4m3": None,  # beside dot_scaled, of which a CPU has none
        "Triton fp8_e4m3_1x128 x fp8_e4m3_128x128": (1.2, None),
    },
    "decode_groups_cuda": {
        "groups mxfp8": (1.5, 2.0),
        "groups mxfp4": (2.0, 3.0),
        "groups fp8_block": None,
    },
    "invariant_cuda": {
        f"invariant {what} {fmt}": marks
        for fmt in ("mxfp8", "fp8_block")
        for what, marks in (("fwd", (0.88, 0.95)), ("decode", (0.93, 1.0)))
    },
    "scales_cuda": {
        "gemm row scales": (1.2, 1.4),
        "gemm outliers": (1.4, 1.7),
        "gemm spread": (0.45, 0.6),
        "gemm exact": (0.85, 0.95),
    },
    "epilogue_cuda": dict.fromkeys(("gemm + bias", "gemm + GELU-aux", "gemm + dGELU"), (8, 4)),
    "split_cuda": {"gemm few tiles": None},
    "quantize_cuda": {"quantize both": (0.8, 0.92), "quantize + sums": None},
    "fused_cuda": dict.fromkeys(
        (
            "layernorm+quant",
            "rmsnorm+quant",
            "silu+quant",
            "swiglu+quant",
            "dswiglu+db+quant",
            "layernorm bwd",
            *(
                f"{step}+quant {recipe}"
                for step in ("layernorm", "rmsnorm", "silu", "swiglu", "dswiglu+db")
                for recipe in ("Float8Block", "DeepSeekV3")
            ),
        ),
        (1.0, None),
    ),
    "layernorm_mlp_cuda": dict.fromkeys(("mlp gelu f+b", "mlp swiglu f+b")),
    "linear_cuda": {"linear fwd+bwd": (1.35, 1.6)},
    "linear_kept_cuda": {"linear made again": None},
    "grouped_cuda": {
        "grouped fprop": (1.4, 1.8),
        "grouped dgrad": (1.4, 1.8),
        "grouped wgrad": (1.2, 1.6),
        "grouped even fwd+bwd": (1.2, 1.5),
        "grouped zipf fwd+bwd": (1.2, 1.5),
        "grouped half fwd+bwd": (1.2, 1.5),
        "grouped apart fwd+bwd": None,
    },
    "moe_decode_cuda": {
        f"{product} {fmt}": marks
        for product in ("gemm1", "gemm2")
        for fmt, marks in (("mxfp8", (1.5, 2.0)), ("mxfp4", (2.0, 3.0)))
    },
    "mixtures_cuda": {
        "mixture mxfp8": (2.5, 2.8),
        "mixture mxfp4": (3.0, 3.3),
        "mixture nvfp4": (2.0, 2.5),
    },
    "grouped_plain_cuda": dict.fromkeys(
        ("grouped one copy fwd+bwd", "grouped dropped fwd", "grouped main_grads f+b")
    ),
    "overhead_cuda": {"host fwd+bwd": (0.4, 0.25)},
    "overhead_gemm_cuda": {"host gemm": (0.015, 0.012)},
    "overhead_modes_cuda": {
        **dict.fromkeys((f"host {name}" for name in bench_host_cuda.MODES), (2.0, 1.9)),
        "host LayerNormLinear, main_grad": (2.0, 1.9),
        **dict.fromkeys(("host autocast()", "host recipe given"), (1.7, 1.6)),
        **dict.fromkeys(("host main_grad", "host delayed"), (1.8, 1.7)),
        "host micro-batch": (1.5, 1.4),
        **dict.fromkeys(("host LayerNormLinear", "host LayerNormMLP"), (1.2, 1.1)),
    },
    "workspace_cuda": {"workspace": None},
}


@pytest.fixture
def on_cpu() -> GpuContext:
    """The context of the CUDA benchmarks with the CPU in place of the GPU, tiny sizes."""
    made = Gpu("none", torch.__version__, "", te_mx.__version__, "", copy_gbs=10.0)
    return GpuContext(gpu.effort(None, quick=True), True, made, torch.device("cpu"))


# Operands packed for Hopper, which no CPU kernel takes.
@pytest.mark.filterwarnings("ignore:te_mx runs .* not sm90:te_mx.FallbackWarning")
@pytest.mark.parametrize(
    "name", sorted({*runner.CUDA_BENCHMARKS, "decode_groups_cuda", "triton_cuda"} - {"graph_cuda"})
)
def test_cuda_benchmark_runs_in_place_of_a_gpu(name: str, on_cpu: GpuContext) -> None:
    rows = list((runner.CUDA_BENCHMARKS | runner.MODEL_BENCHMARKS)[name](on_cpu))
    targets = {row.benchmark: row.target for row in reversed(rows)}  # the first row of a name
    for benchmark, marks in CUDA_ROWS[name].items():
        target = targets.pop(benchmark)
        assert (target and (target.must, target.aim)) == marks
    assert not targets
    for row in rows:
        assert row.us > 0 and isinstance(row.value, float)
        assert row.peer in line(row.cells()) and row.peer_rate in line(row.cells())


# Speed and memory against bf16, as the project asks for them.
MODEL_ROWS = {
    "861m-eager": (1.32, 1.45),
    "861m-compiled": (1.32, 1.45),
    "861m-causal": (1.32, 1.45),
    "8b-eager": (1.4, 1.55),
    "8b-compiled": (1.35, 1.55),
    "mixtral": (1.25, 1.4),
    "qwen3-moe": (1.25, 1.4),
}
LAYER_ROWS = {"layer converted": (1.0, 0.85), "layer fused": (0.65, 0.5)}


def test_whole_models_run_in_place_of_a_gpu(
    on_cpu: GpuContext, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("transformers")
    from benchmarks import bench_models_cuda

    asked = ("layer", "861m-eager", "mixtral")
    rows = list(runner.MODEL_BENCHMARKS["models_cuda"](replace(on_cpu, rows=asked, profile=True)))
    marks = {row.benchmark: (row.target.must, row.target.aim) for row in rows if row.target}
    assert marks == LAYER_ROWS | {name: MODEL_ROWS[name] for name in asked[1:]}
    for row in rows:
        assert row.peer == "bf16" and row.peer_rate in line(row.cells())
        assert row.value > 0 and (row.us is None) == row.benchmark.startswith("layer")
    targets = {name: case.target for name, case in bench_models_cuda.CASES.items()}
    assert {name: (t.must, t.aim) for name, t in targets.items()} == MODEL_ROWS
    assert (bench_models_cuda.PEAK.must, bench_models_cuda.PEAK.aim) == (0.75, 0.7)
    assert bench_models_cuda.PEAK.verdict(0.74) == "ok" and bench_models_cuda.PEAK.lower_is_better
    printed = capsys.readouterr().out
    assert "mixtral te_mx: " in printed and "aten::mm" in printed


def test_attention_without_a_mask_computes_the_same() -> None:
    pytest.importorskip("transformers")
    work = Workload("tiny", batch=2, context=32)
    losses, masks = [], []
    for attention in ("sdpa", CAUSAL):
        model = replace(work, attention=attention).build(torch.device("cpu"))
        layer = model.model.layers[0].self_attn

        def note(module: object, args: object, kwargs: dict[str, object]) -> None:
            masks.append(kwargs["attention_mask"] is None)

        layer.register_forward_pre_hook(note, with_kwargs=True)
        (batch,) = [tokens_of(work, torch.device("cpu"))]
        losses.append(model(input_ids=batch, labels=batch, use_cache=False).loss.item())
        # As in compiled code, where position_ids may be those of packed sequences.
        packed = torch.arange(32).remainder(16)[None]
        model(input_ids=batch, position_ids=packed, use_cache=False)
    assert losses[0] == losses[1] and masks == [True, False, True, True]


def test_layers_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    imports = "benchmarks.models_two_gpus, transformers.models.llama.modeling_llama"
    script = ROOT / "benchmarks" / "models_two_gpus.py"
    options = "--quick", "--device", "cpu", "--recipe", "deepseek_v3"
    done = fresh.torchrun(script, *options, imports=imports)
    assert done.returncode == 0, done.stderr
    wanted = (
        ("fsdp2 ", "2x2x64", "1.33x / 1.5x"), ("fsdp2-codes ", "2x2x64", "1.4x / 1.5x"),
        ("ddp ", "2x2x64", "1.33x / 1.5x"), ("tp ", "1x2x64", "1.25x / 1.4x"),
        ("sync bytes ", "deepseek_v3", "0.50x"), ("sync ", "deepseek_v3", "bf16, "),
    )  # fmt: skip
    for row, (name, tokens, marks) in zip(done.stdout.splitlines()[1:], wanted, strict=True):
        assert row.startswith(name) and "1 layers" in row and tokens in row and marks in row


def test_models_that_differ_are_not_compared() -> None:
    pytest.importorskip("transformers")
    from benchmarks.bench_models_cuda import _check_losses
    from benchmarks.models import Candidate

    fine, nan = (Candidate(lambda i: None, loss, None) for loss in (10.4, float("nan")))
    _check_losses("861m", {"bf16": fine, "te_mx": fine})
    with pytest.raises(RuntimeError, match="861m: the first loss of te_mx is nan"):
        _check_losses("861m", {"bf16": fine, "te_mx": nan})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void te_mx::sm90::(anonymous namespace)::gemm_kernel<te_mx::Config>", "te_mx gemm"),
        ("void te_mx::sm90::quantize_kernel<__nv_bfloat16>", "te_mx quantize"),
        ("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "attention"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NTT", "bf16 gemm"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Adam>", "optimizer"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_mm_0", "norm and elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "norm and elementwise"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)", "communication"),
        ("void roll_cuda_kernel<float>", "other"),
    ],
)
def test_kernels_are_sorted_by_what_they_are_for(name: str, kind: str) -> None:
    kernel = kernel_times.Kernel(name, 2, 3000.0)
    assert kernel.kind == kind
    shown = kernel_times.table("861m", [kernel], 0.004)
    assert "861m: 3.0 ms in 2 kernels, a step takes 4.0 ms" in shown and name in shown


def test_a_kernel_that_waits_for_another_one_counts_once() -> None:
    spans = [
        kernel_times.Span("sums", 12.0, 75.0),  # let in early, runs from 70 on
        kernel_times.Span("backward", 10.0, 70.0),
        kernel_times.Span("beside", 20.0, 60.0),
        kernel_times.Span("sums", 90.0, 94.0),
    ]
    made = {kernel.name: (kernel.calls, kernel.us) for kernel in kernel_times.apart(spans)}
    assert made == {"backward": (1, 60.0), "beside": (1, 0.0), "sums": (2, 9.0)}


def test_targets_of_the_full_cuda_sizes() -> None:
    gemm = {shape: (target.must, target.aim) for shape, target in bench_gemm_cuda.GEMM}
    assert gemm.pop((8192, 8192, 8192)) == (1.5, 1.8)
    assert len(gemm) == 4 and set(gemm.values()) == {(1.4, 1.7)}
    linear = {shape: (target.must, target.aim) for shape, target in bench_linear_cuda.LINEAR}
    assert linear.pop((8192, 4096, 4096)) == (1.15, 1.4)
    assert len(linear) == 3 and set(linear.values()) == {(1.35, 1.6)}
    assert bench_linear_cuda.GRAPH.must == 1.0 and bench_linear_cuda.HOST.lower_is_better


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is printed without a GPU")
def test_cuda_benchmarks_say_in_one_line_why_they_do_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "rows.json"
    assert runner.main(["cuda", "--quick", "--json", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 and "needs a Hopper GPU" in printed[0]
    assert all(name in printed[0] for name in runner.CUDA_BENCHMARKS)
    assert json.loads(file.read_text()) == {"rows": []}
    assert set(runner.parse([]).which) == {*runner.BENCHMARKS, *runner.CUDA_BENCHMARKS}


def test_data_of_the_cuda_benchmarks_has_the_classes_it_stands_for(on_cpu: GpuContext) -> None:
    from te_mx.backends.sm90.layouts import tiles as sm90_tiles

    found = {}
    for kind in gpu.KINDS:
        x = te_mx.quantize(on_cpu.randn(256, 1024, seed=1, kind=kind)).operand("rowwise")
        classes = sm90_tiles.classes(sm90_tiles.pack(x.codes, x.scales, "e4m3", 8))
        found[kind] = set(classes.flatten().tolist())
    assert found["gaussian"] == {0}
    assert found["row scales 2^10"] == {1}
    assert found["spread"] == {2}


def test_peers_that_compute_something_else_are_left_out(
    on_cpu: GpuContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    plain = [(on_cpu.randn(32, 64, seed=1), on_cpu.randn(96, 64, seed=2))]
    product = plain[0][0].float() @ plain[0][1].float().t()

    def broken(plain: list, quantized: list) -> object:
        raise RuntimeError("no such instruction")

    peers = {
        "right": lambda plain, quantized: lambda i: product,
        "wrong": lambda plain, quantized: lambda i: product.flip(0),
        "broken": broken,
    }
    monkeypatch.setattr(peers_cuda, "PEERS", peers)
    assert [name for name, _ in peers_cuda.working(plain, [])] == ["right"]
    printed = capsys.readouterr().out
    assert "not run: wrong (its result is off by" in printed
    assert "not run: broken (no such instruction)" in printed


def test_markdown_prints_rows_of_a_table(capsys: pytest.CaptureFixture) -> None:
    runner.main(["gemm", "--quick", "--threads", "1", "--markdown"])
    table = [row for row in capsys.readouterr().out.splitlines() if row.startswith("|")]
    assert len(table) == 4 and len({row.count("|") for row in table}) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gem"], "no benchmark named gem"),
        (["models_cuda", "--rows", "861m"], "no rows 861m; there are layer, 861m-eager"),
        (["gemm", "--profile"], "--rows, --recipe and --profile are of models_cuda: name it"),
    ],
)
def test_what_there_is_not_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as refused:
        runner.main(argv)
    assert refused.value.code == 2 and message in capsys.readouterr().err
