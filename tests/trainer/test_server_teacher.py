"""Training with a teacher on a server, and naming one in a configuration, against a stub of vLLM."""

import asyncio
import threading
import time

import pytest
from datasets import Dataset
from stub_chat_server import Reply
from stub_teacher_server import StubTeacherServer, by_model, problem, teacher_of
from tiny import tiny_llama, tiny_tokenizer
from tokenizers import normalizers
from trainer_harness import ScriptedTeacher, judge_with_hints, logged, make_trainer, prompts
from trl import DatasetMixtureConfig, ModelConfig

from trl_openclaw import CombineTrainer, OPDConfig, Verdict, Vote
from trl_openclaw.errors import SelfTestError, TeacherError, VocabularyMismatchError
from trl_openclaw.recipe import FeedbackArguments, trainer_arguments


def with_context() -> Dataset:
    """Prompts with a privileged context each."""
    return Dataset.from_list([{**row, "privileged_context": "Be brief."} for row in prompts()])


class TestTraining:
    @pytest.mark.parametrize("trainer_class", [None, CombineTrainer])
    def test_is_that_of_a_teacher_in_this_process(self, tmp_path, trainer_class):
        other = tiny_llama(seed=1)
        kwargs = {"trainer_class": trainer_class} if trainer_class else {}
        config = {"max_steps": 2, "seed": 3}
        local = make_trainer(
            tmp_path / "local", teacher_model=other, teacher_processing_class=tiny_tokenizer(), config=config, **kwargs
        )
        local.train()
        with StubTeacherServer(by_model(other)) as server:
            remote = make_trainer(tmp_path / "remote", teacher_model=teacher_of(server), config=config, **kwargs)
            remote.train()
        assert logged(remote, "loss") == pytest.approx(logged(local, "loss"), abs=1e-5)
        assert logged(remote, "opd/gap_abs_mean") == pytest.approx(logged(local, "opd/gap_abs_mean"), abs=1e-5)
        assert any(logged(remote, "loss"))

    def test_hints_chosen_by_overlap(self, tmp_path):
        config = {"hint_selection": "sequence", "topk": 3}
        judge = judge_with_hints("Be brief.", "Use numbers.")
        with StubTeacherServer(by_model(tiny_llama(seed=1))) as server:
            trainer = make_trainer(tmp_path, teacher_model=teacher_of(server), config=config, judge=judge)
            trainer.train()
            assert {request["prompt_logprobs"] for request in server.requests} == {3}
        assert logged(trainer, "hint/candidates") == [2.0]

    def test_rows_that_do_not_fit_are_dropped_and_counted(self, tmp_path):
        with StubTeacherServer(window=40) as server:
            trainer = make_trainer(tmp_path, teacher_model=teacher_of(server))
            trainer.train()
            assert max(len(ids) for request in server.requests for ids in request["prompt"]) < 40
        assert logged(trainer, "hint/dropped/too_long") == [1.0]

    def test_the_server_of_the_policy_itself_is_compared_with_it(self, tmp_path):
        policy = tiny_llama()
        policy.config._name_or_path = "/models/stub"
        with StubTeacherServer(by_model(tiny_llama())) as server:
            trainer = make_trainer(tmp_path, model=policy, teacher_model=teacher_of(server))
            assert trainer.teacher.same_weights_at_start is True
            trainer.train()
        (gap,) = logged(trainer, "teacher/server_gap")
        assert 0 <= gap < 1e-5

    def test_a_server_with_other_weights_under_the_policys_name_is_refused(self, tmp_path):
        policy = tiny_llama()
        policy.config._name_or_path = "/models/stub"
        with StubTeacherServer(by_model(tiny_llama(seed=1))) as server:
            trainer = make_trainer(tmp_path, model=policy, teacher_model=teacher_of(server))
            with pytest.raises(SelfTestError, match=r"`self_test_tolerance`, or pass `same_weights_at_start=False`"):
                trainer.train()
            other = teacher_of(server, same_weights_at_start=False)
            make_trainer(tmp_path, model=policy, teacher_model=other).train()

    def test_a_server_with_another_model_is_not_compared(self, tmp_path):
        with StubTeacherServer() as server:
            trainer = make_trainer(tmp_path, teacher_model=teacher_of(server))
            trainer.train()
        assert trainer.teacher.same_weights_at_start is False
        assert logged(trainer, "teacher/server_gap") == []

    def test_stops_with_one_message_when_the_server_goes_away(self, tmp_path):
        with StubTeacherServer() as server:
            trainer = make_trainer(tmp_path, teacher_model=teacher_of(server), config={"max_steps": 4})
            server.script = [Reply()] * 2 + [Reply(drop=True)]
            said = problem(trainer.train)
        assert said == (
            f"The teacher's server at {server.base_url} (model 'stub-model') failed 2 tries: Connection error (Server "
            "disconnected without sending a response). Look at its log, start it again, or raise `max_retries` "
            "(`teacher_server_...` in a config)."
        )
        assert trainer.state.global_step in (1, 2)

    @pytest.mark.parametrize(
        ("config", "server", "words"),
        [
            ({"temperature": 0.7}, {}, "Use `temperature=1.0`"),
            ({"ddp_timeout": 800}, {}, "must stay below `ddp_timeout`"),
            ({"opd_loss": "full_divergence"}, {}, "only scores"),
            ({"hint_selection": "sequence", "topk": 6}, {"max_logprobs": 5}, "--max-logprobs"),
            ({}, {"models": {"other": None}}, "does not serve 'stub-model'"),
            ({"teacher_server_model": "m", "teacher_server_base_url": "http://h"}, {}, "name two teachers"),
        ],
    )
    def test_is_refused_before_it_starts(self, tmp_path, config, server, words):
        with (
            StubTeacherServer(**server) as stub,
            pytest.raises(ValueError, match=words),
        ):
            make_trainer(tmp_path, teacher_model=teacher_of(stub), config=config)

    def test_a_server_with_another_tokenizer_is_refused(self, tmp_path):
        other = tiny_tokenizer()
        other.backend_tokenizer.normalizer = normalizers.Lowercase()
        with StubTeacherServer(tokenizer=other) as server, pytest.raises(VocabularyMismatchError):
            make_trainer(tmp_path, teacher_model=teacher_of(server))

    def test_rows_are_scored_while_the_judge_thinks(self, tmp_path):
        asked = threading.Event()

        async def judge(turn):
            for _ in range(500):  # answers when the teacher has been asked, which must not wait for it
                if asked.is_set():
                    return Verdict.from_votes([Vote(score=1)])
                await asyncio.sleep(0.01)
            raise RuntimeError("nobody asked the teacher")

        with StubTeacherServer() as server:
            trainer = make_trainer(
                tmp_path,
                CombineTrainer,
                data=with_context(),
                judge=judge,
                teacher_model=teacher_of(server),
                config={"hint_source": "privileged_context", "self_test": False},
            )
            server.edit = lambda payload: asked.set()
            trainer.train()
        assert logged(trainer, "feedback/failed/judge_failed") == [0.0]

    def test_rows_are_scored_while_others_are_judged(self, tmp_path):
        spans = {"judge": [], "teacher": []}

        async def judge(turn):
            began = time.monotonic()
            await asyncio.sleep(1.5)
            spans["judge"].append((began, time.monotonic()))
            return Verdict.from_votes([Vote(score=1)])

        class Timed(StubTeacherServer):
            def post(self, path, request, headers):
                began = time.monotonic()
                answer = super().post(path, request, headers)
                spans["teacher"].append((began, time.monotonic()))
                return answer

        with Timed(script=Reply(delay=0.5)) as server:
            trainer = make_trainer(
                tmp_path,
                CombineTrainer,
                data=with_context(),
                judge=judge,
                teacher_model=teacher_of(server, request_tokens=1, max_concurrency=2),
                config={"hint_source": "privileged_context", "self_test": False},
            )
            spans["teacher"].clear()  # of the check
            trainer.train()
        assert {name: len(found) for name, found in spans.items()} == {"judge": 4, "teacher": 4}
        took = {name: max(ends) - min(begins) for name, (begins, ends) in _edges(spans).items()}
        both = _edges({"both": [*spans["judge"], *spans["teacher"]]})["both"]
        assert took["teacher"] >= 1.0  # two at a time
        assert max(both[1]) - min(both[0]) < sum(took.values()) - 0.5


