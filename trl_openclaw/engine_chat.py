"""Chat with the vLLM engine that samples for a trainer in this process: `LocalChat` without a model of its own."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .chat import Draft
from .local_chat import LocalChat, own_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EngineChat(LocalChat):
    """Chat over the engine of a trainer with `use_vllm=True` and `vllm_mode="colocate"`, which lends it.

    The policy answers, as it was when the latest batch was sampled. A batch of answers that nobody waits for any more
    is still written to its end.

    Args:
        max_batch (`int`, *optional*, defaults to `64`):
            Questions answered at once.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Passed to the chat template, such as `{"enable_thinking": False}`.
    """

    def __init__(self, *, max_batch: int = 64, chat_template_kwargs: Mapping[str, Any] | None = None):
        super().__init__("of the engine that samples", max_batch=max_batch, chat_template_kwargs=chat_template_kwargs)
        self.engine: Any = None
        """The trainer's `vllm.LLM`."""

    def _load(self) -> "tuple[Any, PreTrainedTokenizerBase]":
        if self.engine is None:
            raise ValueError("no trainer has lent its engine. Pass the judge to `OPDTrainer` or `CombineTrainer`")
        tokenizer = self.engine.get_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("its tokenizer has no chat template")
        return self.engine, tokenizer

    def _window(self, model: Any) -> int:
        return model.llm_engine.model_config.max_model_len

    def _answer(self, batch: list, prompts: list[list[int]], rooms: list[int]) -> Sequence[Draft]:
        import torch
        from vllm import SamplingParams

        device = own_device()
        if device.index is not None:  # a thread starts on device 0, whichever one this process works on
            torch.accelerator.set_device_index(device.index)
        temperature = batch[0].temperature
        wanted = [SamplingParams(max_tokens=room, temperature=temperature, seed=self._next_seed()) for room in rooms]
        questions = [{"prompt_token_ids": ids} for ids in prompts]
        answers = [answer.outputs[0] for answer in self.engine.generate(questions, wanted, use_tqdm=False)]
        return [Draft(answer.text, truncated=answer.finish_reason == "length") for answer in answers]
