"""What keeps a sandboxed program in: Landlock for files, seccomp for the network, a user of its own for processes.

These are calls into the Linux kernel by ctypes, made in the small child process of `sandbox_child.py` and nowhere else.
They need no installed program and work in containers, which forbid the mounts and namespaces that bubblewrap needs.
Each function raises `OSError` where the kernel refuses; nobody here decides to go on without.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from collections.abc import Iterable

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP = 1, 8, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
_ALL_NAMESPACES = 0x7E020080
_CAP_DAC_READ_SEARCH = 2


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(number: int, *args: object) -> int:
    if _LIBC is None:
        raise OSError(errno.ENOSYS, "only Linux has this")
    return _LIBC.syscall(ctypes.c_long(number), *args)


def _prctl(option: int, *args: int) -> None:
    if _LIBC is None:
        raise OSError(errno.ENOSYS, "only Linux has prctl")
    values = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]]
    _check(_LIBC.prctl(option, *values), f"prctl {option}")


def forbid_new_privileges() -> None:
    """From here on no setuid program gives anything: what Landlock and seccomp ask for."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Be killed when the parent process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` name."""
    if _LIBC is None:
        raise OSError(errno.ENOSYS, "only Linux has namespaces")
    _check(_LIBC.unshare(flags), "unshare")


# --- Landlock -------------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE = 0x1FF0  # remove and make entries of every kind
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2


def landlock_version() -> int:
    """The version of Landlock that the kernel has, 0 for none."""
    try:
        return max(_syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)), 0)
    except OSError:
        return 0


def landlock_rules(writable: Iterable[str], readable: Iterable[str], devices: Iterable[str]) -> int:
    """Rules by which only these paths can be opened, as a file descriptor for `landlock_enter`.

    Args:
        writable: Folders in which everything is allowed.
        readable: Files and folders that may be read and executed. Those that are not there are left out.
        devices: Files that may be read and written.
    """
    version = landlock_version()
    if not version:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock (Linux 5.13 and newer have it, unless it is off)")
    known = _EXECUTE | _WRITE_FILE | _READ_FILE | _READ_DIR | _MAKE
    known |= (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0) | (_IOCTL_DEV if version >= 5 else 0)
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    attributes = struct.pack("QQQ", known, 0, scoped)[: 24 if version >= 6 else 8]
    size = ctypes.c_size_t(len(attributes))
    rules = _check(_syscall(_CREATE_RULESET, attributes, size, ctypes.c_uint(0)), "Landlock's rules")
    for paths, rights in ((writable, known), (readable, _EXECUTE | _READ_FILE | _READ_DIR), (devices, 6)):
        for path in paths:
            _allow(rules, path, rights & known)
    return rules


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, place)
        _check(_syscall(_ADD_RULE, rules, 1, rule, ctypes.c_uint(0)), f"Landlock's rule for {path}")
    finally:
        os.close(place)


def landlock_enter(rules: int) -> None:
    """Keep this process and all that come from it to the rules, for good."""
    _check(_syscall(_RESTRICT_SELF, rules, ctypes.c_uint(0)), "Landlock")


# --- seccomp --------------------------------------------------------------------------------------------------------

# Name -> number on x86_64, on aarch64. None where there is no such call.
_NETWORK = {"socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425)}
_NEVER = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "kcmp": (312, 272), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory that no limit counts, and ways to talk that no other wall sees
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "mq_open": (240, 180), "msgget": (68, 186), "semget": (64, 190), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
    # files in flight between sockets, which no process holds
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # namespaces, mounts, files without a path
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
}  # fmt: skip
_CHANGE_MODE = {
    "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "setxattrat": (463, 463), "removexattrat": (466, 466),
}  # fmt: skip
_TRUNCATE_CALL = {"truncate": (76, 45)}
_MACHINES = {"x86_64": (0, 0xC000003E, 56, 302), "aarch64": (1, 0xC00000B7, 220, 261)}
_CLONE3 = 435

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_DENY, _UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def _do(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, other, value)


def _when(number: int | None, *steps: bytes) -> bytes:
    return b"" if number is None else _do(_JUMP_EQUAL, number, 0, len(steps)) + b"".join(steps)


def seccomp_program(*, network: bool, change_mode: bool, truncate: bool) -> bytes:
    """A filter of system calls for this machine, as the kernel's own small byte code.

    Args:
        network: Whether sockets are allowed. If not, a connected pair of Unix stream sockets still is.
        change_mode: Whether the mode of a file may be changed by its path, wherever it is.
        truncate: Whether a file may be shortened by its path, wherever it is.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"there is no table of system calls for {platform.machine()} here")
    column, architecture, clone, prlimit = _MACHINES[platform.machine()]
    denied = _NEVER | ({} if change_mode else _CHANGE_MODE) | ({} if truncate else _TRUNCATE_CALL)
    allow, deny = _do(_RETURN, _ALLOW), _do(_RETURN, _DENY)
    program = [_do(_LOAD, _ARCHITECTURE), _do(_JUMP_EQUAL, architecture, 1, 0), _do(_RETURN, _KILL)]
    program += [_do(_LOAD, _NUMBER), _do(_JUMP_AT_LEAST, 0x40000000, 0, 1), _do(_RETURN, _UNKNOWN)]
    program += [_when(numbers[column], deny) for numbers in denied.values()]
    program += [_when(_CLONE3, _do(_RETURN, _UNKNOWN))]  # its flags cannot be read here; libc falls back to clone
    program += [_when(clone, _do(_LOAD, _ARGUMENT_0), _do(_JUMP_ANY_BIT, _ALL_NAMESPACES, 0, 1), deny, allow)]
    program += [_when(prlimit, _do(_LOAD, _ARGUMENT_0), _do(_JUMP_EQUAL, 0, 1, 0), deny, allow)]
    if not network:
        # A datagram pair could still send to the address of somebody else, a stream pair cannot.
        stream_pair = (
            _do(_LOAD, _ARGUMENT_0), _do(_JUMP_EQUAL, 1, 0, 4), _do(_LOAD, _ARGUMENT_1), _do(_AND, 0xF),
            _do(_JUMP_EQUAL, 1, 0, 1), allow, deny,
        )  # fmt: skip
        program += [_when(_NETWORK["socketpair"][column], *stream_pair)]
        program += [_when(_NETWORK[name][column], deny) for name in ("socket", "io_uring_setup")]
    return b"".join([*program, allow])


def seccomp_enter(program: bytes) -> None:
    """Keep this process and all that come from it to the filter, for good."""
    text = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(text)))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(header))


# --- who one is -----------------------------------------------------------------------------------------------------


def enter_user_namespace() -> None:
    """Leave for a user namespace, in which this user keeps its number, and for a space of process numbers.

    The kernel counts the processes of a user in each user namespace apart, so a limit on them means those inside.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWPID)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def become_user(user: int, *, may_search: bool) -> None:
    """Give up root for a user that owns nothing and has no other process.

    Args:
        user: Its number.
        may_search: Whether it may pass folders that are closed to it, as `/root` is, where Python may be installed.
            What it may open there is up to Landlock.
    """
    if may_search:
        _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if may_search:
        bit = 1 << _CAP_DAC_READ_SEARCH
        header, sets = struct.pack("II", 0x20080522, 0), struct.pack("IIIIII", bit, bit, bit, 0, 0, 0)
        _check(_LIBC.capset(header, sets) if _LIBC else -1, "capset")
        _prctl(_PR_CAP_AMBIENT, 2, _CAP_DAC_READ_SEARCH)
