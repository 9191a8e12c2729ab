"""Class Variants: one thing that is done in several ways, depending on the version of a host package.

For code of ours that calls a host; what a host calls is wrapped, and each wrapper states its versions itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mindspeed_tft.registry.registry import REGISTRY, Registry
from mindspeed_tft.registry.targets import PatchError
from mindspeed_tft.registry.versions import clauses, fits

_F = TypeVar("_F", bound=Callable[..., Any])


class Variants:
    """Called like each of its functions, of which it takes the one that is declared for the version that is there."""

    def __init__(self, what: str, host: str, registry: Registry = REGISTRY) -> None:
        """`what` is done, for messages; `host`: a package whose version the registry knows."""
        self.what = what
        self.host = host
        self._registry = registry
        self._declared: list[tuple[str, Callable[..., Any]]] = []
        self._chosen: tuple[str | None, Callable[..., Any]] | None = None

    def on(self, versions: str) -> Callable[[_F], _F]:
        """Declare a function for a range of versions, e.g. ">=0.12,<0.17"; of several that fit the first is taken."""
        clauses(versions)  # a range that cannot be read is an error here, not in the middle of a recovery

        def declare(function: _F) -> _F:
            self._declared.append((versions, function))
            self._chosen = None
            return function

        return declare

    def ranges(self) -> tuple[str, ...]:
        """The ranges that are declared, in order."""
        return tuple(versions for versions, _ in self._declared)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            PatchError: no function is declared for the version that is there.
        """
        version = self._registry.version(self.host)
        if self._chosen is None or self._chosen[0] != version:
            self._chosen = (version, self._choose(version))
        return self._chosen[1](*args, **kwargs)

    def _choose(self, version: str | None) -> Callable[..., Any]:
        for versions, function in self._declared:
            if version is not None and fits(version, versions):
                return function
        known = "; ".join(self.ranges()) or "none"
        raise PatchError(
            f"{self.what}: how this is done with {self.host} {version or '(version unknown)'} is not declared"
            f" (declared: {known}). Remedy: use one of these versions."
        )
