"""The box around one untrusted program: the keeper that builds it, and the two ends of an assert test inside it.

caller (rewards/sandbox.py) --> keeper --> [first process of the namespaces -->] the program, a fresh interpreter

The keeper never runs the program's code. It ends every process below it when the program ends, when the caller sends
SIGTERM, and when the caller dies. Linux only; standard library only; nothing of the trainer is loaded. Programs are
short, so a keeper has to start fast.
"""

import _signal as signal  # `signal` adds enumerations, which take a quarter of a keeper's start
import builtins
import errno
import marshal
import operator
import os
import resource
import struct
import sys
import time
import types

if __name__ != "__main__":  # inside a box of an assert test this file is alone
    from rewards import leftovers, walls

NEW_MOUNT, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NO_SUID, NO_DEV, READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 1, 32, 4096, 16384, 1 << 18, 2
PARENT_DEATH, DUMPABLE, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 36, 38  # of prctl
SET_ATTRIBUTES, ALL_BELOW = 442, 0x8000  # of mounts: the number of the call on every machine, and its flag
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # not zero: no limit would see its pages, as in walls.py
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
MOST_FILES = 4096  # files and folders of a program
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


class _Stop(Exception):
    """The caller asked for the end, or died."""


# ---- the keeper ------------------------------------------------------------------------------------------------


def keep_box(handle: int) -> None:
    """Build the box that an open file describes, run its program, report, leave no process behind, and end."""
    with os.fdopen(handle, "rb") as file:  # closed, so that the program does not inherit it
        spec = marshal.load(file)
    os.set_inheritable(spec["report"], False)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a program of the same user may send it to process 1, which hears it
    walls.call("prctl", PARENT_DEATH, signal.SIGTERM)
    walls.call("prctl", SUBREAPER, 1)
    uid = lock = None
    is_apart = spec["isolation"] == "namespaces"
    try:
        if os.getppid() != spec["caller"]:
            raise _Stop  # it died before prctl
        if os.geteuid() == 0:
            uid, lock = leftovers.take_uid()
        else:  # the limit counts the user's other processes too
            spec["limits"]["NPROC"] += sum(num_threads for *_, num_threads in leftovers.processes(os.getuid()))
        if is_apart:
            _unshare()
        walls.call("prctl", DUMPABLE, 0)  # a program of the same user can neither trace the keeper nor open its pipes
        main = os.fork()
        if not main:
            _in_child(_first if is_apart else _become_program, spec, uid)
        _leave_channels(spec)
        status = os.waitpid(main, 0)[1]
        if not is_apart:  # in namespaces the first process has reported it
            _report(spec, "end", status, time.monotonic())
    except _Stop:
        pass
    except OSError as error:
        _report(spec, "error", f"{type(error).__name__}: {error}")
    finally:
        _end(spec, None if is_apart else uid)  # namespaces end as a whole
        if uid is not None and lock is not None:
            leftovers.give_back(uid, lock)
    os._exit(0)


def _end(spec: dict, uid: int | None) -> None:
    """End all processes, close the pipes that the caller reads, and only then remove the files: that may take long."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Stop:  # the signal came just now
        pass
    leftovers.end_descendants(uid)
    for handle in (0, 1, 2, spec["report"]):
        os.close(handle)
    leftovers.remove_tree(spec["folder"])


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the end
    raise _Stop


def _in_child(function, spec: dict, uid: int | None) -> None:
    """Call a function that does not return in a forked child; report its error if it fails."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        function(spec, uid)
    except BaseException as error:
        _report(spec, "error", f"{type(error).__name__}: {error}")
    finally:
        os._exit(127)


def _first(spec: dict, uid: int | None) -> None:
    """Be process 1 of the namespaces: all processes in them die with it, and it dies with the keeper."""
    walls.call("prctl", PARENT_DEATH, signal.SIGKILL)
    _build_root(spec, uid)
    main = os.fork()
    if not main:
        _in_child(_become_program, spec, uid)
    _leave_channels(spec)
    while True:
        pid, status = os.wait()
        if pid == main:
            _report(spec, "end", status, time.monotonic())
            os._exit(0)


