"""Programs that loop, hog, fork, print, snoop, phone home or stay: none gets through, and the run says how it ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from trl_openclaw.environments import sandbox_probe
from trl_openclaw.environments.sandbox import Limits, Sandbox, SandboxResult
from trl_openclaw.environments.sandbox_io import Capture
from trl_openclaw.environments.scratch import Scratch
from trl_openclaw.errors import SandboxError

SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(params=[True, False], ids=["namespaces", "no-namespaces"])
def either(request, sandbox, monkeypatch):
    """The sandbox with the kernel's help and without; the second needs root."""
    if not request.param and os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setattr(Sandbox, "_namespaces", request.param)
    return sandbox


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


# --- an ordinary run ------------------------------------------------------------------------------------------------


def test_a_run(sandbox):
    run = sandbox.run(
        ["sh", "-c", "cat; cat a/b.txt; echo wrong >&2; exit 3"],
        stdin="from stdin ",
        files={"a/b.txt": "from a file é"},
    )
    assert (run.ended, run.exit_code, run.ok) == ("exited", 3, False)
    assert (run.stdout, run.stderr) == ("from stdin from a file é", "wrong\n")
    assert run.seconds > 0


def test_every_run_has_a_directory_of_its_own_that_is_removed(sandbox):
    first, second = (sandbox.run(["sh", "-c", "pwd; ls -A; touch x; mkdir -p a/b/c"]).stdout.split() for _ in "ab")
    assert len(first) == len(second) == 1
    assert first != second
    assert not os.path.exists(first[0])


def test_a_directory_may_outlive_a_run(sandbox):
    with Scratch() as place:
        sandbox.run(["sh", "-c", "echo 1 > x; chmod 000 x; mkdir d; chmod 000 d"], scratch=place)
        assert "x" in sandbox.run(["ls"], scratch=place).stdout
    assert not os.path.exists(place.path)


def test_a_very_deep_directory_is_removed():
    with Scratch() as place:
        folder = os.open(place.path, os.O_RDONLY)
        for _ in range(1050):
            os.mkdir("d" * 10, dir_fd=folder)
            inner = os.open("d" * 10, os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = inner
        os.close(folder)
    assert not os.path.exists(place.path)


def test_an_own_signal_and_a_missing_program(sandbox):
    run = sandbox.run(["sh", "-c", "kill -SEGV $$"])
    assert (run.ended, run.exit_code) == ("killed", -signal.SIGSEGV)
    for program in ("no-such-program", "./no-program.txt", "/root/closed"):
        run = sandbox.run([program], files={"no-program.txt": ""})
        assert (run.ended, run.exit_code) == ("not_started", 127)
        assert program in run.stderr


def test_bytes_that_are_no_text(sandbox):
    assert python(sandbox, "import os; os.write(1, b'a\\xff\\xfe\\xc3b')").stdout == "a���b"


def test_runs_at_the_same_time(sandbox):
    with ThreadPoolExecutor(6) as pool:
        runs = list(pool.map(lambda i: sandbox.run(["sh", "-c", "cat > x; sleep 0.2; cat x"], stdin=str(i)), range(6)))
    assert [run.stdout for run in runs] == [str(i) for i in range(6)]


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
def test_wall_time(sandbox, code):
    run = python(sandbox, f"print('begun', flush=True)\n{code}", limits=replace(sandbox.limits, seconds=0.5))
    assert (run.ended, run.exit_code, run.stdout) == ("timeout", None, "begun\n")


def test_cpu_time(sandbox):
    assert python(sandbox, "while True: pass", limits=replace(sandbox.limits, cpu_seconds=1)).ended == "cpu"


def test_memory_of_one_process(sandbox):
    run = python(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 22))")
    assert "MemoryError" in run.stderr or run.ended == "memory"


def test_memory_of_all_processes_together(sandbox):
    code = "import os, time\nfor _ in range(3): os.fork()\nx = bytes([1]) * (100 << 20)\ntime.sleep(30)"
    assert python(sandbox, code).ended == "memory"


