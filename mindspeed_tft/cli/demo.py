"""x"""
from __future__ import annotations
def command() -> None:
    """x"""
