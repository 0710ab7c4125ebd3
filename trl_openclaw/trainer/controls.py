"""Control arms: what a hint must beat before anybody believes in it. Each changes one thing and nothing else."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ..types import Feedback
from .hint_rows import HintCandidates

CONTROLS = ("random_hint", "raw_next_state", "unhinted_teacher", "negative_advantage")
"""`random_hint`: another hint, that was meant for another prompt. `raw_next_state`: the next state's own words as the
hint. `unhinted_teacher`: the teacher does not see the hint. `negative_advantage`: every token of a hinted row gets
`-C`.

Rows that had no usable hint stay out under each of them, so that the arms train on the same rows."""

Texts: TypeAlias = tuple[str | None, ...]

_MEMORY = 256

UNRELATED_HINTS = (
    "Mention the weather.",
    "Compare it to an animal.",
    "Begin with a question.",
    "Name a colour.",
    "Write as if to a colleague.",
    "Mention a month of the year.",
    "Use the past tense.",
    "Talk about a journey.",
    "Mention a musical instrument.",
    "Say where you read about it.",
    "Include a number.",
    "Speak of somebody's childhood.",
)
"""Where all hints of a run are one and the same, `random_hint` draws from these."""


class HintControl:
    """Gives the hints of a batch as a control arm has them.

    Args:
        name: One of `CONTROLS`, or `None` for the hints as they are.
        clean: Cleans a text as hints are cleaned; `None` when nothing is left.
    """

    def __init__(self, name: str | None, clean: Callable[[str], str | None]):
        self.name = name
        self.clean = clean
        # A batch may hold one prompt only, so hints for other prompts come from the batches before, too.
        self._memory: deque[tuple[Any, Texts]] = deque(maxlen=_MEMORY)

    def __call__(
        self,
        hints: Sequence[HintCandidates],
        prompts: Sequence[Any],
        feedback: Sequence[Feedback],
        generator: random.Random,
        *,
        remember: bool = True,
    ) -> list[HintCandidates]:
        """The hints of the arm.

        Args:
            hints: The hints that were found, per row.
            prompts: The rows' prompts.
            feedback: The rows' feedback, for the next state's words.
            generator: Draws random hints.
            remember: Whether later batches may draw from this one; not from an evaluation's, which must change nothing.
        """
        if self.name == "raw_next_state":
            return [self._next_state(hint, row) for hint, row in zip(hints, feedback, strict=True)]
        if self.name == "random_hint":
            found = [(prompt, hint.texts) for prompt, hint in zip(prompts, hints, strict=True) if hint.texts]
            known = [*self._memory, *found]
            if remember:
                self._memory.extend(found)
            return [self._stranger(hint, prompt, known, generator) for hint, prompt in zip(hints, prompts, strict=True)]
        if self.name == "unhinted_teacher":  # nobody reads the hint, so one candidate is as good as all
            return [replace(hint, texts=hint.texts[:1]) for hint in hints]
        return list(hints)

    def _next_state(self, hint: HintCandidates, feedback: Feedback) -> HintCandidates:
        state = feedback.turn.next_state
        words = self.clean(state.text) if state is not None else None
        return self._instead(hint, (words,) if words else ())

    def _stranger(
        self, hint: HintCandidates, prompt: Any, known: Sequence[tuple[Any, Texts]], generator: random.Random
    ) -> HintCandidates:
        own = set(hint.texts)
        strangers = [texts for other, texts in known if other != prompt and own.isdisjoint(texts)]
        return self._instead(hint, generator.choice(strangers or [(text,) for text in UNRELATED_HINTS]))

    def _instead(self, hint: HintCandidates, texts: tuple[str | None, ...]) -> HintCandidates:
        if not hint.texts:
            return hint
        return replace(hint, texts=texts, drop=None if texts else "no_hint")