def _edges(spans):
    """When each of some spans began, and when each ended."""
    return {name: tuple(zip(*found, strict=True)) for name, found in spans.items()}


class TestConfig:
    def test_names_a_server(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TEACHER_KEY", "secret")
        cards = {"stub-model": None, "kind": "stub-model"}
        with StubTeacherServer(models=cards) as server:
            config = {
                "teacher_server_model": "stub-model",
                "teacher_server_base_url": server.base_url,
                "teacher_server_adapter": "kind",
                "teacher_server_api_key_env": "TEACHER_KEY",
                "teacher_server_timeout": 7.0,
                "teacher_server_max_retries": 3,
                "teacher_server_request_tokens": 99,
            }
            trainer = make_trainer(tmp_path, config=config)
            trainer.train()
            assert {request["model"] for request in server.requests} == {"kind"}
            assert server.headers[-1]["authorization"] == "Bearer secret"
        teacher = trainer.teacher
        assert (teacher.timeout, teacher.max_retries, teacher.request_tokens) == (7.0, 3, 99)
        assert "secret" not in str(trainer.args.to_dict())

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"teacher_server_max_retries": -1}, "`teacher_server_max_retries` must be a whole number at least 0"),
            ({"teacher_server_request_tokens": 0}, "`teacher_server_request_tokens` must be a whole number at least 1"),
            ({"teacher_server_model": "m"}, "needs `teacher_server_base_url`"),
            ({"teacher_server_base_url": "http://h/v1"}, "`teacher_server_base_url` needs `teacher_server_model`"),
            ({"teacher_server_adapter": "a"}, "`teacher_server_adapter` needs `teacher_server_model`"),
            ({"teacher_server_timeout": 0}, "`teacher_server_timeout` must be a finite number greater than 0"),
            ({"teacher_server_model": 7, "teacher_server_base_url": "http://h"}, "`teacher_server_model` must be text"),
            (
                {"teacher_server_model": "m", "teacher_server_base_url": "http://h", "teacher": "ema"},
                "name two teachers",
            ),
            (
                {
                    "teacher_server_model": "m",
                    "teacher_server_base_url": "http://h",
                    "teacher_model_name_or_path": "x",
                },
                "name two teachers",
            ),
        ],
    )
    def test_half_a_server_or_two_teachers_are_refused(self, tmp_path, config, words):
        with pytest.raises(ValueError, match=words):
            make_trainer(tmp_path, config=config)

    def test_a_recipe_asks_the_server_before_it_loads_a_model(self, tmp_path, dead_url):
        config = {"teacher_server_model": "m", "teacher_server_base_url": dead_url}
        args = OPDConfig(str(tmp_path), use_cpu=True, bf16=False, **config)
        model = ModelConfig(model_name_or_path="nobody/nothing")
        with pytest.raises(TeacherError, match="cannot be reached"):
            trainer_arguments(FeedbackArguments(dataset_name="x"), args, model, DatasetMixtureConfig())

    def test_a_config_and_an_argument_are_two_teachers(self, tmp_path):
        config = {"teacher_server_model": "m", "teacher_server_base_url": "http://127.0.0.1:9/v1"}
        with pytest.raises(ValueError, match="`teacher_server_model` name two teachers"):
            make_trainer(tmp_path, config=config, teacher_model=ScriptedTeacher(lambda row: [-1.0]))
