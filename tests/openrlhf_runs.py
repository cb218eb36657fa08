"""Real OpenRLHF runs of the tiny model on a CPU: its launcher, trainers, executors and engines, with Ray.

OpenRLHF's policy and critic need CUDA and DeepSpeed; [`CpuPolicyActor`] and [`CpuCriticActor`] train in their place.
Its engines ask for bf16 and for weights by CUDA; [`CpuRolloutActor`] is ours with the settings that a CPU build of vLLM
needs. All else is as it is.
`conftest.py` puts the stand-ins for flash-attn, and this file, on the path of worker processes.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import openrlhf.utils
import ray
import torch
import vllm_cpu
from openrlhf.trainer.ray.launcher import BaseModelActor
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor, _load_agent_executor
from openrlhf.utils.agent import SingleTurnAgentExecutor
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import openrlhf_integration.rollout_actor as rollout_actor
from openrlhf_integration.cache_actor import running_cache
from openrlhf_integration.rollout_actor import Group, Sample, SpecRolloutActor, _sample
from openrlhf_integration.seams import in_place_of, plain
from openrlhf_integration.start import start_cache_of
from openrlhf_integration.train_ppo_ray import main

PROMPTS = [f"{a}+{b}" for a in range(3) for b in range(2)]
# More is reused, and for longer, than by default.
LENIENT = ["--spec.log_lenience", "0.5", "--spec.carry_limit", "0"]

REWARD = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    share = torch.tensor([sum(c.isdigit() for c in text) / (len(text) + 1) for text in texts])
    share *= torch.tensor([prompt != "?" for prompt in prompts])
    return {"rewards": share, "scores": share, "extra_logs": {"digits": share}}
"""

AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Turns(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        text = states["action_text"]
        reward = torch.tensor(sum(c.isdigit() for c in text) / (len(text) + 1))
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": " go on: " if self.turns < 2 else "",
            "done": self.turns == 2,
            "sampling_params": states["sampling_params"],
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Turns)
"""


def start_ray() -> None:
    ray.init(
        "local", num_cpus=4, num_gpus=4, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=True
    )


def write_files(directory: Path, prompts=PROMPTS) -> dict[str, str]:
    """A data set, a reward function and an agent; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {name: directory / name for name in ("prompts.jsonl", "reward.py", "agent.py")}
    files["prompts.jsonl"].write_text("".join(json.dumps({"input": p, "label": p}) + "\n" for p in prompts))
    files["reward.py"].write_text(REWARD)
    files["agent.py"].write_text(AGENT)
    return {name: str(path) for name, path in files.items()}


