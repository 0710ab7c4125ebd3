"""Run under `accelerate launch`, mostly with two processes: scenarios one after another, each a line of JSON."""

import asyncio
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from launch_ranks import take_leave
from model_zoo import tokens_counted
from tiny import tiny_llama, tiny_tokenizer
from torch.distributed.tensor import DTensor
from trainer_harness import (
    ScriptedTeacher,
    always_replies,
    batches_of,
    judge_that,
    judge_with_hints,
    make_trainer,
    rollout_by_prompt,
)
from transformers import LlamaForCausalLM
from transformers.integrations import is_deepspeed_zero3_enabled

from trl_openclaw import CombineTrainer, LLMJudge, NextState, OPDTrainer, Verdict, Vote, scoring
from trl_openclaw.environments.conversation import ConversationRollout
from trl_openclaw.errors import OpenClawError
from trl_openclaw.teachers import EMATeacher, LocalTeacher
from trl_openclaw.trainer.alarms import BandAlarm

RANK = int(os.environ.get("RANK", "0"))
WITH_DEEPSPEED = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
DEFAULT_BUDGET = scoring.TOKEN_BUDGET
WITH_FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"


def hints_on_rank_zero_only(turn):
    return Verdict.from_votes([Vote(score=-1, hint="Be brief." if RANK == 0 else None)])


async def judge_of_rank_zero(turn):
    return hints_on_rank_zero_only(turn)


async def judge_broken_on_rank_one(turn):
    if RANK == 1:
        raise RuntimeError("down on rank 1")
    return hints_on_rank_zero_only(turn)


async def judge_slow_on_rank_one(turn):
    await asyncio.sleep(RANK * 0.5)
    return await judge_by_prompt(turn)


async def judge_in_this_process(turn):
    return await judge_by_prompt(turn)


judge_in_this_process.runs_in_process = True


async def judge_scores_by_rank(turn):
    return Verdict.from_votes([Vote(score=1 if RANK == 0 else -1)])


async def judge_broken(turn):
    raise RuntimeError(f"down on rank {RANK}")


def uneven_rollout(prompts, trainer):
    """Long completions on rank 0, short ones on rank 1."""
    ids = trainer.tokenize_prompts(prompts)
    length = 6 if RANK == 0 else 1
    found = [[65 + i] * length + [256] for i in range(len(prompts))]
    return {"prompt_ids": ids, "completion_ids": found, "logprobs": [[-1.0] * len(row) for row in found]}


async def satisfied_on_rank_one(turn, row):
    return NextState("Again!", satisfied=RANK == 1)


class CountedConversations(ConversationRollout):
    """Tells in the log how often the model sampled."""

    def __call__(self, prompts, trainer):
        calls, generate = [], trainer.model.generate
        trainer.model.generate = lambda *args, **kwargs: calls.append(1) or generate(*args, **kwargs)
        output = super().__call__(prompts, trainer)
        trainer.model.generate = generate
        trainer.record_metric("generations", len(calls))
        trainer.record_metric("turns_here", sum(len(row) for row in output["trajectory"]) / 2 / len(prompts))
        return output


async def judge_by_prompt(turn):
    """A hint for every other length of prompt."""
    hinted = len(turn.prompt[0]["content"]) // 2 % 2
    return Verdict.from_votes([Vote(score=-1, hint="Be brief." if hinted else None)])


async def three_hints_by_prompt(turn):
    """Three candidates for every other length of prompt."""
    hinted = len(turn.prompt[0]["content"]) // 2 % 2
    hints = ("Be brief.", "Say it kindly.", "Use numbers.") if hinted else (None,)
    return Verdict.from_votes([Vote(score=-1, hint=hint) for hint in hints])


def teacher_broken_on_rank_one(row):
    if RANK == 1:
        raise RuntimeError("down on rank 1")
    return [-1.0] * len(row.completion_ids)


def one_bad_prompt():
    """A stream whose first prompt is malformed, which only one rank gets to see."""
    yield {"prompt": [{"role": "User", "content": "hi"}]}
    for i in range(7):
        yield {"prompt": [{"role": "user", "content": "hi" * (i + 1)}]}


