"""Checks of settings. All say the same: the setting's name, what is allowed, and what was given."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any


def check_number(name: str, value: object, allowed: str, fits: Callable[[Any], bool], whole: bool = False) -> None:
    """Refuse what is no number, or not in the range.

    Args:
        name (`str`): of the setting.
        value (`object`): as given. A boolean is no number, nor is text that looks like one.
        allowed (`str`): what it is to be, in words that follow "is".
        fits (callable): whether a number is in the range; NaN is in none where this compares.
        whole (`bool`, *optional*): whether only whole numbers are allowed.

    Raises:
        ValueError: with the name first, so that a caller may put a prefix before it.
    """
    kind = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
        raise ValueError(f"{name} is {allowed}, not {value!r}")
