"""OpenRLHF: the launcher's command line, what it refuses, and the places in OpenRLHF that the adapter relies on."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf")
pytest.importorskip("ray")
pytest.importorskip("vllm")

import numpy as np
from openrlhf_runs import flags, parse

from openrlhf_integration.cache_actor import Rules
from openrlhf_integration.checks import UnsupportedSetting
from openrlhf_integration.config import SpecSettings, split_arguments
from openrlhf_integration.samples_generator import RolloutSamples, share_out_seconds
from openrlhf_integration.seams import in_place_of, plain
from openrlhf_integration.train_ppo_ray import main
from specrl_plugins import ReusePolicy, RolloutCounts

pytestmark = pytest.mark.openrlhf


# -- command line


@pytest.mark.parametrize("form", ["--spec.{}", "--spec_{}"])
def test_flags_are_taken_out_and_the_rest_is_left(form):
    line = ["--actor.adam.lr", "1", form.format("log_lenience"), "0.25", "--use_spec_rollout", "--ds.packing_samples"]
    line += [form.format("guard"), "false", form.format("carry_limit") + "=3", form.format("rule"), "random"]
    settings, rest = split_arguments(line)
    assert settings == SpecSettings(use_spec_rollout=True, rule="random", log_lenience=0.25, guard=False, carry_limit=3)
    assert rest == ["--actor.adam.lr", "1", "--ds.packing_samples"]


def test_without_a_switch_there_are_no_settings():
    assert split_arguments(["--spec.rule", "full", "--x"]) == (None, ["--x"])
    assert split_arguments(["--spec_prune_oversample", "3", "--x"]) == (None, ["--x"])


def test_engines_that_draft_come_with_reuse_or_pruning(capsys):
    line = ["--spec.vllm_speculative_config", '{"method": "suffix"}']
    settings, _ = split_arguments(["--use_spec_rollout", *line])
    assert settings is not None and settings.vllm_speculative_config == {"method": "suffix"}
    with pytest.raises(SystemExit):
        split_arguments(line)
    assert "comes with --use_spec_rollout or --spec.prune" in capsys.readouterr().err


def test_pruning_has_a_switch_of_its_own():
    line = ["--spec.prune", "--spec_prune_oversample", "1.5", "--spec.prune_warmup_steps=3", "--x"]
    assert split_arguments(line) == (SpecSettings(prune=True, prune_oversample=1.5, prune_warmup_steps=3), ["--x"])


def test_defaults_are_those_of_the_trl_adapter():
    config = pytest.importorskip("trl_integration.config")
    theirs = {f.name: f.default for f in config.SpecRolloutArguments.__dataclass_fields__.values()}
    for name, setting in SpecSettings.__dataclass_fields__.items():
        assert theirs[name if name == "use_spec_rollout" else f"spec_{name}"] == setting.default, name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--spec.refresh_rate", "2"], "refresh_rate"),
        (["--spec.carry_limit", "-1"], "carry_limit"),
        (["--spec.cache_max_mib", "0"], "--spec.cache_max_mib"),
        (["--spec.rule", "fast"], "--spec.rule"),
        (["--spec.guard", "maybe"], "true"),
        (["--spec.log_lenience", "nan"], "--spec.log_lenience"),
        (["--spec.log_lenience", "-1"], "--spec.log_lenience is 0 or more"),
        (["--spec.lenience", "1"], "did you mean --spec.log_lenience"),
        (["--spec_refresh=1"], "did you mean --spec.refresh_rate"),
        (["--spec.vllm_speculative_config", "suffix"], "expected a JSON object"),
        (["--spec.vllm_speculative_config", "[1]"], "expected a JSON object"),
        (["--spec.prune_detection_length", "0"], "--spec.prune_detection_length"),
        (["--spec.prune_oversample", "0.5"], "--spec.prune_oversample"),
        (["--spec.prune_target_share", "1"], "--spec.prune_target_share"),
        (["--spec.prune_warmup_steps", "-1"], "--spec.prune_warmup_steps"),
        (["--spec.prune_success_reward", "nan"], "--spec.prune_success_reward"),
    ],
)
def test_values_out_of_range_are_refused_by_name(line, message, capsys):
    with pytest.raises(SystemExit):
        split_arguments(["--use_spec_rollout", *line])
    assert message in capsys.readouterr().err


def test_what_is_refused_ends_in_one_line(tiny_model, tmp_path):
    line = flags(tiny_model, tmp_path, "--use_spec_rollout", rollout__temperature=0.5)
    run = subprocess.run(
        [sys.executable, "-m", "openrlhf_integration.train_ppo_ray", *line], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "--rollout.temperature 0.5" in run.stderr and "Traceback" not in run.stderr


def test_an_unknown_flag_is_refused_by_openrlhf(tiny_model, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(flags(tiny_model, tmp_path, "--use_spec_rollout", "--spec.verifier", "trainer"))
    assert "--spec.verifier" in capsys.readouterr().err


def test_help_shows_both(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert "--actor.model_name_or_path" in shown and "--use_spec_rollout" in shown
    for name in set(SpecSettings.__dataclass_fields__) - {"use_spec_rollout"}:
        assert f"--spec.{name}" in shown and f"--spec_{name}" in shown


def test_the_script_gets_our_settings_and_prefix_caching(tiny_model, tmp_path, capsys):
    args = parse(flags(tiny_model, tmp_path, "--use_spec_rollout", "--spec.refresh_rate", "0.2"))
    assert args.spec == SpecSettings(use_spec_rollout=True, refresh_rate=0.2)
    assert args.vllm.enable_prefix_caching
    assert "--vllm.enable_prefix_caching was turned on" in capsys.readouterr().out


def test_without_the_switch_the_script_is_untouched(tiny_model, tmp_path):
    args = parse(flags(tiny_model, tmp_path))
    assert not hasattr(args, "spec") and not args.vllm.enable_prefix_caching


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        (dict(rollout__temperature=0.7), "--rollout.temperature 0.7"),
        (dict(rollout__top_p=0.9), "--rollout.top_p 0.9"),
        (dict(train__async_enable=True, train__partial_rollout_enable=True), "--train.partial_rollout_enable"),
        (dict(vllm__num_engines=0), "--vllm.num_engines"),
        (dict(train__full_determinism_enable=True), "--train.full_determinism_enable"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_wrong_is_refused_by_flag(tiny_model, tmp_path, changes, flag):
    with pytest.raises(UnsupportedSetting, match=flag):
        parse(flags(tiny_model, tmp_path, "--use_spec_rollout", **changes))
    parse(flags(tiny_model, tmp_path, **changes))  # OpenRLHF itself has nothing against it


PRUNING = dict(rollout__max_new_tokens=1024)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        (dict(rollout__max_new_tokens=512), "--rollout.max_new_tokens 512"),
        (dict(rollout__max_new_tokens=None, data__max_len=512), "--data.max_len 512"),
        (dict(reward__remote_url=None), "--reward.remote_url"),
        (dict(train__async_enable=True, train__partial_rollout_enable=True), "--train.partial_rollout_enable"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_pruned_right_is_refused_by_flag(tiny_model, tmp_path, changes, flag):
    with pytest.raises(UnsupportedSetting, match=flag):
        parse(flags(tiny_model, tmp_path, "--spec.prune", **PRUNING | changes))


def test_pruning_alone_takes_what_only_reuse_refuses(tiny_model, tmp_path, capsys, caplog):
    changes = dict(rollout__temperature=0.7, train__num_episodes=1)
    args = parse(flags(tiny_model, tmp_path, "--spec.prune", **PRUNING | changes))
    assert args.vllm.enable_prefix_caching and "--train.num_episodes" not in caplog.text
    printed = capsys.readouterr().out
    assert "Online pruning: 8 responses to a prompt start and 4 of them survive" in printed
    assert "Speculative rollouts" not in printed


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        ({}, {}, "not {}"),
        ({"method": "suffix", "num_speculative_tokens": 200}, {}, "at most 128"),
        ({"model": "small"}, dict(vllm__enable_sleep=True, train__colocate_all=True), "would not come back"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_drafts_that_would_fail_later_are_refused(tiny_model, tmp_path, config, changes, why):
    drafting = ["--use_spec_rollout", "--spec.vllm_speculative_config", json.dumps(config)]
    with pytest.raises(UnsupportedSetting, match=why):
        parse(flags(tiny_model, tmp_path, *drafting, **changes))


def test_one_episode_is_warned_of(tiny_model, tmp_path, caplog):
    parse(flags(tiny_model, tmp_path, "--use_spec_rollout", train__num_episodes=1))
    assert "--train.num_episodes" in caplog.text


def test_names_are_put_back_after_an_error():
    import types

    module = types.SimpleNamespace(a=1)
    with pytest.raises(KeyError), in_place_of(module, a=2):
        assert module.a == 2
        raise KeyError
    assert module.a == 1


# -- places in OpenRLHF


def parameters(function):
    """Without the one that Ray adds to the methods of actors."""
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


def test_openrlhf_is_where_the_adapter_expects_it():
    import openrlhf.trainer.ppo_trainer as synchronous
    import openrlhf.trainer.ppo_trainer_async as asynchronous
    import openrlhf.trainer.ray.vllm_engine as engine
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    actor = plain(engine.RolloutRayActor)
    assert parameters(actor.generate) == ["self", "prompt_token_ids", "sampling_params", "multi_modal_data"]
    assert parameters(actor.generate_responses) == (
        ["self", "prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "num_samples", "images"]
    )
    assert inspect.iscoroutinefunction(actor.reset_prefix_cache)
    assert "self.executor.execute(" in inspect.getsource(actor.generate_responses)
    assert "RolloutRayActor.options(" in inspect.getsource(engine.create_vllm_engines)

    assert parameters(SamplesGenerator._generate_vllm) == (
        ["self", "dataloader_iter", "num_prompts", "dynamic_filtering", "generate_kwargs"]
    )
    source = inspect.getsource(SamplesGenerator._generate_vllm)
    assert source.index("self._process_response_into_experience(") < source.index("if dynamic_filtering and")
    source = inspect.getsource(SamplesGenerator)
    assert source.count("self.tokenizer") == 2 and "hf_tokenizer=self.tokenizer," in source
    for method in (SamplesGenerator.generate_samples, SamplesGenerator.generate_eval_samples):
        assert "self._generate_vllm(" in inspect.getsource(method)

    base = synchronous.BasePPOTrainer
    assert parameters(base.train_step) == ["self", "rollout_samples", "global_step"]
    assert parameters(base.broadcast_to_vllm) == ["self"]
    assert parameters(base.init_checkpoint_states) == ["self"]
    assert parameters(base.save_best_checkpoint) == ["self", "eval_metrics", "global_step", "client_states"]
    source = inspect.getsource(base.save_best_checkpoint)
    assert source.index("if current_value > self.best_eval_metric_value:") < source.index('"save_checkpoint"')
    source = inspect.getsource(plain(synchronous.PPOTrainer))
    assert "self.samples_generator = SamplesGenerator(" in source
    assert source.index("self.init_checkpoint_states()") < source.index("self.samples_generator.generate_samples(")
    assert "SamplesGenerator(" in inspect.getsource(plain(asynchronous.GenerateSamplesActor).__init__)
    source = inspect.getsource(plain(asynchronous.PPOTrainerAsync).__init__)
    assert "GenerateSamplesActor.remote(" in source and "TrainingActor.remote(" in source
    # The lock is held while the shared trainer's broadcast runs.
    source = inspect.getsource(plain(asynchronous.TrainingActor).broadcast_to_vllm)
    assert source.index("acquire") < source.index("super().broadcast_to_vllm()") < source.index("release")


def test_no_method_that_calls_super_is_inherited_from_an_actor_class():
    """Ray would send workers a copy of it, with a copy of its class, and `super()` would fail there."""
    from openrlhf_integration import rollout_actor, trainer

    ours = [rollout_actor.SpecRolloutActor, trainer.SpecPPOTrainer, trainer.SpecPPOTrainerAsync]
    ours += [trainer.SpecTrainingActor, trainer.SpecGenerateSamplesActor]
    for cls in ours:
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            method = inspect.unwrap(method)
            if "__class__" in method.__code__.co_freevars:
                owner = method.__closure__[method.__code__.co_freevars.index("__class__")].cell_contents
                assert getattr(sys.modules[owner.__module__], owner.__name__) is owner, f"{cls.__name__}.{name}"


def test_images_and_requests_outside_of_a_sample_pass_through(monkeypatch):
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
    from vllm import SamplingParams

    from openrlhf_integration.rollout_actor import Group, Sample, SpecRolloutActor, _sample

    passed = []

    async def generate(self, *arguments):
        passed.append(arguments)

    monkeypatch.setattr(plain(RolloutRayActor), "generate", generate)
    actor = SpecRolloutActor.__new__(SpecRolloutActor)
    actor._warned_changed = False
    actor._rules = Rules(ReusePolicy(), 100, guard=False)
    params = SamplingParams(temperature=1.0, max_tokens=4)

    async def requests():
        await actor.generate([1], params)
        _sample.set(Sample(Group(1, None), 0))
        await actor.generate([2], params, {"image": ["picture"]})
        await actor.generate([3], params)  # a later turn
        for changed in (dict(temperature=0.5), dict(stop=["x"]), dict(top_k=3), dict(n=2), dict(logprobs=5)):
            _sample.set(Sample(Group(1, None), 0))
            await actor.generate([4], SamplingParams(**dict(temperature=1.0, max_tokens=4) | changed))

    asyncio.run(requests())
    assert [tokens for tokens, *_ in passed] == [[1], [2], [3], [4], [4], [4], [4], [4]]
    assert passed[1][2] == {"image": ["picture"]}


# -- counts


def test_stages_add_up_to_the_seconds_that_passed():
    counts = RolloutCounts(lookup_s=0.5, verify_s=20.0, generate_s=60.0, store_s=0.5)
    share_out_seconds(counts, 5.0)
    assert counts.seconds == pytest.approx(5.0)
    assert (counts.lookup_s, counts.verify_s) == (0.5, pytest.approx(1.0))  # the cache's own seconds are left alone
    counts = RolloutCounts(generate_s=60.0, judge_s=20.0)
    share_out_seconds(counts, 4.0)
    assert (counts.generate_s, counts.judge_s) == (pytest.approx(3.0), pytest.approx(1.0))


def test_metrics_travel_with_the_samples():
    import pickle

    samples = pickle.loads(pickle.dumps(RolloutSamples([1, 2], {"spec/reused_tokens": 3.0})))
    assert samples == [1, 2] and samples.metrics == {"spec/reused_tokens": 3.0}


# -- text


def byte_level():
    """Every token a byte, as where GPT's tokenizers know no better: characters are split."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces():
    """Words that begin with a mark for the space, as in Llama 2: the first space of a text is dropped."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "▁one", "▁two", "▁", "three", "▁fo", "ur", ".", "▁."]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize("kind", [byte_level, sentence_pieces])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_text_is_what_vllm_writes(kind, skip_special_tokens):
    from types import SimpleNamespace

    from transformers import PreTrainedTokenizerFast
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    from openrlhf_integration.rollout_actor import _text

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind(), eos_token="</s>", additional_special_tokens=["<|im|>"])
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=64, skip_special_tokens=skip_special_tokens)
    prompt = tokenizer.encode("one two 你好<|im|> three four")
    for _ in range(200):
        # Random bytes, whole characters, then a character that may have been cut.
        tokens = rng.integers(0, len(tokenizer), 6).tolist() + tokenizer.encode(" two. wörld 🙂 three")
        tokens += tokenizer.encode("🙂")[: rng.integers(0, 5)]
        request = SimpleNamespace(request_id="0", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=params)
        vllm = IncrementalDetokenizer.from_new_request(tokenizer, request)
        vllm.update(tokens, stop_terminated=False)
        assert _text(prompt, tokens, params, tokenizer) == vllm.output_text


# -- examples

EXAMPLES = Path(__file__).parents[1] / "examples" / "openrlhf"


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.sh")))
def test_the_example_scripts_are_command_lines_that_openrlhf_takes(script, tmp_path):
    """Run as they are, but for the interpreter, which writes down what it was asked for."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{tmp_path}/line"\n')
    python.chmod(0o755)
    subprocess.run(
        ["bash", EXAMPLES / script, "--ds.packing_samples"],
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WORK": str(tmp_path)},
        capture_output=True,
    )
    option, module, *line = (tmp_path / "line").read_text().splitlines()
    assert (option, module) == ("-m", "openrlhf_integration.train_ppo_ray")
    args = parse(line)
    assert args.spec == SpecSettings(use_spec_rollout=True) and args.train.num_episodes > 1 and args.ds.packing_samples


def test_the_example_data_and_reward_fit_together(tmp_path):
    pytest.importorskip("reasoning_gym")
    import json
    import runpy

    data = tmp_path / "data" / "sums.jsonl"
    command = [sys.executable, str(EXAMPLES / "prepare_data.py"), "--output", str(data), "--prompts", "3"]
    subprocess.run([*command, "--settings", '{"max_terms": 3}'], check=True)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(rows) == 3 and all(row["input"][0]["role"] == "user" for row in rows)
    reward_func = runpy.run_path(str(EXAMPLES / "reward_func.py"))["reward_func"]
    label = rows[0]["label"]
    answer = json.loads(label)["problem"]["answer"]
    queries = [f"prompt It is <answer> {answer} </answer>", "prompt <answer>no</answer>", "prompt"]
    scored = reward_func(queries, ["prompt"] * 3, [label] * 3)
    assert scored["rewards"][0] == 1 and scored["rewards"][1:].max() < 1
    assert scored["extra_logs"]["correct"].tolist() == [1, 0, 0]
