"""The model card: TRL's metadata, versions and citations around how this package trained the model."""

import importlib
import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .._trl import get_config_model_id
from ..teachers import ExternalTeacher, LocalTeacher

if TYPE_CHECKING:
    from .opd_trainer import OPDTrainer

VERSIONS = "### Framework versions\n\n"
"""What TRL's card says from here on is kept."""

BADGE = re.compile(r"^\[<img.*$", re.MULTILINE)
"""A line of TRL's card that leads to the run in an experiment tracker."""


def write_model_card(
    trainer: "OPDTrainer",
    write: Callable[..., None],
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
) -> None:
    """Have TRL write its card, then replace what it says of the training, of which it knows nothing.

    Args:
        trainer: The trainer, whose `output_dir` gets the card.
        write: TRL's own `create_model_card`.
        model_name: The title; by default `hub_model_id`'s name, else the base model's with the method's behind it.
        dataset_name: A dataset on the Hub, which is linked to, or a folder, which is named.
        tags: More tags.
    """
    base = get_config_model_id(trainer.model.config)
    title = model_name or _default_title(trainer, base)
    write(model_name=title, dataset_name=dataset_name if _is_hub_id(dataset_name) else None, tags=tags)
    if not trainer.is_world_process_zero():
        return
    path = Path(trainer.args.output_dir, "README.md")
    card = ModelCard.load(path, ignore_metadata_errors=True)
    card.data.base_model = base if _is_hub_id(base) else None
    vars(card.data).pop("licence", None)  # a placeholder, and not how the Hub spells it
    template = Template(resources.files(__package__).joinpath("model_card.md").read_text("utf-8"))
    card.text = template.substitute(
        title=title,
        base=_model(base) or "a model without a name",
        method=method_name(trainer),
        data=_data(trainer, dataset_name),
        weights=_weights(trainer),
        badges="\n".join([*BADGE.findall(card.text), ""]),
        paper_title=trainer._paper["title"],
        paper_id=trainer._paper["id"],
        settings="\n".join(f"| {name} | {value} |" for name, value in _settings(trainer)),
        version=importlib.import_module(__name__.partition(".")[0]).__version__,
        versions_and_citations=card.text.partition(VERSIONS)[2].rstrip(),
    )
    card.save(path)


def method_name(trainer: "OPDTrainer") -> str:
    """Which of the three modes this is."""
    if not trainer.opd_weight:
        return "Binary RL"
    return "Combine" if trainer.rl_weight else "OPD"


def _settings(trainer: "OPDTrainer") -> Iterator[tuple[str, str]]:
    """What the training depended on, as rows of a table."""
    args, distils, rewards = trainer.args, bool(trainer.opd_weight), bool(trainer.rl_weight)
    in_advantage = distils and trainer.objective is None
    terms = [(trainer.rl_weight, "r")] * rewards + [(trainer.opd_weight, "A")] * in_advantage
    if terms:
        formula = " + ".join(term if weight == 1 else f"{weight:g} * {term}" for weight, term in terms)
        yield "advantage of a token", f"`{formula}`"
    if in_advantage:
        yield "A", f"log-prob of the token under the teacher minus that under the student{_bound(args)}"
    elif distils:
        weight = "" if trainer.opd_weight == 1 else f", times {trainer.opd_weight:g}"
        yield "distillation loss", f"`{args.opd_loss}`: {_objective(args)}{weight}"
    if distils:
        if args.reward_scale != 1:
            yield "beyond the teacher", f"lambda {args.reward_scale:g}, seen from `{args.opd_reference or 'initial'}`"
        if args.control is not None:
            yield "control arm", f"`{args.control}`"
        yield "teacher", _teacher(trainer)
        yield "hints", _hints(trainer)
    if rewards:
        yield "r", _rewards(trainer)
    if trainer.judge is not None:
        followed = "the dataset column `next_state`" if trainer.next_state is None else _named(trainer.next_state)
        yield "judge", _named(trainer.judge)
        yield "next states", followed
    yield "learning rate", f"{args.learning_rate:g}, {args.lr_scheduler_type.value}"
    yield "optimizer steps", str(trainer.state.global_step)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    yield "replies per step", f"{rows} ({args.num_generations} to a prompt)"
    engine = ", by vLLM" if args.use_vllm else ""
    yield "sampling", f"temperature {args.temperature:g}, at most {args.max_completion_length} tokens{engine}"
    yield "loss", f"`{args.loss_type}`, ratio clip {args.epsilon:g}/{args.epsilon_high:g}, `beta` {args.beta:g}"
    yield "seed", str(args.seed)


