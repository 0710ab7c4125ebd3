"""Sees rows end while TRL's call of transformers' `generate` is still sampling the others.

TRL calls `generate` on the unwrapped model and returns when the last row has ended. Here the call gets one more
stopping criterion, which never stops anything and looks at each step's tokens. TRL has no place to hand one in, so the
model carries a `generate` of its own for as long as the call may come.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

from ..trajectories import TRAJECTORY_COLUMN
from .forward import replaced


@dataclass(frozen=True)
class Rollout:
    """This rank's part of a sampled batch, as TRL hands it to the reward functions.

    Args:
        prompts: What was sampled from, text or messages.
        prompt_ids: Their ids, unpadded.
        completions: What was sampled, text or messages; with what tools, environments and users said in between.
        completion_ids: Their ids, unpadded.
        masked: Which completions were cut and are masked by TRL (`mask_truncated_completions`).
        tool_mask: For each completion, 1 where an id was sampled and 0 elsewhere; `None` where all were.
        temperatures: At which each completion's log-probs are taken, relative to the trainer's own; `None` for that.
    """

    prompts: list
    prompt_ids: list[list[int]]
    completions: list
    completion_ids: list[list[int]]
    masked: list[bool]
    tool_mask: list[list[int]] | None = None
    temperatures: list[float] | None = None

    def temperature(self, row: int) -> float:
        """That of a row."""
        return 1.0 if self.temperatures is None else self.temperatures[row]


Announce = Callable[[int, list[int]], None]
"""Takes a row's place in the batch and its sampled ids, the end token included."""


