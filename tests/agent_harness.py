"""Tools, environments and scripted policies for tests of trajectories."""

import json

from datasets import Dataset
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import SETTINGS, always_replies, judge_that
from trl.chat_template_utils import qwen3_chat_template

from trl_openclaw import CombineConfig, CombineTrainer, OPDConfig, OPDTrainer


def call(x, name="double") -> str:
    """What a policy samples to call a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps({"x": x})}}}\n</tool_call><|im_end|>'


CALL = call(2)


def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x


class Doubler:
    """An environment with one tool."""

    def reset(self, **kwargs):
        return " (double it)"

    def double(self, x: int) -> int:
        """Double a number.

        Args:
            x: The number.
        """
        return 2 * x


def tool_tokenizer():
    """The tiny tokenizer, with a template that knows tools."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def script_completions(trainer, texts):
    """Let the policy sample these: one entry per call of the generation step, a text for all rows or one for each."""
    steps = iter(texts)
    tokenizer = trainer.processing_class

    def scripted(prompt_ids, *args, **kwargs):
        text = next(steps)
        row_texts = [text] * len(prompt_ids) if isinstance(text, str) else text
        assert len(row_texts) == len(prompt_ids)
        ids = [tokenizer(text)["input_ids"] for text in row_texts]
        if trainer.empty_rows is None:
            ids, _ = trainer._fill_empty(ids, None)
        return ids, None

    trainer._generate_single_turn = scripted


def agent_trainer(
    tmp_path, trainer_class=OPDTrainer, texts=(CALL, "4<|im_end|>"), *, model=None, config=None, rows=4, **kwargs
):
    """A trainer whose policy calls tools as scripted; every turn is judged -1 and has a hint, unless told otherwise."""
    config_class = CombineConfig if issubclass(trainer_class, CombineTrainer) else OPDConfig
    if not {"tools", "environment_factory", "rollout_func"} & kwargs.keys():
        kwargs["tools"] = [double]
    given = {"judge": judge_that(), "next_state": always_replies, **kwargs}
    given.setdefault("train_dataset", Dataset.from_list([{"prompt": [{"role": "user", "content": "2?"}]}] * rows))
    trainer = trainer_class(
        model=tiny_llama(max_position_embeddings=4096) if model is None else model,
        args=config_class(output_dir=str(tmp_path), **{**SETTINGS, "max_completion_length": 600, **(config or {})}),
        processing_class=tool_tokenizer(),
        **given,
    )
    script_completions(trainer, texts)
    return trainer