def equal_on_rank_zero_only() -> Dataset:
    """Batches of eight prompts: four equal ones, which go to rank 0, and four that begin differently."""
    texts = [
        f"{chr(97 + 4 * batch) if i < 4 else chr(65 + 4 * batch + i)}" * 30 for batch in range(4) for i in range(8)
    ]
    return Dataset.from_list([{"prompt": text} for text in texts])


def rollout_by_row(prompts, trainer):
    """Completions that differ from row to row."""
    ids = trainer.tokenize_prompts(prompts)
    found = [[65 + i + RANK, 70 + i] * (1 + i % 3) + [256] for i in range(len(prompts))]
    return {"prompt_ids": ids, "completion_ids": found, "logprobs": [[-1.0] * len(row) for row in found]}


def more_turns_on_rank_zero(prompts, trainer):
    """Three turns in each completion of rank 0, with a user in between, and one in those of rank 1."""
    said = trainer.suffixes.after_turn([{"role": "user", "content": "Again!"}])
    found = {"prompt_ids": trainer.tokenize_prompts(prompts), "completion_ids": [], "env_mask": [], "trajectory": []}
    for i in range(len(prompts)):
        own = [65 + i, 70 + i, 256]
        ids, mask = list(own), [1] * 3
        messages = [{"role": "assistant", "content": chr(65 + i)}, {"role": "user", "content": "Again!"}]
        for _ in range(2 if RANK == 0 else 0):
            ids, mask, messages = ids + said + own, mask + [0] * len(said) + [1] * 3, messages + messages[:2]
        found["completion_ids"].append(ids)
        found["env_mask"].append(mask)
        found["trajectory"].append(messages)
    return {**found, "logprobs": [[-1.0] * len(ids) for ids in found["completion_ids"]]}


async def judge_by_step(turn):
    """Every second step is fine; the others have three hints each."""
    hints = (
        [None] if turn.step % 2 else [f"{word} {turn.step}" for word in ("Be brief", "Say it kindly", "Use numbers")]
    )
    return Verdict.from_votes([Vote(score=1 if turn.step % 2 else -1, hint=hint) for hint in hints])


WHOLE_ROWS = ", in whole rows"
"""At the end of a scenario's name: without prefix sharing."""

SHARING = {
    "judge": judge_that(),
    "rollout_func": rollout_by_row,
    "data": equal_on_rank_zero_only(),
    "config": {"num_generations": 1, "shuffle_dataset": False, "max_grad_norm": 0.0},
}


LONG_HINT = {**SHARING, "judge": judge_that(hint="Be brief. " * 9) if RANK == 0 else judge_that()}


APART = {"rollout_func": rollout_by_prompt, "config": {"teacher": "live", "reward_scale": 1.5, "learning_rate": 0.01}}
"""A reference that is another model than the teacher."""


BY_PROMPT = {"judge": judge_by_prompt, "rollout_func": rollout_by_prompt}
"""What is sampled and said depends on the prompt alone, whichever process has it."""

AVERAGE = {"teacher": "ema", "teacher_ema_rate": 0.5}