def _leave_channels(spec: dict) -> None:
    """Close the channels, so that only the program holds them: its end must be seen before the clean-up."""
    for channel in spec["channels"]:
        os.close(channel)


def _become_program(spec: dict, uid: int | None) -> None:
    """Give up all rights and become the program, in a process group of its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    if spec["isolation"] != "namespaces":
        os.chmod(spec["folder"], 0o711)
        os.mkdir(home(spec["folder"]), 0o700)
        os.chdir(home(spec["folder"]))
        _write_files(spec["files"], ".", uid)
    for name, value in spec["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    walls.call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    walls.call("prctl", PARENT_DEATH, signal.SIGKILL)
    command = spec["command"]
    if spec["isolation"] == "bubblewrap":  # it makes calls that the filter refuses, then loads the filter itself
        reads, writes = os.pipe()
        os.write(writes, spec["system_calls"])
        os.set_inheritable(reads, True)
        command[1:1] = ["--seccomp", str(reads)]
    else:
        if spec["isolation"] == "limits":
            walls.show_only(".", box_paths(spec["prefix"]), DEVICES)
        walls.load_filter(spec["system_calls"])
    _report(spec, "start", time.monotonic())
    os.execve(command[0], command, ENVIRONMENT)


def home(folder: str) -> str:
    """Return the program's own folder without namespaces. The program cannot rename it."""
    return f"{folder}/home"


def _unshare() -> None:
    """Enter new namespaces. Without root, a user namespace gives the right; it maps only this user."""
    uid, gid, is_root = os.geteuid(), os.getegid(), os.geteuid() == 0
    walls.call("unshare", NEW_IPC | NEW_PID | NEW_NET | (0 if is_root else NEW_USER))
    if not is_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _build_root(spec: dict, uid: int | None) -> None:
    """Make a new root with the interpreter, read-only, and an empty /tmp in memory; leave the old root.

    The new root has no /proc and no files of the run.
    """
    root, limits = spec["folder"].encode(), spec["limits"]
    walls.call("unshare", NEW_MOUNT)  # not earlier: the keeper still needs the old root
    walls.call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    options = f"size={limits['FSIZE']},nr_inodes={spec['most_files']},mode=755".encode()
    walls.call("mount", b"tmpfs", root, b"tmpfs", NO_SUID | NO_DEV, options)
    for path in box_paths(spec["prefix"]):
        _show(path.encode(), root)
    for path in DEVICES:
        _show(path.encode(), root, flags=NO_SUID)
    os.mkdir(root + b"/tmp", 0o700)
    _write_files(spec["files"], os.fsdecode(root + b"/tmp"), uid)
    os.chdir(root)
    walls.call("pivot_root", b".", b".")
    walls.call("umount2", b".", DETACH)
    os.chdir("/tmp")


def box_paths(prefix: str) -> list[str]:
    """Return the paths of the host that programs may read: the system's libraries and the interpreter's folder."""
    paths = [path for path in dict.fromkeys((*SYSTEM, prefix)) if os.path.lexists(path)]
    return [p for p in paths if not any(p != q and p.startswith(q + "/") for q in paths)]