class RowWatch(StoppingCriteria):
    """Announces the rows that have sampled an end token.

    What a step shows is read at the next one. `generate` waits for the device at every step, to see whether all rows
    have ended, so by then it has arrived and nothing waits a second time. Rows that end with the batch's last step are
    not announced: nothing is left to be ahead of.

    Args:
        prompts (`(B, P)`): The ids that sampling goes on from.
        end_ids: The ids that end a completion.
        announce: Called once for each row.
    """

    def __init__(self, prompts: torch.Tensor, end_ids: Sequence[int], announce: Announce):
        self._rows, self._start = self._at = tuple(prompts.shape)
        self._announce = announce
        device = prompts.device
        # Not called `eos_token_id`: by that name `generate` knows who pads the rows that have ended.
        self._end_ids = torch.tensor(list(end_ids), device=device)
        self._ended = torch.zeros(self._rows, dtype=torch.bool, device=device)
        self._news = torch.zeros(self._rows, dtype=torch.bool, pin_memory=device.type == "cuda")
        self._arrived = None if device.type == "cpu" else torch.Event(device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Look at the ids `(B, P + steps)`; `False` for each row."""
        self._at = self._rows, self._at[1] + 1
        if tuple(input_ids.shape) == self._at:  # else there are beams, or several tokens a step
            self._tell(input_ids)
            self._look(input_ids[:, -1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def _look(self, tokens: torch.Tensor) -> None:
        """Send for the rows that have ended with these tokens `(B,)`. What follows an end token is padding."""
        ends = torch.isin(tokens, self._end_ids)
        self._news.copy_(ends > self._ended, non_blocking=True)
        self._ended |= ends
        if self._arrived is not None:
            self._arrived.record()

    def _tell(self, input_ids: torch.Tensor) -> None:
        """Announce the rows that ended one step ago."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._news.any():
            rows = self._news.nonzero().flatten().tolist()
            for row, ids in zip(rows, input_ids[rows, self._start : -1].tolist(), strict=True):
                self._announce(row, ids)


@contextmanager
def watched_generate(model: nn.Module, end_ids: Sequence[int], announce: Announce) -> Iterator[None]:
    """Announce the rows of every `model.generate(input_ids=...)` as they end.

    Args:
        model: The model that `generate` will be called on; a PEFT model passes the criterion on to its base model.
        end_ids: The ids that end a completion.
        announce: Called in the middle of `generate`; what it raises ends the generation.
    """
    generate = model.generate

    def watched(*args: Any, stopping_criteria: StoppingCriteriaList | None = None, **kwargs: Any) -> Any:
        watch = RowWatch(kwargs["input_ids"], end_ids, announce)
        return generate(*args, stopping_criteria=StoppingCriteriaList([*(stopping_criteria or ()), watch]), **kwargs)

    with replaced(model, "generate", watched):
        yield


def announced(trainer: Any, images: Any, multimodal_fields: Any) -> AbstractContextManager[None]:
    """While this is open, `trainer.on_completion` is called for each row that ends before its batch does.

    Only where a row's own ids are all that makes its completion: with transformers' own `generate`, on text, without
    tools, environments or a rollout function, and with a tokenizer that decodes and does not parse.
    """
    parses = any(
        getattr(trainer.tokenizer, name, None) is not None for name in ("response_template", "response_schema")
    )
    if (
        not trainer.announces_completions
        or trainer.use_vllm
        or trainer.use_transformers_continuous_batching
        or trainer.rollout_func is not None
        or trainer.tools
        or trainer.environment_factories is not None
        or images is not None
        or multimodal_fields
        or parses
    ):
        return nullcontext()
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return watched_generate(model, trainer.eos_token_ids, trainer.on_completion)


_FIELD = "trajectory"
"""The field in which a rollout function hands over the messages of each row, from the first assistant message on."""


def with_trajectories(output: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """What a rollout function gave, with the messages of each row, since TRL knows its completions as one text only.

    Where the function gives none but says which ids it did not sample, the ids are decoded, turn by turn.

    Args:
        output: `completion_ids`, perhaps `env_mask` and `trajectory`, and more.
        tokenizer: Decodes.

    Raises:
        ValueError: When `trajectory` or `env_mask` do not go with the ids.
    """
    ids, masks, found = output["completion_ids"], output.get("env_mask"), output.get(_FIELD)
    if masks is not None and not _are_masks(masks, ids):
        raise ValueError("`env_mask` of the rollout function must have a 0 or 1 for each of `completion_ids`.")
    if found is not None:
        if not (isinstance(found, list | tuple) and len(found) == len(ids) and all(map(_is_conversation, found))):
            raise ValueError(
                f"`{_FIELD}` of the rollout function must be a list of messages (`role`, and `content` that is text or "
                "parts) for each row, from the first assistant message on."
            )
        return output | {TRAJECTORY_COLUMN: [list(messages) for messages in found]}
    if masks is None or all(map(all, masks)):
        return output
    return output | {TRAJECTORY_COLUMN: [_decoded(tokenizer, *row) for row in zip(ids, masks, strict=True)]}


def _are_masks(masks: Any, ids: Sequence[Sequence[int]]) -> bool:
    try:
        lengths = [len(mask) for mask in masks]
        return lengths == [len(row) for row in ids] and all(value in (0, 1) for mask in masks for value in mask)
    except TypeError:
        return False


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and all(
        isinstance(message, dict) and "role" in message and _is_content(message.get("content")) for message in messages
    )


def _is_content(content: Any) -> bool:
    return (
        content is None
        or isinstance(content, str)
        or (isinstance(content, list) and all(isinstance(part, dict) for part in content))
    )


def _decoded(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[dict[str, str]]:
    """A message for each run of ids that were sampled, or were not."""
    runs = [(bool(sampled), [i for i, _ in group]) for sampled, group in groupby(zip(ids, mask, strict=True), _mask_of)]
    texts = tokenizer.batch_decode([run for _, run in runs], skip_special_tokens=True)
    roles = ["assistant" if sampled else "tool" for sampled, _ in runs]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def _mask_of(pair: tuple[int, int]) -> bool:
    return bool(pair[1])


def as_rewards_see(trainer: Any, rows: Sequence[dict[str, Any]], place: int, ids: list[int]) -> tuple[Any, Any, dict]:
    """What TRL's reward functions will be shown of a row that `on_completion` announced.

    Args:
        trainer: Gives the processing class that decodes.
        rows: This rank's rows of the generation batch.
        place: Which of them.
        ids: What it sampled.

    Returns:
        The prompt, in a copy that nobody else will change, the completion, and the row's other columns.
    """
    prompt = copy.deepcopy(rows[place]["prompt"])
    text = trainer.processing_class.batch_decode([ids], skip_special_tokens=True)[0]
    completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    return prompt, completion, reward_columns(rows, place)


def reward_columns(rows: Sequence[dict[str, Any]], place: int) -> dict[str, Any]:
    """The other columns of a row, as TRL's reward functions will be shown them."""
    return {name: rows[place][name] for name in rows[0] if name not in ("prompt", "completion", "completion_ids")}
