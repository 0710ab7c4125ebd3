"""What the recipes share: names in a config file become judges, next states and data, or a clear error."""

import asyncio
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from stub_chat_server import Reply
from transformers.utils import is_torch_bf16_gpu_available
from trl import DatasetMixtureConfig
from trl.scripts.utils import DatasetConfig

from trl_openclaw import (
    PERSONAS,
    FunctionNextState,
    LLMJudge,
    LocalJudge,
    OutcomeJudge,
    RuleJudge,
    Turn,
    UserSimulator,
    cli,
    collect_feedback,
    recipe,
)
from trl_openclaw.recipe import FeedbackArguments, build_judge, build_next_state, parse_recipe_args

MODULE = """
class Judge:
    client = None
    async def __call__(self, turn):
        ...

judge_object = Judge()
number = 3

async def judge_coroutine(turn):
    ...

def rule(turn):
    return 1

async def user(turn, row):
    ...

def test_runner(turn, row):
    return "passed"
"""


def arguments(**settings) -> FeedbackArguments:
    return FeedbackArguments(**{"dataset_name": "unused", **settings})


def assert_one_clear_line(error, *words):
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert all(word in message for word in words), message


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    """A module that lies in the working directory and nowhere on the path."""
    (tmp_path / "my_feedback.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_feedback", raising=False)
    before = list(sys.path)
    yield "my_feedback"
    sys.modules.pop("my_feedback", None)
    assert sys.path == before


# Judges


def test_no_judge_is_none():
    assert build_judge(arguments()) is None


def test_llm_judge_takes_every_setting(monkeypatch, chat_server):
    monkeypatch.setenv("MY_KEY", "secret")
    judge = build_judge(
        arguments(
            judge="llm",
            judge_model="stub-model",
            judge_base_url=chat_server.base_url,
            judge_api_key_env="MY_KEY",
            judge_num_votes=5,
            judge_question="separate",
            judge_max_tokens=99,
            judge_timeout=7.0,
        )
    )
    assert isinstance(judge, LLMJudge)
    assert (judge.num_votes, judge.question, judge.max_tokens) == (5, "separate", 99)
    assert judge.client.timeout == 7.0
    asyncio.run(judge.client.complete([{"role": "user", "content": "hi"}], max_tokens=5))
    assert chat_server.requests[0]["model"] == "stub-model"
    assert chat_server.headers[0]["authorization"] == "Bearer secret"


def with_our_config(monkeypatch, tmp_path, name, server, *argv):
    """Judge and next state as one of our configs describes them, on the stub server."""
    monkeypatch.chdir(tmp_path)
    config = cli.recipes_dir() / "configs" / f"{name}.yaml"
    server.models = ["Qwen/Qwen3-8B"]
    argv = ["--config", config, "--use_cpu", "true", "--judge_base_url", server.base_url, *argv]
    script_args = parse(monkeypatch, name, *argv)[0]
    judge = build_judge(script_args)
    return judge, build_next_state(script_args, judge)


def judged(judge, user, turn):
    (feedback,) = asyncio.run(collect_feedback([turn], [{}], next_state=user, judge=judge))
    return feedback


def judge_or_user(messages, thoughts=""):
    marker = re.search(r"The marker is (\w+)\.", messages[-1]["content"])
    if marker is None:
        return f"{thoughts}Shorter, please."
    return f"{thoughts}VERDICT-{marker[1]}: -1\nHINT-{marker[1]}: Be brief.\nEND-{marker[1]}"


# To a server that counts words as tokens, 600 of them; it speaks of the tags it will use, as models do.
THOUGHTS = f"<think>{'VERDICT: 1 ' * 300}</think>\n\n"


@pytest.mark.parametrize("name", ["rl", "opd", "combine"])
def test_our_configs_ask_judge_and_user_not_to_think(monkeypatch, tmp_path, chat_server, name):
    chat_server.script = judge_or_user
    feedback = judged(*with_our_config(monkeypatch, tmp_path, name, chat_server), Turn("hi", "Well, ..."))
    assert (feedback.score, feedback.turn.next_state.text) == (-1, "Shorter, please.")
    assert len(chat_server.requests) == 1 + 3
    assert [request["chat_template_kwargs"] for request in chat_server.requests] == [{"enable_thinking": False}] * 4


