"""What `trl-openclaw serve` can be told, on its command line or in a config file."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...config_file import read_config_file
from ..engines import ENGINES
from ..store import STORE_FILE
from .app import GatewayOptions
from .auth import is_loopback
from .guard import LOCAL_NAMES, read_host, read_origin


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ServeSettings:
    """Settings of the gateway. The help of each is what `trl-openclaw serve --help` shows.

    Raises:
        ValueError: In one line, for a value that cannot be.
    """

    model: str = _setting("", "Path or name of the model; for vLLM its name on the server. Needed.")
    served_model_name: str | None = _setting(None, "The model's name for clients; transformers only.")
    engine: Literal["transformers", "vllm"] = _setting(
        "transformers", "What samples: a model in here, or a vLLM server."
    )
    engine_url: str = _setting("http://localhost:8000/v1", "Address of the vLLM server.")
    engine_api_key_env: str | None = _setting(None, "Environment variable that holds the vLLM server's key.")
    engine_logprobs: Literal["raw", "processed"] = _setting(
        "raw", "What the vLLM server reports: `processed` if it was started with `--logprobs-mode processed_logprobs`."
    )
    host: str = _setting("127.0.0.1", "Address to listen at. One that others can reach needs `--keys`.")
    port: int = _setting(8700, "Port to listen at; 0 takes a free one.")
    allow_host: list | str | None = field(
        default=None,
        metadata={"help": "Other names to be asked under, such as `host.docker.internal`; several with commas."},
    )
    allow_origin: list | str | None = field(
        default=None,
        metadata={"help": "Other pages that may use the API, such as `app://obsidian.md`; several with commas."},
    )
    keys: str | None = _setting(None, "File with one `user: key` a line, readable by its owner only.")
    live_dir: str = _setting("runs/live", "Folder shared with the learner.")
    temperature: float = _setting(1.0, "Sampling temperature of requests that name none.")
    top_p: float = _setting(1.0, "The same for `top_p`.")
    max_tokens: int | None = _setting(None, "Room for a reply where a request names none; by default what fits.")
    timeout: float = _setting(120.0, "Seconds that the engine may say nothing, or a request waits for its turn.")
    max_body_mb: float = _setting(8.0, "Size that a request may have.")
    max_in_flight: int = _setting(256, "Requests that are answered at once.")
    log_content: bool = _setting(False, "Write messages and replies to the log.")
    judge: str | None = _setting(None, "`llm`, `local`, or a dotted path; without it only thumbs count.")
    judge_model: str | None = _setting(None, "Model name on the judge's server, or a local path.")
    judge_base_url: str = _setting("http://localhost:8000/v1", "Address of the judge's OpenAI-compatible server.")
    judge_api_key_env: str = _setting("OPENAI_API_KEY", "Environment variable that holds that server's key.")
    judge_num_votes: int = _setting(3, "Votes per turn.")
    judge_question: Literal["combined", "separate"] = _setting("combined", "Score and hint in one question, or in two.")
    judge_max_tokens: int = _setting(512, "Room for one answer of the judge.")
    judge_timeout: float = _setting(60.0, "Seconds that one request to the judge may take.")
    judge_extra_body: dict | str | None = field(
        default=None, metadata={"help": "More fields for each request to the judge, as JSON."}
    )
    judge_concurrency: int = _setting(4, "Turns that are judged at once.")

    def __post_init__(self):
        if not self.model:
            raise ValueError("`--model` is missing: the path of a model, or its name on the vLLM server.")
        if self.engine not in ENGINES:
            raise ValueError(f"`engine` is one of {', '.join(ENGINES)}, got {self.engine!r}.")
        if self.engine_logprobs not in ("raw", "processed"):
            raise ValueError(f"`engine_logprobs` is raw or processed, got {self.engine_logprobs!r}.")
        if self.served_model_name and self.engine != "transformers":
            raise ValueError("`served_model_name` is vLLM's own setting there: start the server with it.")
        at_least = {"port": 0, "max_in_flight": 1, "judge_concurrency": 1, "temperature": 0, "max_tokens": 1}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")
        if not 0 < self.top_p <= 1 or self.timeout <= 0 or self.max_body_mb <= 0 or self.port > 65535:
            raise ValueError("`top_p` is above 0 and at most 1, `timeout` and `max_body_mb` above 0, `port` a port.")
        self.allow_host = [read_host(text) for text in _listed("allow_host", self.allow_host)]
        self.allow_origin = [read_origin(text) for text in _listed("allow_origin", self.allow_origin)]
        if "null" in self.allow_origin and not self.keys:
            raise ValueError(
                "`allow_origin: null` needs `keys`: every page in the browser can call itself that, and could read "
                "replies and plant corrections."
            )
        if isinstance(self.judge_extra_body, str):
            try:
                self.judge_extra_body = json.loads(self.judge_extra_body)
            except ValueError as error:
                raise ValueError(f"`judge_extra_body` is no JSON: {error}.") from error

    @property
    def store_path(self) -> Path:
        """The file of the store."""
        return Path(self.live_dir) / STORE_FILE

    @property
    def lock_path(self) -> Path:
        """The file that a gateway holds while it runs."""
        return Path(self.live_dir) / "gateway.lock"

    @property
    def engine_key(self) -> str | None:
        """The vLLM server's key."""
        return os.environ.get(self.engine_api_key_env) if self.engine_api_key_env else None

    @property
    def options(self) -> GatewayOptions:
        """What the gateway itself needs of them."""
        local = is_loopback(self.host)
        names = {name.name for name in dataclasses.fields(GatewayOptions)} & set(self.__dataclass_fields__)
        return GatewayOptions(
            **{name: getattr(self, name) for name in names},
            max_body=int(self.max_body_mb * 2**20),
            hosts=tuple(dict.fromkeys([*LOCAL_NAMES, self.host.lower(), *(self.allow_host or ())])) if local else None,
            origins=tuple(self.allow_origin or ()),
        )


