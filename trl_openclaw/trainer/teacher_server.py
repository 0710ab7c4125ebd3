"""What a trainer asks of a teacher's server before it trains."""

import os

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model

from .._trl import SeamGRPOTrainer, get_config_model_id
from ..errors import TeacherError, VocabularyMismatchError
from ..teachers import InitialWeights, ServerTeacher
from .roles import warn_of_live_server

logger = get_logger(__name__)


def check_teacher_server(trainer: SeamGRPOTrainer, teacher: ServerTeacher, topk: int, initial: InitialWeights) -> None:
    """See that the server can teach this policy, and tell all ranks what it says of itself. A collective.

    Only the main process asks, so that a cluster does not knock on one server's door at once.

    Args:
        trainer: The trainer, after TRL's set-up.
        teacher: Its teacher.
        topk: How many of the most likely tokens the teacher will have to name.
        initial: What is left of the policy before TRL touched it.

    Raises:
        ValueError: If the teacher cannot honour the trainer's settings.
        TeacherError: On every rank, if the server cannot be used, or has no room for a completion.
        VocabularyMismatchError: On every rank, if it reads token ids differently.
    """
    if trainer.temperature != 1:
        raise ValueError(
            f"`temperature={trainer.temperature}`: the student is scored at the temperature that it samples at, and "
            "vLLM gives `prompt_logprobs` at 1 only. Use `temperature=1.0`, or a teacher in this process."
        )
    if teacher.score_timeout >= trainer.args.ddp_timeout:
        raise ValueError(
            f"The teacher's `score_timeout` ({teacher.score_timeout:g} s) must stay below `ddp_timeout` "
            f"({trainer.args.ddp_timeout} s), or the process group gives up while one process still waits for its rows."
        )
    warn_of_live_server(trainer, teacher)
    found: list = [None]
    if trainer.accelerator.is_main_process:
        try:
            found = [teacher.check(trainer.tokenizer, topk=topk)]
        except Exception as error:  # whatever it is, the other ranks wait for this one's word
            known = isinstance(error, TeacherError | VocabularyMismatchError)
            found = [error if known else TeacherError(f"{teacher.where} could not be checked: {error!r}")]
    if trainer.accelerator.num_processes > 1:
        broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    teacher.facts = found[0]
    longest = trainer.max_completion_length
    if teacher.max_length is not None and teacher.max_length <= longest:
        raise TeacherError(
            f"{teacher.where} reads {teacher.max_length} tokens, which leaves no room for a prompt beside "
            f"`max_completion_length={longest}`. Start it with a larger `--max-model-len`, or lower "
            "`max_completion_length`."
        )
    if teacher.same_weights_at_start is None:
        untouched = initial.fresh_adapter or not is_peft_model(trainer.model)
        policy = get_config_model_id(trainer.model.config)
        teacher.same_weights_at_start = untouched and teacher.adapter is None and same_place(policy, teacher.facts.root)
    logger.info(f"{teacher.where} is ready: {teacher.facts}.")


def same_place(policy: str | None, root: str | None) -> bool:
    """Whether policy and server were loaded from the same Hub name or folder."""
    if not policy or not root:
        return False
    return policy == root or (os.path.isdir(policy) and os.path.realpath(policy) == os.path.realpath(root))
