"""How a trajectory becomes bytes and back.

A row is data, also when it is hostile: nothing in it is executed, no length in it is believed before it is checked,
and whatever does not check out raises [`CorruptRow`].

Log-probs are kept in steps of 2^-16 nats, rounded down: what comes back is lower by less than 1.6e-5 nats, which is far
below the 0.03 to 0.05 nats between two inference paths in bf16, and the bits left out are noise that does not compress.
Down, so that a policy that has not changed still accepts all of a draft that it wrote. What is above zero by rounding
comes back as zero, what is below -65,535 nats as about that; a multiple of the step comes back as it is.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from typing import NamedTuple, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from specrl_plugins.trajectory import FINISH_REASONS, FinishReason, Trajectory

FORMAT = 2
# Bounds what a row may claim, so that a hostile length cannot exhaust memory.
MAX_TOKENS = 1 << 20
# Nats between two log-probs that are told apart, and the number of the lowest one: the last below 2^32 in float32.
LOGPROB_STEP = 2.0**-16
_LOWEST = 2**32 - 2**8


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
        _pack(trajectory.tokens),
        _pack(_steps(trajectory.logprobs)),
        _pack(trajectory.ages),
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
            logprobs=_unpack(row.logprobs, "<u4", row.length).astype(np.float32) * np.float32(-LOGPROB_STEP),
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
    blobs = (prompt, *arrays)
    numbers = (format, slot, step, finish, cap, length, reward is not None, *map(len, blobs))
    header = struct.pack("<11qd", *numbers, reward or 0.0)
    return hashlib.blake2b(b"".join((header, *blobs)), digest_size=16).digest()


def _steps(logprobs: NDArray) -> NDArray[np.uint32]:
    """Log-probs as whole numbers of steps below zero."""
    return np.clip(np.ceil(logprobs * np.float32(-1 / LOGPROB_STEP)), 0, _LOWEST).astype(np.uint32)


class _Contexts(threading.local):
    """Of zstandard, which no two threads may use at once; making one takes longer than compressing a row."""

    def __init__(self):
        self.compressor = zstandard.ZstdCompressor(level=1, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def _pack(array: NDArray) -> bytes:
    """Byte planes (all lowest bytes, then all second ones, ...) compress better than whole numbers. Those that are zero
    from one on are left out."""
    size = array.itemsize
    planes = np.ascontiguousarray(array, dtype=f"<u{size}").view(np.uint8).reshape(len(array), size).T
    used = max(1, -(-int(array.max()).bit_length() // 8))
    return _contexts.compressor.compress(planes[:used].tobytes())


def _unpack(blob: bytes, dtype: str, length: int) -> NDArray:
    # The decompressor allocates what the frame header claims, so the claim is checked first.
    used, rest = divmod(zstandard.frame_content_size(blob), length)
    size = np.dtype(dtype).itemsize
    if rest or not 0 < used <= size:
        raise CorruptRow(f"an array does not hold {length} values")
    planes = np.frombuffer(_contexts.decompressor.decompress(blob), np.uint8)
    values = np.zeros((length, size), np.uint8)
    values[:, :used] = planes.reshape(used, length).T
    return values.view(dtype).reshape(length)
