"""examples/train_llama.py under torchrun: two processes against one."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import fresh  # noqa: E402
import llama_ranks  # noqa: E402
import train_llama  # noqa: E402
from gpt import data  # noqa: E402
from gpt.train import run  # noqa: E402
from llama import train  # noqa: E402


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("ranks")
    imports = "train_llama, llama.parallel, transformers.models.llama.modeling_llama"
    done = fresh.torchrun(HERE / "llama_ranks.py", folder, imports=imports)
    assert done.returncode == 0, done.stderr
    script = json.loads((folder / "script" / "run.json").read_text())
    return json.loads((folder / "found.json").read_text()) | {"script": script, "said": done.stdout}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """The runs of one process, by mode."""
    text, folder = data.load(), tmp_path_factory.mktemp("alone")
    args = train_llama.parse(llama_ranks.SMALL)
    chosen = {m: replace(train_llama.settings(args, m), fuse=False) for m in ("fp32", "mxfp8")}
    return {
        mode: run(one, folder / mode, text=text, make=train.LlamaTrainer, quiet=True)
        for mode, one in chosen.items()
    }


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
@pytest.mark.parametrize(("mode", "close"), [("fp32", 1e-5), ("mxfp8", 2e-3)])
def test_two_ranks_train_as_one_process(kind: str, mode: str, close: float, found, alone) -> None:
    """In another order of sums, which quantized layers pass on as steps of their codes."""
    both, one = found[f"{kind} {mode}"], alone[mode]
    assert both["losses"] == pytest.approx(one["losses"], rel=close)
    assert both["val_loss"] == pytest.approx(one["val_loss"], rel=close)
    assert both["losses"][-1] < both["losses"][0] - 0.5 and both["finished"]


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(kind: str, found) -> None:
    whole, resumed = found[f"{kind} mxfp8"], found[f"{kind} resumed"]
    assert resumed["losses"] == whole["losses"] and resumed["val_loss"] == whole["val_loss"]


def test_weights_that_are_gathered_as_codes(found) -> None:
    """All seven layers; dgrad starts from the codes, which is the same but for the smallest."""
    assert found["gathering"] == [7, 0]
    codes, whole = found["fsdp mxfp8"]["losses"], found["fsdp whole weights"]["losses"]
    assert codes == pytest.approx(whole, rel=2e-3)


def test_what_does_not_divide_is_refused(found) -> None:
    batch, heads, experts = found["refused"]
    assert batch == "--batch 3 does not divide by 2 ranks"
    assert heads == "num_key_value_heads 1 does not divide by 2 ranks"
    assert experts == "--parallel tp knows the layers of llama, not of mixtral"


def test_the_script_writes_and_prints_once(found) -> None:
    runs = found["script"]["runs"]
    assert set(runs) == {"fp32", "mxfp8"} and "fsdp on 2 ranks" in runs["mxfp8"]["model"]
    assert found["said"].count("validation loss") == 1


def test_neither_without_the_other(capsys) -> None:
    with pytest.raises(SystemExit):
        train_llama.parse(["--parallel", "tp"])
    assert "--parallel and torchrun go together" in capsys.readouterr().err
