"""Which model generates, judges, plays the user and teaches: printed when training starts."""

import warnings
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .._trl import get_config_model_id
from ..engine_chat import EngineChat
from ..local_chat import LocalChat
from ..server_client import ServerClient
from ..teachers import AdapterOffTeacher, ExternalTeacher, LocalTeacher, ServerTeacher

if TYPE_CHECKING:
    from .opd_trainer import OPDTrainer

POLICY_NOW = "the policy as it is now"
_ONE_MACHINE = {"localhost", "127.0.0.1", "0.0.0.0", "::1"}


def announce_roles(trainer: "OPDTrainer") -> None:
    """Print the roles on the main process."""
    for role, who in roles(trainer).items():
        trainer.accelerator.print(f"{role}: {who}")


def roles(trainer: "OPDTrainer") -> dict[str, str]:
    """Who does what, in words: `generates`, and of `judges`, `plays the user` and `teaches` what there is.

    A trainer, a judge or a next state that knows better says so itself, in its attribute `role`.
    """
    found = {"generates": getattr(trainer, "role", None) or _generator(trainer)}
    for role, part in (("judges", trainer.judge), ("plays the user", trainer.next_state)):
        if part is not None:
            found[role] = getattr(part, "role", None) or _who(part, trainer)
    if trainer.teacher is not None:
        found["teaches"] = _teacher(trainer)
    return found


def warn_of_live_server(trainer: Any, teacher: ServerTeacher) -> None:
    """Warn about a teacher on the server that generates, since that one is sent the policy's weights."""
    if _also_generates(teacher, trainer):
        warnings.warn(
            f"The teacher's server at {teacher.base_url} also generates, so it is sent the policy's weights at "
            "each step: the teacher is the policy as it is now. Published results agree that such a teacher drifts; "
            "give the teacher a server of its own, or use `teacher='frozen'`.",
            UserWarning,
            stacklevel=4,
        )


def _generator(trainer: "OPDTrainer") -> str:
    args = trainer.args
    how = "transformers, in this process"
    if args.use_vllm:
        how = f"vLLM at {_engine_address(args)}" if args.vllm_mode == "server" else "vLLM, in this process"
    if trainer.rollout_func is not None:
        how += ", led by a rollout function"
    return f"{_name_of(trainer.model)} ({how})"


def _teacher(trainer: "OPDTrainer") -> str:
    teacher = trainer.teacher
    if not isinstance(teacher, LocalTeacher):
        return _who(teacher, trainer)
    if isinstance(teacher, ExternalTeacher):
        return f"{_name_of(trainer.accelerator.unwrap_model(teacher.model))}, in this process"
    return {
        "frozen": "the initial weights" + (" (adapter off)" if isinstance(teacher, AdapterOffTeacher) else ""),
        "ema": f"the policy's moving average, rate {trainer.args.teacher_ema_rate:g}",
        "live": POLICY_NOW,
    }[trainer.args.teacher]


def _who(part: Any, trainer: "OPDTrainer") -> str:
    """A judge, a next state or a teacher: the model that it asks, or its own name."""
    client = part if isinstance(part, ServerClient) else getattr(part, "client", None)
    if isinstance(client, ServerClient):
        adapter = getattr(client, "adapter", None)
        model = client.model if adapter is None else f"{client.model} with the adapter {adapter}"
        policy = f", which also generates: {POLICY_NOW}" if _also_generates(client, trainer) else ""
        return f"{model} at {client.base_url}{policy}"
    if isinstance(client, EngineChat):
        return f"{POLICY_NOW}, by the engine that generates"
    if isinstance(client, LocalChat):
        model = client.model
        if trainer.accelerator.unwrap_model(trainer.model) is model:
            return f"{POLICY_NOW}, in this process"
        return f"{model if isinstance(model, str) else _name_of(model)}, in this process"
    detail = getattr(part, "name", None) or getattr(getattr(part, "fn", None), "__name__", None)
    name = getattr(part, "__name__", type(part).__name__)
    return f"{name} ({detail})" if detail else name


def _name_of(model: Any) -> str:
    return get_config_model_id(model.config) or "a model without a name"


def _engine_address(args: Any) -> str:
    return args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"


def _also_generates(client: ServerClient, trainer: Any) -> bool:
    """Whether a server is the one that vLLM generates on."""
    args = trainer.args
    if not args.use_vllm or args.vllm_mode != "server":
        return False
    hosts, ports = zip(*(_host_and_port(url) for url in (client.base_url, _engine_address(args))), strict=True)
    return len(set(ports)) == 1 and (len(set(hosts)) == 1 or _ONE_MACHINE.issuperset(hosts))


def _host_and_port(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
