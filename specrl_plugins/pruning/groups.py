"""Pruning in a rollout: more responses start than are trained on, and at the detection length some are given up.

A group is all that a step samples of one prompt, on whichever ranks. Its survivors are dealt back to the rows that
asked for them, so that every rank trains on as many rows as it brought.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrl_plugins.engine import ObservingEngine
from specrl_plugins.metrics import RolloutCounts
from specrl_plugins.pruning.pruner import Judgement, Pruner
from specrl_plugins.ranks import OneRank, Ranks, own_rows
from specrl_plugins.response import Response
from specrl_plugins.trajectory import assign_slots

Row = tuple[bytes, int]
"""Prompt key and slot of a response."""


@dataclass(eq=False)
class Judged:
    """What the first rank knows of the responses of all ranks, until their rewards are known.

    Args:
        rows (`dict[tuple[bytes, int], int]`): row of each response in what follows.
        hidden (`NDArray[np.float32]` of shape `(rows, hidden)`): what they were judged by.
        judgement (`Judgement`): of the same rows.
    """

    rows: dict[Row, int]
    hidden: NDArray[np.float32]
    judgement: Judgement


class GroupPruning:
    """Prunes the groups of a batch. All ranks make the same calls; the first one's pruner decides.

    Args:
        pruner (`Pruner`): judges responses and learns from their rewards.
        ranks (`Ranks`, *optional*): the processes that train together. Defaults to this one alone.
    """

    def __init__(self, pruner: Pruner, ranks: Ranks | None = None):
        self.pruner = pruner
        self.settings = pruner.settings
        self.ranks = ranks or OneRank()

    def starts(self, keys: Sequence[bytes]) -> list[int]:
        """Which row each response starts for: a row may start several, and while nothing is pruned starts one.

        Args:
            keys (`Sequence[bytes]` of length `batch`): prompt key of each row of this rank.
        """
        gathered = self.ranks.gather(list(keys))
        all_keys = [key for part in gathered for key in part]
        if not self.ranks.gather(self.pruner.ready)[0]:
            return list(range(len(keys)))
        survivors, slots = Counter(all_keys), assign_slots(all_keys)[own_rows(self.ranks, gathered)]
        starts: list[int] = []
        for row, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            group, wanted = self.settings.starts(survivors[key]), survivors[key]
            starts += [row] * ((slot + 1) * group // wanted - slot * group // wanted)  # as even as it goes
        return starts

    def prune(
        self,
        responses: Sequence[Response],
        keys: Sequence[bytes],
        engine: ObservingEngine,
        step: int,
        counts: RolloutCounts,
    ) -> tuple[list[Response], list[Response], Judged | None]:
        """Judge responses that have ended or are at least as long as the detection length.

        Args:
            responses (`Sequence[Response]`): of this rank, as many as [`starts`] said.
            keys (`Sequence[bytes]` of length `batch`): prompt key of each row of this rank.
            engine (`ObservingEngine`): the current policy.
            step (`int`): number, from 1, of the optimizer step.
            counts (`RolloutCounts`): of this rank's batch.

        Returns:
            The survivors, one for each row in its order; what did not survive, of this rank; and, on the first rank,
            what [`learn`] needs.
        """
        length = self.settings.detection_length
        heads = [response.tokens[:length] for response in responses]
        logprobs, hidden = engine.observe([response.prompt for response in responses], heads)
        mine = [(r.key, r.slot, r.finish_reason is not None and len(r.tokens) <= length) for r in responses]
        gathered = self.ranks.gather((mine, hidden, list(keys)))
        rows = [row for part, _, _ in gathered for row in part]
        judged = None
        if self.ranks.index == 0:
            states = np.concatenate([part for _, part, _ in gathered])
            judgement = self.pruner.judge(
                states,
                [key for key, _, _ in rows],
                np.array([ended for _, _, ended in rows], bool),
                Counter(key for _, _, part in gathered for key in part),
                step,
            )
            judged = Judged({(key, slot): row for row, (key, slot, _) in enumerate(rows)}, states, judgement)
        survives = self.ranks.gather(None if judged is None else judged.judgement.survives)[0]
        assert survives is not None
        own = survives[own_rows(self.ranks, [part for part, _, _ in gathered])]
        pruned = []
        for response, line, stays in zip(responses, logprobs, own, strict=True):
            counts.judged_rows += 1
            if stays:
                continue
            # Nobody will ask for its log-probs again: these are the scorer's, which those of an engine may not be.
            known = min(response.prefix, len(line))  # verified, so they are the scorer's already
            response.logprobs = np.concatenate(
                [response.logprobs[:known], line[known:], response.logprobs[len(line) :]]
            )
            if response.finish_reason is None:
                response.finish_reason = "pruned"
                counts.pruned_rows += 1
            pruned.append(response)
        staying = [response for response, stays in zip(responses, own, strict=True) if stays]
        return self._deal(staying, keys), pruned, judged

    def learn(self, judged: Judged | None, responses: Sequence[Response], rewards: Sequence[float]) -> None:
        """Learn from the rewards of the survivors.

        Args:
            judged (`Judged`, *optional*): what [`prune`] returned on this rank.
            responses (`Sequence[Response]` of length `batch`): the survivors of this rank.
            rewards (`Sequence[float]` of length `batch`): their rewards; NaN for one that has none.
        """
        gathered = self.ranks.gather([(r.key, r.slot, reward) for r, reward in zip(responses, rewards, strict=True)])
        if judged is None:
            return
        rewarded = [row for part in gathered for row in part]
        rows = [judged.rows[key, slot] for key, slot, _ in rewarded]
        judgement = judged.judgement
        self.pruner.learn(
            judged.hidden[rows],
            judgement.scores[rows],
            judgement.probabilities[rows],
            judgement.control[rows],
            np.array([reward for _, _, reward in rewarded], float),
            [key for key, _, _ in rewarded],
            judgement.ended[rows],
        )

    def _deal(self, staying: list[Response], keys: Sequence[bytes]) -> list[Response]:
        """Survivors for the rows of this rank: its own where it has enough, those that others have too many of."""
        mine: dict[bytes, list[Response]] = defaultdict(list)
        for response in staying:
            mine[response.key].append(response)
        wanted = Counter(keys)
        surplus = {key: rows[wanted[key] :] for key, rows in mine.items() if len(rows) > wanted[key]}
        missing = {key: count - len(mine[key]) for key, count in wanted.items() if count > len(mine[key])}
        offers = self.ranks.gather((surplus, missing))
        for key, count in missing.items():
            given = [response for offered, _ in offers for response in offered.get(key, [])]
            before = sum(others.get(key, 0) for _, others in offers[: self.ranks.index])
            mine[key] += given[before : before + count]
        waiting = {key: iter(rows) for key, rows in mine.items()}
        return [next(waiting[key]) for key in keys]
