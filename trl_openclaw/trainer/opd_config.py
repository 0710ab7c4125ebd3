"""Configuration of `OPDTrainer`."""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from trl import GRPOConfig

from ..hints import DEFAULT_HINT_TEMPLATE, HintPlacement, check_hint_template
from ..teachers import TEACHERS
from .alarms import AlarmAction, parse_bands
from .objective_fields import ObjectiveFields
from .server_fields import ServerFields
from .settings import Number

HINT_SOURCES = ("auto", "judge", "privileged_context", "none")
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
"""Loss types that divide by the number of rows, so the rows without a signal have to be taken out of the divisor."""


class _OneGeneration(int):
    """The number 1, which passes GRPOConfig's "at least two" check: without a group baseline one is enough."""

    def __lt__(self, other: object) -> bool:
        return False


@dataclass
class OPDConfig(ServerFields, ObjectiveFields, GRPOConfig):
    r"""
    Configuration class for the [`OPDTrainer`].

    Every field of [`~trl.GRPOConfig`] is there. Only the parameters specific to hindsight-guided on-policy
    distillation, and the defaults that differ, are listed here.

    Args:
        teacher (`str`, *optional*, defaults to `"frozen"`):
            Who re-scores the sampled tokens: `"frozen"` (the initial policy; with PEFT the adapter is switched off),
            `"ema"` (a moving average of the policy), or `"live"` (the policy as it is now, which is known to drift and
            warns). A `teacher_model` passed to the trainer, or `teacher_model_name_or_path`, takes its place.
        teacher_ema_rate (`float`, *optional*, defaults to `0.05`):
            How far the `"ema"` teacher moves towards the policy after each optimizer step; 1 is all the way.
        teacher_ema_start (`int`, *optional*, defaults to `0`):
            Optimizer steps that the `"ema"` teacher stays the initial policy.
        teacher_model_name_or_path (`str`, *optional*):
            An external teacher with the student's tokenizer.
        teacher_model_init_kwargs (`dict` or `str`, *optional*):
            Loading arguments of the external teacher that differ from the student's `model_init_kwargs`.
        teacher_server_model (`str`, *optional*):
            A teacher on a vLLM server ([`ServerTeacher`]), by the name that the server lists. It has the student's
            tokenizer, scores at `temperature=1`, and serves losses on the sampled token.
        teacher_server_base_url (`str`, *optional*):
            Address of that server's API, `/v1` included.
        teacher_server_adapter (`str`, *optional*):
            Name of a LoRA adapter that the server has loaded on that model.
        teacher_server_api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the server's key.
        teacher_server_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds that one request to it may take.
        teacher_server_max_retries (`int`, *optional*, defaults to `5`):
            Further tries after a failure that may pass, with pauses that grow from half a second to 8 seconds.
        teacher_server_request_tokens (`int`, *optional*, defaults to `8192`):
            Tokens of the rows that one request to it holds; a longer row goes alone.
        teacher_token_budget (`int`, *optional*):
            Tokens in one of the teacher's forward passes: rows times the longest of them. Defaults to 16,384, or one
            row where that is longer.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Run a prompt that several rows share once: in the student's forward and backward pass, for the teacher
            (hints, too) and when sampling starts. Changes no number but for rounding. Where a model or a setting (such
            as `gradient_checkpointing=True`) does not allow it, rows are run one by one, and a warning says so once.
        opd_loss (`str`, *optional*, defaults to `"sampled_token"`):
            How student and teacher are compared, see `docs/objectives.md`: `"sampled_token"` (GRPO's loss with the gap
            as advantage), `"topk_surrogate"` (the same over the k tokens of a support set), `"topk_reverse_kl"` (k
            tokens, and the rest as one) or `"full_divergence"` (the whole vocabulary).
        logp_gap_clip (`float`, *optional*, defaults to `1.0`):
            Bound C, in nats, on teacher minus student log-prob, for the first two. `None` for no bound.
        format_gap_clip (`float`, *optional*):
            A tighter bound for tokens that are only markup (`**`, `#`, list bullets), for the first two.
        topk (`int`, *optional*, defaults to `4`):
            Tokens k in a support set, and in the overlap that hints are chosen by.
        topk_support (`str`, *optional*, defaults to `"student"`):
            Whose best k tokens are compared: `"student"`, `"teacher"`, or `"overlap"` (of both).
        divergence (`str`, *optional*, defaults to `"reverse_kl"`):
            Of `"full_divergence"`: `"reverse_kl"` KL(student || teacher), `"forward_kl"` KL(teacher || student), or
            `"jsd"`.
        jsd_beta (`float`, *optional*, defaults to `0.5`):
            The teacher's share in the mixture of `"jsd"`.
        hint_selection (`str`, *optional*):
            Which hint candidate is used: `"sequence"` or `"token"` (the one whose teacher agrees best with the student
            about the k best tokens; one forward pass of the teacher per candidate), `"longest"`, `"shortest"`,
            `"random"`. By default `"longest"` for `"sampled_token"` and `"sequence"` for the others.
        max_hints (`int`, *optional*, defaults to `3`):
            Hint candidates M per row, in the order of the votes.
        reward_scale (`float`, *optional*, defaults to `1.0`):
            Lambda of G-OPD, for the first two objectives: above 1 goes beyond the teacher, below 1 stays between
            reference and teacher.
        opd_reference (`str`, *optional*):
            Where G-OPD sees the teacher from: `"initial"` (the default: the policy as it was at the start),
            `"unhinted_teacher"`, or the path of another model.
        control (`str`, *optional*):
            A control arm for comparisons: `"random_hint"` (one for another prompt), `"raw_next_state"` (its words as
            the hint), `"unhinted_teacher"`, or `"negative_advantage"` (every token of a hinted row gets `-C`).
        hint_source (`str`, *optional*, defaults to `"auto"`):
            Where the teacher's extra knowledge comes from: `"judge"`, the dataset column `"privileged_context"`, or
            `"none"` (an external teacher without hints). `"auto"` takes the only one that is there.
        hint_placement (`str`, *optional*, defaults to `"user"`):
            Where a hint goes: to the end of the prompt's last `"user"` message or of its `"system"` message, or,
            with `"turn"`, right before the turn that it is for. A prompt's first turn then has it in the last message
            if that is the user's, every other turn in a user message of its own. The turns of a trajectory then share
            all that came before, which makes the teacher's pass several times cheaper.
        hint_template (`str`, *optional*):
            Text around the hint, with `{hint}` in it.
        self_test (`bool`, *optional*, defaults to `True`):
            Compare teacher and student on the same tokens and prompt before the first step, and refuse to train when
            they disagree.
        self_test_tolerance (`float`, *optional*):
            Mean log-prob difference, in nats, that the self-test accepts; a single token may differ 20 times as much.
            Defaults to `1e-4` in float32 and `0.05` in half precision, where the shape of a batch alone moves
            log-probs.
        feedback_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds that next states and judging of one generation batch may take. What is not there by then is
            counted as timed out. Must stay below `ddp_timeout`, after which the process group would give up. It cannot
            cut async code that blocks the event loop instead of awaiting.
        feedback_concurrency (`int`, *optional*, defaults to `32`):
            Turns per process whose feedback is fetched at once.
        judge_failure_limit (`float`, *optional*, defaults to `0.9`):
            Share of turns, over all processes, whose feedback may fail before the batch counts as a failed one.
        judge_failure_patience (`int`, *optional*, defaults to `2`):
            Failed batches in a row after which all processes stop together.
        alarms (`dict` or `str`, *optional*):
            Bands that `length`, `entropy` and `truncation` of the sampled replies must stay in, such as
            `{"length": [20, 400], "entropy": [0.3, null]}`; see [`~trl_openclaw.trainer.alarms.BandAlarm`].
        alarm_action (`str`, *optional*, defaults to `"warn"`):
            What happens outside of a band: `"warn"`, or `"stop"` to end the training.
        alarm_patience (`int`, *optional*, defaults to `1`):
            Logs in a row outside of a band before that happens.

    > [!NOTE]
    > Advantages are per token, so `off_policy_mask_threshold` masks single tokens instead of sequences, and
    > `loss_type="bnpo"` divides by the active tokens of each micro-batch, so a micro-batch without a signal counts as
    > one with loss 0 in the mean over micro-batches. `"dapo"` (the default) divides by all active tokens of the batch.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]:
    > - `learning_rate`: Defaults to `1e-5` instead of `1e-6`.
    > - `epsilon_high`: Defaults to `0.28` instead of `None`.
    > - `disable_dropout`: Defaults to `True` instead of `False`; teacher and student must agree.
    > - `vllm_importance_sampling_mode`: Defaults to `"token_truncate"` instead of `"sequence_mask"`, which zeroes long
    >   sequences.
    > - `logging_nan_inf_filter`: Defaults to `False` instead of `True`, which logs a loss that is no number as 0.
    > - `num_generations`: `1` is accepted.
    """

    _NUMBERS: ClassVar[dict[str, Number]] = {
        **ObjectiveFields._OBJECTIVE_NUMBERS,
        **ServerFields._SERVER_NUMBERS,
        "teacher_token_budget": Number(whole=True, at_least=1, optional=True),
        "self_test_tolerance": Number(above=0, optional=True),
        "feedback_timeout": Number(above=0),
        "feedback_concurrency": Number(whole=True, at_least=1),
        "judge_failure_limit": Number(above=0, at_most=1),
        "judge_failure_patience": Number(whole=True, at_least=1),
        "alarm_patience": Number(whole=True, at_least=1),
        "teacher_ema_rate": Number(above=0, at_most=1),
        "teacher_ema_start": Number(whole=True, at_least=0),
    }
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs", "alarms"]

    learning_rate: float = field(default=1e-5, metadata={"help": "The initial learning rate for AdamW."})
    epsilon_high: float | None = field(
        default=0.28, metadata={"help": "Upper bound of the clipped probability ratio, minus one."}
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "Whether to disable dropout, so that teacher and student can agree."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Whether the log shows 0 in place of a loss that is no number."}
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={"help": "How vLLM's log-probs correct the loss; see `GRPOConfig`."},
    )
    teacher: str = field(
        default="frozen",
        metadata={"help": "Who re-scores the tokens: the policy as it was (`frozen`), its average (`ema`), or `live`."},
    )
    teacher_ema_rate: float = field(
        default=0.05, metadata={"help": "How far the `ema` teacher moves towards the policy after each step."}
    )
    teacher_ema_start: int = field(
        default=0, metadata={"help": "Steps that the `ema` teacher stays the initial policy."}
    )
    teacher_model_name_or_path: str | None = field(
        default=None, metadata={"help": "An external teacher with the student's tokenizer."}
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Loading arguments of the external teacher that differ from the student's."}
    )
    teacher_token_budget: int | None = field(
        default=None, metadata={"help": "Tokens per teacher forward. Defaults to 16,384, or the longest row."}
    )
    prefix_sharing: bool = field(
        default=True, metadata={"help": "Run a prompt that several rows share once, where the model allows it."}
    )
    hint_source: str = field(
        default="auto",
        metadata={"help": "Where hints come from: `judge`, `privileged_context` (a column), `none`, or `auto`."},
    )
    hint_placement: str = field(
        default="user",
        metadata={"help": "Where a hint goes: end of the last `user` or `system` message, or before its `turn`."},
    )
    hint_template: str = field(
        default=DEFAULT_HINT_TEMPLATE, metadata={"help": "Text around the hint; must contain `{hint}`."}
    )
    self_test: bool = field(
        default=True, metadata={"help": "Refuse to train when teacher and student disagree on equal input."}
    )
    self_test_tolerance: float | None = field(
        default=None, metadata={"help": "Mean log-prob difference (nats) that the self-test accepts."}
    )
    feedback_timeout: float = field(
        default=600.0,
        metadata={
            "help": "Seconds that the feedback of one generation batch may take once the batch is sampled. Cannot cut "
            "async code that blocks the event loop."
        },
    )
    feedback_concurrency: int = field(default=32, metadata={"help": "Turns per process judged at once."})
    judge_failure_limit: float = field(
        default=0.9, metadata={"help": "Share of failed turns from which a batch counts as failed."}
    )
    judge_failure_patience: int = field(
        default=2, metadata={"help": "Failed batches in a row after which all processes stop together."}
    )
    alarms: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Bands for `length`, `entropy` and `truncation`: `{name: [low, high]}`."}
    )
    alarm_action: str = field(default="warn", metadata={"help": "Outside of a band: `warn` or `stop`."})
    alarm_patience: int = field(default=1, metadata={"help": "Logs in a row outside of a band before that happens."})

    def __post_init__(self):
        self._check_values()
        generations = getattr(self, "num_generations", None)
        if generations == 1:
            self.num_generations: int | None = _OneGeneration(1)
        self._use_new_names()
        super().__post_init__()
        self.num_generations = generations
        self._check_against_grpo()

    def _use_new_names(self) -> None:
        """Hand on TRL's own fields under the names that newer transformers give them, or each config would warn."""
        for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
            new = old.replace("gradient", "activation")
            if getattr(self, new, self) is None:
                setattr(self, new, getattr(self, old))

    def _check_values(self) -> None:
        for name, allowed in (
            ("teacher", tuple(TEACHERS)),
            ("hint_source", HINT_SOURCES),
            ("hint_placement", get_args(HintPlacement)),
            ("alarm_action", get_args(AlarmAction)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        check_hint_template(self.hint_template)
        for name, number in self._NUMBERS.items():
            number.check(name, getattr(self, name))
        self._check_objective()
        self._check_server()
        if not parse_bands(self.alarms, "alarms") and (self.alarm_action, self.alarm_patience) != ("warn", 1):
            raise ValueError("`alarm_action` and `alarm_patience` need `alarms`, which is empty.")
        if self.teacher != "ema" and (self.teacher_ema_rate, self.teacher_ema_start) != (0.05, 0):
            raise ValueError(
                f"`teacher_ema_rate` and `teacher_ema_start` need `teacher='ema'`, but `teacher={self.teacher!r}`."
            )
        for name in ("self_test", "prefix_sharing"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.teacher_model_name_or_path, str | None):
            raise ValueError(f"`teacher_model_name_or_path` must be text, got {self.teacher_model_name_or_path!r}.")
        if not isinstance(self.reward_weights, list | tuple | None):
            raise ValueError(f"`reward_weights` must be a list of numbers, got {self.reward_weights!r}.")
        for i, weight in enumerate(self.reward_weights or ()):
            Number().check(f"reward_weights[{i}]", weight)
        if self.teacher_model_name_or_path is not None and self.teacher != "frozen":
            raise ValueError(
                f"`teacher={self.teacher!r}` and `teacher_model_name_or_path` name two teachers. Remove one."
            )

    def _check_against_grpo(self) -> None:
        self._check_objective_against_grpo()
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"`importance_sampling_level={self.importance_sampling_level!r}` gives all tokens of a sequence one "
                "ratio, which destroys token-level credit. Use `importance_sampling_level='token'`."
            )
        if self.loss_type == "vespo":
            raise ValueError(
                "`loss_type='vespo'` weighs whole sequences, which destroys token-level credit. Use `loss_type='dapo'`."
            )
        if self.use_liger_kernel:
            raise ValueError(
                "`use_liger_kernel=True` changes the student's kernels but not the teacher's, so their log-probs "
                "differ where they must not. Use the Hub kernels: `model_init_kwargs={'use_kernels': True}`."
            )
        if self.loss_type in ROW_MEAN_LOSSES and (self.entropy_coef != 0.0 or self.use_adaptive_entropy):
            raise ValueError(
                f"`loss_type={self.loss_type!r}` divides by rows; taking rows without a signal out of that divisor "
                "would rescale the entropy bonus as well. Use `loss_type='dapo'` together with an entropy bonus."
            )
        if self.feedback_timeout >= self.ddp_timeout:
            raise ValueError(
                f"`feedback_timeout` ({self.feedback_timeout:g} s) must stay below `ddp_timeout` ({self.ddp_timeout} "
                "s), or the process group gives up while one process still waits for its judge."
            )
        if self.torch_compile:
            raise ValueError(
                "`torch_compile=True` is not supported: a compiled forward would not see that only completion "
                "positions are scored. Leave it off."
            )
        generation = self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}
        if "temperature" in generation:
            raise ValueError(
                "`generation_kwargs` sets `temperature`, so tokens would be sampled at another temperature than they "
                "are scored at. Use the field `temperature`."
            )
        biased = [name for name in ("top_p", "top_k", "min_p", "repetition_penalty") if name in generation]
        biased += [name for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", None)) if getattr(self, name) != off]
        if self.repetition_penalty != 1.0:
            biased.append("repetition_penalty")
        if biased:
            warnings.warn(
                f"Sampling with {', '.join(f'`{name}`' for name in biased)} draws from another distribution than the "
                "one whose log-probs are trained, which biases the ratio and the advantage.",
                UserWarning,
                stacklevel=3,
            )
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        """Point out checkpoints inside a generation buffer: TRL does not save it, and samples anew when it resumes."""
        uses, accumulation = self.steps_per_generation * self.num_iterations, self.gradient_accumulation_steps
        steps = math.lcm(uses, accumulation) // accumulation
        if self.save_strategy == "steps" and self.save_steps >= 1 and self.save_steps % steps:
            warnings.warn(
                f"`save_steps={self.save_steps:g}` saves in the middle of sampled batches, which serve {uses} "
                "micro-steps each (`steps_per_generation` times `num_iterations`). A resumed run samples such a batch "
                f"anew and trains on its prompts from the start. Use a multiple of {steps}.",
                UserWarning,
                stacklevel=4,
            )
