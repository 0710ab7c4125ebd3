"""Token scores against a plain forward pass and log-softmax."""

import pytest
import torch
from accelerate import Accelerator
from model_zoo import ZOO, tokens_counted
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import tiny_llama
from trl.trainer.utils import add_fused_lm_head
from turn_rows import mixed_rows, turns_of

from trl_openclaw.prefix_plan import make_plan
from trl_openclaw.scoring import TeacherRow, TokenScorer
from trl_openclaw.shared_prefix import PrefixSharing

PAD = 257
ROWS = [
    TeacherRow([258, 5, 6, 7, 8], [10, 11, 12, 256]),
    TeacherRow([258, 9], [20]),
    TeacherRow([258, 3, 4], [30, 31, 32, 33, 34, 35, PAD]),  # the pad id may be sampled, too
    TeacherRow([258] * 20, [40, 41]),
]


def scorer(
    token_budget: int | None = None, pad: int = PAD, share: bool = True, temperature: float = 1.0
) -> TokenScorer:
    accelerator = Accelerator(cpu=True)
    sharing = PrefixSharing(accelerator, pass_cost=0) if share else None  # shares as soon as there is anything to share
    return TokenScorer(accelerator, pad, token_budget, temperature, sharing=sharing)


def fused(model, temperature: float = 1.0):
    add_fused_lm_head(model, temperature=temperature)
    return model


