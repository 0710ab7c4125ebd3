"""From a sampled batch to what the teacher reads before each turn: its hints, placed and tokenized."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .._trl import Rollout
from ..hints import clean_hint, insert_hint, without_special_tokens
from .controls import HintControl
from .hint_rows import (
    DropReason,
    HintCandidates,
    HintedTurn,
    Placement,
    PlainTurn,
    find_hints,
    render_candidates,
    shortlist,
)
from .records import record_candidates
from .turns import BatchTurn

if TYPE_CHECKING:
    from .opd_trainer import OPDTrainer


class HintReader:
    """Finds the hint candidates of a batch, as its control arm has them, and puts them into the prompts.

    Args:
        trainer: Gives settings, feedback and tokenizer.
    """

    def __init__(self, trainer: "OPDTrainer"):
        self.trainer, self.args = trainer, trainer.args
        self.control = HintControl(trainer.args.control, self._clean)

    @property
    def needs_feedback(self) -> bool:
        """Whether the hints depend on what followed the replies of the batch, or on what was said about it."""
        return self.trainer.hint_source == "judge" or self.args.control == "raw_next_state"

    def teachable(self, rollout: Rollout, max_length: int | None) -> list[BatchTurn]:
        """The turns of a batch that can be taught if there are hints, and no others."""
        untaught = self._untaught(rollout)
        return [
            turn
            for turn in self.trainer.turns.turns
            if untaught[turn.row] is None
            and turn.matched
            and (max_length is None or len(rollout.prompt_ids[turn.row]) + turn.stop <= max_length)
        ]

    def __call__(
        self, inputs: Sequence[dict[str, Any]], rollout: Rollout, max_length: int | None
    ) -> list[list[HintedTurn]]:
        """What the teacher may read before each turn; at least one entry, perhaps a dropped one. A collective.

        Args:
            inputs: The dataset's rows.
            rollout: Prompts and completions.
            max_length: The longest row, in tokens, that teacher and reference can read, if known.
        """
        trainer = self.trainer
        # Drawn anew for each batch, and the same again for the same batch after a resume.
        place = (self.args.seed, trainer.state.global_step, trainer.accelerator.process_index, trainer.mode)
        generator = random.Random(f"{place} {rollout.completion_ids}")
        turns = [
            PlainTurn(
                turn.row,
                rollout.prompts[turn.row],
                rollout.prompt_ids[turn.row],
                rollout.completion_ids[turn.row][: turn.start],
                turn.stop - turn.start,
            )
            for turn in trainer.turns.turns
        ]
        hints = self._find(inputs, rollout, generator)
        candidates = render_candidates(turns, hints, self._placement, max_length)
        return [shortlist(found, self.args.hint_selection, generator) for found in candidates]

    def _find(
        self, inputs: Sequence[dict[str, Any]], rollout: Rollout, generator: random.Random
    ) -> list[HintCandidates]:
        """What each turn may be taught with; nothing for a completion without a token to train."""
        trainer, turns = self.trainer, self.trainer.turns.turns
        feedback: list[Any] = trainer.turn_feedback() if self.needs_feedback else [None] * len(turns)
        found = [
            find_hints(trainer.hint_source, inputs[turn.row], answer, trainer.special_tokens)
            for turn, answer in zip(turns, feedback, strict=True)
        ]
        record_candidates(trainer, found)
        untaught = self._untaught(rollout)
        drops = [untaught[turn.row] or (None if turn.matched else "unmatched_turn") for turn in turns]
        found = [HintCandidates(drop=drop) if drop else hints for hints, drop in zip(found, drops, strict=True)]
        prompts = [rollout.prompts[turn.row] for turn in turns]
        found = self.control(found, prompts, feedback, generator, remember=trainer.mode == "train")
        return [replace(hints, texts=hints.texts[: self.args.max_hints]) for hints in found]

    def _untaught(self, rollout: Rollout) -> list[DropReason | None]:
        """Why rows have no token to train, whatever their hints."""
        empty = self.trainer.empty_rows or [False] * len(rollout.masked)
        return [
            "empty_completion" if is_empty else "masked_completion" if is_masked else None
            for is_empty, is_masked in zip(empty, rollout.masked, strict=True)
        ]

    @property
    def _placement(self) -> Placement:
        later = self.args.hint_placement == "turn"
        return Placement(self._in_prompt, self.trainer.tokenize_prompts, self._before_turn if later else None)

    def _in_prompt(self, prompt: Any, hint: str) -> Any:
        hinted = insert_hint(prompt, hint, self.args.hint_placement, self.args.hint_template)
        return prompt if self.args.control == "unhinted_teacher" else hinted

    def _before_turn(self, context_ids: list[int], hint: str) -> list[int]:
        text = self.args.hint_template.replace("{hint}", hint)
        hinted = self.trainer.suffixes.hint_before_turn(context_ids, text)
        return context_ids if self.args.control == "unhinted_teacher" else hinted

    def _clean(self, text: str) -> str | None:
        return clean_hint(without_special_tokens(text, self.trainer.special_tokens))
