import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from jinja2 import TemplateError
from tiny import tiny_tokenizer
from transformers import AutoTokenizer
from trl import GRPOTrainer

from trl_openclaw._trl.suffixes import ChatSuffixes
from trl_openclaw.errors import HintError

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CONTROL_TOKEN = re.compile(r"<[|｜][^<>{}\s'\"]+?[|｜]>|<(?:start|end)_of_turn>")

# The tokens that end a sampled turn; by default `<|im_end|>`.
END_TOKENS = {
    "llama": ("<|eot_id|>",),
    "gemma": ("<end_of_turn>",),
    "gptoss": ("<|return|>", "<|call|>"),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "phi": ("<|end|>", "<|endoftext|>"),
}
SPLICING = [
    "qwen3", "qwen3_training", "qwen2_5", "qwen3_5_think_training", "llama3", "llama3_2", "lfm2", "phi3", "gptoss",
    "gptoss_training", "glm4moe", "nemotron_3_nano",
]  # fmt: skip
WITH_TOOLS = [name for name in SPLICING if name not in ("llama3", "phi3")]
USER = {"role": "user", "content": "How warm is it?"}
SYSTEM = {"role": "system", "content": "Be exact."}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"role": "tool", "name": "weather", "content": "-3 °C}"}
SECOND_TOOL = {"role": "tool", "name": "weather", "content": "no\n"}


def trainer_with(template: str, tokenizer=None, **template_kwargs):
    """As much of a trainer as a template needs; every control token in the template is one token."""
    text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    ends = next((found for name, found in END_TOKENS.items() if template.startswith(name)), ("<|im_end|>",))
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    tokens = sorted({*CONTROL_TOKEN.findall(text), *ends})
    tokenizer.add_special_tokens({"additional_special_tokens": tokens, "bos_token": "<|bos|>", "eos_token": ends[0]})
    tokenizer.chat_template = text
    return SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=None,
        chat_template_kwargs=template_kwargs,
        eos_token_ids=tokenizer.convert_tokens_to_ids(list(ends)),
        _is_vlm=False,
    )


def ids_of(trainer, messages, generation_prompt=True) -> list[int]:
    """A whole conversation, rendered at once."""
    return trainer.processing_class.apply_chat_template(
        messages, add_generation_prompt=generation_prompt, return_dict=False, chat_template=trainer.chat_template,
        **trainer.chat_template_kwargs,
    )  # fmt: skip


def text_of(trainer, ids) -> str:
    return trainer.processing_class.decode(ids)


def turn_ids(trainer, context, turn) -> list[int]:
    """The ids of `turn` as they would be sampled after `context`, the token that ends the turn included."""
    start = len(ids_of(trainer, context))
    ids = ids_of(trainer, [*context, turn], generation_prompt=False)
    end = next(i for i in range(start, len(ids)) if ids[i] in trainer.eos_token_ids)
    return ids[start : end + 1]