def test_a_judge_and_a_user_who_think_at_length_are_understood(monkeypatch, tmp_path, chat_server):
    def think(messages):
        answer = judge_or_user(messages, THOUGHTS)
        room = chat_server.requests[-1]["max_tokens"]
        words = answer.split(" ")
        return answer if len(words) <= room else Reply(" ".join(words[:room]), finish_reason="length")

    chat_server.script = think
    argv = ("--judge_num_votes", 1, "--judge_max_tokens", 512)
    feedback = judged(*with_our_config(monkeypatch, tmp_path, "opd", chat_server, *argv), Turn("hi", "Well, ..."))
    assert feedback.turn.next_state.text == "Shorter, please."
    assert (feedback.score, feedback.hints, feedback.failure) == (-1, ("Be brief.",), None)
    # The user has room for it; the judge's answer is cut once and asked for again.
    assert [request["max_tokens"] for request in chat_server.requests] == [1024, 512, 2048]


def test_extra_body_from_the_command_line(monkeypatch, tmp_path, chat_server):
    chat_server.script = judge_or_user
    argv = ("--judge_extra_body", '{"seed": 3, "chat_template_kwargs": {"enable_thinking": true}}')
    judged(*with_our_config(monkeypatch, tmp_path, "rl", chat_server, *argv), Turn("hi", "Well, ..."))
    assert {request["seed"] for request in chat_server.requests} == {3}
    assert chat_server.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.parametrize(("body", "word"), [("{seed: 3}", "not JSON"), ("[1]", "fields"), ([1], "fields")])
def test_extra_body_that_is_none(body, word):
    with pytest.raises(ValueError) as error:
        arguments(judge_extra_body=body)
    assert_one_clear_line(error, "`judge_extra_body`", word)


@pytest.mark.parametrize("judge", ["local", "outcome", None])
def test_extra_body_without_a_server(judge):
    with pytest.raises(ValueError) as error:
        build_judge(arguments(judge=judge, judge_model="m", judge_extra_body={"seed": 3}))
    assert_one_clear_line(error, "`judge_extra_body`", "`judge: llm`")
    build_judge(arguments(judge=judge, judge_model="m", judge_extra_body="{}"))


def test_local_judge_takes_its_settings():
    judge = build_judge(arguments(judge="local", judge_model="folder", judge_num_votes=2, judge_question="separate"))
    assert isinstance(judge, LocalJudge)
    assert (judge.num_votes, judge.question, judge.max_tokens) == (2, "separate", 512)


def test_outcome_judge():
    assert isinstance(build_judge(arguments(judge="outcome")), OutcomeJudge)


def test_judge_by_dotted_path(my_module):
    assert build_judge(arguments(judge=f"{my_module}.judge_object")) is sys.modules[my_module].judge_object
    assert build_judge(arguments(judge=f"{my_module}.judge_coroutine")) is sys.modules[my_module].judge_coroutine
    rule = build_judge(arguments(judge=f"{my_module}.rule"))
    assert isinstance(rule, RuleJudge)
    assert rule.fn is sys.modules[my_module].rule


@pytest.mark.parametrize("kind", ["llm", "local"])
def test_judge_without_its_model(kind):
    with pytest.raises(ValueError) as error:
        build_judge(arguments(judge=kind))
    assert_one_clear_line(error, f"`judge: {kind}`", "`judge_model`")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("lmm", ["llm", "local", "outcome", "dotted path", "'lmm'"]),
        ("no_such_module.judge", ["no_such_module.judge", "No module named 'no_such_module'"]),
        ("my_feedback.no_such_judge", ["my_feedback.no_such_judge", "no attribute 'no_such_judge'"]),
        ("..judge", ["`judge: ..judge`", "cannot be imported"]),
        ("my_feedback.Judge", ["my_feedback.Judge", "name a function, or an object"]),
        ("my_feedback.number", ["my_feedback.number", "name a function, or an object"]),
    ],
)
def test_judge_that_is_not_there(my_module, path, words):
    with pytest.raises(ValueError) as error:
        build_judge(arguments(judge=path))
    assert_one_clear_line(error, *words)