def _bound(args: Any) -> str:
    return "" if args.logp_gap_clip is None else f", within plus and minus C = {args.logp_gap_clip:g} nats"


def _objective(args: Any) -> str:
    """What an objective compares, in words."""
    if args.opd_loss == "full_divergence":
        beta = f" (beta {args.jsd_beta:g})" if args.divergence == "jsd" else ""
        return f"{args.divergence}{beta} over the whole vocabulary"
    whose = {"student": "the student's", "teacher": "the teacher's", "overlap": "the overlap of both models'"}
    bound = _bound(args) if args.opd_loss == "topk_surrogate" else ""
    return f"{whose[args.topk_support]} best {args.topk} tokens at each position{bound}"


def _teacher(trainer: "OPDTrainer") -> str:
    if not isinstance(trainer.teacher, LocalTeacher):
        return _named(trainer.teacher)
    if isinstance(trainer.teacher, ExternalTeacher):
        model = trainer.accelerator.unwrap_model(trainer.teacher.model)
        return _model(get_config_model_id(model.config)) or "another model, without a name"
    when = {
        "frozen": " as it was at the start",
        "ema": f" as its moving average, rate {trainer.args.teacher_ema_rate:g}",
        "live": " as it is at each step",
    }.get(trainer.args.teacher, "")
    return f"the model itself{when} (`{trainer.args.teacher}`)"


def _hints(trainer: "OPDTrainer") -> str:
    chosen = f"`{trainer.args.hint_selection}` of at most {trainer.args.max_hints}"
    return {
        "judge": f"drawn by the judge from what followed a reply, and shown to the teacher alone ({chosen})",
        "privileged_context": "the dataset column `privileged_context`, shown to the teacher alone (OPCD)",
        "none": "none (classic on-policy distillation)",
    }[trainer.hint_source]


def _rewards(trainer: "OPDTrainer") -> str:
    sources = [f"`{name}`" for name in trainer.reward_func_names[:-1]]  # the last one is the judge's place
    if trainer.judge is not None:
        sources.append("the judge's score")
    baseline = getattr(trainer.args, "reward_baseline", "none")
    return " + ".join(sources) + (", relative to the group" if baseline == "group" else "")


def _data(trainer: "OPDTrainer", name: str | None) -> str:
    """What it was trained on: ` on 48 prompts of ...`."""
    rows = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
    prompts = "" if rows is None else f"{rows} prompts"
    source = ""
    if name and _is_hub_id(name):
        source = _hub_link(name, "datasets/")
    elif name:
        source = f"`{_name(name) if Path(name).is_absolute() else name}`"
    found = " of ".join(filter(None, [prompts, source]))
    return f" on {found}" if found else ""


def _weights(trainer: "OPDTrainer") -> str:
    """From where the trained model can be loaded."""
    if trainer.hub_model_id is not None:
        return trainer.hub_model_id
    folder = Path(trainer.args.output_dir)
    saved = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not saved and trainer.state.global_step:  # TRL writes the card along with each checkpoint, too
        folder /= f"checkpoint-{trainer.state.global_step}"
    return folder.as_posix()


def _default_title(trainer: "OPDTrainer", base: str) -> str:
    if trainer.hub_model_id is not None:
        return trainer.hub_model_id.split("/")[-1]
    return f"{_name(base)}-{method_name(trainer).replace(' ', '-')}" if base else Path(trainer.args.output_dir).name


def _is_hub_id(name: str | None) -> bool:
    """Whether this is no folder here, and could be a name on the Hub."""
    if not name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _name(path: str) -> str:
    """The last part of a Hub name or a path."""
    return Path(path).name or Path(path).resolve().name


def _model(name: str) -> str:
    """A link to the Hub, or the name of a folder: where it lies concerns nobody."""
    if not name:
        return ""
    return _hub_link(name) if _is_hub_id(name) else f"`{_name(name)}`"


def _hub_link(name: str, kind: str = "") -> str:
    return f"[{name}](https://huggingface.co/{kind}{name})"


def _named(part: Any) -> str:
    """A judge, next state or teacher in a few words: its class, and what makes it this one."""
    if hasattr(part, "__name__"):
        return f"`{part.__name__}`"
    model = getattr(getattr(part, "client", part), "model", None)
    detail = getattr(part, "name", None) or getattr(getattr(part, "fn", None), "__name__", None)
    detail = detail or (_name(model) if isinstance(model, str) else None)
    return f"`{type(part).__name__}`" + (f" ({detail})" if detail else "")
