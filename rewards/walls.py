"""The walls that a program's process puts around itself before it starts: system calls (seccomp) and files (Landlock).

Namespaces and resource limits leave gaps. No limit counts memory that no process maps; key rings, some families of
sockets and nested namespaces cross every namespace. A filter refuses these system calls. Without namespaces, Landlock
takes the place of a private root. Both need no rights and no package. Linux only.
"""

import ctypes
import errno
import os
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
SET_SECCOMP, FILTER_MODE = 22, 2  # of prctl
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000  # REFUSE | error number
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of a classic BPF program
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`
X32 = 0x40000000  # on x86_64, this and higher numbers are second names of the same calls
UNIX, NO_STREAM = 1, 0xE  # a socket family; bits of the types of sockets that are not streams
SHARED, ANONYMOUS, HUGE_PAGES = 0x01, 0x20, 0x40000  # flags of mmap
NEW_NAMESPACES = 0x7E020000  # flags of clone

# machine -> its audit number, and the column of CALLS
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
CALLS = {
    # memory that no process maps: no limit counts it, and part of it outlives the program
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "bpf": (321, 280),
    "vmsplice": (278, 75),  # for each byte, a pipe can hold a huge page that is no longer mapped
    "tee": (276, 77),
    "splice": (275, 76),
    "sendfile": (40, 71),  # the same with large pages of files; Python copies files without it too
    "socket": (41, 198),  # TCP buffers hold megabytes, and a UNIX datagram socket many messages; socketpair works
    "listen": (50, 201),
    "io_setup": (206, 0),
    "inotify_init": (253, 26),  # aarch64 has only inotify_init1
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    # key rings have no namespace
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # namespaces of its own would let it mount a file system in memory of any size
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "fsopen": (430, 430),
    # would make refused calls unseen by the filter
    "io_uring_setup": (425, 425),
    # other processes of the same user
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "ioprio_set": (251, 30),
    # objects of the same user that others have made
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_unlink": (241, 181),
}
# These change the process that their first arguments name (the last number says how many): all 0 is the caller.
OWN_ONLY = {
    "prlimit64": ((302, 261), 1),
    "sched_setaffinity": ((203, 122), 1),
    "sched_setparam": ((142, 118), 1),
    "sched_setscheduler": ((144, 119), 1),
    "sched_setattr": ((314, 274), 1),
    "setpriority": ((141, 140), 2),
}
CLONE, CLONE3, MMAP, SOCKETPAIR = (56, 220), (435, 435), (9, 222), (53, 199)
SET_OPTION, OF_SOCKETS, BUFFER_SIZES = (54, 208), 1, (7, 8, 32, 33)  # setsockopt; sizes to send, receive, both forced


def system_calls() -> bytes:
    """Return the filter of a program's system calls. Raises OSError on unknown machines."""
    machine = os.uname().machine
    if machine not in MACHINES or sys.maxsize < 2**32:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine} and this interpreter")
    audit, column = MACHINES[machine]
    refused = REFUSE | errno.EPERM
    code = [_step(LOAD, ARCHITECTURE), _step(EQUAL, audit, 1, 0), _step(RETURN, KILL), _step(LOAD, NUMBER)]
    if machine == "x86_64":
        code += [_step(AT_LEAST, X32, 0, 1), _step(RETURN, KILL)]
    for numbers in CALLS.values():
        code += _when(numbers[column], [_step(RETURN, refused)])
    # A filter cannot read the flags of `clone3`. Without it, libc makes threads by `clone`.
    code += _when(CLONE3[column], [_step(RETURN, REFUSE | errno.ENOSYS)])
    flags = _step(LOAD, ARGUMENTS)
    code += _when(CLONE[column], [flags, _step(ANY_BIT, NEW_NAMESPACES, 0, 1), _step(RETURN, refused)])
    for numbers, count in OWN_ONLY.values():
        zeros = []
        for n in range(count):
            zeros += [_step(LOAD, ARGUMENTS + n * 8), _step(EQUAL, 0, 1, 0), _step(RETURN, refused)]
        code += _when(numbers[column], zeros)
    family, kind = _step(LOAD, ARGUMENTS), _step(LOAD, ARGUMENTS + 8)
    pair = [family, _step(EQUAL, UNIX, 0, 2), kind, _step(ANY_BIT, NO_STREAM, 0, 1)]
    code += _when(SOCKETPAIR[column], [*pair, _step(RETURN, REFUSE | errno.EAFNOSUPPORT)])
    # A socket's buffer may otherwise grow to megabytes, which no process maps.
    sizes = [step for size in BUFFER_SIZES for step in (_step(EQUAL, size, 0, 1), _step(RETURN, refused))]
    option = [_step(LOAD, ARGUMENTS + 8), _step(EQUAL, OF_SOCKETS, 0, 1 + len(sizes)), _step(LOAD, ARGUMENTS + 2 * 8)]
    code += _when(SET_OPTION[column], option + sizes)
    # Pages that two processes could share remain when they are no longer mapped.
    flags = _step(LOAD, ARGUMENTS + 3 * 8)
    pages = [flags, _step(ANY_BIT, HUGE_PAGES, 2, 0), _step(ANY_BIT, ANONYMOUS, 0, 2), _step(ANY_BIT, SHARED, 0, 1)]
    code += _when(MMAP[column], [*pages, _step(RETURN, refused)])
    return b"".join([*code, _step(RETURN, ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction; the last two arguments say how many instructions to skip."""
    return code.to_bytes(2, "little") + bytes((if_true, if_false)) + value.to_bytes(4, "little")


def _when(number: int, steps: list[bytes]) -> list[bytes]:
    """Return steps for one system call. It is allowed unless they refuse it."""
    return [_step(EQUAL, number, 0, len(steps) + 1), *steps, _step(RETURN, ALLOW)]


def load_filter(code: bytes) -> None:
    """Have the kernel filter this thread's system calls from now on, and its children's. Raises OSError."""
    kept = ctypes.create_string_buffer(code, len(code))
    program = (len(code) // 8).to_bytes(8, "little") + ctypes.addressof(kept).to_bytes(8, "little")
    call("prctl", SET_SECCOMP, FILTER_MODE, program, 0, 0, cause="the kernel takes no filter of system calls (seccomp)")


def call(name: str, *arguments: object, cause: str = "") -> int:
    """Call a function of libc. Raises OSError; its text begins with `cause`, or with the name."""
    # prctl and syscall are variadic: their arguments are of full width
    result = getattr(LIBC, name)(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{cause or name}: {os.strerror(number)}")
    return result


# ---- files: Landlock -------------------------------------------------------------------------------------------

CREATE_RULES, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every machine
TELL_VERSION, BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER, TRUNCATE = 1, 2, 4, 8, 1 << 14
SEES_SIGNALS = 6  # the first version that keeps signals, and sockets without a file, inside the box


def landlock_version() -> int:
    """Return the kernel's version of Landlock, or 0 without Landlock."""
    return max(LIBC.syscall(CREATE_RULES, None, ctypes.c_size_t(0), TELL_VERSION), 0)


def show_only(folder: str, paths: list[str], devices: tuple[str, ...]) -> None:
    """Let this process and its children change `folder` only, and read `paths`. Does nothing without Landlock."""
    version = landlock_version()
    if not version:
        return
    every = (1 << min(12 + version, 15)) - 1  # rights that this version knows, without IOCTL_DEV
    # Older kernels do not know the second field, to bind and connect TCP, and the third, signals and sockets.
    fields = (every, 3, 3)[: 1 + (version >= 4) + (version >= SEES_SIGNALS)]
    rules = _landlock(CREATE_RULES, _words(*fields), 8 * len(fields), 0)
    allowed = [(folder, every), *((path, EXECUTE | READ_FILE | READ_FOLDER) for path in paths)]
    allowed += [(path, WRITE_FILE | READ_FILE | TRUNCATE) for path in devices]
    for path, rights in allowed:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
        _landlock(ADD_RULE, rules, BENEATH, _words(rights & every) + handle.to_bytes(4, sys.byteorder), 0)
        os.close(handle)
    _landlock(RESTRICT_SELF, rules, 0)
    os.close(rules)


def _words(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, sys.byteorder) for value in values)


def _landlock(*arguments: object) -> int:
    return call("syscall", *arguments, cause="Landlock")
