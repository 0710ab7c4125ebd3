"""Two real processes over gloo: no rank may wait for another one for ever, and the numbers are those of one process."""

import pytest
from launch_ranks import assert_shared_on_one_rank, assert_turns_of_two_ranks
from rank_runs import STOPPED, Run

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def ranks(ranks_under) -> Run:
    """What both processes found, each with the whole model."""
    return ranks_under("multi_gpu")


@pytest.mark.parametrize("scenario", ["one rank without hints", "uneven lengths", "combine", "lora"])
def test_ranks_stay_in_step(ranks, scenario):
    first, second = ranks[scenario]
    assert first["error"] is None
    assert second["error"] is None
    assert len(first["losses"]) == 2
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-12)  # the same step was taken everywhere
    for a, b, total in zip(first["active_tokens"], second["active_tokens"], first["num_items"], strict=True):
        assert a + b == total
    if scenario == "one rank without hints":
        # A sharded teacher would hang otherwise: the rank without hints runs just as many forwards.
        assert first["teacher_forwards"] == second["teacher_forwards"] == 2
        assert second["active_tokens"] == [0, 0]
        assert second["losses"] == [0.0, 0.0]
        assert first["log"][0]["hint/accepted"] == 0.5


def test_a_reference_that_is_ahead_of_slow_verdicts_changes_nothing(ranks):
    ahead, afterwards = (ranks[f"reference {when}"] for when in ("ahead", "afterwards"))
    for first, second in zip(ahead, afterwards, strict=True):
        assert first["error"] is None
        assert any(first["losses"])
        assert first["losses"] == pytest.approx(second["losses"], rel=1e-5)
        assert first["weights"] == pytest.approx(second["weights"], rel=1e-8)
    assert ahead[0]["weights"] == pytest.approx(ahead[1]["weights"], rel=1e-12)


def test_a_rank_whose_conversations_are_over_samples_on_with_the_others(ranks):
    first, second = ranks["longer conversations on rank zero"]
    assert first["error"] is second["error"] is None
    for a, b in zip(first["log"], second["log"], strict=True):
        assert a["turns_here"] > 1 == b["turns_here"]
        assert a["generations"] == b["generations"] > 1
        assert a["conversation/turns"] == b["conversation/turns"] == (a["turns_here"] + b["turns_here"]) / 2
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-12)


def test_ranks_whose_rows_have_different_numbers_of_turns_stay_in_step(ranks):
    found = ranks["more turns on rank zero"]
    assert_turns_of_two_ranks(*found)
    assert found[0]["weights"] == pytest.approx(found[1]["weights"], rel=1e-12)


def test_each_rank_trains_on_the_scores_of_its_own_rows(ranks):
    first, second = ranks["scores by rank"]
    assert first["step_advantages"] == [[1.0] * 4] * 2
    assert second["step_advantages"] == [[-1.0] * 4] * 2


def test_an_empty_hint_batch_on_all_ranks(ranks):
    first, second = ranks["no hints at all"]
    assert first["losses"] == second["losses"] == [0.0, 0.0]


def test_a_judge_that_fails_on_one_rank_is_counted_and_training_goes_on(ranks):
    first, second = ranks["judge broken on one rank"]
    assert first["error"] is None
    assert second["error"] is None
    assert [entry["feedback/failed/judge_failed"] for entry in first["log"]] == [0.5, 0.5]


@pytest.mark.parametrize(("scenario", "message"), STOPPED.items())
def test_all_ranks_stop_together_with_the_same_message(ranks, scenario, message):
    first, second = ranks[scenario]
    assert message in first["error"]
    assert first["error"] == second["error"]


def test_an_alarm_stops_all_ranks_after_the_same_step(ranks):
    """Each rank decides by its own log, so what is watched must be the same number on all of them."""
    first, second = ranks["alarm"]
    assert len(first["losses"]) == len(second["losses"]) == 1
    for metric, value in (("completions/mean_length", 4.5), ("completions/clipped_ratio", 0.0), ("entropy", None)):
        assert first["log"][0][metric] == second["log"][0][metric]
        assert value is None or first["log"][0][metric] == value


@pytest.mark.parametrize("loss", ["topk_surrogate", "full_divergence"])
def test_an_objective_waits_for_no_rank_without_hints(ranks, loss):
    first, second = ranks[f"{loss} one rank without hints"]
    assert first["error"] is None
    assert second["error"] is None
    assert first["teacher_forwards"] == second["teacher_forwards"]
    assert all(first["losses"])
    assert second["losses"] == [0.0, 0.0]
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-12)
    assert first["log"][0]["opd/loss"] == second["log"][0]["opd/loss"] != 0


@pytest.mark.parametrize("scenario", ["by prompt", "topk_surrogate by prompt", "full_divergence by prompt"])
def test_two_processes_train_like_one(ranks, ranks_under, scenario):
    """The same global batch gives the same loss, and the same weights after two steps."""
    (one,) = ranks_under("single")[scenario]
    first, second = ranks[scenario]
    assert first["error"] is None
    assert 0 < one["num_items"][0] < 8 * 6  # some rows have no hint
    assert first["num_items"] == second["num_items"] == one["num_items"]
    for a, b, whole in zip(first["losses"], second["losses"], one["losses"], strict=True):
        assert (a + b) / 2 == pytest.approx(whole, abs=1e-5)
    assert first["weights"] == pytest.approx(one["weights"], rel=1e-6)


def test_one_rank_shares_prompts_and_the_other_cannot(ranks):
    """Four equal prompts on one rank and four different ones on the other: as many passes, and the same weights."""
    whole = ranks["one rank shares, in whole rows"]
    shared = ranks["one rank shares"]
    assert_shared_on_one_rank(shared, whole)


def test_a_budget_too_small_on_one_rank_stops_both(ranks):
    first, second = ranks["budget too small on one rank"]
    assert "`teacher_token_budget=80` is smaller than one row: a hinted prompt and its completion" in first["error"]
    assert first["error"] == second["error"]


def test_a_row_longer_than_the_default_budget_stops_nobody(ranks):
    first, second = ranks["one rank's rows are longer than the default budget"]
    assert (first["error"], second["error"]) == (None, None)
    assert first["teacher_forwards"] == second["teacher_forwards"] > 2  # more than one a step: the budget was felt
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-12)


def test_one_rank_shares_prompts_when_sampling_and_the_other_has_none(ranks):
    """The model is tried out at the first prompts, where ranks compare notes, whatever their rows."""
    whole = ranks["one rank samples equal prompts, in whole rows"]
    shared = ranks["one rank samples equal prompts"]
    assert shared[0]["sampled_tokens"] < whole[0]["sampled_tokens"]
    for found, expected in zip(shared, whole, strict=True):
        assert found["error"] is None
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