def _show(path: bytes, root: bytes, flags: int = READ_ONLY | NO_SUID | NO_DEV) -> None:
    """Make `path` of the host visible under `root`."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT, 0o644))
    walls.call("mount", path, target, None, BIND | RECURSIVE, None)
    kept = os.statvfs(target).f_flag & 0xF  # a user namespace may not take away noexec, nodev and the like
    walls.call("mount", None, target, None, BIND | REMOUNT | flags | kept, None)
    try:  # mounts below it too: mount_setattr, from Linux 5.12 on, whose first flags are those of mount
        walls.call("syscall", SET_ATTRIBUTES, -1, target, ALL_BELOW, struct.pack("4Q", flags, 0, 0, 0), 32)
    except OSError as error:
        # An older kernel, or a filter of system calls that does not know it: then no other mounts may be there.
        with open("/proc/self/mountinfo", "rb") as mounts:
            is_alone = not any(line.split()[4].startswith(target + b"/") for line in mounts)
        if error.errno not in (errno.ENOSYS, errno.EPERM) or not is_alone:
            raise


def _write_files(files: dict[str, str], folder: str, uid: int | None) -> None:
    paths = [folder]
    for name, text in files.items():
        paths.append(f"{folder}/{name}")
        with open(paths[-1], "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
    if uid is not None:
        for path in paths:
            os.chown(path, uid, uid)


def _report(spec: dict, *words: object) -> None:
    os.write(spec["report"], " ".join(map(str, words)).encode() + b"\n")


# ---- an assert test: the program in one box, the assertions in another -----------------------------------------
#
# The assertions never share an interpreter with the program. They see its functions as proxies, and results as plain
# data, so that no __eq__, no patched builtin and no early exit of the program can decide what is true. An error of the
# program arrives as an error that a test catches only on purpose. docs/rewards.md lists the values that do not cross.

PLAIN = (bool, int, float, str)  # a subclass before its class
CONTAINERS = (list, tuple, set, frozenset)
MUTABLE = {"list": list, "set": set, "dict": dict}
ENDS = (StopIteration, StopAsyncIteration)  # GeneratorExit is not an Exception, so it ends the program
VERBS: dict = {"getattr": getattr, "setattr": setattr, "getitem": operator.getitem, "len": len, "list": list}
VERBS["call"] = lambda function, args, kwargs: function(*args, **kwargs)


def _asks(verb: str):
    """Return a method of a Proxy that has the program's process carry out a verb."""
    return lambda self, *arguments: self._wire.ask([verb, self, *arguments])


class Proxy:
    """Stands for a function or object in the program's process: it can be read and called, not compared."""

    _wire: "Wire"
    _handle: int

    def __init__(self, wire: "Wire", handle: int):
        self.__dict__.update(_wire=wire, _handle=handle)

    __getattr__, __setattr__, __getitem__, __len__ = map(_asks, ("getattr", "setattr", "getitem", "len"))

    def __call__(self, *args, **kwargs) -> object:
        return self._wire.ask(["call", self, args, kwargs])

    def __iter__(self) -> object:
        return iter(self._wire.ask(["list", self]))

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false; test plain data")

    def __eq__(self, other: object) -> bool:
        raise TypeError("an object of the program equals nothing; compare plain data")


