"""What a program may leave behind, and how it is ended and removed: processes, files, things of a throw-away user.

A throw-away user belongs to one keeper at a time: to whoever locks its file. What lives under it is then the keeper's,
and so are the files that it owns. A lock file that is not empty says that its last keeper was killed before the end.
"""

import _signal as signal  # as in rewards/box.py
import ctypes
import itertools
import os
import resource
import stat
import time

from rewards import walls

UIDS = range(60707, 61184)  # given to nobody: by distributions, systemd (also not as DynamicUser) or containers
KILLER = 60706  # nor is this one, which owns no process but those that kill a throw-away user's
END_SECONDS = 10.0  # for the processes of a throw-away user to end; one that cannot be ended blocks its user alone
LOCK_FOLDERS = ("/run/plainroll-uids", "/dev/shm/plainroll-uids", "/tmp/plainroll-uids")  # the first that can be made
WORLD_WRITABLE = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock", "/run/shm")
TRIES = 10  # to read one of a process's threads, which may start and end faster than they are read
LIBC = ctypes.CDLL(None, use_errno=True)


# ---- processes -------------------------------------------------------------------------------------------------


def descendants(root: int) -> dict[int, int]:
    """Return every live process below `root`, with its resident bytes."""
    children: dict[int, list[int]] = {}
    resident = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            parent, used = look(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(pid)
        if used is not None:
            resident[pid] = used
    below, todo = {}, [root]
    while todo:
        for pid in children.get(todo.pop(), []):
            todo.append(pid)
            if pid in resident:
                below[pid] = resident[pid]
    return below


def look(pid: int) -> tuple[int, int | None]:
    """Return a process's parent and its resident bytes; None if it is dead. Raises OSError if there is none.

    A process whose first thread has ended looks dead, but lives on in the others; only they tell its bytes.
    """
    state, parent, num_threads, resident = _read_stat(f"/proc/{pid}/stat")
    if state not in b"ZX":
        return parent, resident
    if num_threads == 1:
        return parent, None
    for _ in range(TRIES):
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                if resident := _read_stat(f"/proc/{pid}/task/{thread}/stat")[3]:
                    return parent, resident
            except (FileNotFoundError, ProcessLookupError):
                pass
    return parent, 0


def _read_stat(path: str) -> tuple[bytes, int, int, int]:
    """Return a state, a parent, the number of the process's threads, and its resident bytes."""
    with open(path, "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0], int(fields[1]), int(fields[17]), int(fields[21]) * resource.getpagesize()


def end_descendants(uid: int | None) -> None:
    """Kill and reap every process below this one, which is their reaper; `uid`: of their throw-away user, if any.

    The dead are reaped last: until then they take up the places of a fork bomb's next children.
    """
    while True:
        if uid is not None:
            _kill_all_of(uid)
        live = descendants(os.getpid())
        for pid in live:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while not live and os.waitpid(-1, os.WNOHANG)[0]:  # 0: one lives that the look before has missed
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _kill_all_of(uid: int) -> None:
    """Kill every process of a user at one moment, so that none can fork out of it.

    A process may kill what has its effective user, and be stopped or killed by what has its real one: here only by
    others of its kind, each of which has then done its own work.
    """
    status = -1
    while status:
        killer = os.fork()
        if not killer:
            try:
                os.setresuid(KILLER, uid, KILLER)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        status = os.waitpid(killer, 0)[1]


def num_tasks(uid: int) -> int:
    """Return the number of threads of a user: what RLIMIT_NPROC counts."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return count


# ---- throw-away users, where this process is root --------------------------------------------------------------


def take_uid() -> tuple[int, int]:
    """Return a user that nobody else has, and the file that locks it for this process. Waits while all are taken."""
    folder = _lock_folder()
    while True:
        for attempt in range(len(UIDS)):
            uid = UIDS[(os.getpid() + attempt) % len(UIDS)]
            lock = _lock(folder, uid)
            if lock is not None:
                os.write(lock, b"in use")
                return uid, lock
        time.sleep(0.05)


def give_back(uid: int, lock: int) -> None:
    """Remove the files of a user, of whom no process is left; others may have it when the lock is closed."""
    if not walls.landlock_version(LIBC):  # otherwise its folder was all that it could write
        for place in WORLD_WRITABLE:
            for entry in os.scandir(place) if os.path.isdir(place) else ():
                try:
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        remove_tree(entry.path)
                except FileNotFoundError:  # somebody else's
                    pass
    os.truncate(lock, 0)


def clean_after_the_killed(folder: str) -> None:
    """Remove a box's folder and end what lives under throw-away users: their keepers were killed."""
    for name in os.listdir(_lock_folder()) if os.geteuid() == 0 else ():
        lock = _lock(_lock_folder(), int(name))  # ends it
        if lock is not None:
            os.close(lock)
    if os.path.lexists(folder):
        remove_tree(folder)


def _lock_folder() -> str:
    """Return a folder that belongs to root alone. Raises OSError if there is none."""
    for folder in LOCK_FOLDERS:
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
            status = os.lstat(folder)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and not status.st_mode & 0o077:
            return folder
    raise OSError(f"no folder for locks of throw-away users: cannot make any of {', '.join(LOCK_FOLDERS)}")


def _lock(folder: str, uid: int) -> int | None:
    """Lock a user and return the open file; None if somebody else has it, or a process of its last program lives on."""
    import pwd  # here: only root needs it

    lock = os.open(f"{folder}/{uid}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.lockf(lock, os.F_TLOCK, 0)
    except OSError:
        os.close(lock)
        return None
    try:
        pwd.getpwuid(uid)
        os.close(lock)
        return None  # it has an account after all
    except KeyError:
        pass
    if os.fstat(lock).st_size:
        deadline = time.monotonic() + END_SECONDS
        while _lives(uid):
            if time.monotonic() > deadline:
                os.close(lock)
                return None
            _kill_all_of(uid)
            time.sleep(0.001)
        give_back(uid, lock)
    return lock


def _lives(uid: int) -> bool:
    """Tell whether a user has a process that is no zombie: nobody may reap those."""
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == uid and look(int(name))[1] is not None:
                return True
        except (FileNotFoundError, ProcessLookupError):
            pass
    return False


# ---- files -----------------------------------------------------------------------------------------------------


def measure_tree(folder: str, most: int) -> tuple[int, int]:
    """Return how many entries a folder has, at all depths, and their bytes on disk. Stops after `most` entries.

    An entry that cannot be looked at counts as too many.
    """
    count = size = 0
    todo = [folder]
    while todo and count <= most:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in itertools.islice(entries, most):
                    count += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # it is being changed
            pass
        except OSError:
            count = most + 1
    return count, size


def remove_tree(path: str) -> None:
    """Remove what a program left, however deep and however locked: inner folders are first moved to the top.

    Nothing outside is touched even while another process changes the tree: folders are opened, never followed.
    """
    names = (os.urandom(8).hex() for _ in itertools.count())
    if _unlink(path, None):
        return
    top = _open_folder(path, None)
    while entries := os.listdir(top):
        for entry in entries:
            if _unlink(entry, top):
                continue
            folder = _open_folder(entry, top)
            for inner in os.listdir(folder):
                if not _unlink(inner, folder):
                    os.close(_open_folder(inner, folder))  # a locked one cannot be moved
                    os.rename(inner, next(names), src_dir_fd=folder, dst_dir_fd=top)
            os.close(folder)
            os.rmdir(entry, dir_fd=top)
    os.close(top)
    os.rmdir(path)


def _unlink(name: str, folder: int | None) -> bool:
    """Remove an entry of an open folder; return False if it is a folder itself."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


def _open_folder(name: str, folder: int | None) -> int:
    """Open and unlock a folder below an open one; a link is an error."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{found}", 0o700)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)
    finally:
        os.close(found)
