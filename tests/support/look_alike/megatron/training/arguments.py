"""The two functions that our parser patch wraps, with the arguments that they have in Megatron."""

import argparse
from collections.abc import Callable
from typing import Any


def parse_args(extra_args_provider: Callable[..., Any] | None = None, ignore_unknown_args: bool = False) -> Any:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lr", type=float)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_args()


def validate_args(args: Any, defaults: dict[str, Any] | None = None) -> Any:
    args.validated = True
    return args