def test_a_fork_bomb_stays_small(either):
    code = """
import os, time
count = 0
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError as error:
    print(count, type(error).__name__)
"""
    run = python(either, code)
    assert run.stdout.split()[1:] == ["BlockingIOError"]
    assert int(run.stdout.split()[0]) < either.limits.processes
    assert run.ended == "exited"


def test_a_fork_bomb_in_the_shell_ends(either):
    marker = f"{time.time_ns() % 10**9}"
    run = either.run(
        ["sh", "-c", f"b() {{ sleep {marker} & b | b & }}; b; sleep 60"], limits=replace(either.limits, seconds=1)
    )
    assert run.ended in ("timeout", "exited")
    assert gone(marker)


def test_megabytes_of_output_are_read_and_not_kept(sandbox):
    size = 30 << 20
    code = f"import sys\nsys.stdout.write('head' + 'x' * {size} + 'tail')\nsys.stderr.write('y' * {size})"
    run = python(sandbox, code)
    kept = sandbox.limits.output_chars
    assert run.ok
    assert run.stdout.startswith("headx")
    assert run.stdout.endswith("xtail")
    assert (run.stdout_cut, run.stderr_cut) == (size + 8 - kept, size - kept)
    assert f"[{run.stdout_cut} characters left out here]" in run.stdout
    assert len(run.stdout) < kept + 100


def test_endless_output_ends_with_the_time(sandbox):
    assert sandbox.run(["yes"], limits=replace(sandbox.limits, seconds=0.5)).ended == "timeout"


def test_stdin_that_nobody_reads(sandbox):
    assert sandbox.run(["true"], stdin="x" * (8 << 20)).ok


def test_the_size_of_one_file(sandbox):
    with Scratch() as place:
        run = sandbox.run(["sh", "-c", "head -c 3000000 /dev/zero > x"], scratch=place)
        assert not run.ok
        assert os.path.getsize(os.path.join(place.path, "x")) == sandbox.limits.file_mb << 20


@pytest.mark.parametrize(
    "code",
    [
        "for i in range(40): open(str(i), 'wb').write(bytes([1]) * 900_000)",
        "k = []\nwhile len(k) < 40:\n k.append(open('x', 'wb', 0)); k[-1].write(b'x' * 900_000); os.unlink('x')",
        "for i in range(200): open(str(i), 'w')",
        "for i in range(200): os.mkdir('d' * 200); os.chdir('d' * 200)",
    ],
    ids=["size", "deleted", "number", "depth"],
)
def test_all_files_together(either, code):
    assert python(either, f"import os, time\n{code}\ntime.sleep(20)").ended == "disk"


# --- walls ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path):
    """A file that only the sandbox keeps a program from."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    return secret


def test_nothing_outside_is_read_written_or_changed(either, outside):
    here, name = str(outside.parent), str(outside)
    found = attempts(
        either,
        f"open({name!r}).read()",
        f"open({name!r}, 'a')",
        f"open({here + '/new'!r}, 'w')",
        f"os.mkdir({here + '/new'!r})",
        f"os.listdir({here!r})",
        f"os.unlink({name!r})",
        f"os.rename({name!r}, {name + '2'!r})",
        f"os.truncate({name!r}, 0)",
        f"os.chmod({name!r}, 0)",
        f"os.symlink({name!r}, 'link'); open('link').read()",
        f"os.link({name!r}, 'hard'); open('hard').read()",
        "open('../x', 'w')",
        "open('/dev/shm/x', 'w')",
        "open('/tmp/x', 'w')",
        f"open({str(Path(__file__))!r}).read()",
        f"os.listdir({str(Path.home())!r})",
        "open('/proc/self/environ').read()",
        "open('/etc/shadow').read()",
        "os.listdir('/')",
        "os.memfd_create('x')",
    )
    assert set(found) <= {"PermissionError", "OSError"}, found
    assert outside.read_text() == "secret"
    assert os.listdir(here) == ["secret"]


def test_nothing_is_reached_by_a_network(either):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        found = attempts(
            either,
            f"socket.create_connection(('127.0.0.1', {port}), 2)",
            f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
            "socket.socket(socket.AF_UNIX)",
            "socket.socketpair(type=socket.SOCK_DGRAM)",
            "socket.socketpair()",
        )
        with pytest.raises(TimeoutError):
            server.accept()
    assert found == ["PermissionError"] * 4 + [""]


def test_other_processes_are_out_of_reach(either):
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        libc = "ctypes.CDLL(None, use_errno=True)"
        found = attempts(
            either,
            f"os.kill({bystander.pid}, signal.SIGKILL)",
            f"assert {libc}.ptrace(16, {bystander.pid}, 0, 0) == 0",
            "os.setpriority(os.PRIO_PROCESS, 0, 5)",
            f"assert {libc}.unshare(0x10000000) == 0",
            "os.setuid(0)",
        )
        assert all(found), found
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_nothing_stays_behind(either):
    marker = uuid.uuid4().hex
    code = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for stream in (0, 1, 2):
            os.close(stream)
        stay = "open('alive', 'w'); import time; time.sleep(60)"
        subprocess.run([sys.executable, "-I", "-S", "-c", stay, sys.argv[1]])
    os._exit(0)
while not os.path.exists("alive"):
    time.sleep(0.01)
"""
    with Scratch() as place:
        run = python(either, code, marker, scratch=place)
        assert run.ok
        assert os.path.exists(os.path.join(place.path, "alive"))
    assert gone(marker, seconds=0.2)  # `run` has waited for it


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_nothing_stays_when_the_trainer_is_killed(sandbox):
    marker = uuid.uuid4().hex
    code = "from trl_openclaw.environments import Limits, Sandbox\n"
    code += f"Sandbox(Limits(seconds=100)).run(['sh', '-c', 'sleep 100; : {marker}'])"
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        until = time.monotonic() + 60
        while not any(p.info["name"] == "sh" and marker in str(p.info["cmdline"]) for p in _processes()):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        trainer.kill()
        trainer.wait()
    assert gone(marker)


