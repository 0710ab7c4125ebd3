"""What `GRPOTrainer` keeps to itself, under names that the rest of the package may use: facts, logs and scores."""

import asyncio
import re
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from .forward import has_virtual_tokens, replaced, takes_row_temperatures
from .parsing import as_logged, call_pattern
from .tool_loop import ToolLoopTrainer


class OpenGRPOTrainer(ToolLoopTrainer):
    """`GRPOTrainer` that tells what it is, takes numbers for its logs, and scores and renders for others."""

    _buffered_inputs: list[dict[str, Any]] | None

    @property
    def mode(self) -> str:
        """`"train"` or `"eval"`: which metrics a number belongs to."""
        return "train" if self.model.training else "eval"

    @property
    def is_multimodal(self) -> bool:
        """Whether the processing class handles images as well as text."""
        return self._is_vlm

    @property
    def has_environment(self) -> bool:
        """Whether an environment supplies the prompts that a dataset leaves out."""
        return self.environment_factories is not None

    @property
    def has_tools(self) -> bool:
        """Whether the policy may call tools, its environment's included."""
        return bool(self.tools)

    @property
    def call_pattern(self) -> re.Pattern[str] | None:
        """What shows that a text was meant to be a tool call; `None` if the tokenizer does not tell."""
        return call_pattern(self.tokenizer)

    @property
    def takes_several_turns(self) -> bool:
        """Whether a completion may hold several turns of the policy."""
        return self.has_tools or self.has_environment or self.rollout_func is not None

    @property
    def scores_old_policy(self) -> bool:
        """Whether TRL scores each sampled batch with the policy once more, since it may move before the last use."""
        uses = self.args.steps_per_generation * self.num_iterations
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        return self.args.gradient_accumulation_steps % uses != 0 or corrected

    @property
    def own_engine(self) -> Any | None:
        """The `vllm.LLM` in this process, where it answers this process alone and whenever it is asked."""
        args = self.args
        alone = args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size == 1
        return self.vllm_generation.llm if self.use_vllm and alone and not args.vllm_enable_sleep_mode else None

    @property
    def uses_router_aux_loss(self) -> bool:
        """Whether a mixture-of-experts load-balancing loss is added to the policy loss."""
        return self.aux_loss_enabled

    @property
    def uses_virtual_tokens(self) -> bool:
        """Whether the policy is a prompt-learning adapter, whose positions shift under padding."""
        return has_virtual_tokens(self.model)

    @property
    def takes_row_temperatures(self) -> bool:
        """Whether each row may be scored at a temperature of its own."""
        return takes_row_temperatures(self.model)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, also where the processing class is a processor around it."""
        return self._tokenizer

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding id, also where the processing class is a processor around it."""
        return self._tokenizer.pad_token_id

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Texts that the tokenizer turns into control tokens, wherever they stand."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        return frozenset([*self._tokenizer.all_special_tokens, *(str(token) for token in added if token.special)])

    def run_async(self, coroutine: Coroutine) -> Any:
        """Run a coroutine on TRL's own event loop and wait for it; works inside a notebook's running loop, too."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.async_loop).result()

    def record_metric(self, name: str, value: float) -> None:
        """Add a number to the next log. The main process's log is the one that is kept."""
        self._metrics[self.mode][name].append(value)

    def record_shares(self, shares: Mapping[str, float], family: re.Pattern[str], of: str) -> None:
        """Add shares of a batch to the next log, where a share that a batch does not name is 0 there.

        Args:
            shares: The batch's shares by their names.
            family: What the names of such shares match in full.
            of: A metric that every batch records once, and this one has recorded already.
        """
        metrics = self._metrics[self.mode]
        earlier = len(metrics[of]) - 1
        for name in sorted({*shares, *filter(family.fullmatch, metrics)}):
            metrics[name] += [0.0] * (earlier - len(metrics[name]))
            metrics[name].append(shares.get(name, 0.0))

    def forget_batches(self) -> None:
        """Sample anew, as at the beginning: what an interrupted training left of a batch is not gone on with."""
        self._step, self._buffered_inputs = 0, None

    def drop_metrics(self, *names: str) -> None:
        """Forget metrics that mean nothing in this run."""
        for name in names:
            self._metrics[self.mode].pop(name, None)

    def record_column(self, name: str, values: Sequence[Any], *, replace: bool = False) -> None:
        """Add a column of this rank's values to the completions table. All ranks must call it alike.

        Args:
            name: The column.
            values: One per row of the sampled batch.
            replace: Whether they take the place of the latest ones.
        """
        found = gather_object(list(values))
        _extend(self._logs["extra"][name], found, replace)

    def simplify_logged_completions(self, rows: int) -> None:
        """Let the latest completions in the table be of one type, whatever tools were called and answered.

        Args:
            rows: Completions of all processes.
        """
        logged = self._logs["completion"]
        _extend(logged, [as_logged(completion) for completion in list(logged)[-rows:]], replace=True)

    def replace_logged_advantages(self, values: torch.Tensor) -> None:
        """Replace the latest advantages in the completions table by all ranks' `values` `(world * B,)`."""
        _extend(self._logs["advantages"], values.tolist(), replace=True)

    def tokenize_prompts(self, prompts: list, rows: Sequence[int] | None = None) -> list[list[int]]:
        """Token ids of `prompts`, rendered exactly as the sampled ones are. Equal ones are rendered once.

        Args:
            prompts: The prompts.
            rows: The row of the batch that each belongs to, whose tools it is shown. By default the rows in order.
        """
        owners = range(len(prompts)) if rows is None else rows
        tools = [self._batch_environments[i] for i in owners] if self.has_environment else [None] * len(prompts)
        keys = [(repr(prompt), shown) for prompt, shown in zip(prompts, tools, strict=True)]
        distinct = dict(zip(keys, prompts, strict=True))
        if not distinct:
            return []
        with replaced(self, "_batch_environments", [shown for _, shown in distinct]):
            ids = dict(zip(distinct, self._tokenize_prompts(list(distinct.values()))[0], strict=True))
        return [ids[key] for key in keys]


def _extend(logged: deque, values: Sequence[Any], replace: bool) -> None:
    """Add a batch's values to a column of the completions table, or put them in place of the latest batch's."""
    for _ in range(min(len(values), len(logged)) if replace else 0):
        logged.pop()
    logged.extend(values)
