"""What a build does with the Hopper kernels, and what it packs; needs the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIND_GPU = ROOT / "csrc" / "sm90" / "find_gpu.cmake"
needs_tree = pytest.mark.skipif(
    not FIND_GPU.is_file() or shutil.which("cmake") is None,
    reason="the source tree or cmake is not here",
)


def program(path: Path, says: str | None) -> None:
    """A program that prints `says`; None: one that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + ("exit 9\n" if says is None else f"printf '{says}'\n"))
    path.chmod(0o755)


@needs_tree
@pytest.mark.parametrize(
    ("driver", "query", "found"),
    [
        ("9.0\\n", None, True),
        ("8.9\\n9.0\\n", None, True),  # two GPUs
        ("8.9\\n", "90\\n", False),  # the driver has answered
        ("10.0\\n12.0\\n", None, False),
        (None, "75,90\\n", True),  # a container with nvcc and without nvidia-smi
        (None, "90", True),
        (None, "89,100,120", False),
        (None, None, False),  # no driver
    ],
)
def test_automatic_builds_look_for_a_hopper_gpu(
    driver: str | None, query: str | None, found: bool, tmp_path: Path
) -> None:
    program(tmp_path / "bin" / "nvidia-smi", driver)
    program(tmp_path / "cuda" / "bin" / "__nvcc_device_query", query)
    script = tmp_path / "ask.cmake"
    script.write_text(f'include("{FIND_GPU}")\nmessage("reason: ${{te_mx_no_hopper}}")\n')
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CUDA_HOME": str(tmp_path / "cuda"),
    }
    said = subprocess.run(
        ["cmake", "-P", str(script)], env=environment, capture_output=True, text=True, check=True
    ).stderr.strip()
    if found:
        assert said == "reason:"
    else:
        assert "no Hopper GPU" in said and "TE_MX_CUDA=ON" in said
