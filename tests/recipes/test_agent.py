"""The agent's recipe: its tasks, its settings, its configs, and two steps of it in this process."""

import json
import re
import sys
from pathlib import Path

import datasets
import pytest
from agent_harness import call, script_completions
from tiny import tiny_llama, tiny_tokenizer
from trl.chat_template_utils import qwen3_chat_template

from trl_openclaw import CombineTrainer, cli
from trl_openclaw.config_file import read_config_file
from trl_openclaw.environments import CodeEnvironment, ShellEnvironment
from trl_openclaw.recipe import run_script

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "recipes" / "agent" / "tasks"
CONFIGS = ROOT / "recipes" / "configs"
recipe = cli.load_recipe(ROOT / "recipes" / "agent.py")

MODULE = """
class Counter:
    def reset(self, **row):
        self.count = 0

    def increment(self) -> str:
        \"\"\"Count one more.\"\"\"
        self.count += 1
        return str(self.count)


def make_counter():
    return Counter()


number = 3
"""


def tasks(split: str) -> list[dict]:
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


# Data


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_reference_solution_passes_its_tests(split):
    environment = CodeEnvironment()
    verdicts = {}
    for task in tasks(split):
        environment.reset(**task)
        environment.run_tests(task["solution"])
        verdicts[task["entry_point"]] = environment.verdict
    assert {name: verdict for name, verdict in verdicts.items() if verdict != "solved"} == {}


def test_no_task_is_solved_by_nothing_and_none_is_there_twice():
    names = [task["entry_point"] for task in [*tasks("train"), *tasks("test")]]
    assert len(names) == len(set(names)) == 52
    environment = CodeEnvironment()
    for task in tasks("test"):
        environment.reset(**task)
        environment.run_tests(f"def {task['entry_point']}(*args):\n    return None")
        assert environment.get_reward() == 0.0


def test_prompts_name_the_function_and_its_arguments_as_the_solution_does():
    for task in [*tasks("train"), *tasks("test")]:
        signature = task["solution"].splitlines()[0].removeprefix("def ").removesuffix(":")
        (message,) = task["prompt"]
        assert message["role"] == "user"
        assert f"`{signature}`" in message["content"]


def test_the_opening_shows_a_turn_that_repairs_another():
    opening = recipe.read_opening("recipes/agent/opening.json")
    assert [message["role"] for message in opening[:5]] == ["system", "user", "assistant", "tool", "assistant"]
    environment = CodeEnvironment()
    environment.reset(tests="assert second([4, 5, 6]) == 5")
    code = [m["tool_calls"][0]["function"]["arguments"]["code"] for m in opening if m.get("tool_calls")]
    environment.run_tests(code[0])
    assert environment.verdict == "failed"
    environment.run_tests(code[1])
    assert environment.verdict == "solved"