def flags(model: str, directory: Path, *more: str, **changes: object) -> list[str]:
    """A command line for OpenRLHF: flags by name, with dots as double underscores; `True` for one without a value."""
    files = write_files(directory, changes.pop("prompts", PROMPTS))
    values: dict[str, object] = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": files["prompts.jsonl"],
        "data.input_key": "input",
        "data.label_key": "label",
        "data.max_len": 64,
        "rollout.max_new_tokens": 12,
        "rollout.batch_size": 3,
        "rollout.n_samples_per_prompt": 4,
        "rollout.micro_batch_size": 4,
        "train.batch_size": 12,
        "train.micro_batch_size": 4,
        "train.num_episodes": 2,
        "actor.num_gpus_per_node": 1,
        "critic.num_gpus_per_node": 1,
        "actor.adam.lr": 1e-3,
        "vllm.num_engines": 1,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "reward.remote_url": files["reward.py"],
        "ckpt.output_dir": directory / "out",
        "ckpt.path": directory / "ckpt",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    line = []
    for name, value in values.items():
        if value is not None:
            line += (
                [f"--{name}"]
                if value is True
                else [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
            )
    return [*line, *more]


class Parsed(Exception):
    """Carries OpenRLHF's arguments out of its script, at the place where training would begin."""


def parse(arguments: list[str]):
    """OpenRLHF's arguments, as its own script and our launcher leave them."""

    def stop(args):
        raise Parsed(args)

    with in_place_of(openrlhf.utils, get_strategy=stop), in_place_of(ray, is_initialized=lambda: True):
        try:
            main(arguments)
        except Parsed as parsed:
            return parsed.args[0]
    raise AssertionError("the script ended before training began")


class SyncFromDirectory:
    """Weights from a checkpoint, into an engine on a CPU."""

    def sync_from_dir(self, path):
        self.reload_weights(weights_path=path)


class OnCpu:
    """Goes before a rollout actor in the bases of a class."""

    async def __init__(self, **kwargs):
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        vllm_cpu.expand_any_type()
        await super().__init__(
            **kwargs
            | dict(
                dtype="float32",
                enforce_eager=True,
                block_size=32,  # shorter than a prompt and its response, so that the prefix cache has work
                gpu_memory_utilization=0.2,
                worker_extension_cls="openrlhf_runs.SyncFromDirectory",
            )
        )

    async def speculative_method(self):
        return self.llm.vllm_config.speculative_config.method

    async def sync_from_dir(self, path):
        await self.llm.collective_rpc("sync_from_dir", args=(path,))


class CpuPlainActor(OnCpu, plain(RolloutRayActor)):
    pass


class CpuRolloutActor(OnCpu, SpecRolloutActor):
    async def meet(self, agent_func_path, remote_rm_url):
        """Serve another run: its cache, its agent or reward function, and the weights that it begins with."""
        await self.reset_prefix_cache()
        await self.sync_from_dir(self.kwargs["model"])
        self._cache = running_cache()
        self._rules = await self._cache.rules.remote()
        self.executor = (
            _load_agent_executor(agent_func_path) if agent_func_path else SingleTurnAgentExecutor(remote_rm_url)
        )

    async def one_of_each(self, prompt, params):
        """An output of ours, the second of its prompt, and an ordinary one."""
        tokenizer = AutoTokenizer.from_pretrained(self.kwargs["model"])
        await self._cache.begin.remote(True)

        async def ours():
            _sample.set(sample := Sample(Group(1, tokenizer), 0))
            output = await self.generate(prompt, deepcopy(params))
            await self._store([sample], [{"reward": None}])
            return output

        await asyncio.create_task(ours())
        await self._cache.begin.remote(True)
        return await asyncio.create_task(ours()), await self.generate(prompt, deepcopy(params))

    async def stall(self):
        """Requests wait from now on."""
        await self.llm.pause_generation(mode="keep")


class CpuPolicyActor(BaseModelActor):
    """The policy, one process, no DeepSpeed: a plain policy gradient."""

    def init_model_from_pretrained(self, strategy, pretrain, max_steps=None, vllm_engines=None):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.strategy, self.args, self.vllm_engines = strategy, strategy.args, vllm_engines
        self.model = AutoModelForCausalLM.from_pretrained(pretrain, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(pretrain)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.args.actor.adam.lr)
        self.experiences, self.states = [], {}
        saved = Path(self.args.ckpt.path) / "_actor" / "states.pt"
        if self.args.ckpt.load_enable and saved.exists():
            self.states, weights = torch.load(saved, weights_only=False)
            self.model.load_state_dict(weights)

    def empty_cache(self):
        pass

    def forward(self, sequences, action_mask, attention_mask, **kwargs):
        with torch.no_grad():
            return self._log_probs(sequences, attention_mask) * action_mask

    def _log_probs(self, sequences, attention_mask):
        logits = self.model(sequences, attention_mask=attention_mask).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, sequences[:, 1:, None])[..., 0]

    def append(self, experience):
        self.experiences.append(experience)

    def fit(self, kl_ctl=0):
        self.optimizer.zero_grad()
        tokens = sum(e.action_mask.sum() for e in self.experiences)
        worst = 0.0
        for e in self.experiences:
            log_probs = self._log_probs(e.sequences, e.attention_mask)
            (-(log_probs * e.advantages * e.action_mask).sum() / tokens).backward()
            if e.rollout_log_probs is not None:
                worst = max(worst, ((log_probs - e.rollout_log_probs) * e.action_mask).abs().max().item())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), torch.inf).item()
        self.optimizer.step()
        self.experiences = []
        return {"rollout_logprob_difference": worst, "actor_grad_norm": norm}

    def broadcast_to_vllm(self):
        if self.args.vllm.enable_prefix_caching:
            ray.get([engine.reset_prefix_cache.remote() for engine in self.vllm_engines])
        path = str(Path(self.args.ckpt.output_dir).absolute() / "weights")
        self.model.save_pretrained(path)
        ray.get([engine.sync_from_dir.remote(path) for engine in self.vllm_engines])

    def get_checkpoint_states(self):
        return self.states

    def save_checkpoint(self, tag, client_states=None, **kwargs):
        path = Path(self.args.ckpt.path) / "_actor"
        path.mkdir(parents=True, exist_ok=True)
        torch.save((client_states, self.model.state_dict()), path / "states.pt")

    def save_model(self):
        self.model.save_pretrained(Path(self.args.ckpt.output_dir))