SCENARIOS = {
    "by prompt": BY_PROMPT,
    "an adapter by prompt": {**BY_PROMPT, "lora": True},
    "an adapter and a head by prompt": {**BY_PROMPT, "lora": {"modules_to_save": ["lm_head"]}},
    "combine by prompt": {**BY_PROMPT, "trainer_class": CombineTrainer},
    "combine with an adapter by prompt": {**BY_PROMPT, "trainer_class": CombineTrainer, "lora": True},
    "teacher loaded again": {**BY_PROMPT, "from_disk": True},
    "teacher is the reference": {**BY_PROMPT, "from_disk": True, "config": {"beta": 0.1}},
    "another model": {
        **BY_PROMPT,
        "teacher_model": tiny_llama(seed=1),
        "teacher_processing_class": tiny_tokenizer(),
    },
    "another model's path": {**BY_PROMPT, "teacher_from_disk": True},
    "live teacher, initial reference": {**BY_PROMPT, "config": APART["config"]},
    "average": {**BY_PROMPT, "config": AVERAGE},
    "average of an adapter": {**BY_PROMPT, "lora": True, "config": AVERAGE},
    "average of a head, too": {**BY_PROMPT, "lora": {"modules_to_save": ["lm_head"]}, "config": AVERAGE},
    "average loaded again": {**BY_PROMPT, "from_disk": True, "config": AVERAGE},
    "one rank without hints": {"judge": judge_of_rank_zero},
    "no hints at all": {"judge": judge_that(hint=None)},
    "uneven lengths": {"judge": judge_that(), "rollout_func": uneven_rollout},
    "longer conversations on rank zero": {
        "judge": judge_that(),
        "rollout_func": CountedConversations(satisfied_on_rank_one, max_turns=3),
        "config": {"max_completion_length": 200, "generation_kwargs": {"sequence_bias": [[[256], 9.0]]}},
    },
    "more turns on rank zero": {
        "judge": judge_by_step,
        "trainer_class": CombineTrainer,
        "rollout_func": more_turns_on_rank_zero,
        "config": {"max_completion_length": 200, "hint_placement": "turn", "opd_loss": "topk_surrogate"},
    },
    "judge broken on one rank": {"judge": judge_broken_on_rank_one},
    "judge broken everywhere": {"judge": judge_broken},
    "judge unreachable": {"judge": LLMJudge("m", "http://127.0.0.1:9/v1")},
    "combine": {"judge": judge_of_rank_zero, "trainer_class": CombineTrainer},
    "scores by rank": {"judge": judge_scores_by_rank, "trainer_class": CombineTrainer},
    "bad prompt in a stream": {"judge": judge_that(), "data": IterableDataset.from_generator(one_bad_prompt)},
    "teacher broken on one rank": {
        "judge": judge_that(),
        "teacher_model": ScriptedTeacher(teacher_broken_on_rank_one),
    },
    # 7 tokens on one rank and 2 on the other make 4.5 for both, which is inside; entropy is what stops them.
    "alarm": {
        "judge": judge_that(),
        "rollout_func": uneven_rollout,
        "callbacks": [BandAlarm({"length": (4, 5), "entropy": (100, None), "truncation": (0, 0)}, "stop")],
    },
    "lora": {"judge": judge_of_rank_zero, "lora": True},
    "reference ahead": {**APART, "judge": judge_slow_on_rank_one},
    "reference afterwards": {**APART, "judge": judge_in_this_process},
    "teacher ahead, broken on one rank": {
        "judge": judge_slow_on_rank_one,
        "teacher_model": ScriptedTeacher(teacher_broken_on_rank_one),
        "config": {"hint_source": "none"},
    },
    "one rank shares": SHARING,
    "one rank shares an adapter": {**SHARING, "lora": True},
    "one rank shares a whole vocabulary": {
        **SHARING,
        "judge": judge_with_hints("Be brief.", "Say it kindly.", "Use numbers."),
        "config": {**SHARING["config"], "opd_loss": "full_divergence"},
    },
    "one rank samples equal prompts": {**SHARING, "rollout_func": None},
    "budget too small on one rank": {**LONG_HINT, "config": {**SHARING["config"], "teacher_token_budget": 80}},
    "one rank's rows are longer than the default budget": {**LONG_HINT, "default_budget": 80},
    **{
        f"{loss} {name}": {**options, "config": {"opd_loss": loss}}
        for loss in ("topk_surrogate", "full_divergence")
        for name, options in (
            ("by prompt", {"judge": three_hints_by_prompt, "rollout_func": rollout_by_prompt}),
            ("one rank without hints", {"judge": judge_of_rank_zero}),
        )
    },
}


def weights_of(model) -> dict[str, list[float]]:
    """Three sums of each parameter (see `_sums`); what is spread over processes is put together first."""
    parameters = dict(model.named_parameters())
    whole = nullcontext()
    if is_deepspeed_zero3_enabled():
        import deepspeed

        whole = deepspeed.zero.GatheredParameters(list(parameters.values()))
    with whole:
        found = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in parameters.items()}
        return {name: _sums(p.detach().double().flatten()) for name, p in found.items()}


def _sums(values: torch.Tensor) -> list[float]:
    """With signs, without, and one that tells places apart."""
    return [values.sum().item(), values.abs().sum().item(), (values * torch.arange(len(values)).cos()).sum().item()]


