"""The fields of `OPDConfig` that choose objective, hints and reference, and what contradicts what among them."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..hint_selection import OVERLAP_RULES, SUPPORTS, TEXT_RULES
from ..objectives import DIVERGENCES, OBJECTIVES, SAMPLED_TOKEN
from .controls import CONTROLS
from .settings import Number

SURROGATES = (SAMPLED_TOKEN, "topk_surrogate")
"""Objectives whose advantage is a gap in log-probs, which can be clipped and extrapolated."""

REFERENCES = ("initial", "unhinted_teacher")


@dataclass
class ObjectiveFields:
    """See [`~trl_openclaw.OPDConfig`] for what the fields mean."""

    _OBJECTIVE_NUMBERS: ClassVar[dict[str, Number]] = {
        "logp_gap_clip": Number(above=0, optional=True),
        "format_gap_clip": Number(above=0, optional=True),
        "topk": Number(whole=True, at_least=1),
        "max_hints": Number(whole=True, at_least=1),
        "jsd_beta": Number(above=0, at_most=1),
        "reward_scale": Number(above=0),
    }
    _OBJECTIVE_CHOICES: ClassVar[dict[str, tuple[str | None, ...]]] = {
        "opd_loss": tuple(OBJECTIVES),
        "topk_support": SUPPORTS,
        "divergence": DIVERGENCES,
        "hint_selection": (*OVERLAP_RULES, *TEXT_RULES, None),
        "control": (*CONTROLS, None),
    }

    opd_loss: str = field(
        default=SAMPLED_TOKEN,
        metadata={"help": f"How student and teacher are compared: {', '.join(f'`{name}`' for name in OBJECTIVES)}."},
    )
    logp_gap_clip: float | None = field(
        default=1.0,
        metadata={"help": "Bound C, in nats, on the gap of the two surrogates. `None` for no bound."},
    )
    format_gap_clip: float | None = field(
        default=None, metadata={"help": "A tighter bound for tokens that are only markup. `None` for none."}
    )
    topk: int = field(default=4, metadata={"help": "Tokens k in a support set, and in the overlap of two models."})
    topk_support: str = field(
        default="student", metadata={"help": "Whose best k tokens are compared: `student`, `teacher` or `overlap`."}
    )
    divergence: str = field(
        default="reverse_kl", metadata={"help": "Of `full_divergence`: `reverse_kl`, `forward_kl` or `jsd`."}
    )
    jsd_beta: float = field(default=0.5, metadata={"help": "The teacher's share in the mixture of `jsd`."})
    hint_selection: str | None = field(
        default=None,
        metadata={
            "help": "Which hint candidate is used: `sequence` or `token` (overlap with the student), `longest`, "
            "`shortest`, `random`. By default `longest` for `sampled_token`, `sequence` for the others."
        },
    )
    max_hints: int = field(default=3, metadata={"help": "Hint candidates M per row, in the order of the votes."})
    reward_scale: float = field(
        default=1.0, metadata={"help": "Lambda of G-OPD: above 1 goes beyond the teacher, seen from the reference."}
    )
    opd_reference: str | None = field(
        default=None,
        metadata={"help": "Reference of G-OPD: `initial`, `unhinted_teacher`, or a model path. Default: `initial`."},
    )
    control: str | None = field(
        default=None, metadata={"help": f"A control arm for comparisons: {', '.join(f'`{c}`' for c in CONTROLS)}."}
    )

    @property
    def uses_initial_reference(self) -> bool:
        """Whether G-OPD sees the teacher from the policy as it was at the start."""
        return self.reward_scale != 1 and self.opd_reference in (None, "initial")

    def _check_objective(self) -> None:
        for name, allowed in self._OBJECTIVE_CHOICES.items():
            if getattr(self, name) not in allowed:
                names = ", ".join(str(choice) for choice in allowed)
                raise ValueError(f"`{name}` must be one of {names}, got {getattr(self, name)!r}.")
        if self.hint_selection is None:
            self.hint_selection = "longest" if self.opd_loss == SAMPLED_TOKEN else "sequence"
        if self.jsd_beta == 1:
            raise ValueError("`jsd_beta` must lie between 0 and 1; use `divergence='reverse_kl'` instead of 1.")
        self._check_uses()

    def _check_uses(self) -> None:
        """Refuse a setting that the chosen objective would ignore: somebody thinks that it does something."""
        unused = {
            "divergence": self.divergence != "reverse_kl" and self.opd_loss != "full_divergence",
            "jsd_beta": self.jsd_beta != 0.5 and self.divergence != "jsd",
            "topk_support": self.topk_support != "student" and not self.opd_loss.startswith("topk"),
            "reward_scale": self.reward_scale != 1 and self.opd_loss not in SURROGATES,
            "logp_gap_clip": self.logp_gap_clip not in (1, None) and self.opd_loss not in SURROGATES,
            "format_gap_clip": self.format_gap_clip is not None and self.opd_loss not in SURROGATES,
            "topk": self.topk != 4 and not self.opd_loss.startswith("topk") and self.hint_selection in TEXT_RULES,
        }
        needs = {
            "divergence": "`opd_loss='full_divergence'`",
            "jsd_beta": "`divergence='jsd'`",
            "topk_support": "an `opd_loss` over k tokens",
            "reward_scale": "`opd_loss='sampled_token'` or `'topk_surrogate'`: elsewhere the extrapolated target would "
            "be no distribution",
            "logp_gap_clip": "`opd_loss='sampled_token'` or `'topk_surrogate'`",
            "format_gap_clip": "`opd_loss='sampled_token'` or `'topk_surrogate'`",
            "topk": "an `opd_loss` over k tokens, or a `hint_selection` by overlap",
        }
        for name, is_unused in unused.items():
            if is_unused:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` needs {needs[name]}, but `opd_loss={self.opd_loss!r}` and "
                    f"`divergence={self.divergence!r}`."
                )
        tighter, bound = self.format_gap_clip, self.logp_gap_clip
        if tighter is not None and bound is not None and tighter >= bound:
            raise ValueError(
                f"`format_gap_clip={tighter:g}` must be tighter than `logp_gap_clip={bound:g}`, which bounds all."
            )
        if not isinstance(self.opd_reference, str | None):
            raise ValueError(
                f"`opd_reference` must be {', '.join(REFERENCES)}, or the path of a model as text, got "
                f"{self.opd_reference!r}."
            )
        if self.opd_reference is not None and self.reward_scale == 1:
            raise ValueError(
                f"`opd_reference={self.opd_reference!r}` is only used with a `reward_scale` other than 1; set that, or "
                "remove the reference."
            )
        if self.control == "unhinted_teacher" and self.opd_reference == "unhinted_teacher":
            raise ValueError(
                "`opd_reference='unhinted_teacher'` is the teacher itself under `control='unhinted_teacher'`, so "
                "`reward_scale` would do nothing. Use `opd_reference='initial'`."
            )
        if self.control == "negative_advantage":
            self._check_negative_advantage()

    def _check_negative_advantage(self) -> None:
        if self.opd_loss != SAMPLED_TOKEN:
            raise ValueError("`control='negative_advantage'` replaces the advantage of `opd_loss='sampled_token'`.")
        if self.logp_gap_clip is None:
            raise ValueError("`control='negative_advantage'` gives every token `-C`: set `logp_gap_clip`.")
        for name, off in (("reward_scale", 1), ("format_gap_clip", None)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` needs an advantage to act on, which "
                    f"`control='negative_advantage'` replaces. Leave it at {off}."
                )

    def _check_objective_against_grpo(self) -> None:
        """Refuse what TRL offers for its own loss only, once its fields are settled."""
        if self.opd_loss == SAMPLED_TOKEN:
            return
        grpo: Any = self
        for name, off in (("off_policy_mask_threshold", None), ("top_entropy_quantile", 1.0), ("delta", None)):
            if getattr(grpo, name) != off:
                raise ValueError(
                    f"`{name}` acts on TRL's own loss, which `opd_loss={self.opd_loss!r}` does not go through. Leave "
                    "it off, or use `opd_loss='sampled_token'`."
                )
        moves = grpo.num_iterations > 1 or grpo.steps_per_generation > grpo.gradient_accumulation_steps
        if self.opd_loss == "full_divergence" and moves and grpo.teacher != "frozen":
            raise ValueError(
                f"`opd_loss='full_divergence'` projects the teacher's hidden states when the loss is computed, but "
                f"`teacher={grpo.teacher!r}` has moved on by then: with `num_iterations` above 1, or more "
                "`steps_per_generation` than `gradient_accumulation_steps`, use `teacher='frozen'` or an objective "
                "over k tokens."
            )