class CpuCriticActor(BaseModelActor):
    """The critic of GAE, one process, no DeepSpeed: a linear head on a transformer, trained by squared errors."""

    def init_model_from_pretrained(self, strategy, pretrain, max_steps):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.strategy = strategy
        self.body = AutoModel.from_pretrained(pretrain, dtype=torch.float32)
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1)
        parameters = [*self.body.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=strategy.args.critic.adam.lr)
        self.experiences = []

    def _values(self, sequences, attention_mask):
        """Of what comes before each token, shape `(batch, tokens - 1)`, as OpenRLHF's critic."""
        return self.head(self.body(sequences, attention_mask=attention_mask).last_hidden_state)[:, :-1, 0]

    def forward(self, sequences, action_mask, attention_mask):
        with torch.no_grad():
            return self._values(sequences, attention_mask) * action_mask

    def append(self, experience):
        self.experiences.append(experience)

    def fit(self):
        self.optimizer.zero_grad()
        tokens = sum(e.action_mask.sum() for e in self.experiences)
        total = 0.0
        for e in self.experiences:
            errors = (self._values(e.sequences, e.attention_mask) - e.returns) * e.action_mask
            loss = errors.square().sum() / tokens
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.experiences = []
        return {"critic_loss": total}


def free_placement_groups() -> None:
    """OpenRLHF leaves those of its engines to the end of the job, which here is that of all tests."""
    for group, state in placement_group_table().items():
        if state["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))


def create_engines(args, actor):
    """Engines as OpenRLHF's own function makes them, of another class."""
    import openrlhf.trainer.ray.vllm_engine as engine

    with in_place_of(engine, RolloutRayActor=ray.remote(actor)):
        return engine.create_vllm_engines(
            args.vllm.num_engines,
            args.vllm.tensor_parallel_size,
            args.actor.model_name_or_path,
            args.train.seed,
            False,
            args.vllm.enable_prefix_caching,
            True,
            args.data.max_len,
            remote_rm_url=args.reward.remote_url,
        )


@contextmanager
def warm_engines(args) -> Iterator[list]:
    """Engines for many short runs, each with a cache of its own."""
    cache = start_cache_of(args)  # which an engine asks for its rules as it starts
    engines = create_engines(args, CpuRolloutActor)
    ray.get([engine.get_num_unfinished_requests.remote() for engine in engines])
    ray.kill(cache)
    yield engines
    for engine in engines:
        ray.kill(engine)
    free_placement_groups()


class WarmPolicyActor:
    """Stands for the class of an actor of its own in each run: the one policy actor of all warm runs, which loads its
    model anew in each. Starting one is mostly imports."""

    @staticmethod
    def options(**options):
        return ray.remote(CpuPolicyActor).options(name="warm_policy", get_if_exists=True, lifetime="detached")


def train(arguments: list[str], warm: list | None = None) -> None:
    """A training run through our launcher, with actors of its own, or with engines that are `warm` already and the warm
    policy actor."""
    import openrlhf.trainer.ray as engines
    import openrlhf.trainer.ray.ppo_actor as ppo_actor
    import openrlhf.trainer.ray.ppo_critic as ppo_critic
    import openrlhf.trainer.ray.vllm_engine as engine

    def create(*args, agent_func_path, remote_rm_url, original=engines.create_vllm_engines, **kwargs):
        if warm is None:
            return original(*args, agent_func_path=agent_func_path, remote_rm_url=remote_rm_url, **kwargs)
        ray.get([engine.meet.remote(agent_func_path, remote_rm_url) for engine in warm])
        return warm

    with (
        in_place_of(engines, create_vllm_engines=create),
        in_place_of(engine, RolloutRayActor=ray.remote(CpuPlainActor)),
        in_place_of(ppo_actor, PolicyModelActor=WarmPolicyActor if warm else ray.remote(num_gpus=1)(CpuPolicyActor)),
        in_place_of(ppo_critic, CriticModelActor=ray.remote(num_gpus=1)(CpuCriticActor)),
        in_place_of(rollout_actor, SpecRolloutActor=CpuRolloutActor),
    ):
        try:
            main(arguments)
        finally:
            if warm is None:
                free_placement_groups()


def history(directory: Path) -> list[dict[str, float]]:
    """What a run wrote to TensorBoard, one dict a step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps: dict[int, dict[str, float]] = {}
    for file in sorted(directory.rglob("events.*")):
        events = EventAccumulator(str(file.parent)).Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                steps.setdefault(event.step, {})[name] = event.value
    return [steps[step] for step in sorted(steps)]
