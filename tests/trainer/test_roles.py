"""Who generates, judges, plays the user and teaches is said once, when training starts."""

import warnings
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from stub_chat_server import StubChatServer
from stub_teacher_server import StubTeacherServer, teacher_of
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import LORA, ScriptedTeacher, judge_that, make_trainer

from trl_openclaw import LLMJudge, LocalJudge, RuleJudge, ServerTeacher, UserSimulator
from trl_openclaw.next_states import PERSONAS
from trl_openclaw.trainer.roles import roles, warn_of_live_server

URL = "http://127.0.0.1:8000/v1"


def named(name: str):
    model = tiny_llama()
    model.config._name_or_path = name
    return model


def roles_of(trainer, **changes) -> dict[str, str]:
    """The roles in a trainer where some settings, or parts, are others."""
    args = SimpleNamespace(**{**vars(trainer.args), **changes.pop("args", {})})
    parts = {"judge": trainer.judge, "next_state": trainer.next_state, "teacher": trainer.teacher, **changes}
    known = {"args": args, "model": trainer.model, "accelerator": trainer.accelerator, "rollout_func": None}
    return roles(SimpleNamespace(**{**known, **parts}))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("roles"), model=named("org/policy"))


def test_are_printed_once_when_training_starts(tmp_path, capsys):
    make_trainer(tmp_path, model=named("org/policy")).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if ": " in line and not line.startswith("{")]
    assert lines == [
        "generates: org/policy (transformers, in this process)",
        "judges: judge",
        "plays the user: always_replies",
        "teaches: the initial weights",
    ]


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (LLMJudge("Qwen3-8B", URL), f"Qwen3-8B at {URL}"),
        (LocalJudge("org/judge"), "org/judge, in this process"),
        (LocalJudge(named("org/other"), tiny_tokenizer()), "org/other, in this process"),
        (RuleJudge(judge_that), "RuleJudge (judge_that)"),
        (ScriptedTeacher(None), "ScriptedTeacher"),
    ],
)
def test_a_judge_is_its_model_or_its_own_name(trainer, judge, said):
    assert roles_of(trainer, judge=judge)["judges"] == said


def test_the_policy_as_its_own_judge(trainer):
    judge = LocalJudge(trainer.model, tiny_tokenizer())
    assert roles_of(trainer, judge=judge)["judges"] == "the policy as it is now, in this process"


def test_who_plays_the_user(trainer):
    simulator = UserSimulator(LLMJudge("Qwen3-8B", URL).client, "I dislike lists.")
    assert roles_of(trainer, next_state=simulator)["plays the user"] == f"Qwen3-8B at {URL}"
    assert roles_of(trainer, next_state=PERSONAS["one-sentence"])["plays the user"] == "Persona (one-sentence)"


def test_parts_that_are_not_there(trainer):
    assert list(roles_of(trainer, judge=None, next_state=None, teacher=None)) == ["generates"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"config": {"teacher": "ema", "teacher_ema_rate": 0.2}}, "the policy's moving average, rate 0.2"),
        ({"config": {"teacher": "live"}}, "the policy as it is now"),
        ({"peft_config": LoraConfig(**LORA)}, "the initial weights (adapter off)"),
        (
            {"teacher_model": named("org/teacher"), "teacher_processing_class": tiny_tokenizer()},
            "org/teacher, in this process",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_teacher_in_this_process(tmp_path, settings, said):
    assert roles(make_trainer(tmp_path, **settings))["teaches"] == said


def test_a_teacher_on_a_server(trainer):
    assert roles_of(trainer, teacher=ServerTeacher("big", URL))["teaches"] == f"big at {URL}"
    with_adapter = ServerTeacher("big", URL, adapter="kind")
    assert roles_of(trainer, teacher=with_adapter)["teaches"] == f"big with the adapter kind at {URL}"


VLLM = {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({**VLLM, "vllm_mode": "colocate"}, "vLLM, in this process"),
        (VLLM, "vLLM at http://0.0.0.0:8000"),
        ({**VLLM, "vllm_server_base_url": "http://gpu7:9000"}, "vLLM at http://gpu7:9000"),
    ],
)
def test_vllm_generates(trainer, args, said):
    assert roles_of(trainer, args=args)["generates"] == f"org/policy ({said})"
    led = roles_of(trainer, args=args, rollout_func=print)["generates"]
    assert led == f"org/policy ({said}, led by a rollout function)"


@pytest.mark.parametrize(
    ("url", "args", "same"),
    [
        (URL, VLLM, True),
        ("http://localhost:8000/v1", VLLM, True),
        ("http://127.0.0.1:8001/v1", VLLM, False),
        ("http://gpu7:8000/v1", VLLM, False),
        ("http://gpu7:8000/v1", {**VLLM, "vllm_server_base_url": "http://gpu7:8000"}, True),
        ("https://gpu7/v1", {**VLLM, "vllm_server_base_url": "https://gpu7:443/"}, True),
        (URL, {**VLLM, "vllm_mode": "colocate"}, False),
        (URL, {**VLLM, "use_vllm": False}, False),
    ],
)
def test_a_server_that_also_generates_has_the_policys_weights(trainer, url, args, same):
    judge, teacher = LLMJudge("m", url), ServerTeacher("m", url)
    found = roles_of(trainer, judge=judge, teacher=teacher, args=args)
    said = f"m at {url}" + (", which also generates: the policy as it is now" if same else "")
    assert (found["judges"], found["teaches"]) == (said, said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_live_server(SimpleNamespace(args=SimpleNamespace(**{**vars(trainer.args), **args})), teacher)
    assert [("such a teacher drifts" in str(warning.message)) for warning in caught] == [True] * same


def test_one_server_judges_plays_the_user_and_teaches(tmp_path, capsys):
    """Three roles, one address."""

    class Both(StubTeacherServer):
        def post(self, path, request, headers):
            if path.endswith("/chat/completions"):
                return StubChatServer.post(self, path, request, headers)
            return super().post(path, request, headers)

    with Both() as server:
        judge = LLMJudge("stub-model", server.base_url, num_votes=1)
        simulator = UserSimulator(judge.client, "I dislike lists.")
        trainer = make_trainer(tmp_path, judge=judge, next_state=simulator, teacher_model=teacher_of(server))
        trainer.train()
    printed = capsys.readouterr().out
    for role in ("judges", "plays the user", "teaches"):
        assert f"{role}: stub-model at {server.base_url}\n" in printed
