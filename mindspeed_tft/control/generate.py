"""Writes wire_pb2.py and wire_pb2.pyi from wire.proto: `python -m mindspeed_tft.control.generate`. Needs grpcio-tools.

protoc adds a check that refuses every protobuf runtime older than itself. Our messages use nothing new, and the hosts
of this plugin come with old protobuf releases, so the check is cut out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
_CUT = ("runtime_version", "Protobuf Python Version", "CHECKED-IN PROTOBUF GENCODE")
NAMES = ("wire_pb2.py", "wire_pb2.pyi")


def generate() -> dict[str, str]:
    """The text of both generated files, by name."""
    with tempfile.TemporaryDirectory() as out:
        # The path below the root is the file's name in protobuf's one global pool: it must not be just "wire.proto".
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}"]
        subprocess.run([*command, str(HERE / "wire.proto")], check=True, timeout=120)
        return {name: _plain((Path(out) / HERE.relative_to(ROOT) / name).read_text()) for name in NAMES}


def _plain(text: str) -> str:
    """Without version numbers and without the runtime check, so that any protoc gives the same text."""
    kept = ["# mypy: ignore-errors"]
    inside = False
    for line in text.splitlines():
        if line.startswith("_runtime_version.ValidateProtobufRuntimeVersion("):
            inside = True
        if not inside and not any(mark in line for mark in _CUT):
            kept.append(line.rstrip())
        if inside and line.startswith(")"):
            inside = False
    return "\n".join(kept) + "\n"


def main() -> None:
    for name, text in generate().items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