# Settings


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny model whose own template knows no tools."""
    folder = tmp_path / "model"
    tiny_llama(max_position_embeddings=8192).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def start(folder, tmp_path, monkeypatch):
    """Starts the recipe in this process, with what a CPU and a tiny model need on top of a config."""

    def run(trainer_class, *argv, config=CONFIGS / "agent.yaml"):
        options = {
            "config": config,
            "model_name_or_path": folder,
            "output_dir": tmp_path / "out",
            "max_steps": 2,
            "use_cpu": "true",
            "disable_tqdm": "true",
        }
        given = [str(part) for option, value in options.items() for part in (f"--{option}", value)]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(ROOT / "recipes" / "agent.py"), *given, *map(str, argv)])
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        return run_script(trainer_class, recipe.make_parser("agent.py"), complete=recipe.complete)

    return run


@pytest.fixture
def refused(start, capsys):
    """The one line with which the recipe ends that cannot start."""

    def run(*argv, **kwargs) -> str:
        with pytest.raises(SystemExit) as stop:
            start(must_not_be_built, *argv, **kwargs)
        assert stop.value.code == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("agent.py: error: ")]
        assert len(lines) == 1
        return lines[0]

    return run


def must_not_be_built(**arguments):
    raise AssertionError("the trainer, and with it the model, is loaded last")


def keeps_arguments(**arguments):
    raise Kept(arguments)


class Kept(Exception):
    """Carries the arguments that the trainer would have been built with."""


def arguments_of(start, *argv, **kwargs) -> dict:
    with pytest.raises(Kept) as kept:
        start(keeps_arguments, *argv, **kwargs)
    return kept.value.args[0]


def write_rows(folder: Path, *rows: dict, splits=("train", "test")) -> Path:
    folder.mkdir(exist_ok=True)
    for split in splits:
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


PROMPT = [{"role": "user", "content": "Write f."}]


def test_unknown_template(refused):
    line = refused("--tool_template", "chatml")
    assert "`tool_template` must be one of qwen2_5" in line
    assert "'chatml'" in line


def test_template_whose_markers_the_tokenizer_lacks(refused):
    line = refused("--tool_template", "llama3_1")
    assert "<|start_header_id|>" in line
    assert "does not have" in line


@pytest.fixture
def without_template(tmp_path) -> Path:
    """The config for CPU, with a model that has to bring its own template."""
    config = read_config_file(CONFIGS / "agent.yaml")
    del config["tool_template"]
    (tmp_path / "plain.yaml").write_text(json.dumps(config))
    return tmp_path / "plain.yaml"


def test_model_without_a_tool_template(refused, without_template):
    line = refused(config=without_template)
    assert "knows no tools" in line
    assert "`tool_template`: qwen2_5" in line


def test_template_whose_calls_trl_cannot_read(refused, without_template, folder):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template + "{# changed #}"
    tokenizer.save_pretrained(folder)
    assert "TRL cannot read the tool calls" in refused(config=without_template)


def test_model_with_a_tool_template_keeps_it(start, without_template, folder):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.save_pretrained(folder)
    arguments = arguments_of(start, config=without_template)
    assert arguments["processing_class"].chat_template == qwen3_chat_template


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("python", ["`environment` is one of code, shell", "dotted path"]),
        ("no_such_module.Environment", ["`environment: no_such_module.Environment` cannot be imported"]),
        ("my_counter.number", ["`environment: my_counter.number` is 3"]),
    ],
)
def test_unknown_environment(refused, tmp_path, environment, words):
    (tmp_path / "my_counter.py").write_text(MODULE)
    line = refused("--environment", environment)
    assert all(word in line for word in words), line


def test_data_without_tests(refused, tmp_path):
    data = write_rows(tmp_path / "data", {"prompt": PROMPT, "answer": "x"})
    line = refused("--dataset_name", data)
    assert "needs a column `tests`" in line
    assert "'prompt', 'answer'" in line


@pytest.mark.parametrize("bad_split", ["train", "test"])
def test_tests_that_cannot_be_run(refused, tmp_path, bad_split):
    good, bad = ({"prompt": PROMPT, "tests": tests} for tests in ("assert f() == 1", "x = 1"))
    data = write_rows(tmp_path / "data", good, good)
    write_rows(data, good, bad, splits=[bad_split])
    line = refused("--dataset_name", data, "--eval_strategy", "steps", "--eval_steps", 1)
    assert "Row 1 of the data set" in line
    assert "asserts nothing" in line


def test_opening_that_is_not_there_or_no_list(refused, tmp_path):
    assert "`opening: nowhere.json` cannot be read" in refused("--opening", "nowhere.json")
    for text, words in (
        ('{"role": "system"}', "must hold a list of messages"),
        ("{}", "must hold a list of messages"),
        ('["You are an agent."]', "must hold a list of messages"),
        ('[{"role": "system"', "cannot be read"),
    ):
        (tmp_path / "opening.json").write_text(text)
        assert f"`opening: opening.json` {words}" in refused("--opening", "opening.json")


def test_sandbox_that_this_machine_cannot_hold(refused, monkeypatch):
    from trl_openclaw.environments import sandbox_probe

    monkeypatch.setattr(sandbox_probe, "broken_walls", lambda *_: {"files": "a program in it could read elsewhere"})
    line = refused()
    assert "This machine cannot keep a program in" in line
    assert "Needed: Linux 5.13" in line
    assert "allow_missing" in line


def test_environments_by_name(start, tmp_path):
    assert isinstance(arguments_of(start)["environment_factory"](), CodeEnvironment)
    data = write_rows(tmp_path / "data", {"prompt": PROMPT})
    shell = arguments_of(start, "--environment", "shell", "--dataset_name", data)["environment_factory"]
    assert isinstance(shell(), ShellEnvironment)


def test_class_of_ones_own_is_put_into_a_process_and_a_function_is_called(start, tmp_path, monkeypatch):
    (tmp_path / "my_counter.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = write_rows(tmp_path / "data", {"prompt": PROMPT})
    given = ["--dataset_name", data, "--environment"]
    wrapped = arguments_of(start, *given, "my_counter.Counter")["environment_factory"]()
    wrapped.reset()
    assert (wrapped.increment(), wrapped.increment()) == ("1", "2")
    assert not isinstance(wrapped, sys.modules["my_counter"].Counter)
    plain = arguments_of(start, *given, "my_counter.make_counter")["environment_factory"]()
    assert isinstance(plain, sys.modules["my_counter"].Counter)


def test_the_opening_stands_before_every_prompt(start):
    arguments = arguments_of(start)
    opening = recipe.read_opening("recipes/agent/opening.json")
    template = arguments["processing_class"]
    for row, task in zip(arguments["train_dataset"], tasks("train"), strict=True):
        wanted = template.apply_chat_template([*opening, *task["prompt"]], tokenize=False)
        assert template.apply_chat_template(row["prompt"], tokenize=False) == wanted
        assert row["tests"] == task["tests"]


# Two steps


def calls(code: str) -> str:
    return call(code).replace('"double"', '"run_tests"').replace('"x"', '"code"')


def scripted(*texts):
    """The trainer, whose policy samples these texts in every step."""

    class Scripted(CombineTrainer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            script_completions(self, texts * 16)

    return Scripted


def logs(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


SHORT = ["--per_device_train_batch_size", 2, "--num_generations", 2, "--max_completion_length", 1500]


def test_each_turn_is_rewarded_and_hinted_by_what_followed_it(start, tmp_path):
    texts = [calls("def f(x):\n    return 0"), "I give up.<|im_end|>"]
    data = write_rows(tmp_path / "data", *tasks("train")[:4])
    trainer = start(scripted(*texts), *SHORT, "--dataset_name", data, "--eval_steps", 2)
    for entry in logs(trainer):
        assert entry["turns/mean"] == 2.0
        assert entry["environment/verdict/not_loaded"] == 1.0  # not the function that was asked for
        assert entry["steps/0/reward"] == entry["steps/1/reward"] == -1.0
        assert entry["steps/0/hint_accepted"] == entry["steps/1/hint_accepted"] == 1.0
        assert entry["grad_norm"] > 0
    evaluated = [
        entry["eval_environment/verdict/not_loaded"] for entry in trainer.state.log_history if "eval_loss" in entry
    ]
    assert evaluated == [1.0, 1.0]  # before and after


def test_the_config_for_gpus_trains_a_tiny_model(start, chat_server, folder):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.save_pretrained(folder)
    chat_server.models = ["Qwen/Qwen3-8B"]
    chat_server.script = lambda messages: vote(messages[-1]["content"])
    on_cpu = ["--use_vllm", "false", "--bf16", "false", "--dtype", "float32", "--gradient_checkpointing", "false"]
    server = ["--judge_base_url", chat_server.base_url, "--save_strategy", "no", "--report_to", "none"]
    small = ["--gradient_accumulation_steps", 1, "--per_device_train_batch_size", 8, "--max_completion_length", 1500]
    trainer = start(
        scripted(calls("def f(x):\n    return 0"), "Done.<|im_end|>"),
        *on_cpu,
        *server,
        *small,
        config=CONFIGS / "agent_qwen3_4b.yaml",
    )
    assert len(logs(trainer)) == 2
    for entry in logs(trainer):
        assert entry["steps/0/hint_accepted"] == entry["steps/1/hint_accepted"] == 1.0
        assert entry["steps/0/reward"] == pytest.approx(-1.0)
        assert entry["turns/unmatched"] == 0.0
    assert len(chat_server.requests) == 2 * 8 * 2 * 3  # a vote is a request: steps, trajectories, turns, votes
    assert all(request["chat_template_kwargs"] == {"enable_thinking": False} for request in chat_server.requests)


def vote(question: str) -> str:
    marker = re.search(r"The marker is (\w+)\.", question)[1]
    return f"VERDICT-{marker}: -1\nHINT-{marker}: Read the task again.\nEND-{marker}"


def test_the_config_for_gpus_is_what_its_comment_says():
    config = read_config_file(CONFIGS / "agent_qwen3_4b.yaml")
    assert (
        config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == 4 * config["num_generations"]
    )
    wanted = {"judge": "llm", "use_vllm": True, "vllm_mode": "colocate", "hint_placement": "turn", "use_peft": True}
    wanted |= {"reward_baseline": "group", "judge_reward": "mean", "judge_num_votes": 3, "num_generations": 8}
    wanted |= {"rl_weight": 1, "opd_weight": 1, "logp_gap_clip": 1, "epsilon": 0.2, "epsilon_high": 0.28}
    wanted |= {"chat_template_kwargs": {"enable_thinking": False}}
    assert {name: config[name] for name in wanted} == wanted