def run(scenario: str, folder: str) -> dict:
    """Train as a scenario says; what this process found."""
    name, whole_rows, _ = scenario.partition(WHOLE_ROWS)
    options = dict(SCENARIOS[name])
    if lora := options.pop("lora", False):
        from peft import LoraConfig

        more = lora if isinstance(lora, dict) else {}
        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more)
    model = saved_model(folder, 0) if options.pop("from_disk", False) else tiny_llama()
    if options.pop("teacher_from_disk", False):
        options["teacher_model"] = saved_model(folder, 1)
    scoring.TOKEN_BUDGET = options.pop("default_budget", DEFAULT_BUDGET)
    try:
        trainer = trainer_of(options, model, folder, whole_rows)
    except ValueError as refused:
        return {"rank": RANK, "error": f"{type(refused).__name__}: {refused}"}
    found = train(trainer)
    if isinstance(trainer.teacher, EMATeacher):
        trainer.teacher.save(Path(folder, scenario), writes=RANK == 0)
    return found


def saved_model(folder: str, seed: int) -> str:
    """Where this process finds a tiny model."""
    return str(Path(folder, f"rank{RANK}-model{seed}"))


def save_models(folder: str) -> None:
    """Each process for itself, and before it is one of several: then only the first one would save any."""
    for seed in (0, 1):
        tiny_llama(seed).save_pretrained(saved_model(folder, seed))
        tiny_tokenizer().save_pretrained(saved_model(folder, seed))


def trainer_of(options: dict, model: LlamaForCausalLM | str, folder: str, whole_rows: str) -> OPDTrainer:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return make_trainer(
        folder,
        options.pop("trainer_class", OPDTrainer),
        model=model,
        next_state=always_replies,
        # The same global batch whatever the number of processes.
        config={
            "max_steps": 2,
            "per_device_train_batch_size": 8 // world,
            # Asked for the CPU, accelerate would leave engines out; not asked, it needs to be told what to talk over.
            **({"use_cpu": False, "ddp_backend": "gloo"} if WITH_DEEPSPEED or WITH_FSDP else {}),
            "feedback_timeout": 60.0,
            "prefix_sharing": not whole_rows,
            "seed": 3,
            **options.pop("config", {}),
        },
        **options,
    )


def train(trainer: OPDTrainer) -> dict:
    """Train, and tell of it."""
    batches = batches_of(trainer)
    forwards, teacher = [], trainer.model
    if isinstance(trainer.teacher, LocalTeacher):
        teacher = trainer.teacher.model
        teacher.register_forward_pre_hook(lambda *args: forwards.append(1))
    passes = []
    trainer.model.get_input_embeddings().register_forward_hook(
        lambda *args: passes.append(1) if torch.is_grad_enabled() else None
    )
    trainer._self_test.due = False  # its forwards would be counted, too
    losses = []
    step = trainer.training_step
    trainer.training_step = lambda *args, **kwargs: losses.append(step(*args, **kwargs)) or losses[-1]
    error = None
    try:
        with tokens_counted(trainer.model) as tokens, tokens_counted(teacher) as teacher_tokens:
            trainer.train()
    except (OpenClawError, ValueError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    by_name = weights_of(trainer.model)
    return {
        "rank": RANK,
        "error": error,
        "teacher_forwards": len(forwards),
        "losses": [loss.item() for loss in losses],
        "num_items": [batch["num_items_in_batch"].item() for batch in batches],
        "step_advantages": [batch["step_advantages"].squeeze(1).tolist() for batch in batches],
        "active_tokens": [int((b["completion_mask"] * b["tool_mask"]).sum()) for b in batches],
        "engine": type(trainer.model_wrapped).__name__,
        "student_tokens": tokens[True],
        "teacher_tokens": teacher_tokens[False],
        "sampled_tokens": tokens[False],
        "student_passes": len(passes),
        "weights": sum(size for _, size, _ in by_name.values()),
        "weights_by_name": by_name,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
    }


def prepare_engine() -> None:
    """Have engines work on the CPU, in one thread."""
    torch.set_num_threads(1)
    if WITH_FSDP:  # which accelerate leaves out there, without a word; `ACCELERATE_TORCH_DEVICE` is set
        PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    if WITH_DEEPSPEED:  # which would compile faster ways to talk within one machine, for a minute
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main(folder: str, *scenarios: str) -> None:
    save_models(folder)
    with Path(folder, f"rank{RANK}.jsonl").open("w") as file:
        for scenario in scenarios:
            print(json.dumps(run(scenario, folder)), file=file, flush=True)


if __name__ == "__main__":
    prepare_engine()
    main(*sys.argv[1:])
    take_leave()
