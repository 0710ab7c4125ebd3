"""Chat with a transformers model in this process: the same face as `chat.ChatClient`, no server."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .chat import ChatReply, Draft, complete_with_room
from .errors import ChatError, JudgeUnavailableError
from .types import Messages

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase, StoppingCriteriaList

# The random state belongs to the process: two generations at once, of any models, would restore it over each other. Nor
# is an engine of vLLM made for two threads.
_GENERATING = threading.Lock()

GATHER_SECONDS = 0.01
"""How long the first question waits for others to share its batch."""


@dataclass(eq=False)
class _Job:
    messages: Messages
    max_tokens: int
    temperature: float
    draft: "Future[Draft]" = field(default_factory=Future)
    abandoned: bool = False

    @property
    def settings(self) -> tuple[int, float]:
        """What the rows of one batch must have in common."""
        return self.max_tokens, self.temperature


class LocalChat:
    """Chat over a transformers model in this process; the policy under training may be used.

    Questions asked at the same time are answered in batches, one batch at a time, in a thread. The model is left as it
    was found (training mode, gradient checkpointing), and so is torch's random state: sampling uses a stream of its
    own, seeded from torch's initial seed.

    A generation whose askers have all been cancelled ends with the token it is at, and they wait for that: a model that
    is also trained must not be in two hands. Reading the prompts counts as one token here.

    Args:
        model (`str` or `torch.nn.Module`):
            Path or name of a model, loaded at first use, or a model in memory, used as it is. A model whose weights are
            spread over processes (ZeRO-3, FSDP) is refused: not every process asks the same questions.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Tokenizer with a chat template. Defaults to the one that belongs to `model`.
        max_batch (`int`, *optional*, defaults to `16`):
            Questions answered in one generation.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Passed to the chat template, such as `{"enable_thinking": False}`.
    """

    runs_in_process = True
    reads_images = False

    def __init__(
        self,
        model: "str | nn.Module",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        max_batch: int = 16,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        if max_batch < 1:
            raise ValueError(f"`max_batch` must be at least 1, got {max_batch}.")
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self._waiting: list[_Job] = []
        self._working = False
        self._batch: list[_Job] = []
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._loaded: nn.Module | None = None
        self._draws: torch.Generator | None = None

    async def complete(self, messages: Messages, *, max_tokens: int, temperature: float | None = None) -> ChatReply:
        """Answer `messages`.

        Args:
            messages: The conversation.
            max_tokens: Room for the answer, thinking included.
            temperature: Sampling temperature; `None` or 0 takes the likeliest token each time.

        Returns:
            The final answer. Raises `ChatError` when there is none.
        """

        async def ask(room: int) -> Draft:
            job = _Job(messages, room, temperature or 0.0)
            self._submit(job)
            try:
                return await asyncio.wrap_future(job.draft)
            except asyncio.CancelledError:
                await self._abandon(job)
                raise

        return await complete_with_room(ask, max_tokens)

    async def check(self) -> None:
        """Load the model if need be; raise `JudgeUnavailableError` when it cannot chat."""
        try:
            await asyncio.to_thread(self._load)
        except (OSError, ValueError, ChatError) as error:
            raise JudgeUnavailableError(f"The chat model {_name(self.model)} cannot be used: {error}") from error

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._waiting.append(job)
            start, self._working = not self._working, True
        if start:
            # Not awaited: the work also serves others, so it must outlive whoever asked first.
            asyncio.get_running_loop().run_in_executor(None, self._work)

    async def _abandon(self, job: _Job) -> None:
        """Give up a job; if nobody wants the running batch any more, wait until the worker has let go of the model.

        Whichever batch the job is in: `asyncio.gather` is over as soon as one of its cancelled questions is.
        """
        job.abandoned = True
        job.draft.cancel()
        await asyncio.sleep(0)  # whoever is cancelled together with this one gives up, too
        with self._lock:
            batch = self._batch
        if batch and _is_abandoned(batch):
            with suppress(ChatError):
                await asyncio.wrap_future(batch[0].draft)

    def _work(self) -> None:
        """Answer all waiting jobs, batch by batch."""
        time.sleep(GATHER_SECONDS)
        while batch := self._next_batch():
            try:
                drafts = self._generate(batch)
            except BaseException as error:  # `exit()`, too: an error that gets away leaves all askers waiting
                kind = error.kind if isinstance(error, ChatError) else "error"
                drafts = [ChatError(kind, f"{_name(self.model)}: {type(error).__name__}: {error}") for _ in batch]
            for job, draft in zip(batch, drafts, strict=True):
                if isinstance(draft, ChatError):
                    job.draft.set_exception(draft)
                else:
                    job.draft.set_result(draft)

    def _next_batch(self) -> list[_Job]:
        """Take out the oldest job that waits, and those that can go with it; none when nothing waits."""
        batch: list[_Job] = []
        with self._lock:
            for job in list(self._waiting):
                if len(batch) == self.max_batch:
                    break
                if batch and job.settings != batch[0].settings:
                    continue
                self._waiting.remove(job)
                # False when whoever asked has gone away.
                if job.draft.set_running_or_notify_cancel():
                    batch.append(job)
            self._working = bool(batch)
            self._batch = batch
        return batch

    def _load(self) -> "tuple[Any, PreTrainedTokenizerBase]":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with self._loading:
            if self.tokenizer is None:
                source = self.model if isinstance(self.model, str) else getattr(self.model.config, "_name_or_path", "")
                if not source:
                    raise ValueError("a model in memory that does not say where it came from needs `tokenizer`")
                self.tokenizer = AutoTokenizer.from_pretrained(source)
            if not getattr(self.tokenizer, "chat_template", None):
                raise ValueError("its tokenizer has no chat template")
            if isinstance(self.model, str):
                if self._loaded is None:
                    self._loaded = AutoModelForCausalLM.from_pretrained(self.model, dtype="auto").to(own_device())
                return self._loaded, self.tokenizer
            model = self.model
            while not hasattr(model, "generate") and hasattr(model, "module"):
                model = model.module
            _refuse_sharded(model)
            return model, self.tokenizer

    def _generate(self, batch: list[_Job]) -> list[Draft | ChatError]:
        model, tokenizer = self._load()
        window = self._window(model)
        prompts = [self._encode(tokenizer, job.messages) for job in batch]
        fitting = [index for index, ids in enumerate(prompts) if len(ids) < window]
        drafts: list[Draft | ChatError] = [
            ChatError("error", f"a prompt of {len(ids)} tokens does not fit the model's window of {window}")
            for ids in prompts
        ]
        if not fitting:
            return drafts
        rooms = [min(batch[0].max_tokens, window - len(prompts[index])) for index in fitting]
        with _GENERATING:
            if _is_abandoned(batch):  # before its turn came: the model may be training by now
                return [ChatError("error", "nobody waits for the answer any more") for _ in prompts]
            answers = self._answer(batch, [prompts[index] for index in fitting], rooms)
        for index, draft in zip(fitting, answers, strict=True):
            drafts[index] = draft
        return drafts

    def _window(self, model: Any) -> int:
        """Tokens that the model can read and write."""
        return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def _answer(self, batch: list[_Job], prompts: list[list[int]], rooms: list[int]) -> Sequence[Draft | ChatError]:
        """A draft for each of the batch's prompts that fit, with room for so many tokens each."""
        import torch

        model, tokenizer = self._load()
        ends = end_ids(model, tokenizer)
        with torch.no_grad(), _in_eval(model), self._own_randomness(model):
            outputs = _run(model, prompts, max(rooms), batch[0].temperature, ends, _until_abandoned(batch))
        drafts = []
        for room, ids in zip(rooms, outputs, strict=True):
            stop = next((at for at, token in enumerate(ids[:room]) if token in ends), None)
            text = tokenizer.decode(ids[: room if stop is None else stop], skip_special_tokens=True)
            drafts.append(Draft(text, truncated=stop is None))
        return drafts

    def _encode(self, tokenizer: "PreTrainedTokenizerBase", messages: Messages) -> list[int]:
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )
        return list(encoded["input_ids"])

    def _next_seed(self) -> int:
        """One more number of this chat's own stream."""
        import torch

        if self._draws is None:
            self._draws = torch.Generator().manual_seed(torch.initial_seed())
        return int(torch.randint(2**62, (), generator=self._draws))

    @contextmanager
    def _own_randomness(self, model: "nn.Module") -> Iterator[None]:
        """Draw from this chat's own stream and leave the process's random state alone.

        Going on from the process's state would give every batch of a step the same draws, and equal prompts in
        different batches the same "independent" answers.
        """
        import torch

        seed = self._next_seed()
        devices = {parameter.device for parameter in model.parameters()} - {torch.device("cpu")}
        kind = next(iter(devices)).type if devices else "cuda"
        module = torch.get_device_module(kind)
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device.index or 0 for device in devices], device_type=kind))
            torch.default_generator.manual_seed(seed)
            # A new thread starts on device 0, whichever one this process works on.
            for device in devices:
                if hasattr(module, "device"):
                    stack.enter_context(module.device(device))
                module.manual_seed(seed)
            yield


