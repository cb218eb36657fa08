"""OpenRLHF's `train_ppo_ray` with a flag or two more.

    python3 -m openrlhf_integration.train_ppo_ray --use_spec_rollout --spec.prune \
        <every flag of openrlhf.cli.train_ppo_ray>

Our flags are taken out of the command line; parsing, checks and training are OpenRLHF's own. Its script looks four
names up in this process, at which it finds ours (openrlhf 0.11.2):

- `openrlhf.utils.config.hierarchize`: every argument passes through it on the way from the parser to the checks.
- `openrlhf.trainer.ray.create_vllm_engines`, and in it `RolloutRayActor`.
- `openrlhf.trainer.ppo_trainer.PPOTrainer`, `openrlhf.trainer.ppo_trainer_async.PPOTrainerAsync`.

What they start in other processes are subclasses, found there by import.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from openrlhf_integration.checks import UnsupportedSetting
from openrlhf_integration.config import SpecSettings, spec_parser, split_arguments

SCRIPT = "openrlhf.cli.train_ppo_ray"


def main(arguments: list[str] | None = None) -> None:
    """Train.

    Args:
        arguments (`list[str]`, *optional*): the command line; defaults to that of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        try:
            _run_script(["--help"])
        finally:  # OpenRLHF's parser leaves by SystemExit
            print("\n" + spec_parser().format_help().partition("\n\n")[2], end="")
    settings, rest = split_arguments(arguments)
    if settings is None:
        _run_script(rest)
        return
    with speculative(settings):
        _run_script(rest)


def _run_script(arguments: list[str]) -> None:
    previous, sys.argv = sys.argv, [SCRIPT, *arguments]
    try:
        runpy.run_module(SCRIPT, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = previous


@contextmanager
def speculative(settings: SpecSettings) -> Iterator[None]:
    """Let OpenRLHF's script build our actors.

    Args:
        settings (`SpecSettings`): of the run.
    """
    import openrlhf.trainer.ppo_trainer as synchronous
    import openrlhf.trainer.ppo_trainer_async as asynchronous
    import openrlhf.trainer.ray as engines
    import openrlhf.trainer.ray.vllm_engine as engine
    import openrlhf.utils.config as config
    import ray

    from openrlhf_integration.checks import check_args
    from openrlhf_integration.rollout_actor import SpecRolloutActor
    from openrlhf_integration.seams import in_place_of
    from openrlhf_integration.start import announce, start_cache_of
    from openrlhf_integration.trainer import SpecPPOTrainer, SpecPPOTrainerAsync

    parsed: list[Any] = []
    cache: list[Any] = []  # the actor lives as long as its handle, which is here

    def hierarchize(flat: Any, original: Any = config.hierarchize) -> Any:
        args = original(flat)
        args.spec = settings
        check_args(args)
        announce(args)
        # The policy's actor resets the prefix cache at each update of the weights, where this says that there is one.
        args.vllm.enable_prefix_caching = True
        parsed.append(args)
        return args

    def create_vllm_engines(*args: Any, original: Any = engines.create_vllm_engines, **kwargs: Any) -> list[Any]:
        cache.append(start_cache_of(parsed[-1]))
        with in_place_of(engine, RolloutRayActor=ray.remote(SpecRolloutActor)):
            return original(*args, **kwargs)

    with ExitStack() as stack:
        for module, names in (
            (config, dict(hierarchize=hierarchize)),
            (engines, dict(create_vllm_engines=create_vllm_engines)),
            (synchronous, dict(PPOTrainer=ray.remote(SpecPPOTrainer))),
            (asynchronous, dict(PPOTrainerAsync=ray.remote(SpecPPOTrainerAsync))),
        ):
            stack.enter_context(in_place_of(module, **names))
        try:
            yield
        finally:  # its name is free again, should this process train once more
            for actor in cache:
                ray.kill(actor)


if __name__ == "__main__":
    try:
        main()
    except UnsupportedSetting as error:
        sys.exit(f"error: {error}")
