"""What a tier declares of itself: read without its class or the library that it needs."""

from __future__ import annotations

from typing import NamedTuple


class TierType(NamedTuple):
    """A type of tier. A built-in one is ``TYPE`` in the module ``type`` of the tier's folder.

    That module imports neither the tier nor its library. The configuration, ``kvladder check``, the
    checks of packages and the tests of the documentation read it. An entry point of another package
    may name one in place of a class.
    """

    name: str
    """Name in a configuration."""
    make: str
    """Module and class of the tier, ``package.module:Class``. ``examine`` of that class checks what
    the settings name before a cache opens."""
    summary: str
    """The medium, in a few words."""
    survives: str
    """Whether blocks survive a restart, in a few words."""
    docs: str = ""
    """Page in ``docs/`` with its settings; empty if the page of all settings has them."""
    extra: str = ""
    """Extra of ``package`` that installs ``libraries``; empty if the package itself does."""
    libraries: tuple[str, ...] = ()
    """Distributions of the libraries that the tier imports, beside those of every tier."""
    instead: tuple[str, ...] = ()
    """Distributions that may replace those of the extra, installed by hand."""
    isolates: bool = False
    """True if the tier always runs in a process of its own, since its library may crash or hang."""
    package: str = "kvladder"
    """Distribution that has the tier."""

    @property
    def hint(self) -> str:
        """Return the command for a missing library; empty if there is no extra."""
        return f"install {self.package}[{self.extra}]" if self.extra else ""
