"""A teacher scores the student's token ids, so both must mean the same by every id."""

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .._trl import get_config_model_id
from ..errors import VocabularyMismatchError


def check_same_vocabulary(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_model: nn.Module,
    teacher_tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Refuse a teacher that reads token ids differently.

    Args:
        student_tokenizer: The tokenizer that the policy samples with.
        teacher_model: The teacher, whose embedding must hold every id.
        teacher_tokenizer: The teacher's tokenizer; by default the one beside its weights.

    Raises:
        VocabularyMismatchError: If a token has another id, is missing, or does not fit into the teacher's embedding.
    """
    path = get_config_model_id(teacher_model.config)
    name = path or type(teacher_model).__name__
    if teacher_tokenizer is None:
        try:
            if not path:  # its class's name might be somebody's repository
                raise ValueError("The model does not say where it came from.")
            teacher_tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise VocabularyMismatchError(
                f"No tokenizer could be loaded for the teacher `{name}`, so its vocabulary cannot be compared with the "
                "student's. Pass `teacher_processing_class`."
            ) from error
    student, teacher = student_tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    if student != teacher:
        differing = [token for token in {**student, **teacher} if student.get(token) != teacher.get(token)]
        example = min(differing, key=lambda token: (student.get(token, 1 << 40), token))
        raise VocabularyMismatchError(
            f"The teacher `{name}` has another vocabulary: {len(differing):,} tokens differ (student {len(student):,}, "
            f"teacher {len(teacher):,} tokens), for example {example!r} is {student.get(example)} for the student and "
            f"{teacher.get(example)} for the teacher. Token-level distillation needs one tokenizer; choose a teacher "
            "of the same family."
        )
    rows = teacher_model.get_input_embeddings().weight.shape[0]
    if rows and rows <= max(student.values()):  # 0 rows: sharded away, the tokenizers have decided
        raise VocabularyMismatchError(
            f"The teacher `{name}` embeds {rows:,} tokens but ids reach {max(student.values()):,}."
        )
