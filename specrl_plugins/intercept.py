"""A stand-in for an object of a framework, through which the framework's own code can be made to do our work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

E = TypeVar("E")
T = TypeVar("T")


class Intercepted(Generic[E]):
    """Behaves as the object it wraps, but for one call, in which it runs a piece of work of ours with an engine.

    A subclass defines that call: it asks [`_taken_work`] whether there is work, and passes the call on where there is
    none.

    Args:
        original (`Any`): the object to stand in for.

    Attributes:
        framework_s (`float`): seconds that the framework's calls took beside our work, summed over all of them.
    """

    def __init__(self, original: Any):
        self._original = original
        self.framework_s = 0.0
        self._work: Callable[[E], None] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # not there yet: the object is being unpickled or copied
            raise AttributeError(name)
        return getattr(self._original, name)

    def run_instead(self, work: Callable[[E], T], framework_call: Callable[[], Any]) -> T:
        """Run `work` in place of the one call that `framework_call` leads to; returns what `work` returned.

        Raises:
            RuntimeError: `framework_call` did not lead to it.
        """
        results: list[T] = []

        def timed(engine: E) -> None:
            start = time.perf_counter()
            results.append(work(engine))
            self.framework_s -= time.perf_counter() - start

        self._work = timed
        start = time.perf_counter()
        try:
            framework_call()
        finally:
            self._work = None
        self.framework_s += time.perf_counter() - start
        if not results:
            raise RuntimeError(
                f"the framework generated without calling {type(self._original).__name__}.generate: this version of "
                "it is not supported."
            )
        return results[0]

    def _taken_work(self) -> Callable[[E], None] | None:
        """The work to run in this call, which is then no longer there for the next one."""
        work, self._work = self._work, None
        return work
