"""Run mypy over the package as it is installed, not as it lies in the source tree.

mypy finds packages by folders, and `patches/` and `configs/` are parts of the package that lie beside it (setup.cfg).
So it is shown a folder of links in the installed layout. The options are in pyproject.toml.
"""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    mapped = dict(line.split(" = ") for line in config["options"]["package_dir"].split("\n") if line)
    # Always the same folder, because mypy's cache knows the files by their paths; and a cache of its own, because one
    # that a mypy without this view has written says that mindspeed_tft.patches does not exist.
    view = ROOT / "build" / "types"
    shutil.rmtree(view, ignore_errors=True)
    package = view / "mindspeed_tft"
    package.mkdir(parents=True)
    for path in (ROOT / "mindspeed_tft").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for name, folder in mapped.items():
        (package / name.rpartition(".")[2]).symlink_to(ROOT / folder)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *sys.argv[1:]]
    command += ["--cache-dir", str(ROOT / "build" / "types-cache"), "-p", "mindspeed_tft"]
    result = subprocess.run(command, cwd=view, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = result.stdout
    for name, folder in mapped.items():  # say where the file is, so that an editor can open it
        output = output.replace(f"{name.replace('.', '/')}/", f"{folder}/")
    print(output, end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
