"""How a trajectory becomes bytes and back.

A row is data, also when it is hostile: nothing in it is executed, no length in it is believed before it is checked,
and whatever does not check out raises [`CorruptRow`].
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from specrl_plugins.trajectory import FINISH_REASONS, FinishReason, Trajectory

FORMAT = 1
# Bounds what a row may claim, so that a hostile length cannot exhaust memory.
MAX_TOKENS = 1 << 20
_LEVEL = 3


class CorruptRow(ValueError):
    """A stored row does not check out."""


class Row(NamedTuple):
    """A trajectory as columns; the three arrays are compressed."""

    format: int
    prompt: bytes
    slot: int
    step: int
    finish: int
    cap: int
    reward: float | None
    length: int
    tokens: bytes
    logprobs: bytes
    ages: bytes
    checksum: bytes


def encode(trajectory: Trajectory) -> Row:
    """Columns of a trajectory, with the checksum over all of them."""
    # SQLite would take a NumPy scalar for a blob.
    columns = (
        FORMAT,
        trajectory.prompt,
        int(trajectory.slot),
        int(trajectory.step),
        FINISH_REASONS.index(trajectory.finish_reason),
        int(trajectory.cap),
        None if trajectory.reward is None else float(trajectory.reward),
        len(trajectory.tokens),
        _pack(trajectory.tokens, "<i4"),
        _pack(trajectory.logprobs, "<f4"),
        _pack(trajectory.ages, "<u2"),
    )
    return Row(*columns, checksum=_checksum(columns))


def decode(row: Row) -> Trajectory:
    """The trajectory of a row.

    Raises:
        CorruptRow: another format version, a checksum that does not match, or content that no trajectory has.
    """
    if row.format != FORMAT:
        raise CorruptRow(f"format {row.format!r}, expected {FORMAT}")
    try:
        if _checksum(row[:-1]) != row.checksum:
            raise CorruptRow("its checksum does not match")
        if not 0 < row.length <= MAX_TOKENS or row.finish < 0:
            raise CorruptRow(f"{row.length} tokens, finish {row.finish}")
        return Trajectory(
            prompt=row.prompt,
            slot=row.slot,
            tokens=_unpack(row.tokens, "<i4", row.length).astype(np.int32, copy=False),
            logprobs=_unpack(row.logprobs, "<f4", row.length).astype(np.float32, copy=False),
            ages=_unpack(row.ages, "<u2", row.length).astype(np.uint16, copy=False),
            finish_reason=cast(FinishReason, FINISH_REASONS[row.finish]),
            cap=row.cap,
            step=row.step,
            reward=row.reward,
        )
    except CorruptRow:
        raise
    # SQLite columns have no fixed type: a hostile file may hold any value in any of them.
    except (ValueError, TypeError, IndexError, struct.error, zstandard.ZstdError, OverflowError) as error:
        raise CorruptRow(str(error)) from error


def _checksum(columns: tuple) -> bytes:
    format, prompt, slot, step, finish, cap, reward, length, *arrays = columns
    digest = hashlib.blake2b(digest_size=16)
    digest.update(struct.pack("<7q", format, slot, step, finish, cap, length, reward is not None))
    digest.update(struct.pack("<d", reward or 0.0))
    for blob in (prompt, *arrays):
        digest.update(struct.pack("<q", len(blob)))
        digest.update(blob)
    return digest.digest()


def _pack(array: NDArray, dtype: str) -> bytes:
    """Byte planes (all lowest bytes, then all second ones, ...) compress better than whole numbers."""
    planes = np.ascontiguousarray(array, dtype=dtype).view(np.uint8).reshape(len(array), -1).T
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(planes.tobytes())


def _unpack(blob: bytes, dtype: str, length: int) -> NDArray:
    size = length * np.dtype(dtype).itemsize
    # The decompressor allocates what the frame header claims, so the claim is checked first.
    if zstandard.frame_content_size(blob) != size:
        raise CorruptRow(f"an array does not hold {length} values")
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint8)
    return planes.reshape(-1, length).T.copy().view(dtype).reshape(length)
