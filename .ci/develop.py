"""Make this tree importable from the virtual environment that runs this: a path file, and the
metadata that `importlib.metadata.version("te-mx")` reads."""

import re
import shutil
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None, "pyproject.toml names no version"
    site = Path(sysconfig.get_path("purelib"))
    (site / "te_mx_tree.pth").write_text(f"{ROOT}\n")
    for old in site.glob("te_mx-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"te_mx-{version[1]}.dist-info"
    info.mkdir()
    fields = {"Metadata-Version": "2.1", "Name": "te-mx", "Version": version[1]}
    (info / "METADATA").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))


if __name__ == "__main__":
    main()
