"""Malformed prompts are named with their row and field before training, or at the batch that holds them."""

import warnings

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from trainer_harness import logged, make_trainer, prompts

from trl_openclaw.trainer.prompts import first_problem, prompt_problem

USER = {"role": "user", "content": "hi"}
IMAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "`prompt` is empty"),
        ("", "`prompt` is empty"),
        (None, "`prompt` must be text, or a list of messages with `role` and `content`, got None"),
        (3, "`prompt` must be text, or a list of messages with `role` and `content`, got 3"),
        (USER, "`prompt` must be text, or a list of messages with `role` and `content`, got {'role'"),
        (["hi"], "`prompt[0]` must be a message with `role` and `content`, got 'hi'"),
        ([USER, {"content": "hi"}], "`prompt[1]` has no `role` such as 'user', only 'content'"),
        ([{"role": None, "content": "hi"}], "`prompt[0]` has no `role` such as 'user', only 'content'"),
        ([{"role": " ", "content": "hi"}], "`prompt[0]` has no `role`"),
        ([{"role": "User", "content": "hi"}], "`prompt[0]` has the role 'User', .* use 'user'"),
        ([{"role": "human", "content": "hi"}], "`prompt[0]` has the role 'human', .* use 'user'"),
        ([{"role": "user"}], "`prompt[0]` has no `content`, only 'role'"),
        ([{"role": "user", "content": None, "tool_calls": None}], "`prompt[0]` has no `content`, only 'role'"),
        ([{key: CALL[key] for key in ("role", "tool_calls")}], "`prompt[0]` has no `content`"),
        ([{"role": "user", "content": 3}], "`prompt[0]['content']` must be text or a list of parts, got 3"),
        ([{"role": "user", "content": ["hi"]}], "`prompt[0]['content'][0]` must be a part with a `type`"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "`prompt[0]['content'][0]` must be a part with a `type`"),
        ([{"role": "user", "content": [{"type": "text"}]}], "`prompt[0]['content'][0]['text']` must be text, got None"),
        ([IMAGE], "`prompt[0]['content'][0]` is of type 'image', .* reads text only"),
    ],
    ids=str,
)
def test_malformed_prompts(prompt, problem):
    head, _, tail = problem.partition(".*")
    found = prompt_problem(prompt, images=False)
    assert found.startswith(head)
    assert tail in found


@pytest.mark.parametrize(
    "prompt",
    [
        "hi",
        " ",
        [USER],
        [{"role": "user", "content": ""}],
        [{**USER, "tool_calls": None, "name": None}],
        [USER, CALL, {"role": "tool", "content": "4"}],
        [USER, {"role": "assistant", "content": "Sure,"}],
        [{"role": "developer", "content": "Speak."}],
        [{"role": "ipython", "content": "4"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi", "image": None}]}],
    ],
    ids=str,
)
def test_well_formed_prompts(prompt):
    assert prompt_problem(prompt, images=False) is None


def test_images_are_for_policies_that_see():
    assert prompt_problem([IMAGE], images=True) is None


def test_text_and_messages_do_not_mix():
    assert first_problem(["hi", "ho"], images=False) is None
    assert "row 2: `prompt` is text in some rows" in first_problem(["hi", "ho", [USER]], images=False)


class TestDatasets:
    def test_the_row_is_named_before_the_model_is_loaded(self, tmp_path):
        data = Dataset.from_list([{"prompt": [USER]}] * 1500 + [{"prompt": []}])
        with pytest.raises(ValueError, match=r"`train_dataset`, row 1500: `prompt` is empty"):
            make_trainer(tmp_path, model="no such model", data=data)

    @pytest.mark.parametrize("kind", [dict, DatasetDict])
    def test_evaluation_data_too(self, tmp_path, kind):
        bad = Dataset.from_list([{"prompt": [{"role": "User", "content": "hi"}]}])
        with pytest.raises(ValueError, match=r"`new`, row 0: `prompt\[0\]` has the role 'User'"):
            make_trainer(tmp_path, eval_dataset=kind(old=prompts(2), new=bad))

    def test_evaluation_may_be_of_another_kind(self, tmp_path):
        trainer = make_trainer(tmp_path, eval_dataset=Dataset.from_list([{"prompt": "once upon"}] * 4))
        assert trainer.evaluate()["eval_hint/accepted"] == 1.0

    def test_a_last_message_of_the_assistant_is_followed_by_a_new_turn(self, tmp_path):
        """TRL does not continue it: the sampled completion is a message of its own."""
        data = Dataset.from_list([{"prompt": [USER, {"role": "assistant", "content": "Sure,"}]}] * 4)
        trainer = make_trainer(tmp_path, data=data)
        trainer.train()
        rendered = trainer.processing_class.decode(trainer.tokenize_prompts(list(data["prompt"]))[0])
        assert rendered.endswith("assistant\nSure,<|im_end|>\n<|im_start|>assistant\n")
        assert logged(trainer, "hint/accepted") == [1.0]

    def test_an_image_where_the_tokenizer_is_only_loaded_later(self, tmp_path):
        """The dataset is read before TRL loads the tokenizer, so the batch is what is refused."""
        data = Dataset.from_list([{"prompt": [IMAGE]}] * 4)
        with pytest.raises(ValueError, match=r"`train_dataset`, row 0: .* reads text only"):
            make_trainer(tmp_path, data=data)
        trainer = make_trainer(tmp_path)
        trainer.train_dataset = data
        with pytest.raises(ValueError, match=r"The batch of process 0, row 0: .* reads text only"):
            trainer.train()


class TestBatches:
    def test_a_stream_is_checked_as_it_comes(self, tmp_path):
        def rows():
            yield from prompts(2)
            yield {"prompt": [{"role": "user"}]}
            yield {"prompt": [USER]}

        trainer = make_trainer(
            tmp_path, data=IterableDataset.from_generator(rows), config={"max_steps": 2, "shuffle_dataset": False}
        )
        message = r"The batch of process 0, row 0: `prompt\[0\]` has no `content`, only 'role'"
        with pytest.raises(ValueError, match=message):
            trainer.train()
        assert trainer.state.global_step == 1

    def test_a_transform_is_checked_by_what_it_gives(self, tmp_path):
        data = prompts(4).with_transform(lambda batch: {"prompt": [""] * len(batch["prompt"])})
        trainer = make_trainer(tmp_path, data=data)
        with pytest.raises(ValueError, match=r"The batch of process 0, row 0: `prompt` is empty"):
            trainer.train()

    def test_a_transform_may_make_a_prompt_of_something_else(self, tmp_path):
        rows = Dataset.from_list([{"prompt": ""}] * 4)
        data = rows.with_transform(lambda batch: {"prompt": [[USER]] * len(batch["prompt"])})
        make_trainer(tmp_path, data=data).train()

    def test_a_row_without_a_prompt(self, tmp_path):
        data = IterableDataset.from_generator(lambda: iter([{"question": "hi"}] * 4))
        with pytest.raises(ValueError, match="got None"):
            make_trainer(tmp_path, data=data).train()


def test_plain_text_for_a_chat_model_is_pointed_out(tmp_path):
    text = Dataset.from_list([{"prompt": f"What is {i} and 1?"} for i in range(8)])
    trainer = make_trainer(tmp_path, data=text)
    with pytest.warns(UserWarning, match="continued as it stands, without the model's chat template"):
        trainer.train()
    trainer = make_trainer(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The prompts are plain text")
        trainer.train()
