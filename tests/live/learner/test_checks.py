"""Every check fails for what it is there for, says so where there is nothing to look at, and leaves numbers."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from learner_harness import USER, make_learner, open_store, record, states
from tiny import tiny_llama

from trl_openclaw.errors import LearnerError
from trl_openclaw.live.learner.checks import (
    CHECKS,
    QUESTIONS_TO_ANSWER,
    CheckResult,
    Checks,
    Evidence,
    as_detail,
    failures,
)
from trl_openclaw.live.learner.greedy import greedy_replies, repetition, until_end
from trl_openclaw.live.learner.measure import Item
from trl_openclaw.live.learner.probes import load_probes, prompt_of
from trl_openclaw.live.learner.snapshot import Snapshot, load_tensors, other_weights, trained_tensors
from trl_openclaw.live.learner.token_notes import gains
from trl_openclaw.live.records import TokenScores

ALL = {
    "check_held_out": 0.1,
    "check_probes": 0.2,
    "check_probes_total": 1.0,
    "check_replays": 0.1,
    "check_length": [0.05, 4.0],
    "check_entropy": [0.1, 4.0],
    "check_repetition": 0.3,
}


def prepared(folder, **config):
    """A learner between two steps, without having trained: the optimizer is there, and nothing is in the batch."""
    learner = make_learner(folder, **config)
    learner.create_optimizer_and_scheduler(num_training_steps=1)
    return learner, Snapshot(learner)


@torch.no_grad()
def move(learner, size: float, seed: int = 0) -> None:
    """Change the weights at random."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in trained_tensors(learner).values():
        tensor.add_(size * torch.randn(tensor.shape, generator=generator))


def check(learner, before: Snapshot, name: str, version: str = "new") -> CheckResult:
    return learner.updates.checks(version, before)[name]


