"""Sampling through `model.generate_batch`, transformers' continuous batching, with a budget a row and log-probs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints

from specrl_plugins import Continuation
from trl_integration.sampling import method_in_place


class BatchRecorder:
    """Samples a batch of requests, each with its own budget, and keeps what came of them.

    The log-prob of a token is the log of the softmax that it was drawn from, so temperature is in it.

    Args:
        model ([`~transformers.PreTrainedModel`]): what samples.
        budgets (`Sequence[int]` of length `batch`): most tokens to sample for each row.
        eos_token_ids (`Sequence[int]`): ids that end a row.
    """

    def __init__(self, model: PreTrainedModel, budgets: Sequence[int], eos_token_ids: Sequence[int]):
        self.model: Any = model
        self.budgets = budgets
        self.eos_token_ids = list(eos_token_ids)
        self._outputs: list[Any] = []

    def generate_batch(
        self, inputs: Sequence[list[int]], generation_config: Any, continuous_batching_config: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """As the model's own, which knows neither budgets nor failures: it leaves out the rows that failed.

        Raises:
            RuntimeError: a row failed.
        """
        generation_config, batching = copy.copy(generation_config), copy.copy(continuous_batching_config)
        generation_config.max_new_tokens, batching.return_logprobs = max(self.budgets), True
        outputs: dict[str, Any] = {}
        hints = WorkloadHints(max(map(len, inputs)), max(self.budgets), len(inputs))  # what the model's own tells it
        with self.model.continuous_batching_context_manager(
            generation_config=generation_config, continuous_batching_config=batching, workload_hints=hints
        ) as manager:
            # Rows that begin alike go together: they share the blocks of their prompts.
            for row in sorted(range(len(inputs)), key=lambda row: inputs[row], reverse=True):
                manager.add_request(
                    inputs[row],
                    request_id=str(row),
                    max_new_tokens=self.budgets[row],
                    eos_token_id=self.eos_token_ids,
                )
            while len(outputs) < len(inputs):
                output = manager.get_result(timeout=1)
                if output is None and not manager.is_running():
                    raise RuntimeError(f"continuous batching ended before all rows did: {manager.fatal_error}")
                if output is not None and output.error is not None:
                    raise RuntimeError(f"continuous batching failed: {output.error}")
                if output is not None:
                    outputs[output.request_id] = output
        self._outputs = [outputs[str(row)] for row in range(len(inputs))]
        return {output.request_id: output for output in self._outputs}

    def continuations(self) -> list[Continuation]:
        """What was sampled, one continuation a row."""
        return [
            Continuation(
                np.array(output.generated_tokens, np.int32),
                np.array(output.logprobs, np.float32),
                "stop" if output.generated_tokens[-1] in self.eos_token_ids else "length",
            )
            for output in self._outputs
        ]


@contextmanager
def recorded_generate_batch(
    model: PreTrainedModel, budgets: Sequence[int], eos_token_ids: Sequence[int]
) -> Iterator[BatchRecorder]:
    """While open, `model.generate_batch` stops each row at its budget and notes what it samples.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model whose `generate_batch` is called, once.
        budgets, eos_token_ids: see [`BatchRecorder`].
    """
    recorder = BatchRecorder(model, budgets, eos_token_ids)
    with method_in_place(model, "generate_batch", recorder.generate_batch):
        yield recorder