class TestAfterTurn:
    @pytest.mark.parametrize("template", ["qwen3_training", "qwen2_5", "llama3", "llama3_2", "lfm2", "phi3", "gemma3"])
    def test_a_conversation_put_together_is_the_whole_rendered_at_once(self, template):
        trainer = trainer_with(template)
        suffixes = ChatSuffixes(trainer)
        conversation = [USER, {"role": "assistant", "content": "Cold."}, {"role": "user", "content": "No, in °C!"}]
        conversation += [{"role": "assistant", "content": "-3"}, {"role": "user", "content": " Thanks\n"}]
        if template == "qwen3_training":  # it writes thoughts before each turn, which the generation prompt does not
            conversation = [
                {**m, "content": f"<think>\nhm\n</think>\n\n{m['content']}"} if m["role"] == "assistant" else m
                for m in conversation
            ]
        ids = ids_of(trainer, conversation[:1])
        for i in (1, 3):
            ids = (
                ids + turn_ids(trainer, conversation[:i], conversation[i]) + suffixes.after_turn([conversation[i + 1]])
            )
        assert text_of(trainer, ids) == text_of(trainer, ids_of(trainer, conversation))

    @pytest.mark.parametrize("template", [name for name in WITH_TOOLS if name != "qwen3"])
    def test_tools_answer_as_in_trl(self, template):
        trainer = trainer_with(template)
        found = ChatSuffixes(trainer).after_turn([TOOL, SECOND_TOOL])
        assert found == GRPOTrainer._get_tool_suffix_ids(trainer, [TOOL, SECOND_TOOL])
        assert "-3 °C}" in text_of(trainer, found)

    def test_a_template_that_rewrites_earlier_turns(self):
        trainer = trainer_with("qwen3")
        with pytest.raises(ValueError, match="prefix"):
            GRPOTrainer._get_tool_suffix_ids(trainer, [TOOL])
        found = text_of(trainer, ChatSuffixes(trainer).after_turn([TOOL]))
        answer = "<tool_response>\n-3 °C}\n</tool_response>"
        assert found == f"\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"

    def test_text_after_the_end_token_comes_first(self):
        found = text_of(trainer := trainer_with("qwen2_5"), ChatSuffixes(trainer).after_turn([USER]))
        assert found == "\n<|im_start|>user\nHow warm is it?<|im_end|>\n<|im_start|>assistant\n"

    def test_a_last_turn_that_ends_with_a_token_of_its_own(self):
        found = text_of(trainer := trainer_with("gptoss"), ChatSuffixes(trainer).after_turn([USER]))
        assert found == "<|start|>user<|message|>How warm is it?<|end|><|start|>assistant"

    def test_several_messages_of_different_roles(self):
        found = text_of(trainer := trainer_with("qwen2_5"), ChatSuffixes(trainer).after_turn([TOOL, SYSTEM, USER]))
        assert found.endswith(
            "</tool_response><|im_end|>\n<|im_start|>system\nBe exact.<|im_end|>\n<|im_start|>user\nHow warm is it?"
            "<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_the_template_and_the_keywords_of_the_trainer(self):
        trainer = trainer_with("qwen2_5", enable_thinking=False)
        trainer.chat_template = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
        found = text_of(trainer, ChatSuffixes(trainer).after_turn([USER]))
        assert found.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")

    def test_a_processor_answers_with_a_batch(self):
        trainer = trainer_with("smolvlm")
        tokenizer = trainer.processing_class
        trainer._is_vlm, trainer.processing_class = (
            True,
            SimpleNamespace(
                apply_chat_template=lambda messages, **kwargs: [tokenizer.apply_chat_template(messages, **kwargs)]
            ),
        )
        found = tokenizer.decode(ChatSuffixes(trainer).after_turn([USER]))
        assert found.endswith("User: How warm is it?<end_of_utterance>\nAssistant:")

    def test_a_template_that_shows_nothing_of_a_turn(self):
        with pytest.raises(ValueError, match="leaves such a message out"):
            ChatSuffixes(trainer_with("smolvlm")).after_turn([USER])  # which reads parts only

    def test_messages_that_the_template_refuses(self):
        with pytest.raises(ValueError, match=r"roles tool, tool after an assistant's turn: .*alternate"):
            ChatSuffixes(trainer_with("gemma3")).after_turn([TOOL, SECOND_TOOL])


def contexts(template: str):
    """Conversations that a turn may follow, which differ in their last message."""
    yield [USER]
    yield [SYSTEM, USER]
    yield [USER, {"role": "assistant", "content": "Cold."}, {"role": "user", "content": "Sure?\n\n"}]
    if template != "qwen3_5_think_training":  # which wants a user
        yield [SYSTEM]
    if template in WITH_TOOLS:
        yield [USER, CALLS, TOOL]
        yield [USER, CALLS, SECOND_TOOL, TOOL]


class TestHintBeforeTurn:
    @pytest.mark.parametrize("template", SPLICING)
    def test_is_the_conversation_with_one_more_message(self, template):
        trainer = trainer_with(template)
        suffixes = ChatSuffixes(trainer)
        for context in contexts(template):
            for hint in ("Use numbers.", "1) Don't.\n2) <b>Do</b>!"):
                ids = ids_of(trainer, context)
                hinted = suffixes.hint_before_turn(ids, hint)
                whole = ids_of(trainer, [*context, {"role": "user", "content": hint}])
                assert hinted == whole, context

    @pytest.mark.parametrize("template", ["qwen3", "qwen3_training"])
    def test_before_a_generation_prompt_that_skips_the_thoughts(self, template):
        trainer = trainer_with(template, enable_thinking=False)
        ids = ids_of(trainer, [USER])
        assert text_of(trainer, ids).endswith("</think>\n\n")
        hinted = ChatSuffixes(trainer).hint_before_turn(ids, "Use numbers.")
        assert hinted == ids_of(trainer, [USER, {"role": "user", "content": "Use numbers."}])

    def test_sampled_turns_stay_as_they_are(self):
        trainer = trainer_with("qwen3_training")
        suffixes = ChatSuffixes(trainer)
        sampled = [*trainer.processing_class.encode("no thoughts  "), trainer.eos_token_ids[0]]
        ids = ids_of(trainer, [USER]) + sampled + suffixes.after_turn([TOOL])
        hinted = suffixes.hint_before_turn(ids, "Use numbers.")
        prompt = len(trainer.processing_class.encode("<|im_start|>assistant\n"))
        assert hinted[: len(ids) - prompt] == ids[:-prompt]
        assert text_of(trainer, hinted[len(ids) - prompt :]) == (
            "<|im_start|>user\nUse numbers.<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_nothing_is_rendered_twice_that_does_not_depend_on_the_text(self, monkeypatch):
        trainer = trainer_with("qwen2_5")
        suffixes = ChatSuffixes(trainer)
        ids = ids_of(trainer, [USER])
        suffixes.hint_before_turn(ids, "Use numbers.")
        calls = []
        render = suffixes._render
        monkeypatch.setattr(suffixes, "_render", lambda *args: calls.append(args) or render(*args))
        suffixes.hint_before_turn(ids, "Be brief.")
        assert len(calls) == 1

    @pytest.mark.parametrize("template", ["gemma", "gemma3", "cohere"])
    def test_a_template_that_wants_alternating_roles(self, template):
        trainer = trainer_with(template)
        with pytest.raises(TemplateError):
            ids_of(trainer, [USER, USER])
        with pytest.raises(HintError, match=r"alternate.*hint_placement='user'"):
            ChatSuffixes(trainer).hint_before_turn(ids_of(trainer, [USER]), "Use numbers.")

    def test_a_template_that_closes_the_tools_answers_with_the_next_turn(self):
        trainer = trainer_with("deepseekv3_training")
        suffixes = ChatSuffixes(trainer)
        assert suffixes.hint_before_turn(ids_of(trainer, [USER]), "Do.") == ids_of(
            trainer, [USER, {"role": "user", "content": "Do."}]
        )
        with pytest.raises(HintError, match=r"differently.*hint_placement='user'"):
            suffixes.hint_before_turn(ids_of(trainer, [USER, CALLS, TOOL]), "Do.")

    def test_ids_that_do_not_end_with_the_generation_prompt(self):
        trainer = trainer_with("qwen2_5")
        for ids in (ids_of(trainer, [USER])[:-1], ids_of(trainer, [USER], generation_prompt=False), []):
            with pytest.raises(HintError, match="do not end with"):
                ChatSuffixes(trainer).hint_before_turn(ids, "Use numbers.")

    def test_a_text_that_the_template_takes_for_something_else(self):
        trainer = trainer_with("qwen3_5_think")  # where it counts as a tool's answer, and earlier thoughts are shown
        ids = ids_of(trainer, [USER, CALLS, TOOL])
        with pytest.raises(HintError, match="something other than"):
            ChatSuffixes(trainer).hint_before_turn(ids, "<tool_response>x</tool_response>")


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3_training", "llama3_2"])
def test_with_a_tokenizer_that_merges(smollm2, template):
    trainer = trainer_with(template, AutoTokenizer.from_pretrained(smollm2))
    suffixes = ChatSuffixes(trainer)
    for text in ('{"a": 1}', "Why?", "Two\n\n", "a <b>", "x = [1, 2]", 'Ends in a quote"'):
        context = [USER, CALLS, {**TOOL, "content": text}]
        hinted = suffixes.hint_before_turn(ids_of(trainer, context), text)
        assert text_of(trainer, hinted) == text_of(
            trainer, ids_of(trainer, [*context, {"role": "user", "content": text}])
        )
        assert suffixes.after_turn([context[-1]]) == GRPOTrainer._get_tool_suffix_ids(trainer, [context[-1]])