def test_nothing_stays_when_the_sandbox_itself_is_killed(either):
    marker = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(python, either, "import time; time.sleep(100)", marker)
        until = time.monotonic() + 30
        while len(found := [p for p in _processes() if marker in str(p.info["cmdline"])]) < 3:
            assert time.monotonic() < until
            time.sleep(0.02)
        min(found, key=lambda p: p.pid).kill()
        with pytest.raises(SandboxError, match="its child process died"):
            run.result()
    assert gone(marker)


def _processes():
    return psutil.process_iter(["name", "cmdline"])


def test_the_environment_is_clean(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "do not tell")
    run = Sandbox(sandbox.limits, env={"GIVEN": "1"}).run(["env"], env={"ALSO": "2"})
    assert "do not tell" not in run.stdout
    assert {"GIVEN=1", "ALSO=2"} <= set(run.stdout.split())


def test_further_files_can_be_made_readable(sandbox, outside):
    assert not sandbox.run(["cat", str(outside)]).ok
    allowed = Sandbox(sandbox.limits, readable=[outside])
    assert allowed.run(["cat", str(outside)]).stdout == "secret"
    assert not allowed.run(["sh", "-c", f"echo x > {outside}"]).ok


# --- what a machine cannot hold -------------------------------------------------------------------------------------


def test_a_machine_that_lacks_a_wall_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox_probe, "broken_walls", lambda *_: {"network": "a program in it could open a socket"})
    with pytest.raises(SandboxError, match=r"network: a program in it could open a socket. Needed: Linux with seccomp"):
        Sandbox(allow_missing=["files"])
    with pytest.warns(UserWarning, match="does not hold 'network'"):
        Sandbox(allow_missing=["network"])


