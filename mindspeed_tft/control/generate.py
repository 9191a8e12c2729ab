"""Writes the Python of our .proto files, beside each: `python -m mindspeed_tft.control.generate`. Needs grpcio-tools.

protoc adds a check that refuses every protobuf runtime older than itself. Our messages use nothing new, and the hosts
of this plugin come with old protobuf releases, so the check is cut out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOS = tuple(ROOT / "mindspeed_tft" / path for path in ("control/wire.proto", "clusterd/recover.proto"))
_CUT = ("runtime_version", "Protobuf Python Version", "CHECKED-IN PROTOBUF GENCODE")


def generate(proto: Path) -> dict[Path, str]:
    """The text of both generated files of a .proto file, by where they belong."""
    targets = (proto.with_name(f"{proto.stem}_pb2.py"), proto.with_name(f"{proto.stem}_pb2.pyi"))
    with tempfile.TemporaryDirectory() as out:
        # The path below the root is the file's name in protobuf's one global pool: it must not be just "wire.proto".
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}"]
        subprocess.run([*command, str(proto)], check=True, timeout=120)
        return {path: _plain((Path(out) / path.relative_to(ROOT)).read_text()) for path in targets}


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
    for proto in PROTOS:
        for path, text in generate(proto).items():
            path.write_text(text)


if __name__ == "__main__":
    main()
