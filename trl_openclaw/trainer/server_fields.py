"""The fields of `OPDConfig` that name a teacher on a server."""

import os
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ..teachers import ServerTeacher
from ..teachers.server import REQUEST_TOKENS
from .settings import Number


@dataclass
class ServerFields:
    """See [`~trl_openclaw.OPDConfig`] for what the fields mean."""

    _SERVER_NUMBERS: ClassVar[dict[str, Number]] = {
        "teacher_server_timeout": Number(above=0),
        "teacher_server_max_retries": Number(whole=True, at_least=0),
        "teacher_server_request_tokens": Number(whole=True, at_least=1),
    }

    teacher_server_model: str | None = field(
        default=None, metadata={"help": "A teacher on a vLLM server: the model's name as the server lists it."}
    )
    teacher_server_base_url: str | None = field(
        default=None, metadata={"help": "Address of that server's API, `/v1` included."}
    )
    teacher_server_adapter: str | None = field(
        default=None, metadata={"help": "Name of a LoRA adapter that the server has loaded on that model."}
    )
    teacher_server_api_key_env: str = field(
        default="OPENAI_API_KEY", metadata={"help": "Environment variable that holds the server's key."}
    )
    teacher_server_timeout: float = field(
        default=300.0, metadata={"help": "Seconds that one request to the teacher's server may take."}
    )
    teacher_server_max_retries: int = field(
        default=5, metadata={"help": "Further tries after a failure of that server that may pass."}
    )
    teacher_server_request_tokens: int = field(
        default=REQUEST_TOKENS, metadata={"help": "Tokens of the rows that one request to it holds."}
    )

    def server_teacher(self) -> ServerTeacher | None:
        """The teacher that these fields name, or `None`."""
        if self.teacher_server_model is None or self.teacher_server_base_url is None:
            return None
        return ServerTeacher(
            self.teacher_server_model,
            self.teacher_server_base_url,
            adapter=self.teacher_server_adapter,
            api_key=os.environ.get(self.teacher_server_api_key_env) or None,
            timeout=self.teacher_server_timeout,
            max_retries=self.teacher_server_max_retries,
            request_tokens=self.teacher_server_request_tokens,
        )

    def _check_server(self: Any) -> None:
        """Refuse half of a server, and a second teacher beside it."""
        for name in ("teacher_server_model", "teacher_server_base_url", "teacher_server_adapter"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"`{name}` must be text, got {getattr(self, name)!r}.")
        if self.teacher_server_model is None:
            for known in fields(ServerFields):
                if getattr(self, known.name) != known.default:
                    raise ValueError(f"`{known.name}` needs `teacher_server_model`, the name that the server lists.")
            return
        if self.teacher_server_base_url is None:
            raise ValueError(
                "`teacher_server_model` needs `teacher_server_base_url`, such as 'http://localhost:8000/v1'."
            )
        for name, other in (("teacher_model_name_or_path", None), ("teacher", "frozen")):
            if getattr(self, name) != other:
                raise ValueError(
                    f"`teacher_server_model` and `{name}={getattr(self, name)!r}` name two teachers. Remove one."
                )
