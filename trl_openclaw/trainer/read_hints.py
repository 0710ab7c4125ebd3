"""From a sampled batch to the prompts that the teacher reads: its hints, placed and tokenized."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..hints import clean_hint, insert_hint, without_special_tokens
from .controls import HintControl
from .hint_rows import HintCandidates, HintedRow, find_hints, render_candidates, shortlist
from .records import record_candidates

if TYPE_CHECKING:
    from .opd_trainer import OPDTrainer, Rollout


class HintReader:
    """Finds the hint candidates of a batch, as its control arm has them, and puts them into the prompts.

    Args:
        trainer: Gives settings, feedback and tokenizer.
    """

    def __init__(self, trainer: "OPDTrainer"):
        self.trainer, self.args = trainer, trainer.args
        self.control = HintControl(trainer.args.control, self._clean)

    def __call__(
        self,
        inputs: Sequence[dict[str, Any]],
        batch: dict[str, Any],
        rollout: "Rollout",
        plain: Sequence[Sequence[int]],
        max_length: int | None,
    ) -> list[list[HintedRow]]:
        """What the teacher may read for each row; at least one entry, perhaps a dropped one. A collective.

        Args:
            inputs: The dataset's rows.
            batch: The generation batch.
            rollout: Prompts and completions.
            plain: The ids that each row was sampled from.
            max_length: The teacher's window in tokens, if known.
        """
        trainer = self.trainer
        # Drawn anew for each batch, and the same again for the same batch after a resume.
        place = (self.args.seed, trainer.state.global_step, trainer.accelerator.process_index, trainer.mode)
        generator = random.Random(f"{place} {rollout.completion_ids}")
        candidates = render_candidates(
            rollout.prompts,
            plain,
            self._find(inputs, batch, rollout, generator),
            [len(ids) for ids in rollout.completion_ids],
            tokenize=trainer.tokenize_prompts,
            place=self._place,
            max_length=max_length,
        )
        return [shortlist(rows, self.args.hint_selection, generator) for rows in candidates]

    def _find(
        self, inputs: Sequence[dict[str, Any]], batch: dict[str, Any], rollout: "Rollout", generator: random.Random
    ) -> list[HintCandidates]:
        """What each row may be taught with; nothing for a completion without a token to train."""
        trainer = self.trainer
        feedback = trainer.feedback.last
        found = [
            find_hints(trainer.hint_source, row, answer, trainer.special_tokens)
            for row, answer in zip(inputs, feedback, strict=True)
        ]
        record_candidates(trainer, found)
        has_tokens = batch["completion_mask"].any(dim=1).tolist()
        for i in range(len(found)):
            if trainer.empty_rows and trainer.empty_rows[i]:
                found[i] = HintCandidates(drop="empty_completion")
            elif not has_tokens[i]:
                found[i] = HintCandidates(drop="masked_completion")
        found = self.control(found, rollout.prompts, feedback, generator, remember=trainer.mode == "train")
        return [replace(hints, texts=hints.texts[: self.args.max_hints]) for hints in found]

    def _place(self, prompt: Any, hint: str) -> Any:
        hinted = insert_hint(prompt, hint, self.args.hint_placement, self.args.hint_template)
        return prompt if self.args.control == "unhinted_teacher" else hinted

    def _clean(self, text: str) -> str | None:
        return clean_hint(without_special_tokens(text, self.trainer.special_tokens))