def read_settings(args: Sequence[str], prog: str = "trl-openclaw serve") -> ServeSettings:
    """The settings of a command line; those it does not name are taken from the file after `--config`.

    Raises:
        ValueError: In one line, for a value or a file that cannot be.
        SystemExit: For an option that there is not, and for `--help`.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Serve a model over OpenAI's API, and record what it says.")
    parser.add_argument("--config", help="YAML file with settings, by the names below without the dashes.")
    hints = get_type_hints(ServeSettings)
    for setting in dataclasses.fields(ServeSettings):
        _add_option(parser, setting, hints[setting.name])
    given = vars(parser.parse_args(args))
    config = given.pop("config", None)
    values = read_config_file(config) if config is not None else {}
    if unknown := set(values) - set(hints):
        raise ValueError(f"{config} holds settings that there are not: {', '.join(sorted(unknown))}.")
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{config} gives `{name}` the value {value!r}, which is not of its kind.")
    return ServeSettings(**{**values, **given})


def _add_option(parser: argparse.ArgumentParser, setting: "dataclasses.Field[Any]", hint: Any) -> None:
    kinds = get_args(hint) or (hint,)
    names = list(dict.fromkeys([f"--{setting.name.replace('_', '-')}", f"--{setting.name}"]))
    text = setting.metadata["help"].replace("%", "%%")
    if setting.default not in (None, False, ""):
        text += f" Default: {setting.default}."
    kwargs: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}
    if hint is bool:
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **kwargs)
    elif list in kinds:
        parser.add_argument(*names, action="append", metavar="STR", **kwargs)
    elif get_origin(hint) is Literal:
        parser.add_argument(*names, choices=kinds, **kwargs)
    else:
        kind = str if str in kinds else kinds[0]
        parser.add_argument(*names, type=kind, metavar=kind.__name__.upper(), **kwargs)


def _listed(name: str, given: list | str | None) -> list[str]:
    """What was given in one text with commas, or in several.

    Raises:
        ValueError: When one of them is no text.
    """
    texts = [given] if isinstance(given, str) else given or []
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"`{name}` is a text, or a list of texts, got {given!r}.")
    return [part for text in texts for part in text.split(",") if part.strip()]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of a file is of the kind that a setting has."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kinds = tuple(kind for kind in (get_args(hint) or (hint,)))
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)