def dense_reference(model, row: TeacherRow, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    with torch.no_grad():
        logps = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    start = len(row.prompt_ids)
    return torch.stack([logps[start + t - 1, token] for t, token in enumerate(row.completion_ids)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("token_budget", [22, 40, None])
@pytest.mark.parametrize("share", [False, True])
def test_equals_log_softmax_of_each_row_alone(temperature, token_budget, share):
    model = fused(tiny_llama(), temperature)
    scores = scorer(token_budget, share=share).score(model, ROWS)
    assert scores.per_token_logps.shape == (4, 7)
    for i, row in enumerate(ROWS):
        expected = dense_reference(model, row, temperature)
        torch.testing.assert_close(scores.per_token_logps[i, : len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_what_is_not_there_is_nan_and_masked():
    scores = scorer().score(fused(tiny_llama()), ROWS)
    lengths = torch.tensor([len(row.completion_ids) for row in ROWS])
    expected = torch.arange(7) < lengths.unsqueeze(1)
    assert torch.equal(scores.mask, expected)
    assert scores.per_token_logps[~expected].isnan().all()


def test_padding_order_and_other_rows_change_nothing():
    model = fused(tiny_llama())
    alone = scorer().score(model, [ROWS[1]]).per_token_logps[0, 0]
    for rows in (ROWS, ROWS[::-1], [ROWS[1], ROWS[3]]):
        for pad in (PAD, 0):
            scores = scorer(None, pad).score(model, rows)
            torch.testing.assert_close(scores.per_token_logps[rows.index(ROWS[1]), 0], alone, atol=1e-5, rtol=1e-5)


def test_head_sees_completion_positions_only():
    model = fused(tiny_llama())
    seen = []
    model.base_model.register_forward_hook(lambda m, a, out: seen.append(out.last_hidden_state.shape[1]))
    scorer().score(model, [TeacherRow([258] * 30, [1, 2, 3])])
    assert seen == [33]
    # The scorer's own hook, registered later and removed again, cut 33 positions to 4 (three tokens, one before).
    assert len(model.base_model._forward_hooks) == 1


def test_no_rows_no_forward():
    model = tiny_llama()  # without a fused head a forward would raise
    assert scorer().score(model, []).per_token_logps.shape == (0, 0)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("others", [[], [TeacherRow([258, 9, 4], [20, 21])]])
def test_a_completion_without_tokens_has_no_scores(share, others):
    scores = scorer(share=share).score(fused(tiny_llama()), [TeacherRow([258, 9, 4], []), *others])
    assert scores.mask.sum(dim=1).tolist() == [0, *(2 for _ in others)]


def test_dropout_is_off_and_the_mode_comes_back():
    model = fused(tiny_llama(attention_dropout=0.5))
    calm = scorer().score(model, ROWS).per_token_logps
    model.train()
    assert torch.equal(scorer().score(model, ROWS).per_token_logps.nan_to_num(), calm.nan_to_num())
    assert model.training


def test_inside_lora():
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(fused(tiny_llama()), config).eval()
    scores = scorer().score(model, ROWS)
    for i, row in enumerate(ROWS):
        expected = dense_reference(model, row)
        torch.testing.assert_close(scores.per_token_logps[i, : len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_virtual_tokens_of_prompt_tuning_are_not_cut_off():
    model = get_peft_model(fused(tiny_llama()), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    row = ROWS[0]
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    with torch.no_grad():
        logps = model(input_ids=ids).logits[0, 3:].log_softmax(-1)
    expected = torch.stack([logps[len(row.prompt_ids) + t - 1, token] for t, token in enumerate(row.completion_ids)])
    scored = scorer().score(model, [row]).per_token_logps[0]
    torch.testing.assert_close(scored, expected, atol=1e-5, rtol=1e-5)


def test_a_log_prob_that_is_not_finite_is_missing():
    model = tiny_llama()
    fused(model)
    with torch.no_grad():
        model.lm_head.weight[20] = float("inf")
    scores = scorer().score(model, [ROWS[1]])
    assert not scores.mask.any()


def hinted_rows() -> list[TeacherRow]:
    """Three completions of each of two prompts, under two hints of different lengths, in no good order."""
    found = [
        TeacherRow([258, *range(p, p + 40 + p), *hint, 7, 8], [100 + p + c] * (3 + c))
        for p in (1, 5)
        for c in range(3)
        for hint in ([200, 201, 202], [203] * 11)
    ]
    return [found[i] for i in (7, 2, 9, 0, 4, 11, 1, 10, 3, 8, 5, 6)]


class TestSharing:
    @pytest.mark.parametrize("share", [False, True])
    @pytest.mark.parametrize("token_budget", [65, 200, None])
    def test_rows_of_a_tree_are_scored_as_each_row_alone(self, share, token_budget):
        model = fused(tiny_llama())
        scores = scorer(token_budget, share=share).score(model, hinted_rows())
        for row, found in zip(hinted_rows(), scores.per_token_logps, strict=True):
            expected = dense_reference(model, row)
            torch.testing.assert_close(found[: len(expected)], expected, atol=1e-5, rtol=1e-5)

    def test_what_rows_have_in_common_is_run_once(self):
        model = fused(tiny_llama())
        shared, full = (self.tokens_run(model, scorer(share=share)) for share in (True, False))
        assert full == 12 * max(row.length for row in hinted_rows())
        # Per prompt: itself, two hints of which the longer reaches into the completions' pass, and six completions.
        assert shared < full / 2

    def tokens_run(self, model, scorer) -> int:
        scorer.score(model, [hinted_rows()[0]] * 2)  # tries the model out
        seen = []
        handle = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        scorer.score(model, hinted_rows())
        handle.remove()
        return sum(ids.numel() for ids in seen)

    @pytest.mark.parametrize("share", [False, True])
    def test_no_pass_exceeds_the_budget(self, share):
        model, seen = fused(tiny_llama()), []
        model.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True)
        scorer(200, share=share).score(model, hinted_rows())
        assert len(seen) >= 3
        assert max(seen) <= 200

    @pytest.mark.parametrize("share", [False, True])
    def test_a_budget_smaller_than_a_row(self, share):
        with pytest.raises(ValueError, match=r"`teacher_token_budget=21` is smaller than one row: .* have 22 tokens"):
            scorer(21, share=share).score(fused(tiny_llama()), ROWS)


class TestTurns:
    """Rows that leave a trajectory one after another, and end wherever they end."""

    @pytest.mark.parametrize("family", [*ZOO])
    @pytest.mark.parametrize("pass_cost", [0, 15])
    def test_every_answer_is_that_of_the_row_alone(self, family, pass_cost):
        """At no cost passes end wherever a row parts or ends; at some cost rows are padded in the middle of a plan."""
        model, rows = fused(ZOO[family]()), mixed_rows()
        shares = scorer()
        shares.sharing.pass_cost = pass_cost
        shares.score(model, rows)  # tries the model out
        with tokens_counted(model) as tokens:
            found = shares.score(model, rows, topk=3, keep_states=True)
        plan = make_plan([[*row.prompt_ids, *row.completion_ids] for row in rows], None, pass_cost)
        assert tokens[False] == sum(part.tokens for part in plan.passes)
        assert tokens[False] < sum(row.length for row in rows) / 2
        rounding = 1e-4 if family == "qwen3_next" else 1e-5  # linear attention in chunks, which begin elsewhere
        for i, row in enumerate(rows):
            length = len(row.completion_ids)
            alone = scorer(share=False).score(model, [row], topk=3, keep_states=True)
            assert found.mask[i].tolist() == [t < length for t in range(found.mask.size(1))]
            for ours, theirs in (
                (found.per_token_logps, alone.per_token_logps),
                (found.states.hidden, alone.states.hidden),
            ):
                torch.testing.assert_close(ours[i, :length], theirs[0], atol=rounding, rtol=rounding)
            assert torch.equal(found.topk_ids[i, :length], alone.topk_ids[0])

    def test_each_token_of_a_trajectory_is_run_once(self):
        """Whatever the number of turns: what is run beside it are the hints, and the turns under them."""
        model, rows, shares = fused(tiny_llama()), turns_of(1, hints=(4,)), scorer()
        shares.score(model, rows)  # tries the model out
        with tokens_counted(model) as tokens:
            shares.score(model, rows)
        trunk = rows[-1].length - 4 - 2 - 14  # up to the last hint
        assert tokens[False] == trunk + sum(4 + 2 + len(row.completion_ids) for row in rows)

    def test_a_budget_has_little_run_again(self):
        """Batches part where rows share the prompt alone, not in the middle of a trajectory."""
        model, rows = fused(tiny_llama()), [row for trajectory in range(4) for row in turns_of(trajectory)]
        longest, run, batches = max(row.length for row in rows), [], []
        model.register_forward_pre_hook(lambda m, a, kwargs: batches.append(1), with_kwargs=True)
        for budget in (13 * longest, None):
            shares = scorer(budget)
            shares.score(model, rows[:2])  # tries the model out
            batches.clear()
            with tokens_counted(model) as tokens:
                shares.score(model, rows)
            run.append(tokens[False])
            assert len(batches) == (3 if budget else 1)
        assert run[0] <= run[1] + 2 * 10


class TestMoreThanLogProbs:
    @pytest.mark.parametrize("token_budget", [22, 40, None])
    def test_best_tokens_and_log_probs_of_any_tokens(self, token_budget):
        model = fused(tiny_llama(), 0.7)
        found = scorer(token_budget, temperature=0.7).score(model, ROWS, topk=5, keep_states=True)
        assert found.topk_ids.shape == (4, 7, 5)
        anything = torch.randint(0, 259, (4, 7, 9), generator=torch.Generator().manual_seed(0))
        logps = found.states.log_probs_at(anything)
        for i, row in enumerate(ROWS):
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            with torch.no_grad():
                dense = (model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.7).log_softmax(-1)
            assert torch.equal(found.topk_ids[i, : len(dense)], dense.topk(5).indices)
            expected = dense.gather(-1, anything[i, : len(dense)])
            torch.testing.assert_close(logps[i, : len(dense)], expected, atol=1e-4, rtol=1e-4)

    def test_positions_can_be_chosen(self):
        found = scorer().score(fused(tiny_llama()), ROWS, topk=3, keep_states=True)
        at = (torch.tensor([3, 0]), torch.tensor([1, 2]))
        assert torch.equal(found.best_at(at), found.topk_ids[at])
        ids = torch.tensor([[41], [12]])  # the tokens that were sampled there
        torch.testing.assert_close(found.states_at(at).log_probs_at(ids)[:, 0], found.per_token_logps[at])

    @pytest.mark.parametrize("wanted", [{"topk": 3}, {"keep_states": True}, {"topk": 3, "keep_states": True}], ids=str)
    def test_no_rows_cost_one_forward_and_give_the_right_shapes(self, wanted):
        """A rank without hints asks the model as often as the others and knows as well what came of it."""
        model = fused(tiny_llama())
        calls = []
        model.register_forward_pre_hook(lambda *args: calls.append(1))
        found = scorer().score(model, [], **wanted)
        assert len(calls) == 1
        assert found.per_token_logps.shape == found.mask.shape == (0, 0)
        assert found.topk_ids is None or found.topk_ids.shape == (0, 0, 3)
        assert ("topk" in wanted) == (found.topk_ids is not None)
        assert ("keep_states" in wanted) == (found.states is not None)
        assert found.states is None or found.states.hidden.shape == (0, 0, 32)

    def test_only_what_is_asked_for_is_kept(self):
        found = scorer().score(fused(tiny_llama()), ROWS)
        assert found.topk_ids is None
        assert found.states is None

    def test_nothing_has_a_gradient(self):
        found = scorer().score(fused(tiny_llama()), ROWS, topk=3, keep_states=True)
        assert not found.per_token_logps.requires_grad
        assert not found.states.hidden.requires_grad
