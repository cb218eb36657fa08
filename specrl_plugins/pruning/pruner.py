"""The pruner: judges responses half-way, and learns from what became of those it kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specrl_plugins.acceptance import Stream
from specrl_plugins.pruning.calibrator import Calibrator
from specrl_plugins.pruning.head import QualityHead
from specrl_plugins.pruning.settings import PruningSettings
from specrl_plugins.pruning.survivors import draw, survival_probabilities
from specrl_plugins.pruning.track_record import TrackRecord


@dataclass(frozen=True)
class Judgement:
    """What was decided on the rows of a batch.

    Args:
        survives (`NDArray[np.bool_]` of shape `(rows,)`):
            Whether a row goes on.
        scores (`NDArray[np.float64]` of shape `(rows,)`):
            Score of the head, between 0 and 1; NaN where the hidden state was not finite.
        probabilities (`NDArray[np.float64]` of shape `(rows,)`):
            Chance that the row had to survive, before it was drawn whether its group is a control group.
        control (`NDArray[np.bool_]` of shape `(rows,)`):
            Whether the head had no say in the row's group: survivors were drawn blindly, or all survive.
        ended (`NDArray[np.bool_]` of shape `(rows,)`):
            Whether the response had ended before the detection length.
    """

    survives: NDArray[np.bool_]
    scores: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    control: NDArray[np.bool_]
    ended: NDArray[np.bool_]


class Pruner:
    """Head, calibrator and survivor rule put together.

    Labels after pruning. Survivors are no fair sample, and what the head learns from them alone it would find
    confirmed for ever. But the chance pi_i of each row to survive is known, so each label stands for 1 / pi_i rows
    (Horvitz and Thompson): sums over survivors then have the expectation of sums over all rows. With the share c of
    control groups, k survivors of n rows and the rule's probability rho_i,

        pi_i = c k / n + (1 - c) rho_i  >=  c k / n,

    so that no row is without a chance to be seen and no weight above n / (c k). Weights are cut at `MAX_WEIGHT`, which
    matters only where c k / n is smaller than its inverse, and scaled to a mean of 1 in each step.

    Whether it may prune. The head is measured on rows that it has not learned from yet: scores as they were when the
    rows were judged, against what became of them, over the most recent rows. What pruning needs is an order within
    groups, among responses that have ended and among those that have not: a head that tells easy prompts from hard ones
    and no more would draw lots within them, and so would one that sees no more than that a response has ended. So AUC
    is measured among these, where `learn` is told. Pruning is on once `warmup_steps` steps were learned from and while
    this AUC is above 1/2 by two standard errors of a head that knows nothing.

    Several processes. A group is judged by one process, in one call. Processes that each judge some groups decide alike
    if their heads are alike, that is, if each learns from the rows of all of them, in one order.

    Args:
        hidden_size (`int`):
            Size of the policy's hidden states.
        settings (`PruningSettings`):
            What to prune.
        seed (`int`):
            Seed of the head and of every draw.
        device (`str`, *optional*, defaults to `"cpu"`):
            Where the head is.
    """

    MAX_WEIGHT = 20.0

    def __init__(self, hidden_size: int, settings: PruningSettings, seed: int, device: str = "cpu"):
        self.settings = settings
        self.seed = seed
        self.head = QualityHead(hidden_size, seed=seed, device=device)
        self.calibrator = Calibrator()
        self._steps = 0
        self._record = TrackRecord()

    @property
    def ready(self) -> bool:
        """Whether it may prune: warm-up is over, and the head is measurably better than chance."""
        return self._steps >= self.settings.warmup_steps and self._record.surprise > 2

    def judge(
        self,
        hidden: NDArray,
        groups: Sequence[bytes],
        finished: NDArray,
        survivors: Mapping[bytes, int],
        step: int,
    ) -> Judgement:
        """Decide which rows go on. Exactly `survivors[group]` rows of each group do, or all where there are fewer.

        While it is not ready, groups with too many rows are drawn blindly. All rows of a group must be in one call.
        Decisions depend on seed, step, group and the scores of its rows, not on the order or the company of the rows.

        Args:
            hidden (`NDArray[np.float32]` of shape `(rows, hidden)`):
                Last-layer hidden state of the token at the detection length, or of the last token of a response that
                ended before. A row that is not finite is judged as an average one.
            groups (`Sequence[bytes]` of length `rows`):
                Group of each row: the key of its prompt, 16 bytes.
            finished (`NDArray[np.bool_]` of shape `(rows,)`):
                Whether the response ended before the detection length.
            survivors (`Mapping[bytes, int]`):
                Survivors of each group.
            step (`int`):
                Optimizer step the rollout is for.

        Raises:
            ValueError: the arguments differ in their number of rows, or hidden states are of another size.
        """
        if not len(hidden) == len(groups) == len(finished):
            raise ValueError(
                f"{len(hidden)} hidden states, {len(groups)} groups, {len(finished)} flags: one each a row"
            )
        ended = np.asarray(finished, np.bool_)
        scores = self.head.scores(hidden)
        chances = self.calibrator.probabilities(scores)
        judgement = Judgement(
            survives=np.ones(len(scores), np.bool_),
            scores=scores,
            probabilities=np.ones(len(scores)),
            control=np.ones(len(scores), np.bool_),
            ended=ended,
        )
        ready = self.ready
        rows_of: dict[bytes, list[int]] = {}
        for row, group in enumerate(groups):
            rows_of.setdefault(group, []).append(row)
        for group, members in rows_of.items():
            count = survivors[group]
            if len(members) <= count:
                continue
            rows = np.array(members)
            rows = rows[np.argsort(scores[rows], kind="stable")]  # an order that is the group's own
            rng = self._random(group, step)
            blind = np.full(len(rows), count / len(rows))
            if not ready:
                control, pi, marginal = True, blind, blind
            else:
                share = self.settings.control_share
                control = bool(rng.random() < share)
                rule = survival_probabilities(chances[rows], count, self.settings.target_share, ended[rows])
                pi = blind if control else rule
                marginal = share * blind + (1 - share) * rule
            judgement.survives[rows] = draw(pi, rng)
            judgement.probabilities[rows] = marginal
            judgement.control[rows] = control
        return judgement

    def learn(
        self,
        hidden: NDArray,
        scores: NDArray,
        probabilities: NDArray,
        control: NDArray,
        rewards: NDArray,
        groups: Sequence[bytes] | None = None,
        ended: NDArray | None = None,
    ) -> None:
        """Learn from the rows of a step that were kept, once their rewards are known.

        Args:
            hidden (`NDArray[np.float32]` of shape `(rows, hidden)`): as given to `judge`.
            scores, probabilities, control (`NDArray` of shape `(rows,)`): of the judgement.
            rewards (`NDArray` of shape `(rows,)`): NaN where unknown; such rows are left out.
            groups (`Sequence[bytes]` of length `rows`, *optional*): group of each row. Without them, all rows of the
                step are compared with each other.
            ended (`NDArray[np.bool_]` of shape `(rows,)`, *optional*): of the judgement. Without, rows of a group are
                compared whether they had ended or not.
        """
        self._steps += 1
        known = np.flatnonzero(~np.isnan(rewards) & ~np.isnan(scores))
        if len(known):
            labels = (rewards[known] > self.settings.success_reward).astype(np.float64)
            weights = np.minimum(1 / probabilities[known], self.MAX_WEIGHT)
            weights /= weights.mean()
            numbers = np.zeros(len(rewards), np.int64)
            if groups is not None:
                numbers = np.unique(np.array(groups), return_inverse=True)[1]
            if ended is not None:
                numbers = 2 * numbers + ended
            self._record.add(
                scores=scores[known],
                chances=self.calibrator.probabilities(scores[known]),
                labels=labels,
                weights=weights,
                control=control[known],
                groups=numbers[known],
            )
            self.calibrator.update(scores[known], labels, weights)
            self.head.learn(hidden[known], labels, weights)

    def metrics(self) -> dict[str, float]:
        """How the head does, and what pruning does to success rates. What cannot be told yet is left out.

        | name | meaning |
        | --- | --- |
        | `prune/ready` | 1 if it may prune, else 0 |
        | `prune/head_accuracy` | share of rows that did what the calibrated chance made more likely |
        | `prune/head_auc` | chance that of a success and a failure the success has the higher score |
        | `prune/head_auc_in_groups` | the same for two responses to one prompt that both had ended or both had not |
        | `prune/calibration_error` | mean distance of calibrated chance and success rate |
        | `prune/survivor_positive_rate` | successes / survivors in groups in which the head chose |
        | `prune/positive_rate_unpruned` | successes / rows in groups in which it did not |

        All but the calibration error are over the rows of the track record, the most recent ones with
        a reward; accuracy and AUC weigh them as labels are weighed.
        """
        metrics = {"ready": float(self.ready)} | self._record.metrics()
        if self.calibrator.error is not None:
            metrics["calibration_error"] = self.calibrator.error
        return {f"prune/{name}": value for name, value in metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that decisions depend on, in tensors and plain numbers (`torch.load` with `weights_only=True`)."""
        return {
            "taught": self._taught(),
            "steps": self._steps,
            "head": self.head.state_dict(),
            "calibrator": self.calibrator.state_dict(),
            "record": self._record.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: it is of a head for another size of hidden states, or was taught under other settings.
        """
        for name, value in self._taught().items():
            if state["taught"][name] != value:
                raise ValueError(f"it was taught with {name} {state['taught'][name]}, which is {value} now")
        self.head.load_state_dict(state["head"])
        self.calibrator.load_state_dict(state["calibrator"])
        self._record.load_state_dict(state["record"])
        self._steps = state["steps"]

    def save(self, path: Path) -> None:
        """Write all of this to a file: whole, or not at all."""
        part = path.with_name(f"{path.name}.part")
        torch.save(self.state_dict(), part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what [`save`] wrote.

        Raises:
            ValueError: the file is damaged, or see [`load_state_dict`]; the message names it.
        """
        try:
            self.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # whatever is wrong with it
            raise ValueError(
                f"What the pruner had learned cannot be taken from {path}: {error}\nDelete the file, and pruning "
                "begins with a warm-up of its own."
            ) from error

    def _taught(self) -> dict[str, float]:
        """Settings on which it depends what was learned."""
        return {name: getattr(self.settings, name) for name in ("detection_length", "success_reward")}

    def _random(self, group: bytes, step: int) -> np.random.Generator:
        """Random numbers that depend on seed, step and group alone, keyed as in `specrl_plugins.acceptance`."""
        word = (1 << 64) - 1
        key = np.frombuffer(group, "<u8").astype(np.uint64)
        counter = np.array([0, Stream.PRUNE << 48, step & word, self.seed & word], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))
