"""House rules that no linter knows: small files, nothing half done, no test switched off."""

import re
import subprocess
import sys
from pathlib import Path

MAX_BYTES = 500_000
MAX_LINES = {".py": 800, ".cpp": 600, ".h": 600, ".hpp": 600, ".cu": 600, ".cuh": 600}
# A Python file of te_mx has at least so many lines: less is part of another idea. Those that have
# a place of their own, and why; the __init__.py of a folder needs no reason.
LEAST_LINES = 38
SMALL = {
    "te_mx/__main__.py": "python -m te_mx",
    "te_mx/_ops/stored.py": "an op",
    "te_mx/backends/device_names.py": "names of devices, of all backends",
    "te_mx/backends/cpu/cost.py": "measured constants of a device",
    "te_mx/backends/sm90/cost.py": "measured constants of a device",
    "te_mx/distributed/calls.py": "loads the rest of distributed at the first call that needs it",
    "te_mx/formats/mxfp4.py": "a family of formats",
    "te_mx/formats/mxfp6.py": "a family of formats",
    "te_mx/formats/mxfp8.py": "a family of formats",
    "te_mx/integrations/checkpoints/quark.py": "a writer of checkpoints",
    "te_mx/pytorch/attention/rope.py": "a module of Transformer Engine by its name",
    "te_mx/pytorch/fp8.py": "a module of Transformer Engine by its name",
    "te_mx/pytorch/transformer.py": "a module of Transformer Engine by its name",
    "te_mx/recipe.py": "the public names of recipes/",
    "te_mx/runtime/compiled.py": "what compiled code calls, in folders from dispatch to nn",
    "te_mx/runtime/report.py": "tables of text, for the reports of three folders",
}
# What state a weight is in: te_mx/weights knows, everything else asks the source of a module
# (te_mx/weights/source.py) for what it needs.
STATES = re.compile(
    r"_is_dropped|_is_weight_only|\._frozen\b|\._lent\b|\._microbatch\b|\._gathered\b|\._owned\b"
    r"|\._joined\b|\._split\b|\._halves\b|_source\.(dropped|kept|joined|fixes)\b"
    r"|(isinstance|type)\([\w.]*_source\b"
    r"|isinstance\(.*\b(WeightSource|Cached|Frozen|QuantizedOnly|WeightOnly|Gathered)\b"
)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# A test may ask for hardware (skipif with a reason); it may not be skipped for good.
SWITCHED_OFF = re.compile(r"(@|marks=)pytest\.mark\.(skip\b|xfail)|unittest\.skip\b|assert True\b")
# Kernels are written in the words of third_party/mxtile, so that another tile library could serve.
INTRINSICS = re.compile(r"\b_mm\d*_|\b_tile_\w+\(|\basm\b|#include <\w*intrin\.h>")
# torch does not bring numpy, so te_mx runs without.
NUMPY = re.compile(r"\b(import|from) numpy\b|\bfrom_numpy\(|\.numpy\(")

# Private names of torch and of Python: te_mx/torch_internals.py has them, with what te_mx does in a
# torch without.
INSIDE = Path("te_mx/torch_internals.py")
INTERNALS = re.compile(
    r"\btorch\._(?!_)|\bforward_ad\._|_current_graph_task_id|_will_engine_execute|queue_callback|_execution_engine"
    r"|_backward_cls|_raw_saved_|_len_torch_|_functorch|_is_profiler_enabled|_dynamo_marked"
    r"|_fsdp_param|_unsharded_param|\b_all_reduce_hook|_module_info\b|_orig_size|_is_fsdp_managed"
    r"|_module_state_mapping|_get_module_state|_active_ddp_module|_module_parameters\b"
    r"|_StridedShard|_dtensor_spec|\._local_tensor\b|\._spec\b|_prepare_(in|out)put_fn"
    r"|_call_impl\b|_global_(forward|backward)_|_make_wrapper_subclass|_ConvNd|_pytree"
    r"|_storage_Use|_cdata\b|_swap_data_ptr|_is_gil_enabled|_getframe|cell_contents"
    r"|_CheckpointFrame|_guards\b|(from|import) torch\S*\._(?!_)"
)
# Documented by torch, or a module object that is asked for and not looked into.
DOCUMENTED = re.compile(r"torch\._foreach_\w+|\"torch\._dynamo\"|torch\._neg_view")


def is_small(path: Path) -> bool:
    """Whether a file of te_mx has few lines, and no reason for it."""
    if path.suffix != ".py" or path.parts[0] != "te_mx" or path.name == "__init__.py":
        return False
    return str(path) not in SMALL and len(path.read_text().splitlines()) < LEAST_LINES


def complaints(path: Path) -> list[str]:
    size = path.stat().st_size
    if size > MAX_BYTES:
        return [f"{path}: {size // 1000} kB, at most {MAX_BYTES // 1000}"]
    limit = MAX_LINES.get(path.suffix)
    if limit is None:
        return []
    lines = path.read_text().splitlines()
    found = []
    if len(lines) > limit:
        found.append(
            f"{path}: {len(lines)} lines, at most {limit}: is there more than one idea in it?"
        )
    if is_small(path):
        found.append(
            f"{path}: {len(lines)} lines, at least {LEAST_LINES}: to which idea does it belong? "
            "Or it has a reason in SMALL of .ci/house.py"
        )
    for number, line in enumerate(lines, 1):
        if UNFINISHED.search(line):
            found.append(f"{path}:{number}: unfinished: {line.strip()}")
        if path.suffix == ".py" and SWITCHED_OFF.search(line):
            found.append(f"{path}:{number}: a test is switched off: {line.strip()}")
        if path.parts[0] == "te_mx" and NUMPY.search(line):
            found.append(f"{path}:{number}: needs numpy, which te_mx does not: {line.strip()}")
        inside = path.suffix == ".py" and path.parts[0] == "te_mx" and path != INSIDE
        if inside and INTERNALS.search(DOCUMENTED.sub("", line)):
            found.append(f"{path}:{number}: a private name outside {INSIDE}: {line.strip()}")
        outside = inside and path.parts[1] != "weights"
        if outside and STATES.search(line):
            found.append(f"{path}:{number}: asks for the state of a weight: {line.strip()}")
        if path.parts[0] == "csrc" and INTRINSICS.search(line):
            found.append(f"{path}:{number}: raw instruction outside mxtile: {line.strip()}")
    return found


def main() -> int:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    this = Path(__file__).resolve()
    paths = [Path(n) for n in names if Path(n).is_file() and Path(n).resolve() != this]
    found = [line for path in paths for line in complaints(path)]
    found += [
        f"{name}: not a file of fewer than {LEAST_LINES} lines any more: take it out of SMALL"
        for name in SMALL
        if not Path(name).is_file() or len(Path(name).read_text().splitlines()) >= LEAST_LINES
    ]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