# Next states


def test_no_next_state_is_none():
    assert build_next_state(arguments(), None) is None


@pytest.mark.parametrize("name", list(PERSONAS))
def test_persona_by_name(name):
    assert build_next_state(arguments(next_state=name), None) is PERSONAS[name]


def test_simulator_asks_the_judges_client():
    judge = LLMJudge("m", "http://localhost:1/v1")
    user = build_next_state(arguments(next_state="simulator", persona="I am in a hurry."), judge)
    assert isinstance(user, UserSimulator)
    assert user.client is judge.client
    assert user.persona == "I am in a hurry."


def test_next_state_by_dotted_path(my_module):
    assert build_next_state(arguments(next_state=f"{my_module}.user"), None) is sys.modules[my_module].user
    provider = build_next_state(arguments(next_state=f"{my_module}.test_runner"), None)
    assert isinstance(provider, FunctionNextState)
    assert provider.fn is sys.modules[my_module].test_runner


@pytest.mark.parametrize(
    ("judge", "persona"),
    [(LLMJudge("m", "http://localhost:1/v1"), None), (OutcomeJudge(), "I am in a hurry."), (None, "I am in a hurry.")],
)
def test_simulator_without_persona_or_model(judge, persona):
    with pytest.raises(ValueError) as error:
        build_next_state(arguments(next_state="simulator", persona=persona), judge)
    assert_one_clear_line(error, "`next_state: simulator`", "`persona`", "`llm` or `local`")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("one-sentense", ["one-sentence", "simulator", "dotted path", "'one-sentense'"]),
        ("no_such_module.user", ["`next_state: no_such_module.user`", "No module named"]),
    ],
)
def test_next_state_that_is_not_there(path, words):
    with pytest.raises(ValueError) as error:
        build_next_state(arguments(next_state=path), None)
    assert_one_clear_line(error, *words)


# Model and data


@pytest.mark.parametrize("path", ["/no/such/model", "./no-such-model", "runs/models/no-such-model"])
def test_model_folder_that_does_not_exist(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        recipe._check_model_path(path)
    assert_one_clear_line(error, "`model_name_or_path`", f"no folder {path}", "make model")


def test_no_model_at_all():
    with pytest.raises(ValueError) as error:
        recipe._check_model_path(None)
    assert_one_clear_line(error, "`model_name_or_path` is missing")


def test_hub_names_and_folders_are_models(tmp_path):
    recipe._check_model_path("Qwen/Qwen3-1.7B")
    recipe._check_model_path(str(tmp_path))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A dataset as files, and a cache of its own."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, texts in {"train": ["a", "b"], "test": ["c"]}.items():
        rows = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in texts]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return folder


def load(name, **mixture):
    return recipe._load_dataset(FeedbackArguments(dataset_name=name), DatasetMixtureConfig(**mixture))


def test_dataset_from_a_folder(data):
    dataset = load(str(data))
    assert {split: len(rows) for split, rows in dataset.items()} == {"train": 2, "test": 1}


def test_shipped_data_is_found_from_any_working_directory(data, tmp_path, monkeypatch):
    script = tmp_path / "recipes" / "opd.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(load("data")["train"]) == 2


def test_mixture_of_datasets(data):
    mixture = [DatasetConfig(path="json", data_files=str(data / f"{split}.jsonl")) for split in ("train", "test")]
    assert len(load(None, datasets=mixture)["train"]) == 3


def test_no_dataset_named():
    with pytest.raises(ValueError) as error:
        load(None)
    assert_one_clear_line(error, "`dataset_name`", "`datasets`")


@pytest.mark.parametrize("name", ["no-such-dataset", "someone/no-such-dataset", "/no/such/folder", "empty"])
def test_dataset_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as error:
        load(name)
    assert_one_clear_line(error, f"`dataset_name: {name}` cannot be loaded")


def test_split_that_is_not_there(data):
    with pytest.raises(ValueError) as error:
        recipe._get_split(load(str(data)), "validation")
    assert_one_clear_line(error, "'validation'", "train, test")


# Arguments


def parse(monkeypatch, name, *argv):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, argv)])
    return parse_recipe_args(cli.load_recipe(cli.recipes_dir() / f"{name}.py").make_parser())


