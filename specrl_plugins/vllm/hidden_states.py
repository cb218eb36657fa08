"""Last-layer hidden states of given contexts, out of a running vLLM engine.

The state of a context is what the LM head is given at its last token: the last layer's output after the final norm. A
request for one token makes the engine compute it, from the prefix cache but for the last block, in whatever batch the
scheduler puts it. Two things are left: to see the states, and to know which is whose.

**Seen** they are in `compute_logits(hidden_states)`, which vLLM requires of every generative model
(`vllm.model_executor.models.interfaces_base.VllmModelForTextGeneration`). While a tap is open, a [`Tap`] stands in its
place on each worker's model, put there by `apply_model` ("run a function directly on the model inside each worker"). It
returns what the model returns, and notes each row's state and highest log-probs. Nothing is passed to the engine when
it is built, so an engine that a framework built will do.

**Known** they are by their answers. A request asks for the [`TOP`] highest log-probs of its next token, and its state
is the row whose log-probs these are: they are of the same logits, so that they agree to rounding, and no other row's
do. So a state is only ever returned to a request that the LM head answered with it. Nothing is assumed about how
vLLM orders, chunks, pads, preempts or captures a batch, nor about who else is in it, and other requests are sampled as
ever.

What else vLLM offers, and why it is not used:

- Custom logits processors are given the rows of a batch in order. In 0.29 an engine that has one, or in whose
  environment one is installed, falls back to the older of vLLM's two model runners, which changes speed and rounding
  for all requests; in 0.31 the newer runner has an interface of its own and refuses processors of the other. They are
  refused beside speculative decoding, and an engine that is already there takes none.
- Hidden-state extraction (`speculative_config={"method": "extract_hidden_states"}`) takes the place of speculative
  decoding, gives states before the final norm and hands them over in files.
- A pooling model returns states, but cannot generate: it would be a second engine with weights of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from specrl_plugins.ranks import OneRank, Ranks, own_rows

TOP = 20
"""Log-probs by which a state is found: as many as vLLM lets a request ask for by default (`max_logprobs`)."""

_TOLERANCE = 1e-4  # nats, between two ways to compute a log-softmax of the same logits in float32
_HELD_ROWS = 16384  # most rows that a tap holds: 128 MiB of a model with 4,096 features in half precision
_SENT = 1024  # contexts that are asked for at once; far fewer than are held, since a chunk of a prompt is a row too
_TIMES_ASKED = 3  # a state that other rows pushed out is asked for again
_LOGITS_ROWS = 64  # rows whose logits are in memory in float32 at a time


class HiddenStates:
    """The hidden states of an `LLM`.

    An engine in a process of its own (vLLM's default; TRL's is in the trainer's) needs
    `VLLM_ALLOW_INSECURE_SERIALIZATION=1`, as `LLM.apply_model` does.

    Args:
        llm (`LLM`): awake, with the weights whose states are wanted. Its `max_logprobs` is at least [`TOP`].
        ranks (`Ranks`, *optional*): the processes that share the engine, where it is tensor-parallel: they send it the
            contexts of all of them, in the same order, and each keeps the states of its own. Defaults to this one.
    """

    def __init__(self, llm: LLM, ranks: Ranks | None = None):
        self.llm = llm
        self.ranks = ranks or OneRank()

    def of(self, contexts: Sequence[list[int]]) -> NDArray[np.float32]:
        """The state of each context at its last token.

        Args:
            contexts (`batch` lists of `context tokens` ids): at least one context on some rank; each has at least one
                token, and one less than the engine's context length at most.

        Returns:
            `NDArray[np.float32]` of shape `(batch, features)`.

        Raises:
            RuntimeError: a state did not pass `compute_logits`.
        """
        gathered = self.ranks.gather(list(contexts))
        everyone = [context for part in gathered for context in part]
        states: list[NDArray[np.float32]] = []
        self.llm.apply_model(open_tap)
        try:
            for start in range(0, len(everyone), _SENT):
                states += self._ask(everyone[start : start + _SENT])
        finally:
            self.llm.apply_model(close_tap)
        return np.stack(states)[own_rows(self.ranks, gathered)]

    def _ask(self, contexts: Sequence[list[int]]) -> list[NDArray[np.float32]]:
        states: dict[int, NDArray[np.float32]] = {}
        for _ in range(_TIMES_ASKED):
            missing = [row for row in range(len(contexts)) if row not in states]
            if not missing:
                break
            outputs = self.llm.generate(
                [{"prompt_token_ids": contexts[row]} for row in missing],
                sampling_params=tapped_params(),
                use_tqdm=False,
            )
            replies = self.llm.apply_model(partial(tapped_states, answers=_answers(outputs)))
            states |= _found(missing, replies)
        return _all(states, len(contexts))


class AsyncHiddenStates:
    """The hidden states of an asynchronous engine (`AsyncLLM`), for many callers at a time, between other requests.

    Its process was started with `VLLM_ALLOW_INSECURE_SERIALIZATION=1`, which lets functions be sent to workers;
    OpenRLHF's actor sets it.

    Args:
        ask (async callable): sends token ids and `SamplingParams` to the engine, returns its last `RequestOutput`.
        collective_rpc (async callable): the engine's.
    """

    def __init__(
        self,
        ask: Callable[[list[int], SamplingParams], Awaitable[RequestOutput]],
        collective_rpc: Callable[..., Awaitable[list[Any]]],
    ):
        self.ask = ask
        self.collective_rpc = collective_rpc

    async def of(self, contexts: Sequence[list[int]]) -> NDArray[np.float32]:
        """See [`HiddenStates.of`]. The contexts of a call are sent together: a group of rollouts, not a whole batch."""
        await self._apply(open_tap)
        try:
            return np.stack(await self._ask(contexts))
        finally:
            await self._apply(close_tap)

    async def _ask(self, contexts: Sequence[list[int]]) -> list[NDArray[np.float32]]:
        states: dict[int, NDArray[np.float32]] = {}
        for _ in range(_TIMES_ASKED):
            missing = [row for row in range(len(contexts)) if row not in states]
            if not missing:
                break
            outputs = await asyncio.gather(*(self.ask(contexts[row], tapped_params()) for row in missing))
            states |= _found(missing, await self._apply(partial(tapped_states, answers=_answers(outputs))))
        return _all(states, len(contexts))

    async def _apply(self, function: Callable[[Any], Any]) -> list[Any]:
        return await self.collective_rpc("apply_model", args=(function,))


class Tap:
    """Stands in place of a model's `compute_logits`, and notes what it is given.

    What is noted is on its way to the host while the model goes on, so that nothing waits for it.

    Args:
        compute_logits (callable): the model's, which it calls.
    """

    def __init__(self, compute_logits: Callable[..., Tensor | None]):
        self.compute_logits = compute_logits
        self.users = 0
        self._rows: deque[tuple[Tensor, Tensor]] = deque()  # states and highest log-probs of one call each
        self._held = 0

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        logits = self.compute_logits(hidden_states, *args, **kwargs)
        if logits is not None:  # a tensor-parallel rank that does not sample has none
            self._note(hidden_states, logits)
        return logits

    def _note(self, hidden_states: Tensor, logits: Tensor) -> None:
        top = torch.cat([_top_logprobs(part) for part in logits.split(_LOGITS_ROWS)])
        self._rows.append((_on_host(hidden_states), _on_host(top)))
        self._held += len(top)
        while self._held > _HELD_ROWS and len(self._rows) > 1:
            self._held -= len(self._rows.popleft()[1])

    def find(self, answers: Tensor) -> list[NDArray[np.float32] | None]:
        """The states of rows that were noted.

        Args:
            answers (`Tensor` of shape `(requests, TOP)`): highest log-probs, nats, in falling order.

        Returns:
            An array of shape `(features,)` a request; `None` where no row that is held has these log-probs.
        """
        if not self._rows:
            return [None] * len(answers)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # what is on its way has arrived
        ends = np.cumsum([len(top) for _, top in self._rows])
        distances, rows = torch.cdist(answers, torch.cat([top for _, top in self._rows]), p=float("inf")).min(1)

        def state(row: int) -> NDArray[np.float32]:
            call = int(np.searchsorted(ends, row, side="right"))
            return self._rows[call][0][row - int(ends[call])].float().numpy()  # counted from the end of its call

        return [
            state(row) if distance <= _TOLERANCE else None
            for row, distance in zip(rows.tolist(), distances.tolist(), strict=True)
        ]


def open_tap(model: Any) -> None:
    """Note the model's states until [`close_tap`] was called as often as this."""
    if not isinstance(model.compute_logits, Tap):
        model.compute_logits = Tap(model.compute_logits)
    model.compute_logits.users += 1


def close_tap(model: Any) -> None:
    """Undo [`open_tap`]; the last one to close leaves the model as it was."""
    tap = model.compute_logits
    tap.users -= 1
    if not tap.users:
        del model.compute_logits  # the method of the class shows again, or what somebody else put in its place
        if model.compute_logits != tap.compute_logits:
            model.compute_logits = tap.compute_logits


def tapped_states(model: Any, answers: NDArray[np.float32]) -> list[NDArray[np.float32] | None]:
    """See [`Tap.find`]."""
    return model.compute_logits.find(torch.from_numpy(answers))


def tapped_params() -> SamplingParams:
    """How to ask for a context's state: vLLM insists on generating a token. A greedy one needs no randomness."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=TOP,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _top_logprobs(logits: Tensor) -> Tensor:
    logits = logits.float()
    return logits.topk(TOP).values - logits.logsumexp(-1, keepdim=True)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy that will be there once the device is done, in pinned memory where it comes from one."""
    return tensor.to("cpu", non_blocking=True, copy=True)


def _answers(outputs: Sequence[RequestOutput]) -> NDArray[np.float32]:
    """The highest log-probs of each request's token, in falling order, of shape `(requests, TOP)`."""
    answers = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        # The sampled token comes first, and then again by its rank.
        top = logprobs.logprobs[1 : 1 + TOP] if isinstance(logprobs, FlatLogprobs) else []
        if len(top) < TOP:
            raise RuntimeError(
                f"vLLM answered with {len(top)} log-probs where {TOP} were asked for "
                f"(finish_reason={output.outputs[0].finish_reason!r})."
            )
        answers.append(top)
    return np.array(answers, np.float32)


def _found(
    rows: Sequence[int], replies: Sequence[Sequence[NDArray[np.float32] | None]]
) -> dict[int, NDArray[np.float32]]:
    """The states that a worker has: tensor-parallel ones have the same or none, pipeline stages but the last none."""
    found = {}
    for row, *workers in zip(rows, *replies, strict=True):
        state = next((state for state in workers if state is not None), None)
        if state is not None:
            found[row] = state
    return found


def _all(states: dict[int, NDArray[np.float32]], count: int) -> list[NDArray[np.float32]]:
    if len(states) < count:
        raise RuntimeError(
            f"{count - len(states)} of {count} hidden states were not seen in {_TIMES_ASKED} attempts. Either other "
            "requests pushed them out, or the engine is one whose states cannot be seen: `logprobs_mode` must be one "
            "of log-probs, `data_parallel_size` 1, and `enable_batch_sharded_sampling` off."
        )
    return [states[row] for row in range(count)]
