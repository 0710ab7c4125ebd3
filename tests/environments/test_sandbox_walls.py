"""Programs that snoop, write elsewhere, phone home or stay: none gets through, or the machine is refused."""

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from sandbox_harness import attempts, gone, python

from trl_openclaw.environments import sandbox_probe
from trl_openclaw.environments.sandbox import WALLS, Sandbox
from trl_openclaw.environments.scratch import Scratch
from trl_openclaw.errors import SandboxError

SYSTEM_PYTHON = "/usr/bin/python3"


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
            "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
            "socket.socketpair()",
        )
        with pytest.raises(TimeoutError):
            server.accept()
    assert found == ["PermissionError"] * 5 + [""]


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
def test_nothing_stays_when_the_trainer_is_killed(tmp_path):
    marker = uuid.uuid4().hex
    code = "from trl_openclaw.environments import Limits, Sandbox\n"
    code += f"Sandbox(Limits(seconds=100)).run(['sh', '-c', 'sleep 100; : {marker}'])"
    env = os.environ | {"TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], env=env)
    try:
        until = time.monotonic() + 60
        while not any(
            p.info["name"] == "sh" and marker in str(p.info["cmdline"])
            for p in psutil.process_iter(["name", "cmdline"])
        ):
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
        while not (found := [p for p in psutil.process_iter(["cmdline"]) if marker in str(p.info["cmdline"])]):
            assert time.monotonic() < until
            time.sleep(0.02)
        found[0].parent().parent().kill()
        with pytest.raises(SandboxError, match="its child process died"):
            run.result()
    assert gone(marker)


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
    ],
)
def test_the_trial_sees_what_gets_through(sandbox, monkeypatch, change, wall):
    task = Sandbox._task

    def weaker(*args):
        given = task(*args)
        return given | change | {"limits": given["limits"] | change.get("limits", {})}

    monkeypatch.setattr(Sandbox, "_task", weaker)
    assert list(tried_anew(sandbox)) == [wall]


def test_a_trial_that_cannot_be_run_shows_nothing_good(sandbox, monkeypatch):
    task = Sandbox._task
    monkeypatch.setattr(Sandbox, "_task", lambda *args: task(*args) | {"argv": ["false"]})
    assert set(tried_anew(sandbox)) == set(WALLS)


def tried_anew(sandbox: Sandbox) -> dict:
    return sandbox_probe._broken_walls.__wrapped__(sandbox.python, True, os.geteuid() == 0)


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