@pytest.mark.parametrize("config", sorted((cli.recipes_dir() / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_setting_of_our_configs_is_read(config, monkeypatch, tmp_path):
    told = re.search(rf"accelerate launch recipes/(\w+)\.py --config recipes/configs/{config.name}", config.read_text())
    assert told, "the config does not say how it is launched"
    name = told[1]
    monkeypatch.chdir(tmp_path)
    parsed = parse(monkeypatch, name, "--config", config, "--use_cpu", "true")
    *scripts, training_args, model_args = [part for part in parsed if not isinstance(part, DatasetMixtureConfig)]
    assert [bool(script_args.dataset_name) for script_args in scripts] == ([] if name == "live" else [True])
    assert model_args.model_name_or_path
    assert training_args.output_dir.startswith("runs/")


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_a_recipe_opens_with_its_launch_command(name):
    module = cli.load_recipe(cli.recipes_dir() / f"{name}.py")
    command, _, config = module.__doc__.split("\n\n")[1].strip().rpartition(" ")
    assert command == f"accelerate launch recipes/{name}.py --config"
    assert (cli.recipes_dir().parent / config).is_file()


def test_setting_that_nobody_reads_is_refused(monkeypatch, tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text("dataset_name: d\noutput_dir: o\nmax_stepz: 2\nnum_processes: 1\naccelerate_config: single\n")
    with pytest.raises(ValueError) as error:
        parse(monkeypatch, "opd", "--config", config, "--use_cpu", "true", "--lerning_rate", "1")
    assert_one_clear_line(error, "--max_stepz", "--lerning_rate")
    assert "num_processes" not in str(error.value)
    assert "accelerate_config" not in str(error.value)


def test_command_line_comes_before_the_config_file(monkeypatch, tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text("dataset_name: d\noutput_dir: o\nmax_steps: 2\nnum_processes: 1\n")
    _, training_args, *_ = parse(monkeypatch, "opd", "--config", config, "--use_cpu", "true", "--max_steps", 3)
    assert training_args.max_steps == 3


def test_rl_is_combine_without_hints(monkeypatch, capsys, tmp_path):
    argv = ["--dataset_name", "d", "--output_dir", tmp_path, "--use_cpu", "true"]
    assert parse(monkeypatch, "rl", *argv)[1].opd_weight == 0.0
    assert parse(monkeypatch, "combine", *argv)[1].opd_weight == 1.0
    rl = cli.load_recipe(cli.recipes_dir() / "rl.py")
    errors = refused(monkeypatch, capsys, "rl", *argv, "--opd_weight", 0.5, check=rl.check)
    assert_words(errors, "`opd_weight=0.5`", "recipes/combine.py")


# What is wrong is said before a model is loaded, the cheapest first


def refused(monkeypatch, capsys, name, *argv, check=None) -> str:
    """The one line with which a recipe ends that cannot start."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, argv)])
    parser = cli.load_recipe(cli.recipes_dir() / f"{name}.py").make_parser(prog=f"{name}.py")
    with pytest.raises(SystemExit) as stop:
        recipe.run_script(must_not_be_built, parser, check)
    assert stop.value.code == 2
    errors = capsys.readouterr().err
    lines = [line for line in errors.splitlines() if line.startswith(f"{name}.py: error: ")]
    assert len(lines) == 1, errors
    assert errors.endswith(f"{lines[0]}\n")
    return lines[0]


def must_not_be_built(**arguments):
    raise AssertionError("the trainer, and with it the model, is loaded last")


def assert_words(text, *words):
    assert all(word in text for word in words), text


@pytest.fixture
def combine(monkeypatch, capsys, tmp_path, chat_server, data):
    """Runs our Combine config as it ships, on local data and a judge that answers, and returns the error."""
    monkeypatch.chdir(tmp_path)
    chat_server.models = ["Qwen/Qwen3-8B"]
    config = cli.recipes_dir() / "configs" / "combine.yaml"
    given = ["--config", config, "--dataset_name", data, "--judge_base_url", chat_server.base_url]

    def run(*argv) -> str:
        return refused(monkeypatch, capsys, "combine", *given, *argv)

    return run


NOTHING_THERE = ("--judge_base_url", "http://127.0.0.1:9/v1")


@pytest.mark.skipif(is_torch_bf16_gpu_available(), reason="this machine has a GPU that computes in bf16")
def test_bf16_without_a_gpu(combine):
    assert_words(combine(), "`bf16`", "--bf16 false", "--use_cpu true")


def test_missing_extra_comes_before_the_judge_is_asked(combine, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert_words(combine("--bf16", "false", *NOTHING_THERE), "`use_peft`", "pip install 'trl-openclaw[peft]'")


@pytest.mark.parametrize(
    ("setting", "package", "extra"),
    [
        ("--load_in_4bit", "bitsandbytes", "quantization"),
        ("--load_in_8bit", "bitsandbytes", "quantization"),
        ("--use_vllm", "vllm", "vllm"),
        ("--report_dir", "matplotlib", "demo"),
    ],
)
def test_every_missing_extra_is_named(combine, monkeypatch, setting, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    assert_words(combine("--use_cpu", "true", setting, "true"), setting.strip("-"), f"trl-openclaw[{extra}]")


def test_judge_out_of_reach_comes_before_the_data_and_the_model(combine):
    errors = combine("--use_cpu", "true", *NOTHING_THERE, "--dataset_name", "someone/no-such-dataset")
    assert_words(errors, "http://127.0.0.1:9/v1", "'Qwen/Qwen3-8B'", "cannot be reached")


def test_only_the_first_process_asks_for_the_judge(combine, monkeypatch):
    monkeypatch.setattr(recipe.OPDConfig, "process_index", 1)
    assert "`model_name_or_path: " in combine("--use_cpu", "true", *NOTHING_THERE)


def test_model_out_of_reach_is_noticed_by_its_config(combine):
    errors = combine("--use_cpu", "true", "--model_name_or_path", "someone/no-such-model")
    assert_words(errors, "`model_name_or_path: someone/no-such-model` cannot be loaded")


def test_folder_without_a_model(combine, tmp_path):
    assert_words(combine("--use_cpu", "true", "--model_name_or_path", tmp_path), "config.json")


def test_judge_without_a_model_comes_before_the_model(monkeypatch, capsys, tmp_path, data):
    argv = ["--dataset_name", data, "--output_dir", tmp_path / "o", "--use_cpu", "true"]
    argv += ["--model_name_or_path", tmp_path, "--judge", "llm"]
    assert_words(refused(monkeypatch, capsys, "combine", *argv), "`judge_model`")


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read"), ("", "is empty"), ("- 1", "does not hold"), ("a: [", "cannot be read")],
)
def test_config_file_that_is_none(monkeypatch, capsys, tmp_path, text, words):
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    assert_words(refused(monkeypatch, capsys, "opd", "--config", path), f"error: {path} {words}")


def test_config_without_a_value(monkeypatch, capsys):
    assert_words(refused(monkeypatch, capsys, "opd", "--config"), "--config needs a value")


@pytest.mark.parametrize(
    ("environment", "device", "expected"),
    [("1", "cpu", 3), (None, "cpu", 3), ("2", "cpu", 1), ("1", "cuda", 1)],
)
def test_processes_share_all_cores_unless_told_otherwise(environment, device, expected, monkeypatch):
    if environment is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        recipe._use_all_cores(SimpleNamespace(device=torch.device(device), world_size=2))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_script_that_trained_takes_leave_of_the_other_processes(monkeypatch):
    """Threads that talk to them may abort an interpreter that ends."""
    calls = []
    accelerator = SimpleNamespace(
        wait_for_everyone=lambda: calls.append("wait"), end_training=lambda: calls.append("end")
    )
    trainer = SimpleNamespace(accelerator=accelerator)
    monkeypatch.setattr(recipe, "parse_recipe_args", lambda parser: (None, None, None, None))
    monkeypatch.setattr(recipe, "trainer_arguments", lambda *args: {})
    monkeypatch.setattr(recipe, "train", lambda trainer, args: calls.append("train") or trainer)
    assert recipe.run_script(lambda **arguments: trainer, parser=None) is trainer
    assert calls == ["train", "wait", "end"]