def _is_abandoned(batch: list[_Job]) -> bool:
    return all(job.abandoned for job in batch)


def _until_abandoned(batch: list[_Job]) -> "StoppingCriteriaList":
    """Ends a generation as soon as nobody waits for any of its rows."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Abandoned(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full(input_ids.shape[:1], _is_abandoned(batch), dtype=torch.bool, device=input_ids.device)

    return StoppingCriteriaList([Abandoned()])


def _run(
    model: "nn.Module",
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    ends: list[int],
    stopping: "StoppingCriteriaList",
) -> list[list[int]]:
    """The new ids of every row, whatever follows an end token included."""
    import torch

    width = max(len(ids) for ids in prompts)
    pad = ends[0] if ends else 0
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    # Defaults of the checkpoint that mean nothing without sampling would only be warned about.
    greedy = {} if temperature else {"temperature": None, "top_p": None, "top_k": None}
    output = model.generate(
        input_ids=torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=model.device),
        attention_mask=torch.tensor(
            [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device
        ),
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
        use_cache=True,
        return_dict_in_generate=False,
        stopping_criteria=stopping,
        **sampling,
        **greedy,
    )
    return output[:, width:].tolist()


@contextmanager
def _in_eval(model: "nn.Module") -> Iterator[None]:
    """Evaluation mode, which also switches gradient checkpointing off, then every module as it was found."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def end_ids(model: "nn.Module", tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids that end a reply."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    ids = [ends] if isinstance(ends, int) else list(ends or ())
    return list(dict.fromkeys([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]))


def _refuse_sharded(model: "nn.Module") -> None:
    sharded = any(hasattr(p, "ds_id") or type(p.data).__name__ == "DTensor" for p in model.parameters())
    if sharded or any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ChatError(
            "error",
            "its weights are spread over processes (ZeRO-3 or FSDP), and not every process asks the same questions. "
            "Serve the model and use `LLMJudge` or `ChatClient`, or pass a path to load a copy",
        )


def own_device() -> "torch.device":
    """This process's device. A worker thread's current device says nothing about it."""
    import torch

    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator().type
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def _name(model: "str | nn.Module") -> str:
    return repr(model) if isinstance(model, str) else type(model).__name__
