"""How a trajectory becomes bytes and back.

A row is data, also when it is hostile: nothing in it is executed, no length in it is believed before it is checked,
and whatever does not check out raises [`CorruptRow`].

Log-probs are kept in steps of 2^-16 nats, rounded down: what comes back is lower by less than 1.6e-5 nats, which is far
below the 0.03 to 0.05 nats between two inference paths in bf16, and the bits left out are noise that does not compress.
Down, so that a policy that has not changed still accepts all of a draft that it wrote. What is above zero by rounding
comes back as zero, what is below -65,535 nats as about that; a multiple of the step comes back as it is.
"""

from __future__ import annotations

import struct
import threading
import zlib
from typing import NamedTuple, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from specrl_plugins.trajectory import FINISH_REASONS, FinishReason, Trajectory

FORMAT = 3
# Bounds what a row may claim, so that a hostile length cannot exhaust memory.
MAX_TOKENS = 1 << 20
# Nats from one log-prob that can be stored to the next one below, and the lowest: float32's last below 2^32 steps.
_STEP = np.float32(-(2.0**-16))
_LOWEST = _STEP * np.float32(2**32 - 2**8)


class CorruptRow(ValueError):
    """A stored row does not check out."""


class Row(NamedTuple):
    """A trajectory as columns; its three arrays are one compressed blob."""

    format: int
    prompt: bytes
    slot: int
    step: int
    finish: int
    cap: int
    reward: float | None
    length: int
    arrays: bytes
    checksum: int


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
        _pack(trajectory),
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
        tokens, steps, ages = _unpack(row.arrays, row.length)
        return Trajectory(
            prompt=row.prompt,
            slot=row.slot,
            tokens=tokens.astype(np.int32),
            logprobs=steps.astype(np.float32) * _STEP,
            ages=ages.astype(np.uint16),
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


def _checksum(columns: tuple) -> int:
    """CRC-32: it tells damage, not intent. Who can write a row can write its checksum too, whichever it is."""
    format, prompt, slot, step, finish, cap, reward, length, arrays = columns
    numbers = (format, slot, step, finish, cap, length, reward is not None, len(prompt), len(arrays))
    header = struct.pack("<9qd", *numbers, reward or 0.0)
    return zlib.crc32(arrays, zlib.crc32(header + prompt))


class _Contexts(threading.local):
    """Of zstandard, which no two threads may use at once; making one takes longer than compressing a row."""

    def __init__(self):
        self.compressor = zstandard.ZstdCompressor(level=1, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def _pack(trajectory: Trajectory) -> bytes:
    """Token ids, log-probs in steps below zero, and ages, as one compressed table of shape `(3, tokens)`.

    Its byte planes (all lowest bytes, then all second ones, ...) compress better than whole numbers, and one frame
    takes less room and time than three. Planes that are zero from one on are left out.
    """
    table = np.empty((3, len(trajectory.tokens)), "<u4")
    table[0] = trajectory.tokens
    table[1] = np.ceil(trajectory.logprobs.clip(_LOWEST, 0) / _STEP)
    table[2] = trajectory.ages
    used = max(1, (int(table.max()).bit_length() + 7) // 8)
    planes = table.view(np.uint8).reshape(-1, 4).T[:used]
    return _contexts.compressor.compress(planes.tobytes())


def _unpack(blob: bytes, length: int) -> NDArray[np.uint32]:
    """The table of [`_pack`]."""
    # The decompressor allocates what the frame header claims, so the claim is checked first.
    used, rest = divmod(zstandard.frame_content_size(blob), 3 * length)
    if rest or not 1 <= used <= 4:
        raise CorruptRow(f"its arrays do not hold {length} values")
    planes = np.frombuffer(_contexts.decompressor.decompress(blob), np.uint8).reshape(used, 3 * length)
    table = np.zeros((3 * length, 4), np.uint8)
    for place, plane in enumerate(planes):
        table[:, place] = plane
    return table.view("<u4").reshape(3, length)
