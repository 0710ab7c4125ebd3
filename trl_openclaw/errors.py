"""Errors that a user of this package may want to catch."""


class OpenClawError(Exception):
    """Base class of this package's errors."""


class HintError(OpenClawError, ValueError):
    """A hint cannot be placed into this prompt."""


class ParseError(OpenClawError, ValueError):
    """A judge's answer does not hold what was asked for. `kind` is the failure to count it under."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class ChatError(OpenClawError):
    """A chat server did not answer. `kind` is one of `timeout`, `unreachable`, `denied`, `refused`,
    `truncated`, `error`."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class JudgeUnavailableError(OpenClawError):
    """The judge cannot be reached, or failed so often that training on would be training on nothing."""


class SelfTestError(OpenClawError):
    """Teacher and student disagree about the same tokens under the same prompt, so no advantage can be trusted."""


class VocabularyMismatchError(OpenClawError, ValueError):
    """The teacher does not share the student's tokenizer or vocabulary."""


class TeacherError(OpenClawError, ValueError):
    """A teacher of one's own, or one on a server, failed or answered with something other than its rows' scores."""


class SandboxError(OpenClawError):
    """A sandbox cannot be made as asked on this machine, or could not start or end its processes."""


class ToolError(OpenClawError):
    """A tool failed. The policy is answered with the text."""


class StoreError(OpenClawError):
    """The store of live turns cannot do what it was asked to."""


class StoreBusyError(StoreError):
    """Another process has held the store for too long. Nothing was changed; try again."""


class StoreFullError(StoreError):
    """The store cannot grow: the disk is full, or a limit on file sizes is reached. Nothing was changed."""


class UnknownTurnError(StoreError, LookupError):
    """There is no such turn, session, user, batch or version, or it is not this user's."""


class EngineError(OpenClawError):
    """An engine gave no reply, or not all of it. `kind` says why, and with it what a client is told.

    `down`: it cannot be reached. `slow`: it did not answer in time. `refused`: it does not take this request.
    `unloaded`: it does not know the adapter. `broken`: it answered with something else than a reply. `busy`: it has not
    begun with this request, for others that came before.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class LearnerError(OpenClawError):
    """A live learner cannot start, or cannot go on: another one runs, or engine and trainer do not fit each other."""
