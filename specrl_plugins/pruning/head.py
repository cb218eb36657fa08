"""The quality head: how promising a partial response is."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F


class QualityHead:
    """A small network on the policy's last hidden state, trained on the fly from final rewards.

    Its score is sigmoid(f(x)), where x is the hidden state h of the last token, standardised in each dimension with
    mean and standard deviation over the examples in its buffer,

        x = clip((h - mean) / std, -5, 5),        f(x) = w2 . silu(W1 x + b1) + b2,

    because some dimensions of hidden states are a thousand times larger than others. The buffer holds the most recent
    examples; each time it learns, it makes `UPDATES` steps on minibatches of them. With weights v_i and labels y_i the
    loss is

        sum_i v_i / V(y_i) * bce(f(x_i), y_i) / 2,        V(y) = sum of the v_i with label y,

    in which successes weigh as much as failures, however rare they are. So a score of 1/2 means that a response looks
    no better or worse than others, and how likely it is to succeed is the calibrator's to say. While the buffer holds
    one class alone there is nothing to learn.

    Everything random comes from a generator of its own; torch's global ones stay as they are.

    Args:
        hidden_size (`int`):
            Size of a hidden state.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the first weights and of the order of examples.
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
            Where the network is.
        buffer (`int`, *optional*, defaults to `4096`):
            Most examples kept.
    """

    WIDTH = 64  # of the hidden layer
    LEARNING_RATE = 0.01  # of AdamW, times hidden_size^(-1/2)
    WEIGHT_DECAY = 1.0  # large, for hidden states have more dimensions than there are examples
    MINIBATCH = 256
    UPDATES = 12  # each time it learns; many more fit the noise of the buffer

    def __init__(
        self,
        hidden_size: int,
        seed: int = 0,
        device: str | torch.device = "cpu",
        buffer: int = 4096,
    ):
        self.hidden_size = hidden_size
        self.device = torch.device(device)
        self._capacity = buffer
        self._random = torch.Generator().manual_seed(seed)
        with torch.inference_mode(False):
            inner = self._layer(hidden_size, self.WIDTH, std=hidden_size**-0.5)
            outer = self._layer(self.WIDTH, 1, std=0.1 * self.WIDTH**-0.5)
            self._network = nn.Sequential(inner, nn.SiLU(), outer).to(self.device)
            # The more inputs, the more a step of each weight moves their sum.
            rate = self.LEARNING_RATE * hidden_size**-0.5
            self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=rate, weight_decay=self.WEIGHT_DECAY)
            self._hidden = torch.zeros(0, hidden_size, dtype=torch.float32, device=self.device)
            self._labels = torch.zeros(0, dtype=torch.float32, device=self.device)
            self._weights = torch.zeros(0, dtype=torch.float32, device=self.device)
            self._mean = torch.zeros(hidden_size, dtype=torch.float32, device=self.device)
            self._std = torch.ones(hidden_size, dtype=torch.float32, device=self.device)

    def _layer(self, inputs: int, outputs: int, std: float) -> nn.Linear:
        # Not initialised by torch, which would take that from its global generator.
        layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float32))
        nn.init.normal_(layer.weight, std=std, generator=self._random)
        nn.init.zeros_(layer.bias)
        return layer

    def scores(self, hidden: NDArray) -> NDArray:
        """Score of each response, from its hidden state.

        Args:
            hidden (`NDArray[np.float32]` of shape `(rows, hidden)`): last-layer hidden states.

        Returns:
            `NDArray[np.float64]` of shape `(rows,)`, between 0 and 1, exclusively; NaN where a hidden state is not
            finite.

        Raises:
            ValueError: the hidden states have another shape.
        """
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            states = self._checked(hidden)
            logits = self._network(self._standardised(states)).squeeze(1).double().clamp(-30, 30)
            return torch.where(states.isfinite().all(1), torch.sigmoid(logits), torch.nan).cpu().numpy()

    def learn(self, hidden: NDArray, labels: NDArray, weights: NDArray) -> None:
        """Take examples into the buffer, and train.

        Args:
            hidden (`NDArray[np.float32]` of shape `(rows, hidden)`): last-layer hidden states, finite.
            labels (`NDArray` of shape `(rows,)`): 1 for a success, 0 for a failure.
            weights (`NDArray` of shape `(rows,)`): how many responses each stands for, above 0.

        Raises:
            ValueError: the hidden states have another shape.
        """
        # Whatever mode the rollout runs in: examples are kept, and training needs gradients in full precision.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(self.device.type, enabled=False),
        ):
            self._keep(self._checked(hidden), labels, weights)
            self._train()

    def _keep(self, hidden: torch.Tensor, labels: NDArray, weights: NDArray) -> None:
        def newest(old: torch.Tensor, new: Any) -> torch.Tensor:
            new = torch.as_tensor(new, dtype=torch.float32, device=self.device)
            return torch.cat([old, new])[-self._capacity :].clone()  # a view would keep, and save, all of it

        self._hidden = newest(self._hidden, hidden)
        self._labels = newest(self._labels, labels)
        self._weights = newest(self._weights, weights)
        if len(self._hidden) > 1:
            # A dimension that never changes tells nothing; it must not be divided by zero.
            self._std, self._mean = torch.std_mean(self._hidden, dim=0)
            self._std = torch.where(self._std > 0, self._std, 1.0)

    def _train(self) -> None:
        successes = self._weights @ self._labels
        failures = self._weights @ (1 - self._labels)
        if not successes or not failures:
            return
        share = torch.where(self._labels == 1, self._weights / successes, self._weights / failures) / 2
        size = min(self.MINIBATCH, len(share))
        passes = math.ceil(self.UPDATES * size / len(share))
        order = torch.cat([torch.randperm(len(share), generator=self._random) for _ in range(passes)])
        for rows in order[: self.UPDATES * size].to(self.device).split(size):
            logits = self._network(self._standardised(self._hidden[rows])).squeeze(1)
            losses = F.binary_cross_entropy_with_logits(logits, self._labels[rows], reduction="none")
            # Scaled up from the minibatch's share of the buffer: in expectation, the loss over the buffer.
            loss = (share[rows] * losses).sum() * len(share) / size
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()

    def _checked(self, hidden: NDArray) -> torch.Tensor:
        if hidden.ndim != 2 or hidden.shape[1] != self.hidden_size:
            raise ValueError(f"hidden states have the shape (rows, {self.hidden_size}), not {hidden.shape}")
        return torch.as_tensor(hidden, dtype=torch.float32, device=self.device)

    def _standardised(self, hidden: torch.Tensor) -> torch.Tensor:
        return ((hidden - self._mean) / self._std).clamp(-5, 5)

    def state_dict(self) -> dict[str, Any]:
        """Network, optimiser, buffer and generator."""
        return {
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "hidden": self._hidden,
            "labels": self._labels,
            "weights": self._weights,
            "mean": self._mean,
            "std": self._std,
            "random": self._random.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: it is of a head for another size of hidden states.
        """
        if state["hidden"].shape[1] != self.hidden_size:
            raise ValueError(
                f"the saved head is for hidden states of size {state['hidden'].shape[1]}, the model's have "
                f"{self.hidden_size}: resume with the model that it was trained with"
            )
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        for name in ("hidden", "labels", "weights", "mean", "std"):
            setattr(self, f"_{name}", state[name].to(self.device))
        self._random.set_state(state["random"].cpu())
