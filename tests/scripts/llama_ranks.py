"""What each of two ranks does for test_example_llama_parallel.py: argv[1] is a folder, which gets
found.json from the first rank."""

import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import torch  # noqa: E402
import train_llama  # noqa: E402
from gpt import data  # noqa: E402
from gpt.train import run  # noqa: E402
from llama import parallel, train  # noqa: E402

SMALL = [
    "--config", "small", "--layers", "1", "--dtype", "fp32", "--steps", "6", "--batch", "4",
    "--seq", "32", "--threads", "1", "--eval-every", "0",
]  # fmt: skip


def settings(kind: str, mode: str, *more: str) -> train.LlamaSettings:
    return train_llama.settings(train_llama.parse([*SMALL, "--parallel", kind, *more]), mode)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    device, text, found = parallel.start("cpu"), data.load(), {}

    def trained(chosen: train.LlamaSettings, name: str, **how: object) -> dict:
        return run(chosen, folder / name, text=text, make=parallel.ParallelTrainer, **how)

    for kind in parallel.KINDS:
        for mode in ("fp32", "mxfp8"):
            found[f"{kind} {mode}"] = trained(settings(kind, mode), f"{kind}-{mode}.pt", quiet=True)
        path = f"{kind}-two.pt"
        stopped = trained(settings(kind, "mxfp8"), path, quiet=True, should_stop=lambda n: n == 3)
        assert stopped["steps"] == 3
        found[f"{kind} resumed"] = trained(settings(kind, "mxfp8"), path, quiet=True, resume=True)
    found["fsdp whole weights"] = trained(
        settings("fsdp", "mxfp8", "--no-gather-codes"), "whole.pt", quiet=True
    )
    found["gathering"] = [
        sum(bool(module.__dict__.get("_gathers")) for module in trainer.model.modules())
        for trainer in (
            parallel.ParallelTrainer(settings("fsdp", "mxfp8", *more), text)
            for more in ([], ["--no-gather-codes"])
        )
    ]
    found["refused"] = [
        parallel.why_not(settings("fsdp", "mxfp8", "--batch", "3"), 2),
        parallel.why_not(settings("tp", "mxfp8", "--config", "tiny"), 2),
        parallel.why_not(settings("tp", "mxfp8", "--config", "mixtral-tiny"), 2),
    ]
    assert device == "cpu" and not parallel.any_of(False)
    assert parallel.any_of(torch.distributed.get_rank() == 1)
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    options = [*SMALL, "--parallel", "fsdp", "--steps", "2", "--out", str(folder / "script")]
    assert train_llama.main(options) == 0  # and leaves the group


if __name__ == "__main__":
    main(Path(sys.argv[1]))