def trained_towards(learner, turns, sign: float):
    """Move the weights so that replies of turns become likelier, or less likely."""
    optimizer = torch.optim.SGD([p for p in learner.model.parameters() if p.requires_grad], lr=0.3)
    for _ in range(3):
        loss = torch.zeros(())
        for turn in turns:
            logits = learner.model(torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])).logits[0]
            logps = logits[len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
            loss = loss - sign * logps.gather(1, torch.tensor(turn.completion_ids).unsqueeze(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# One by one


@pytest.mark.parametrize(("score", "sign", "outcome"), [(-1, -1.0, "passed"), (-1, 1.0, "failed"), (1, -1.0, "failed")])
def test_held_out_turns_must_not_go_the_wrong_way(tmp_path, score, sign, outcome):
    store = open_store(tmp_path)
    ids = record(store, range(4), score=score, held_out=True)
    record(store, range(4, 6), score=None, hints=("Be brief.",), held_out=True)  # without a score they say nothing
    record(store, range(6, 8), score=0, held_out=True)
    learner, before = prepared(tmp_path, check_held_out=0.1)
    trained_towards(learner, [store.show(USER, turn_id) for turn_id in ids], sign)
    found = check(learner, before, "held_out")
    assert found.outcome == outcome
    assert found.numbers["turns"] == 4
    assert (found.numbers["preference"] < -0.1) == (outcome == "failed")
    assert "over 4 turns (accepted -0.1)" in found.note


def test_the_preference_is_the_mean_of_score_times_change(tmp_path):
    store = open_store(tmp_path)
    good = record(store, range(2), score=1, held_out=True)
    bad = record(store, range(2, 4), score=-1, held_out=True)
    learner, before = prepared(tmp_path, check_held_out=100.0)
    move(learner, 0.1)
    found = check(learner, before, "held_out").numbers["preference"]
    expected = []
    for turn_id, score in [*((i, 1) for i in good), *((i, -1) for i in bad)]:
        turn = store.show(USER, turn_id)
        ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
        with torch.no_grad():
            logits = learner.model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
        now = logits.gather(1, torch.tensor(turn.completion_ids).unsqueeze(1)).mean().item()
        expected.append(score * (now - sum(turn.logprobs) / len(turn.logprobs)))
    assert found == pytest.approx(sum(expected) / 4, abs=1e-5)
    assert abs(found) > 1e-3


@pytest.mark.parametrize(("count", "note"), [(0, "no held-out turns yet"), (3, "3 held-out turns, 4 needed")])
def test_too_few_held_out_turns_are_said_to_be_too_few(tmp_path, count, note):
    store = open_store(tmp_path)
    record(store, range(count), held_out=True)
    learner, before = prepared(tmp_path, check_held_out=0.1)
    move(learner, 10.0)
    assert check(learner, before, "held_out") == CheckResult("no_data", note, {"turns": count})


def write_probes(folder, lines) -> str:
    path = folder / "probes.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


PROBES = [
    {"question": "one", "answer": "1", "wordings": ["eins", "un"]},
    {"question": "two", "answer": "2!", "wordings": ["zwei"]},
]


@pytest.mark.parametrize("name", ["plain_questions", "other_wordings"])
def test_answers_must_not_become_unlikely(tmp_path, name):
    settings = {"check_probe_file": write_probes(tmp_path, PROBES), "check_probes": 0.2}
    learner, before = prepared(tmp_path, **settings)
    same = check(learner, before, name, "same")
    assert same.outcome == "passed"
    assert same.numbers["questions"] == {"plain_questions": 2, "other_wordings": 3}[name]
    assert same.numbers["nll"] == same.numbers["nll_published"] == same.numbers["nll_base"]
    move(learner, 3.0)
    worse = check(learner, before, name)
    assert worse.outcome == "failed"
    assert worse.numbers["nll"] > worse.numbers["nll_published"] + 0.2


def test_small_losses_add_up_to_a_large_one(tmp_path):
    settings = {"check_probe_file": write_probes(tmp_path, PROBES), "check_probes": 0.01, "check_probes_total": 0.2}
    learner, _ = prepared(tmp_path, **settings)
    move(learner, 3.0)
    learner.progress = type(learner.progress)("v000001", {})
    found = check(learner, Snapshot(learner), "plain_questions")  # nothing in this update, too much in all
    assert found.numbers["nll"] == pytest.approx(found.numbers["nll_published"], abs=1e-6)
    assert found.numbers["nll"] > found.numbers["nll_base"] + 0.2
    assert found.outcome == "failed"


def test_the_shipped_questions_have_answers_and_two_or_three_wordings():
    probes = load_probes(None)
    assert len(probes) >= 20
    assert all(probe.question and probe.answer and 2 <= len(probe.wordings) <= 3 for probe in probes)
    asked = [text for probe in probes for text in (probe.question, *probe.wordings)]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("lines", [[], [{"question": "one"}], ["text"]])
def test_a_broken_file_of_questions_is_refused(tmp_path, lines):
    with pytest.raises(LearnerError, match="`check_probe_file`"):
        make_learner(tmp_path, check_probe_file=write_probes(tmp_path, lines))


def test_what_corrections_have_gained_must_not_be_undone(tmp_path):
    store = open_store(tmp_path)
    ids = record(store, range(4))
    record(store, range(4, 8), score=1, hints=())
    learner = make_learner(tmp_path, max_updates=2, check_replays=0.1)
    learner.train()
    first, second = (version.events[0].detail["checks"]["replays"] for version in store.versions(USER))
    assert (first["outcome"], first["note"]) == ("no_data", "no corrections were trained yet")
    assert second["numbers"]["corrections"] == 4
    assert second["numbers"]["gain_published"] > 0.1
    before = Snapshot(learner)
    load_tensors(learner, learner.initial_weights)  # all of it undone
    undone = check(learner, before, "replays")
    assert undone.outcome == "failed"
    assert undone.numbers["gain"] == pytest.approx(0.0, abs=1e-4)
    trained_towards(
        learner, [store.show(USER, turn_id) for turn_id in ids], 1.0
    )  # what was wrong is likelier than ever
    worse = check(learner, Snapshot(learner), "replays", "worse")
    assert worse.numbers["gain"] < -0.1
    learner.progress = type(learner.progress)("worse", {})
    assert check(learner, Snapshot(learner), "replays", "no better").outcome == "failed"


def replayed(*gains: tuple[float, float], lost: float = 0.0) -> CheckResult:
    """What the check says of corrections with these gains, each under the published version and under the new one."""

    class OfGains(Checks):
        def __init__(self):
            self.trainer = SimpleNamespace(args=SimpleNamespace(check_replays=0.1, check_replays_undone=0.1))

        def _fits(self, turn):
            return True

    turns = [
        SimpleNamespace(turn_id=str(place), prompt_ids=(1,), completion_ids=(2,), logprobs_temperature=1.0)
        for place in range(len(gains))
    ]
    old, new = ({turn.turn_id: [pair[place]] for turn, pair in zip(turns, gains, strict=True)} for place in (0, 1))
    versions = SimpleNamespace(of_new=lambda items: new, of_published=lambda items: old)
    return OfGains().replays(versions, Evidence([], [(turn, TokenScores([0.0], [], [1.0])) for turn in turns], lost))


def test_corrections_do_not_wear_off_over_many_updates():
    first = replayed(*[(0.5, 0.44)] * 4)
    assert (first.outcome, first.numbers["lost"]) == ("passed", pytest.approx(0.06))
    second = replayed(*[(0.44, 0.38)] * 4, lost=first.numbers["lost"])
    assert (second.outcome, second.numbers["lost"]) == ("failed", pytest.approx(0.12))
    better = replayed(*[(0.44, 0.53)] * 4, lost=first.numbers["lost"])
    assert (better.outcome, better.numbers["lost"]) == ("passed", 0.0)


def test_what_was_lost_stands_with_the_version_that_is_published(tmp_path):
    store = open_store(tmp_path)
    for number, lost in ((1, 0.06), (2, 0.01), (3, None)):
        store.add_version(USER, f"v{number:06d}", "base", f"/{number}")
        detail = {"checks": {"replays": {"numbers": {"lost": lost}}}}
        store.add_version_event(USER, f"v{number:06d}", "checked", detail)
    store.add_version(USER, "v000004", "base", "/4")
    store.add_version_event(USER, "v000004", "checked", {"checks": {"replays": {"numbers": {}}}})
    learner, _ = prepared(tmp_path)
    for version, lost in (("v000001", 0.06), ("v000002", 0.01), ("v000003", 0), ("v000004", 0), ("base", 0)):
        learner.progress = type(learner.progress)(version, {})
        assert learner.updates.checks._evidence().lost == lost


@pytest.mark.parametrize(
    ("one", "others", "outcome"),
    [
        ((0.8, 0.0), 8, "failed"),  # its mean alone would pass
        ((0.8, 0.0), 9, "passed"),  # one of ten
        ((0.8, 0.5), 8, "passed"),  # less than half of it
        ((0.15, 0.06), 8, "passed"),  # more than half, and still little
        ((-0.1, -0.25), 8, "failed"),  # it went the wrong way before, and goes on
    ],
)
def test_single_corrections_are_not_undone_behind_the_mean(one, others, outcome):
    found = replayed(one, *[(0.5, 0.6)] * others)
    assert found.outcome == outcome
    assert found.numbers["lost"] <= 0.1


def test_gains_that_are_no_numbers_fail():
    found = replayed((0.5, 0.6), (0.5, math.nan))
    assert found.outcome == "failed"
    assert math.isnan(found.numbers["lost"])


def test_a_gain_is_the_change_along_the_advantages():
    scores = TokenScores(student=(-1.0, -2.0, -3.0), teacher=(), advantages=(0.5, -1.0, 0.0))
    assert gains(scores, [-0.5, -2.6, 7.0]) == pytest.approx((0.5 * 0.5 + 1.0 * 0.6) / 1.5)
    assert gains(TokenScores((-1.0,), (), (0.0,)), [-2.0]) is None


@pytest.mark.parametrize(
    ("settings", "bad"),
    [
        ({"check_length": [0.9, 1.1]}, "length is"),
        ({"check_entropy": [0.9, 1.1]}, "entropy is"),
        ({"check_repetition": 0.1}, "repetition is"),
    ],
)
def test_collapsed_replies_are_noticed(tmp_path, settings, bad):
    settings = {**settings, "check_probe_file": write_probes(tmp_path, PROBES), "check_reply_tokens": 12}
    learner, before = prepared(tmp_path, **settings)
    assert check(learner, before, "collapse", "same").outcome == "passed"
    ends = bad == "length is"

    def collapsed(module, inputs, output):  # every reply is one token, over and over, or ends at once
        output.logits = torch.full_like(output.logits, -20.0)
        output.logits[..., 256 if ends else 65] = 20.0
        return output

    hook = learner.model.get_base_model().register_forward_hook(collapsed)
    found = check(learner, before, "collapse")
    hook.remove()
    assert found.outcome == "failed"
    assert bad in found.note
    assert found.numbers["length"] == (1 if ends else 12)
    assert found.numbers["repetition"] == (0 if ends else pytest.approx(8 / 9))
    assert found.numbers["entropy"] == pytest.approx(0.0, abs=1e-6)
    assert found.numbers["entropy_base"] > 0.5


def test_replies_are_those_to_each_prompt_by_itself(tmp_path):
    learner, _ = prepared(tmp_path)
    learner.eos_token_ids = [*learner.eos_token_ids, *range(97, 105)]  # so that some end early, and at another length
    prompts = [
        prompt_of(learner, question) for question in ("Why?", "What is the capital of France, and why?", "Go on")
    ]
    alone = [greedy_replies(learner, [prompt], 12) for prompt in prompts]
    assert len({one.length for one in alone}) > 1
    together = greedy_replies(learner, prompts, 12)
    for name in ("length", "entropy", "repetition"):
        expected = sum(getattr(one, name) for one in alone) / len(alone)
        assert getattr(together, name) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("ids", "reply"), [([1, 2, 9, 0, 0], [1, 2, 9]), ([9, 9], [9]), ([1, 2, 3], [1, 2, 3]), ([], [])]
)
def test_a_reply_goes_to_its_first_end(ids, reply):
    assert until_end(ids, {9, 8}) == reply


@pytest.mark.parametrize(
    ("ids", "share"), [([1, 2, 3], 0.0), ([1, 2, 3, 4, 5], 0.0), ([1] * 6, 2 / 3), ([1, 2, 3, 4] * 2, 1 / 5)]
)
def test_repetition_is_the_share_of_groups_that_stood_before(ids, share):
    assert repetition(ids) == pytest.approx(share)


# Together


def test_all_checks_say_something_and_all_numbers_are_kept(tmp_path):
    store = open_store(tmp_path)
    record(store, range(4))
    record(store, range(4, 8), held_out=True)
    make_learner(tmp_path, max_updates=1, **ALL).train()
    (version,) = store.versions(USER)
    detail = version.events[0].detail
    assert detail["turns"] == 4
    assert detail["seconds"] > 0
    assert {name: one["outcome"] for name, one in detail["checks"].items()} == {
        "held_out": "passed",
        "plain_questions": "passed",
        "other_wordings": "passed",
        "replays": "no_data",
        "collapse": "passed",
    }
    assert all(one["note"] for one in detail["checks"].values())


def test_what_is_switched_off_says_so(tmp_path):
    learner, before = prepared(tmp_path)
    found = learner.updates.checks("new", before)
    assert found.keys() == CHECKS.keys()
    assert {(one.outcome, one.note) for one in found.values()} == {("off", "switched off in the settings")}


def test_numbers_that_are_none_fail_and_are_stored_as_nothing(tmp_path):
    settings = {"check_probe_file": write_probes(tmp_path, PROBES), "check_probes": 0.2, "check_held_out": 0.1}
    store = open_store(tmp_path)
    record(store, range(4), held_out=True)
    learner, before = prepared(tmp_path, **settings)
    move(learner, math.nan)
    found = learner.updates.checks("new", before)
    assert [found[name].outcome for name in ("held_out", "plain_questions", "other_wordings")] == ["failed"] * 3
    assert "held_out: " in failures(found)
    assert json.loads(json.dumps(as_detail(found), allow_nan=False))["plain_questions"]["numbers"]["nll"] is None


def test_the_base_model_is_measured_before_there_are_turns(tmp_path):
    settings = {"check_probes": 0.2, "check_length": [0.05, 4.0]}
    learner, before = prepared(tmp_path, **settings)
    checks = learner.updates.checks
    checks.prepare()
    move(learner, 0.5)
    scored, replied = [], []
    score, generate = learner.scorer.score, learner.model.generate
    learner.scorer.score = lambda model, rows: scored.append(len(rows)) or score(model, rows)
    learner.model.generate = lambda **kwargs: replied.append(len(kwargs["input_ids"])) or generate(**kwargs)
    found = checks("new", before)
    assert scored == [24, 48]  # of the new version alone, since the published one is the base model
    assert replied == [QUESTIONS_TO_ANSWER]  # all at once
    assert found["plain_questions"].numbers["nll_base"] != found["plain_questions"].numbers["nll"]


def test_a_learner_measures_it_when_it_starts(tmp_path):
    store = open_store(tmp_path)
    record(store, range(4))
    learner, order = make_learner(tmp_path, max_updates=1), []
    checks, prepare, claim = learner.updates.checks, learner.updates.checks.prepare, store.claim
    checks.prepare = lambda: order.append("prepared") or prepare()
    learner.at_desk.store.claim = lambda *args, **kwargs: order.append("claimed") or claim(*args, **kwargs)
    learner.train()
    assert order[:2] == ["prepared", "claimed"]


def test_each_reply_is_scored_once_per_version(tmp_path):
    learner, before = prepared(tmp_path)
    measures = learner.updates.checks.measures
    calls, score = [], learner.scorer.score
    learner.scorer.score = lambda model, rows: calls.append(len(rows)) or score(model, rows)
    items = [Item(str(i), [258, i], [65, 256]) for i in range(3)]
    move(learner, 0.5)
    new = measures("new", items, lambda: other_weights(learner, {k: v.clone() for k, v in _tensors(learner).items()}))
    old = measures("old", items, lambda: other_weights(learner, before.weights))
    again = measures("new", [*items, Item("3", [258], [66])], lambda: other_weights(learner, _tensors(learner)))
    assert calls == [3, 3, 1]
    assert {key: again[key] for key in new} == new
    assert new != old
    measures.forget("old")
    measures("new", items[:1], lambda: other_weights(learner, _tensors(learner)))
    assert calls == [3, 3, 1, 1]


def _tensors(learner):
    return trained_tensors(learner)


# What becomes of a version that fails


def test_a_rejected_version_is_not_published_and_its_batch_ends_so(tmp_path, capsys):
    store = open_store(tmp_path)
    ids = record(store, range(8))
    learner = make_learner(tmp_path, max_updates=2)
    reject(learner, {1})
    learner.train()
    assert states(store, ids) == ["rejected"] * 4 + ["trained"] * 4
    bad, good = store.versions(USER)
    assert [event.event for event in bad.events] == ["checked", "rejected"]
    assert bad.events[-1].detail == {"reason": "held_out: worse"}
    assert (good.parent, good.published) == ("base", True)
    assert "Version v000001 was rejected: held_out: worse." in capsys.readouterr().out
    assert list(learner.progress.batches.values()) == ["v000002"]
    folder = tmp_path / "checkpoints" / "default"
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2"]


def test_it_goes_on_without_a_version_that_the_engine_refused(tmp_path, capsys):
    store = open_store(tmp_path)
    record(store, range(8))
    make_learner(tmp_path, max_updates=1).train()
    store.add_version_event(USER, "v000001", "load_failed", {"error": "rank 64 is too large."})
    learner = make_learner(tmp_path, max_updates=2)
    learner.train()
    said = "Going on from version base, since the engine cannot load v000001: rank 64 is too large.\n"
    assert said in capsys.readouterr().out
    assert [version.parent for version in store.versions(USER)] == ["base", "base"]
    assert store.published_version(USER) == learner.progress.version == "v000002"


def test_a_roll_back_in_the_last_moment_is_not_overwritten(tmp_path):
    store = open_store(tmp_path)
    record(store, range(8))
    make_learner(tmp_path, max_updates=1).train()
    learner = make_learner(tmp_path, max_updates=2)
    own = learner.desk.store._store
    publish = own.publish

    def meanwhile(*args, **kwargs):
        store.roll_back(USER)
        return publish(*args, **kwargs)

    own.publish = meanwhile
    learner.train()
    assert store.published_version(USER) == "base"
    assert store.versions(USER)[-1].events[-1].event == "rejected"


def test_the_version_that_answered_before_is_not_removed_at_once(tmp_path):
    store = open_store(tmp_path)
    record(store, range(12))
    make_learner(tmp_path, max_updates=3, keep_versions=1).train()
    assert sorted(path.name for path in (tmp_path / "adapters" / USER).iterdir()) == ["v000002", "v000003"]
    assert store.roll_back(USER) == "v000002"


def reject(learner, updates) -> None:
    """Let the checks of these updates fail."""
    checks, calls = learner.updates.checks, []

    class Failing:
        measures, prepare = checks.measures, checks.prepare

        def __call__(self, version, before):
            calls.append(version)
            bad = len(calls) in updates
            return {"held_out": CheckResult("failed" if bad else "passed", "worse" if bad else "fine", {})}

    learner.updates.checks = Failing()


@pytest.mark.parametrize("teacher", ["frozen", "ema"])
def test_after_a_rejection_training_goes_on_as_if_it_had_not_been(tmp_path, teacher):
    ema = {"teacher_ema_rate": 0.3} if teacher == "ema" else {}
    weights, averages = [], []
    for folder, rejected in (("with", {1, 3}), ("without", set())):
        store = open_store(tmp_path / folder)
        bad = [range(4), range(8, 12)] if rejected else []
        for numbers in (range(4), range(4, 8), range(8, 12), range(12, 16)):
            if numbers in bad or numbers.start in (4, 12):
                record(store, numbers)
        learner = make_learner(tmp_path / folder, max_updates=4 if rejected else 2, teacher=teacher, **ema)
        reject(learner, rejected)
        learner.train()
        weights.append({name: tensor.clone() for name, tensor in trained_tensors(learner).items()})
        if teacher == "ema":
            averages.append(learner.teacher.score([_row()]).per_token_logps)
        learner.progress = None
        saved = tmp_path / folder / "checkpoints" / "default" / ("checkpoint-4" if rejected else "checkpoint-2")
        assert (saved / "live_batches.json").is_file()
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-6), name
    for a, b in zip(averages[::2], averages[1::2], strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def _row():
    from trl_openclaw.scoring import TeacherRow

    return TeacherRow([258, 72, 105], [65, 66, 256])


def test_a_rejection_leaves_weights_and_optimizer_as_they_were(tmp_path):
    store = open_store(tmp_path)
    record(store, range(8))
    learner = make_learner(tmp_path, max_updates=2)
    reject(learner, {2})
    seen, begin = [], learner.updates.on_step_begin

    def watching(*args, **kwargs):
        begin(*args, **kwargs)
        seen.append(Snapshot(learner))

    learner.updates.on_step_begin = watching
    learner.train()
    after = Snapshot(learner)
    for name, tensor in after.weights.items():
        assert torch.equal(tensor, seen[1].weights[name]), name
        assert not torch.equal(tensor, seen[0].weights[name]) or "lora_A" in name
    for key, state in after.optimizer["state"].items():
        for name, value in state.items():
            assert torch.equal(value, seen[1].optimizer["state"][key][name]), name


def test_the_model_answers_as_before_when_it_has_been_looked_at(tmp_path):
    learner, before = prepared(tmp_path)
    move(learner, 0.5)
    kept = {name: tensor.clone() for name, tensor in trained_tensors(learner).items()}
    with other_weights(learner, before.weights):
        ids = torch.tensor([[258, 72]])
        assert torch.allclose(learner.model(ids).logits, tiny_llama()(ids).logits, atol=1e-5)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in trained_tensors(learner).items())
