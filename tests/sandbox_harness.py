"""Programs for a sandbox, and where their processes went."""

import json
import time

import psutil

from trl_openclaw.environments.sandbox import Sandbox, SandboxResult


def python(sandbox: Sandbox, code: str, *arguments: str, **options) -> SandboxResult:
    return sandbox.run([sandbox.python, "-I", "-S", "-c", code, *arguments], **options)


def attempts(sandbox: Sandbox, *lines: str, **options) -> list[str]:
    """Run each line by itself and list what it raised, `""` for nothing."""
    code = "import json, os, socket, subprocess, ctypes, signal\nfound = []\n"
    for line in lines:
        code += (
            f"try:\n    {line}\n    found.append('')\nexcept BaseException as e:\n    found.append(type(e).__name__)\n"
        )
    return json.loads(python(sandbox, code + "print(json.dumps(found))", **options).stdout)


def gone(marker: str, seconds: float = 20.0) -> bool:
    """Whether no process with this text in its command line is there any more."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(marker in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
            return True
        time.sleep(0.05)
    return False
