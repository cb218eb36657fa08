"""vLLM's own server, reached through TRL's client, as the engine of a rollout. As read in TRL 1.16.0.

The main process alone has a client. It asks for the rows of all ranks, so that the server has them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from requests.adapters import HTTPAdapter

from specrl_plugins import Continuation
from specrl_plugins.intercept import Intercepted
from specrl_plugins.ranks import Ranks, own_rows, together
from trl_integration.checks import UnsupportedSetting

if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

Row = TypeVar("Row")
Answer = TypeVar("Answer")

# Sequences that are scored by one request, which answers with a few hundred bytes a token.
_SCORED_AT_ONCE = 16


class ServerEngine:
    """Scores by prompt log-probs and generates with a budget a row, in as few requests as that takes.

    The server's prompt log-probs are of the model's plain distribution: it applies neither temperature nor a cut of
    the support to them. Settings that sample from another one are refused before, by
    [`~trl_integration.checks.check_config`].

    Args:
        generation ([`~trl.generation.vllm_generation.VLLMGeneration`]): in server mode.
        eos_token_ids (`Sequence[int]`): ids that end a response.
        ranks (`Ranks`): the processes that train together.

    Attributes:
        max_model_len (`int`): context length of the server, tokens.

    Raises:
        UnsupportedSetting: the server returns logits where it is asked for log-probs.
    """

    def __init__(self, generation: VLLMGeneration, eos_token_ids: Sequence[int], ranks: Ranks):
        self._client: VLLMClient | None = getattr(generation, "vllm_client", None)
        self._eos_token_ids = frozenset(eos_token_ids)
        self.ranks = ranks
        self._sampling = {
            "repetition_penalty": generation.repetition_penalty,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "min_p": generation.min_p or 0.0,
            "logprobs": 0,
        }
        found = together(ranks, self._server_settings)
        self.max_model_len, mode, at_once = ranks.gather(found)[0]  # type: ignore[misc]
        if not mode.endswith("_logprobs"):
            raise UnsupportedSetting(
                f"`use_spec_rollout=True` does not work with a vLLM server that runs with `--logprobs-mode {mode}`: it "
                "returns no log-probs. Restart it with `--logprobs-mode processed_logprobs`."
            )
        # Twice as many requests as the server runs sequences: more would only wait, fewer would let it wait for us.
        self._max_requests = 2 * at_once
        if self._client is not None:
            self._keep_connections(self._client, self._max_requests)

    def _server_settings(self) -> tuple[int, str, int] | None:
        """Context length, mode of log-probs, and how many sequences run at once; `None` without a client."""
        if self._client is None:
            return None
        info = self._client.get_server_info()
        at_once = info["scheduler_config"]["max_num_seqs"] * info["parallel_config"]["data_parallel_size"]
        return info["model_config"]["max_model_len"], info["model_config"]["logprobs_mode"], at_once

    @staticmethod
    def _keep_connections(client: VLLMClient, connections: int) -> None:
        """Let the client hold that many connections open. TRL's own limit is what one of its calls needs, 64."""
        retries = client.session.get_adapter(client.base_url).max_retries  # type: ignore[attr-defined]
        client.session.mount(client.base_url, HTTPAdapter(max_retries=retries, pool_maxsize=connections))

    @property
    def max_context(self) -> int:
        return self.max_model_len

    @property
    def max_scored(self) -> int:
        return self.max_model_len - 1  # a scored sequence leaves room for the token that vLLM insists on

    def score(self, prompts: Sequence[list[int]], continuations: Sequence[NDArray[np.int32]]) -> list[NDArray]:
        """See [`specrl_plugins.Engine.score`]."""
        return self._ask(list(zip(prompts, continuations, strict=True)), self._score)

    def generate(self, contexts: Sequence[list[int]], budgets: Sequence[int]) -> list[Continuation]:
        """See [`specrl_plugins.Engine.generate`]."""
        # The server refuses a budget beyond its context, where an engine of one's own stops at the end of it.
        fitting = [
            max(1, min(budget, self.max_model_len - len(context)))
            for context, budget in zip(contexts, budgets, strict=True)
        ]
        return self._ask(list(zip(contexts, fitting, strict=True)), self._generate)

    def _ask(self, rows: list[Row], ask: Callable[[VLLMClient, list[Row]], list[Answer]]) -> list[Answer]:
        """Have the main process ask the server about the rows of all ranks; returns the answers to this rank's own.

        Raises:
            RuntimeError: the server did not answer; on every rank, so that none waits for the others.
        """
        gathered = self.ranks.gather(rows)
        requested = [row for part in gathered for row in part]
        answers: list[Answer] = []
        failure: Exception | None = None
        if self._client is not None and requested:
            try:
                answers = ask(self._client, requested)
            except Exception as error:  # whatever it is, the other ranks must hear of it
                failure = error
        answers, reason = self.ranks.gather((answers, failure and str(failure)))[0]
        if reason is not None:
            raise RuntimeError(f"the vLLM server did not do as asked: {reason}") from failure
        return answers[own_rows(self.ranks, gathered)]

    def _score(self, client: VLLMClient, rows: list[tuple[list[int], NDArray[np.int32]]]) -> list[NDArray[np.float32]]:
        scored = client.get_sequence_logprobs(
            [prompt + tokens.tolist() for prompt, tokens in rows],
            [len(prompt) for prompt, _ in rows],
            top_logprobs=0,  # of the given tokens alone
            chunk_size=_SCORED_AT_ONCE,
        )["actual_logprobs"]
        logprobs = [np.array(row, np.float32).reshape(-1) for row in scored]
        # TRL's client has minus infinity for what the server could not score.
        return [np.where(np.isneginf(row), np.float32(np.nan), row) for row in logprobs]

    def _generate(self, client: VLLMClient, rows: list[tuple[list[int], int]]) -> list[Continuation]:
        """One request for all rows of the same budget: a request has one, and a list of prompts."""
        continuations: dict[int, Continuation] = {}

        def request(budget: int, copies: int, prompts: list[tuple[list[int], list[int]]]) -> None:
            output = client.generate([context for context, _ in prompts], n=copies, max_tokens=budget, **self._sampling)
            places = [place for _, places in prompts for place in places]
            for place, ids, logprobs in zip(places, output["completion_ids"], output["logprobs"], strict=True):
                # TRL's client drops the server's reason: what is shorter than its budget ended by itself.
                ended = len(ids) < budget or ids[-1] in self._eos_token_ids
                continuations[place] = Continuation(
                    np.array(ids, np.int32),
                    np.array([position[0] for position in logprobs], np.float32),  # type: ignore[index]
                    "stop" if ended else "length",
                )

        # Those with the longest budgets first: they end last.
        requests = sorted(_alike(rows).items(), reverse=True)
        with ThreadPoolExecutor(min(len(requests), self._max_requests)) as pool:
            futures = [pool.submit(request, budget, copies, prompts) for (budget, copies), prompts in requests]
        for future in futures:
            future.result()
        return [continuations[place] for place in range(len(rows))]


