"""What a build does with the Hopper kernels, and what it packs; needs the source tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


FOLDERS = ("te_mx", "csrc", "third_party")
FILES = (".gitignore", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")
PRODUCTS = (
    "build/dev/csrc/sm90/CMakeFiles/gemm.cu.o",
    "build/dev/third_party/mxtile/CTestTestfile.cmake",
    "build/wheel/te_mx.whl",
    "csrc/build/CMakeCache.txt",
    "third_party/mxtile/build/test.o",
    "te_mx/_native.cpython-311-x86_64-linux-gnu.so",
    "te_mx/_sm90.cpython-311-x86_64-linux-gnu.so",
    "te_mx/nn/__pycache__/linear.cpython-311.pyc",
    "runs/gpt/bf16.pt",
    ".venv/bin/csrc",
)


@needs_tree
def test_the_sdist_holds_the_sources_and_no_build_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = pytest.importorskip("scikit_build_core.build")
    tree = tmp_path / "tree"
    tree.mkdir()
    unbuilt = shutil.ignore_patterns("__pycache__", "*.so", "build")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=unbuilt)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    sources = {p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file()}
    for name in PRODUCTS:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    monkeypatch.chdir(tree)
    archive = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert names == {*sources, "PKG-INFO"}


def names_of(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w-]", r, maxsplit=1)[0].lower().replace("_", "-") for r in requirements}


@needs_tree
def test_no_extra_brings_what_only_tests_need_and_make_installs_it_all() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = names_of(chain(*project["project"]["optional-dependencies"].values()))
    groups = {kind: names_of(names) for kind, names in project["dependency-groups"].items()}
    compared_with = {"transformer-engine", "torchao", "ml-dtypes", "pydantic"}
    assert compared_with <= groups["test"] | groups["aside"] and not compared_with & extras
    required = project["project"]["dependencies"] + project["build-system"]["requires"]
    named = {*names_of(required), *extras, *groups["test"], *groups["lint"], *groups["docs"]}
    named |= {"cmake", "ninja"}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    for variable, names in (("PACKAGES", named), (r"ASIDE\w*", groups["aside"])):
        installed = re.findall(rf"^{variable} = (.*)$", makefile, re.MULTILINE)
        assert names_of(" ".join(installed).split()) == names
    assert named | groups["aside"] <= names_of((ROOT / "constraints.txt").read_text().splitlines())


@needs_tree
def test_wheels_are_built_for_the_versions_that_the_package_names() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    everything = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, wheels = everything["project"], everything["tool"]["cibuildwheel"]
    pattern = re.compile(r"Python :: (3)\.(\d+)$")
    named = [
        "".join(found.groups()) for c in project["classifiers"] if (found := pattern.search(c))
    ]
    assert wheels["build"].split() == [f"cp{version}-*" for version in named]
    assert project["requires-python"] == f">={named[0][0]}.{named[0][1:]}"
    linux = wheels["linux"]
    assert all(
        linux[f"manylinux-{arch}-image"].startswith("manylinux_2_") for arch in linux["archs"]
    )
    for test in re.findall(r"tests/\S+", wheels["test-command"]):
        assert (ROOT / test).is_file()
    assert "Typing :: Typed" in project["classifiers"] and (ROOT / "te_mx" / "py.typed").is_file()
