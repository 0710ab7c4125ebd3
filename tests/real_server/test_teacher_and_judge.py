"""A real vLLM server as teacher and as judge."""

import asyncio
import threading

import pytest
import torch
from datasets import Dataset
from tiny import tiny_tokenizer
from trainer_harness import SETTINGS, logged
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_openclaw import LLMJudge, NextState, OPDConfig, OPDTrainer, ServerTeacher, Turn, collect_feedback
from trl_openclaw.errors import TeacherError, VocabularyMismatchError
from trl_openclaw.judges import prompted
from trl_openclaw.scoring import TeacherRow

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = (
    ("The capital of France is", " Paris, which lies on the Seine."),
    ("Name three fruits.", " Apples, pears and plums."),
    ("Hello", " world"),
)
TOLERANCE = 1e-3
"""Nats, in float32."""
MARKER = "ab12cd34ef"
AS_ASKED = rf"VERDICT-{MARKER}: (1|0|-1)\nHINT-{MARKER}: [A-Za-z ,]{{8,40}}\nEND-{MARKER}"
"""The form of an answer, which so small a judge keeps only when the server sees to it."""
IN_FORM = {"max_tokens": 96, "extra_body": {"structured_outputs": {"regex": AS_ASKED}}}


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture
def rows(tokenizer):
    return [TeacherRow(tokenizer(prompt)["input_ids"], tokenizer(said)["input_ids"]) for prompt, said in TEXTS]


def teacher_of(server, **kwargs) -> ServerTeacher:
    return ServerTeacher(server.name, server.base_url, **kwargs)


@torch.no_grad()
def assert_agrees(scores, model, rows, topk: int) -> None:
    """What the server says is what a model in this process says."""
    for i, row in enumerate(rows):
        n, start = len(row.completion_ids), len(row.prompt_ids)
        logits = model(torch.tensor([[*row.prompt_ids, *row.completion_ids]])).logits[0, start - 1 : -1]
        own = logits.log_softmax(-1)
        sampled = own.gather(1, torch.tensor(row.completion_ids).unsqueeze(1)).squeeze(1)
        assert scores.mask[i].tolist() == [True] * n + [False] * (scores.mask.size(1) - n)
        assert (scores.per_token_logps[i, :n] - sampled).abs().max() < TOLERANCE
        named = own.gather(1, scores.topk_ids[i, :n])
        assert (named - own.topk(topk).values).abs().max() < TOLERANCE  # the same ids, but for ties


def test_log_probs_and_likely_tokens_are_those_of_the_model(vllm_server, smollm2, tokenizer, rows):
    teacher = teacher_of(vllm_server)
    facts = teacher.check(tokenizer, topk=4)
    assert facts.root == str(smollm2)
    assert facts.window == vllm_server.window
    assert facts.version == "0.31.0"
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert_agrees(teacher.score(rows, topk=4), model, rows, topk=4)


def test_what_cannot_work_is_refused(vllm_server, tokenizer):
    with pytest.raises(TeacherError, match=r"does not serve 'rude'\. It serves: smollm2\."):
        teacher_of(vllm_server, adapter="rude").check(tokenizer)
    with pytest.raises(TeacherError, match=r"Start it with a larger `--max-logprobs`"):
        teacher_of(vllm_server).check(tokenizer, topk=vllm_server.max_logprobs + 1)
    with pytest.raises(VocabularyMismatchError):
        teacher_of(vllm_server).check(tiny_tokenizer())
    teacher = teacher_of(vllm_server)
    teacher.check(tokenizer)
    assert teacher.score([TeacherRow([7] * (teacher.max_length - 1), [8])]).mask.all()
    with pytest.raises(TeacherError, match="maximum context length"):
        teacher.score([TeacherRow([7] * teacher.max_length, [8])])


def test_ids_that_the_model_does_not_know_never_reach_the_server(vllm_server, tokenizer):
    teacher = teacher_of(vllm_server)
    teacher.check(tokenizer)
    scores = teacher.score([TeacherRow([7], [8, 60_000]), TeacherRow([7], [8])])
    assert scores.mask.tolist() == [[True, False], [True, False]]
    assert vllm_server.is_up()


@pytest.fixture
def marked(monkeypatch):
    """The mark of a verdict, known beforehand."""
    monkeypatch.setattr(prompted.secrets, "token_hex", lambda _: MARKER)