def _alike(rows: list[tuple[list[int], int]]) -> dict[tuple[int, int], list[tuple[list[int], list[int]]]]:
    """Rows that can share a request: by budget and number of copies, each context with the places it has in the batch.

    The samples of a prompt that has no draft are copies of one context, which is sent once, as TRL does it.
    """
    places: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for place, (context, budget) in enumerate(rows):
        places.setdefault((tuple(context), budget), []).append(place)
    alike: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}
    for (context, budget), copies in places.items():
        alike.setdefault((budget, len(copies)), []).append((list(context), copies))
    return alike


class InterceptedGeneration(Intercepted[ServerEngine]):
    """Behaves as the `VLLMGeneration` it wraps, in server mode, but for two calls that all ranks make.

    `generate`, inside [`run_instead`], runs a piece of work of ours where TRL wanted to generate: after it synchronised
    the weights, and in its profiling.

    `sync_weights` fails loudly where the server keeps keys and values of the old ones.

    Args:
        generation ([`~trl.generation.vllm_generation.VLLMGeneration`]): in server mode.
        engine (`ServerEngine`): its server.
    """

    def __init__(self, generation: VLLMGeneration, engine: ServerEngine):
        super().__init__(generation)
        self.engine = engine

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list, list, list | None, list | None]:
        """As `VLLMGeneration.generate`; inside [`run_instead`] it returns no rows: `work` has handed them over."""
        work = self._taken_work()
        if work is None:
            return self._original.generate(
                prompts=prompts, images=images, num_generations=num_generations, profiler=profiler
            )
        with profiler or nullcontext():
            work(self.engine)
        return [], [], [], None

    def sync_weights(self) -> None:
        """As `VLLMGeneration.sync_weights`.

        Raises:
            RuntimeError: blocks of the prefix cache were in use, so stale ones remain. TRL's client does not look.
        """
        self._original.sync_weights()
        together(self.engine.ranks, self._reset_prefix_cache)

    def _reset_prefix_cache(self) -> None:
        client = getattr(self._original, "vllm_client", None)
        if client is None:
            return
        answer = client.session.post(f"{client.base_url}/reset_prefix_cache")
        if answer.status_code != 200 or not answer.json()["success"]:
            raise RuntimeError(
                f"the vLLM server could not reset its prefix cache ({answer.status_code}, {answer.text}): keys and "
                "values of old weights would be read. A request of someone else's does this."
            )
