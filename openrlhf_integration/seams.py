"""How our classes get into the place of OpenRLHF's, without changing any of its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def plain(actor_class: Any) -> type:
    """The class behind one that `@ray.remote` decorates, which can be subclassed (Ray 2.55)."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


@contextmanager
def in_place_of(module: ModuleType, **names: Any) -> Iterator[None]:
    """Let names of a module mean ours while something of the module's own runs *in this process*.

    Only for functions that look a class up and hand it to Ray: what they start is built from the class itself. A
    worker process imports the module anew and sees OpenRLHF's names.
    """
    originals = {name: getattr(module, name) for name in names}
    for name, ours in names.items():
        setattr(module, name, ours)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
