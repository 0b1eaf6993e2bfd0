"""`import te_mx`: always works, builds nothing, costs little, and offers what it documents."""

from __future__ import annotations

import subprocess
import sys

from fresh import python

import te_mx

HIDE_NATIVE = "import sys; sys.modules['te_mx._native'] = None\n"
IMPORT_BUDGET = 0.3


def output(code: str) -> str:
    done = python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_exists_and_is_documented():
    for name in te_mx.__all__:
        value = getattr(te_mx, name)
        assert name == "__version__" or value.__doc__, name
    assert isinstance(te_mx.__version__, str)


def test_works_without_the_native_module():
    code = HIDE_NATIVE + (
        "import warnings; warnings.simplefilter('error')\n"
        "import te_mx, torch\n"
        "from te_mx.backends.cpu import binding as cpu\n"
        "print(cpu.missing_reason())\n"
        "warnings.simplefilter('ignore')\n"
        "q = te_mx.quantize(torch.randn(4, 40), columnwise=True)\n"
        "print(te_mx.gemm(q, q).out.shape, te_mx.explain(q, q).kernel)\n"
        "layer = te_mx.Linear(40, 8)\n"
        "with te_mx.autocast(): layer(torch.randn(4, 40)).sum().backward()\n"
        "print(te_mx.is_mxfp8_available())\n"
    )
    lines = output(code).splitlines()
    assert "te_mx._native cannot be imported" in lines[0] and "compiler" in lines[0]
    assert lines[1] == "torch.Size([4, 4]) reference"
    assert lines[2] == "True"


def test_works_without_numpy():
    """Which torch does not bring: results of 4 MiB and more, packed experts, the doctor."""
    code = (
        "import sys, warnings; sys.modules['numpy'] = None\n"
        "warnings.filterwarnings('ignore', 'Failed to initialize NumPy')\n"
        "import torch, te_mx\n"
        "from te_mx.commands.main import main\n"
        "x = torch.randn(1024, 1024)\n"
        "layer = te_mx.Linear(1024, 2048)\n"
        "with te_mx.autocast(): layer(x).sum().backward()\n"
        "assert layer.weight.grad.nbytes == 8 << 20\n"
        "experts = te_mx.GroupedLinear(2, 1024, 1024)\n"
        "te_mx.freeze_weights(experts)\n"
        "with torch.no_grad(), te_mx.autocast(): print(experts(x, [512, 512]).shape)\n"
        "sys.exit(main(['doctor']))\n"
    )
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert lines[0] == "torch.Size([1024, 1024])" and lines[-1] == "nothing is wrong"


def test_without_torch_the_import_says_so():
    done = python("import sys; sys.modules['torch'] = None\nimport te_mx")
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: te_mx needs PyTorch 2.11 or newer")
    assert 'pip install "torch>=2.11"' in last


def test_import_does_not_load_the_native_module():
    assert output("import sys, te_mx; print('te_mx._native' in sys.modules)").strip() == "False"


def test_import_time():
    # Of this process alone: on a loaded machine the clock on the wall tells more of the others.
    code = (
        "import sys, time; sys.dont_write_bytecode = False; t = time.process_time(); import te_mx\n"
        "print(time.process_time() - t)"
    )
    # With bytecode kept, as users have it; the first of three may compile.
    fastest = min(float(output(code)) for _ in range(3))
    assert fastest < IMPORT_BUDGET
