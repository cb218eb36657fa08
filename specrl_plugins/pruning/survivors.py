"""The survivor rule: which responses of a group go on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def survival_probabilities(q: NDArray, count: int, target: float, certain: NDArray | None = None) -> NDArray:
    """Chance of each response of a group to survive, so that survivors are as many and as balanced as wanted.

    Let q_i be the chance that response i succeeds, k the number of survivors and rho their target share of successes.
    Of all survival probabilities that meet both

        sum_i pi_i = k        and        sum_i pi_i q_i = rho k,

    these are the most random ones (largest sum of their entropies): with Lagrange multipliers a and b,

        pi_i = sigmoid(a + b (q_i - rho)),

    where a and b minimise the convex function sum_i log(1 + exp(a + b (q_i - rho))) - a k. Likely successes survive
    more often on hard prompts (b > 0), less often on easy ones (b < 0).

    Both can be met only while rho lies between the mean q of the k lowest and that of the k highest responses.
    Otherwise the k that come nearest survive: the highest on a hard prompt, the lowest on an easy one; responses that
    tie for the last places share them equally.

    A response that has ended already costs no more generation, so giving it up saves nothing: while there are fewer
    than k of these (`certain`), all of them survive and count in the balance, for which the others then make up. Where
    there are k or more they cannot all stay, and keeping only these would drop every long response of the group: so
    all responses compete by the same rule.

    Args:
        q (`NDArray` of shape `(n,)`): chances of success, from 0 to 1.
        count (`int`): k, from 0; all survive where it is at least n.
        target (`float`): rho.
        certain (`NDArray[np.bool_]` of shape `(n,)`, *optional*): responses that have ended already.

    Returns:
        `NDArray[np.float64]` of shape `(n,)`, with sum `min(count, n)`.
    """
    # What differs by less than a millionth counts as tied: it could only be told apart by a b beyond all precision.
    q = np.round(np.asarray(q, np.float64), 6)
    if count >= len(q):
        return np.ones(len(q))
    if certain is not None and 0 < certain.sum() < count:
        places = count - int(certain.sum())
        pi = np.ones(len(q))
        pi[~certain] = survival_probabilities(q[~certain], places, (target * count - q[certain].sum()) / places)
        return pi
    if count == 0:
        return np.zeros(len(q))
    ordered = np.sort(q)
    # Towards the edges of what can be met a and b grow without bound.
    if target > ordered[-count:].mean() - 1e-6:
        return _highest(q, count)
    if target < ordered[:count].mean() + 1e-6:
        return _highest(-q, count)
    return _balanced(q - target, count)


def draw(pi: NDArray, rng: np.random.Generator) -> NDArray:
    """Exactly sum(pi) responses, each with probability pi_i.

    Systematic sampling over a random order: the pi_i, laid end to end, are intervals of a line, and those survive that
    hold one of the points u, u + 1, u + 2, ... with u uniform on (0, 1].

    Args:
        pi (`NDArray` of shape `(n,)`): survival probabilities, whose sum is a whole number.
        rng (`np.random.Generator`): n + 1 uniforms are drawn from it.

    Returns:
        `NDArray[np.bool_]` of shape `(n,)`.

    Raises:
        ValueError: the sum is not a whole number, or a probability is not between 0 and 1.
    """
    pi = np.asarray(pi, np.float64)
    if not np.all((pi >= 0) & (pi <= 1)) or abs(pi.sum() - np.round(pi.sum())) > 1e-6:
        raise ValueError(f"survival probabilities are between 0 and 1 and their sum is a whole number, not {pi}")
    survives = pi == 1  # off the line: rounding could lay two points on an interval of length 1
    order = np.argsort(rng.random(len(pi)))
    order = order[~survives[order]]
    points = 1 - rng.random() + np.arange(round(pi.sum()) - survives.sum())
    ends = np.cumsum(pi[order])
    ends[ends == ends.max(initial=0)] = len(points)  # nor must it lay the last point behind the line
    survives[order[np.searchsorted(ends, points)]] = True
    return survives


def _highest(q: NDArray, count: int) -> NDArray:
    """The highest `count` for certain; those that tie for the last places share them."""
    last = np.sort(q)[-count]
    above, tied = q > last, q == last
    return above + tied * ((count - above.sum()) / tied.sum())


def _balanced(x: NDArray, count: int) -> NDArray:
    """sigmoid(a + b x) with sum `count` and with sum 0 when multiplied by x, by Newton's method.

    Newton's steps, halved until the convex function of `survival_probabilities` falls, reach its minimum from anywhere.
    """
    n = len(x)
    a, b = float(np.log(count / (n - count))), 0.0
    for _ in range(200):
        pi = _sigmoid(a + b * x)
        excess, imbalance = pi.sum() - count, pi @ x
        if abs(excess) + abs(imbalance) < 1e-12 * n:
            break
        w = pi * (1 - pi)
        centre = (w @ x) / w.sum()
        spread = w @ (x - centre) ** 2
        step_b = -(imbalance - centre * excess) / spread
        step_a = -excess / w.sum() - centre * step_b
        # Near the minimum the function is flat to rounding, where Newton's steps are at their best.
        enough = _dual(a, b, x, count) + 1e-12 * n
        size = 1.0
        while _dual(a + size * step_a, b + size * step_b, x, count) > enough:
            size /= 2
        a, b = a + size * step_a, b + size * step_b
    return _sigmoid(a + b * x)


def _dual(a: float, b: float, x: NDArray, count: int) -> float:
    return float(np.logaddexp(0, a + b * x).sum() - a * count)


def _sigmoid(z: NDArray) -> NDArray:
    return np.exp(-np.logaddexp(0, -z))