class Wire:
    """Lines of JSON between the two processes. One asks, the other answers; objects never travel."""

    def __init__(self, reads: int, writes: int):
        import json  # here, because a keeper does not need it

        self.json = json
        self.reads, self.writes = os.fdopen(reads, encoding="utf-8"), os.fdopen(writes, "w", encoding="utf-8")
        self.objects: list = []  # the other side knows them by their index

    def send(self, value) -> None:
        self.writes.write(self.json.dumps(self._pack(value)) + "\n")
        self.writes.flush()

    def receive(self):
        """Return the next value. Raises EOFError when the other side has ended."""
        line = self.reads.readline()
        if not line:
            raise EOFError("the program ended before the test did")
        return self._unpack(self.json.loads(line))

    def ask(self, request: list):
        """Return the other side's answer, or raise its error. Without an answer this process ends."""
        try:
            self.send(request)
            is_value, answer, *arguments = self.receive()
        except Exception as error:  # not for the test to catch: a program that exits or lies has failed
            os.write(2, f"no answer: {type(error).__name__}: {error}\n".encode(errors="replace"))
            os._exit(1)
        if is_value is True:
            return answer
        raise _error(str(answer), arguments)

    def answer(self) -> None:
        """Carry out the other side's requests until it ends."""
        while True:
            try:
                verb, target, *rest = self.receive()
            except EOFError:
                return
            try:
                self.send([True, VERBS[verb](target, *rest)])
            except Exception as error:
                kinds = (kind.__name__ for kind in type(error).__mro__ if hasattr(builtins, kind.__name__))
                self.send([False, next(kinds), *error.args])

    def _pack(self, value) -> list:
        """Return a value, or [n] for row n, and the rows. Rows do not nest, so depth and cycles do not matter."""
        held: list = []
        places: dict[int, int] = {}

        def refer(item) -> object:
            for kind in PLAIN:
                if isinstance(item, kind):
                    item = kind(item)
                    if kind is not int or abs(item) < 2**63:  # JSON writes a larger int in decimal digits, slowly
                        return item
            if item is None:
                return None
            if id(item) not in places:
                places[id(item)] = len(held)
                held.append(item)
            return [places[id(item)]]

        root = refer(value)
        return [root, [self._row(item, refer) for item in held]]  # `held` grows in the loop

    def _row(self, item, refer) -> list:
        if isinstance(item, Proxy):
            return ["yours", item._handle]
        for kind in CONTAINERS:
            if isinstance(item, kind):
                return [kind.__name__, *map(refer, item)]
        if isinstance(item, dict):
            return ["dict", *(refer(part) for pair in item.items() for part in pair)]
        if isinstance(item, int):
            return ["int", hex(item)]
        if isinstance(item, bytes):
            return ["bytes", item.hex()]
        if isinstance(item, complex):
            return ["complex", item.real, item.imag]
        self.objects.append(item)
        return ["mine", len(self.objects) - 1]

    def _unpack(self, packed: list) -> object:
        """Undo `_pack`. Raises ValueError and the like for lines that `_pack` never writes."""
        root, rows = packed
        # Values that may contain themselves are made empty and filled at the end.
        built = {n: MUTABLE[kind]() for n, (kind, *_) in enumerate(rows) if kind in MUTABLE}
        todo, opened = list(range(len(rows))), set()

        def value(part) -> object:
            return built[part[0]] if isinstance(part, list) else part

        while todo:
            kind, *parts = rows[n := todo.pop()]
            missing = [part[0] for part in parts if isinstance(part, list) and part[0] not in built]
            if n in built:
                continue
            if not missing:
                built[n] = self._make(kind, [value(part) for part in parts])
            elif n in opened:
                raise ValueError("a tuple contains itself")
            else:
                opened.add(n)
                todo += [n, *missing]
        for n, (kind, *parts) in enumerate(rows):
            if kind in MUTABLE:
                values = [value(part) for part in parts]
                filled = zip(values[::2], values[1::2], strict=True) if kind == "dict" else values
                (built[n].extend if kind == "list" else built[n].update)(filled)
        return value(root)

    def _make(self, kind: str, parts: list) -> object:
        match kind:
            case "tuple" | "frozenset":
                return getattr(builtins, kind)(parts)
            case "int":
                [digits] = parts
                return int(digits, 16)
            case "bytes":
                return bytes.fromhex(*parts)
            case "complex":
                return complex(*parts)
            case "mine":
                return Proxy(self, int(*parts))
            case "yours":
                return self.objects[parts[0]]
        raise ValueError(f"not a kind of value: {kind!r}")


def _error(name: str, arguments: list) -> Exception:
    """Return the program's error for the test to catch, by the name of its nearest built-in class.

    StopIteration becomes a RuntimeError: `all(map(function, cases))` must not end early and be true.
    """
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ENDS):
        try:
            return kind(*arguments)
        except Exception:  # the class takes other arguments
            pass
    return RuntimeError(f"{name}{tuple(arguments)}")


def serve(wire: Wire) -> None:
    """Run the program as a module, send its names, then answer the test's requests."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    with open("program.py", encoding="utf-8") as file:
        exec(compile(file.read(), "program.py", "exec"), module.__dict__)
    wire.send(dict(module.__dict__))
    wire.answer()


def run_test(wire: Wire) -> None:
    """Run the test on the program's names. Returns only if it holds."""
    with open("test.py", encoding="utf-8") as file:
        code = compile(file.read(), "test.py", "exec")
    # The test must not use a program's own abs, len or isinstance.
    names = {k: v for k, v in wire.receive().items() if not k.startswith("__") and not hasattr(builtins, k)}
    exec(code, {"__name__": "test", **names})


if __name__ == "__main__":
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as sandbox.STARTER does
    _wire = Wire(int(sys.argv[2]), int(sys.argv[3]))
    try:
        {"serve": serve, "test": run_test}[sys.argv[1]](_wire)
    except SystemExit as ended:
        raise RuntimeError("a test must not exit") from ended
