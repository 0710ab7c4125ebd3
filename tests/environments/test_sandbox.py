"""Programs that loop, hog, fork or print without end: the run says what ended them, and the machine stays usable."""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_harness import gone, python

from trl_openclaw.environments import sandbox_usage
from trl_openclaw.environments.sandbox import Limits, Sandbox
from trl_openclaw.environments.sandbox_io import Capture
from trl_openclaw.environments.scratch import Scratch

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


def test_long_commands_whatever_their_letters(sandbox):
    text = "\U0001f600" * 30_000
    run = sandbox.run(["sh", "-c", f": {text}; echo $LONG | wc -m"], env={"LONG": text})
    assert (run.ok, run.stdout) == (True, "30001\n"), run.stderr[:500]


def test_a_command_cannot_say_how_it_went(sandbox):
    code = "import os\nfor f in range(3, 64):\n    try: os.write(f, b'{}')\n    except OSError: continue\n    print(f)"
    run = python(sandbox, code)
    assert (run.ended, run.exit_code, run.stdout) == ("exited", 0, "")


def test_a_command_that_is_too_long_for_the_system_is_not_started(sandbox):
    run = sandbox.run(["echo", "x" * (4 << 20)])
    assert (run.ended, run.exit_code) == ("not_started", 127)
    assert "too long" in run.stderr


def test_what_comes_with_python_can_be_read(sandbox):
    code = "import os, sys\nprint(os.path.isdir(sys.base_prefix) and bool(os.listdir(sys.base_prefix)))"
    assert python(sandbox, code).stdout == "True\n"


def test_bytes_that_are_no_text(sandbox):
    assert python(sandbox, "import os; os.write(1, b'a\\xff\\xfe\\xc3b')").stdout == "a���b"


def test_runs_at_the_same_time(sandbox):
    with ThreadPoolExecutor(6) as pool:
        runs = list(pool.map(lambda i: sandbox.run(["sh", "-c", "cat > x; sleep 0.2; cat x"], stdin=str(i)), range(6)))
    assert [run.stdout for run in runs] == [str(i) for i in range(6)]


def test_sandbox_and_environments_need_no_torch():
    names = "CodeEnvironment, Sandbox, ShellEnvironment, wrap_environment"
    code = f"import sys\nfrom trl_openclaw.environments import {names}\n"
    code += "print({'torch', 'transformers', 'trl', 'numpy'} & set(sys.modules))"
    argv, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    assert subprocess.run(argv, cwd=root, capture_output=True, text=True).stdout == "set()\n"


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
def test_wall_time(sandbox, code):
    run = python(sandbox, f"print('begun', flush=True)\n{code}", limits=replace(sandbox.limits, seconds=0.5))
    assert (run.ended, run.exit_code, run.stdout) == ("timeout", None, "begun\n")


def test_cpu_time(sandbox):
    assert python(sandbox, "while True: pass", limits=replace(sandbox.limits, cpu_seconds=1)).ended == "cpu"


@pytest.mark.parametrize("code", ["bytearray(4 << 30)", "x = []\nwhile True: x.append(bytes(1 << 22))"])
def test_memory_of_one_process(sandbox, code):
    run = python(sandbox, code)
    assert (run.exit_code, run.ended) == (1, "exited")
    assert "MemoryError" in run.stderr


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


HELD = """
import ctypes, os, shutil, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

def written(name, size=900_000):
    file = os.open(name, os.O_RDWR | os.O_CREAT)
    os.write(file, b"x" * size)
    return file

def mapped():
    file = written("f")
    place = libc.mmap(None, 4096, 1, 1, file, 0)
    assert place not in (None, ctypes.c_void_p(-1).value)
    os.close(file)
    os.unlink("f")

def executed():
    shutil.copy("/bin/sleep", "sleep")
    open("sleep", "ab").write(b"x" * 900_000)
    child = subprocess.Popen(["./sleep", "30"])
    os.unlink("sleep")
    return child

def opened():
    kept.append(written("f"))
    os.unlink("f")

def leave():  # the first thread; the others stay
    threading.Thread(target=time.sleep, args=(20,)).start()
    libc.syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)

kept = []
"""


def test_what_forks_hold_counts_once(sandbox):
    code = "for _ in range(3): opened()\nfor _ in range(3): os.fork()\ntime.sleep(1)"
    assert python(sandbox, HELD + code).ended == "exited"


def test_a_program_that_was_deleted_counts_without_its_maps(tmp_path, monkeypatch):
    program = tmp_path / "sleep"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as child:
        inode = program.stat().st_ino
        program.unlink()
        monkeypatch.setattr(sandbox_usage, "_text", lambda path: "")
        held = sandbox_usage._deleted_files([child.pid], 1)
        child.kill()
    assert held[inode] >= os.path.getsize("/bin/sleep")


@pytest.mark.parametrize(("address", "flags"), [(0x200000, 0x100001), (None, 1)], ids=["low", "high"])
def test_a_mapped_file_is_measured_or_counts_as_the_largest(monkeypatch, address, flags):
    space: dict = {}
    exec(HELD, space)
    monkeypatch.setattr(sandbox_usage, "_open_and_deleted", lambda thread: {})
    with tempfile.TemporaryFile() as file:
        file.write(bytes(5000))
        file.flush()
        place = space["libc"].mmap(address, 4096, 1, flags, file.fileno(), 0)
        assert address in (None, place)
        inode = os.fstat(file.fileno()).st_ino
        if os.geteuid() == 0:
            assert 5000 <= sandbox_usage._deleted_files([os.getpid()], 10**9)[inode] < 10**6
        with monkeypatch.context() as nobody:
            nobody.setattr(os, "stat", lambda path: os.lstat("/nowhere"))
            found = sandbox_usage._deleted_files([os.getpid()], 10**9)
        assert found[inode] == 10**9
        space["libc"].munmap(ctypes.c_void_p(place), ctypes.c_size_t(4096))


def test_memory_counts_where_the_first_thread_has_left(sandbox):
    code = "def hog():\n    time.sleep(0.5)\n    x = bytes([2]) * (90 << 20)\n    time.sleep(20)\n"
    code += "for _ in range(2): os.fork()\nthreading.Thread(target=hog).start()\nleave()"
    assert python(sandbox, HELD + code).ended == "memory"


@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(8): mapped()",
        "kept = [executed() for _ in range(8)]",
        "for _ in range(5): opened()\nleave()",
        "for _ in range(8): mapped()\nleave()",
    ],
    ids=["mapped", "executed", "first thread left", "mapped, first thread left"],
)
def test_files_that_were_deleted_count_as_long_as_they_are_held(either, code):
    assert python(either, f"{HELD}{code}\ntime.sleep(20)", limits=replace(either.limits, seconds=8)).ended == "disk"


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


def test_a_process_with_many_open_files_can_run_programs(sandbox):
    """`select` takes no descriptor beyond 1,023, and a trainer may have more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 4096, hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        result = sandbox.run([sandbox.python, "-c", "print('here')"])
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (result.ended, result.stdout) == ("exited", "here\n")
