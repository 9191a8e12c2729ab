"""`python -m mindspeed_tft.names NAME`: the directory for PYTHONPATH that has our package of this name."""

from __future__ import annotations

import sys

from mindspeed_tft import names


def main(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in names.offered():
        known = " | ".join(names.offered())
        print(f"usage: python -m mindspeed_tft.names {known}", file=sys.stderr)
        return 2
    print(names.directory(words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