def judged_by(server, **settings):
    judge = LLMJudge(server.name, server.base_url, num_votes=2, **settings)
    asyncio.run(judge.check())
    turns = [Turn("Name a fruit.", "An apple.", NextState("Shorter, please."))]
    (feedback,) = asyncio.run(collect_feedback(turns, [{}], next_state=None, judge=judge))
    return feedback


def test_a_judge_s_answers_are_parsed(vllm_server, marked):
    feedback = judged_by(vllm_server, **IN_FORM)
    assert [vote.failure for vote in feedback.verdict.votes] == [None, None]
    assert {vote.score for vote in feedback.verdict.votes} <= {-1, 0, 1}
    assert feedback.verdict.score in (-1, 0, 1)


def test_answers_that_are_no_verdicts_are_counted(vllm_server):
    feedback = judged_by(vllm_server, max_tokens=4)
    assert feedback.failure == "judge_failed"
    assert [vote.failure for vote in feedback.verdict.votes] == ["truncated", "truncated"]


async def asks_again(turn, row):
    return NextState("Shorter, please.")


def make_trainer(folder, model, server, steps, **kwargs) -> OPDTrainer:
    """A trainer whose teacher and judge are the server. Hints are given: so small a judge seldom has any."""
    rows = [
        {"prompt": [{"role": "user", "content": f"Name {n} fruits."}], "privileged_context": "Be brief."}
        for n in ("two", "three", "four", "five")
    ]
    settings = {**SETTINGS, "max_steps": steps, "learning_rate": 1e-5, "hint_source": "privileged_context"}
    return OPDTrainer(
        model=str(model),
        args=OPDConfig(str(folder), **settings, judge_failure_limit=1.0, judge_failure_patience=99),
        train_dataset=Dataset.from_list(rows),
        judge=LLMJudge(server.name, server.base_url, num_votes=1, max_retries=0, **IN_FORM),
        next_state=asks_again,
        teacher_model=teacher_of(server, **kwargs),
    )


class AfterStep(TrainerCallback):
    """Does something after the first step."""

    def __init__(self, action):
        self.action = action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.action()


def test_two_steps_with_the_server_as_teacher_and_as_judge(vllm_server, smollm2, tmp_path, marked):
    trainer = make_trainer(tmp_path, smollm2, vllm_server, steps=2)
    trainer.train()
    (gap,) = logged(trainer, "teacher/server_gap")
    print(f"teacher/server_gap: {gap:.2g} nats")
    assert gap < TOLERANCE
    assert logged(trainer, "hint/accepted") == [1.0, 1.0]
    assert logged(trainer, "teacher/missing_tokens") == [0.0, 0.0]
    assert any(logged(trainer, "loss"))
    assert logged(trainer, "feedback/failed/judge_failed") == [0.0, 0.0]
    assert all(-1 <= score <= 1 for score in logged(trainer, "rewards/judge/mean"))


def test_a_server_that_is_killed_and_comes_back_is_waited_for(vllm_server, smollm2, tmp_path):
    def restart():
        vllm_server.kill()
        threading.Timer(3.0, vllm_server.start).start()

    trainer = make_trainer(tmp_path, smollm2, vllm_server, steps=2, max_retries=40)
    trainer.add_callback(AfterStep(restart))
    trainer.train()
    assert trainer.state.global_step == 2
    assert logged(trainer, "teacher/missing_tokens") == [0.0, 0.0]
    vllm_server.wait()


def test_a_server_that_is_killed_and_stays_away_ends_training_with_one_message(vllm_server, smollm2, tmp_path):
    trainer = make_trainer(tmp_path, smollm2, vllm_server, steps=3, max_retries=1)
    trainer.add_callback(AfterStep(vllm_server.kill))
    with pytest.raises(TeacherError, match=r"failed 2 tries: Connection error.*raise `max_retries`"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_an_adapter_by_its_name(adapter_server, smollm2, adapter, tokenizer, rows):
    from peft import PeftModel

    teacher = teacher_of(adapter_server, adapter="kind")
    teacher.check(tokenizer, topk=4)
    scores = teacher.score(rows, topk=4)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert_agrees(scores, PeftModel.from_pretrained(model, adapter), rows, topk=4)
    with pytest.raises(TeacherError, match=r"does not serve 'rude'\. It serves: smollm2, kind"):
        teacher_of(adapter_server, adapter="rude").check(tokenizer)
    base = teacher_of(adapter_server).score(rows).per_token_logps
    assert (base - scores.per_token_logps).nan_to_num().abs().max() > 0.1