def test_a_run_is_refused_when_its_walls_cannot_be_built(sandbox, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    task = Sandbox._task
    monkeypatch.setattr(Sandbox, "_task", lambda *args: task(*args) | {"user": None, "namespaces": False})
    with pytest.raises(SandboxError, match="processes: neither root nor user namespaces"):
        sandbox.run(["true"])


@pytest.mark.parametrize(
    ("change", "wall"),
    [
        ({"readable": ["/"]}, "files"),
        ({"limits": {"memory_mb": 4000}}, "memory"),
        ({"limits": {"processes": 500}}, "processes"),
        ({"argv": ["false"]}, "network"),
    ],
)
def test_the_trial_sees_what_gets_through(sandbox, monkeypatch, change, wall):
    task = Sandbox._task

    def weaker(*args):
        given = task(*args)
        return given | change | {"limits": given["limits"] | change.get("limits", {})}

    monkeypatch.setattr(Sandbox, "_task", weaker)
    assert wall in sandbox_probe._broken_walls.__wrapped__(sandbox.python, True, os.geteuid() == 0)


AS_USER = """
import json, warnings
warnings.simplefilter("ignore")
from trl_openclaw.environments.sandbox import Limits, Sandbox
from trl_openclaw.errors import SandboxError
Sandbox._namespaces = NAMESPACES
try:
    Sandbox()
    refused = ""
except SandboxError as error:
    refused = str(error)
sandbox = Sandbox(Limits(processes=8), allow_missing=["processes"])
fork = "import os, time\\nfor n in range(30):\\n  if os.fork() == 0: time.sleep(30)\\n  print(n, flush=True)"
print(json.dumps([refused] + [sandbox.run(["sh", "-c", line]).stdout for line in (
    "id -u", f"python3 -I -c '{fork}'", "cat /proc/1/cmdline; ls /tmp; chmod 777 $0; echo end"
)]))
"""


@pytest.mark.skipif(not os.path.exists(SYSTEM_PYTHON) or os.geteuid() != 0, reason="needs root and a system's Python")
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_user_who_is_not_root(namespaces):
    if subprocess.run([SYSTEM_PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        pytest.skip("the system's Python is too old")
    nobody = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": Path(__file__).parents[2]}
    can_unshare = subprocess.run(["unshare", "-U", "-p", "-f", "true"], capture_output=True, **nobody).returncode == 0
    argv = [SYSTEM_PYTHON, "-B", "-c", AS_USER.replace("NAMESPACES", str(namespaces))]
    run = subprocess.run(argv, capture_output=True, text=True, **nobody)
    if "Permission denied" in run.stderr or "No module named" in run.stderr:
        pytest.skip("this checkout is closed to other users")
    refused, who, forks, end = json.loads(run.stdout)
    assert who.strip() == "65534"
    if namespaces and can_unshare:
        assert not refused
        assert 0 < len(forks.split()) < 8
    else:
        assert "processes" in refused
        assert "network" not in refused
    assert end == "end\n"


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_files_outside_the_directory_are_refused(sandbox, path):
    with pytest.raises(ValueError, match="no path inside the directory"):
        sandbox.run(["true"], files={path: ""})


def test_a_link_that_a_program_left_is_not_followed(sandbox, outside):
    with Scratch() as place:
        sandbox.run(["sh", "-c", f"ln -s {outside.parent} folder; ln -s {outside} file; mkfifo pipe"], scratch=place)
        with pytest.raises(ValueError, match="'folder' is no folder"):
            place.write({"folder/secret": "overwritten"})
        place.write({"file": "mine", "pipe": "mine"})
        assert sandbox.run(["cat", "file", "pipe"], scratch=place).stdout == "minemine"
    assert outside.read_text() == "secret"


@pytest.mark.parametrize("argv", [[], ["a\0b"], [1]])
def test_commands_that_are_none(sandbox, argv):
    with pytest.raises(ValueError, match="`argv`"):
        sandbox.run(argv)


@pytest.mark.parametrize("value", [0, -1, float("inf"), "5", True])
def test_limits_are_numbers(value):
    with pytest.raises(ValueError, match="`seconds`"):
        Limits(seconds=value)


def test_walls_have_names():
    with pytest.raises(ValueError, match="everything"):
        Sandbox(allow_missing=["everything"])


@pytest.mark.parametrize("max_chars", [1, 2, 7, 100])
def test_a_capture_keeps_head_and_tail(max_chars):
    text = "äöü0123456789"
    data = text.encode()
    for size in (1, 2, 5, 100):
        capture = Capture(max_chars)
        for start in range(0, len(data), size):
            capture.add(data[start : start + size])
        shown, cut = capture.text()
        assert cut == max(0, len(text) - max_chars)
        head, _, tail = shown.partition(f"\n[{cut} characters left out here]\n")
        assert head + tail == (
            text if not cut else text[: max_chars - max_chars // 2] + text[len(text) - max_chars // 2 :]
        )
