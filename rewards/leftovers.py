"""End and remove everything that a program may leave behind: processes, files, files of a throw-away user.

A throw-away user belongs to one keeper at a time, which holds the lock on the user's file. All processes and files of
the user are then the keeper's. If the lock file is not empty, its last keeper was killed before it had cleaned up.
"""

import _signal as signal  # as in rewards/box.py
import itertools
import os
import resource
import stat
import time

from rewards import walls

UIDS = range(60707, 61184)  # used neither by distributions nor systemd (not as DynamicUser either) nor containers
KILLER = 60706  # unused as well; owns only the processes that kill a throw-away user's processes
END_SECONDS = 10.0  # for the processes of a throw-away user to end; a process that cannot be ended blocks only its user
LOCK_FOLDERS = ("/run/plainroll-uids", "/dev/shm/plainroll-uids", "/tmp/plainroll-uids")  # the first that can be made
WORLD_WRITABLE = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock", "/run/shm")
TRIES = 10  # to read one of a process's threads, which may start and end faster than they are read


# ---- processes -------------------------------------------------------------------------------------------------


def descendants(root: int) -> dict[int, int]:
    """Return every live process below `root`, with its resident bytes."""
    children: dict[int, list[tuple[int, int | None]]] = {}
    for pid, parent, resident, _ in processes():
        children.setdefault(parent, []).append((pid, resident))
    below: list[tuple[int, int | None]] = [(root, None)]
    for pid, _ in below:  # grows
        below += children.get(pid, [])
    return {pid: resident for pid, resident in below if resident is not None}


def processes(uid: int | None = None) -> list[tuple[int, int, int | None, int]]:
    """Return the number of every process, of a user if `uid` is given, and `look` of it."""
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            if uid is None or os.stat(f"/proc/{pid}").st_uid == uid:
                found.append((pid, *look(pid)))
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            pass
    return found


def look(pid: int) -> tuple[int, int | None, int]:
    """Return a process's parent, its resident bytes (None: it is dead) and its number of threads. Raises OSError.

    A process whose first thread has ended looks dead, but its other threads live on; only they show its bytes.
    """
    state, parent, num_threads, resident = _read_stat(f"/proc/{pid}/stat")
    if state not in b"ZX":
        return parent, resident, num_threads
    if num_threads == 1:
        return parent, None, 1
    for _ in range(TRIES):
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                if resident := _read_stat(f"/proc/{pid}/task/{thread}/stat")[3]:
                    return parent, resident, num_threads
            except (FileNotFoundError, ProcessLookupError):
                pass
    return parent, 0, num_threads


def _read_stat(path: str) -> tuple[bytes, int, int, int]:
    """Return a state, a parent, the number of the process's threads, and its resident bytes."""
    with open(path, "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0], int(fields[1]), int(fields[17]), int(fields[21]) * resource.getpagesize()


def end_descendants(uid: int | None) -> None:
    """Kill and reap every process below this one, which is their reaper; `uid`: their throw-away user, if any.

    The dead are reaped last: until then they count towards a fork bomb's limit of processes.
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
            while not live and os.waitpid(-1, os.WNOHANG)[0]:  # 0: `descendants` has missed a live process
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _kill_all_of(uid: int) -> None:
    """Kill every process of a user at one moment, so that none can escape by a fork.

    The killer's effective user lets it kill those processes. Its real user decides who may kill it: only other killers,
    each of which does the same work.
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


# ---- throw-away users, where this process is root --------------------------------------------------------------


def take_uid() -> tuple[int, int]:
    """Return an unused user, and the open file that locks it for this process. Waits while all users are taken."""
    folder = _lock_folder()
    while True:
        for attempt in range(len(UIDS)):
            uid = UIDS[(os.getpid() + attempt) % len(UIDS)]
            if (lock := _lock(folder, uid)) is not None:
                os.write(lock, b"in use")
                return uid, lock
        time.sleep(0.05)


def give_back(uid: int, lock: int) -> None:
    """Remove the files of a user without processes. The user is free once the caller closes the lock."""
    if not walls.landlock_version():  # with Landlock it could only write to its own folder
        for place in WORLD_WRITABLE:
            for entry in os.scandir(place) if os.path.isdir(place) else ():
                try:
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        remove_tree(entry.path)
                except FileNotFoundError:  # another program's, which has just removed it
                    pass
    os.truncate(lock, 0)


def clean_after_the_killed(folder: str) -> None:
    """Remove a box's folder, and end all processes of throw-away users whose keepers were killed."""
    for name in os.listdir(_lock_folder()) if os.geteuid() == 0 else ():
        if (lock := _lock(_lock_folder(), int(name))) is not None:  # it has ended the processes
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
    """Lock a user and return the open file; None if it is taken, or if a process of its last program does not end."""
    import pwd  # here, because only root needs it

    lock = os.open(f"{folder}/{uid}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.lockf(lock, os.F_TLOCK, 0)
    except OSError:
        os.close(lock)
        return None
    try:
        pwd.getpwuid(uid)
        os.close(lock)
        return None  # a real account has this number
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
    """Return whether a user has a process that is not a zombie. Zombies do not count: they may never be reaped."""
    return any(resident is not None for _, _, resident, _ in processes(uid))


# ---- files -----------------------------------------------------------------------------------------------------


def measure_tree(folder: str, most: int) -> tuple[int, int]:
    """Return the number of entries of a folder, at all depths, and their bytes on disk. Stops after `most` entries.

    An entry that cannot be read counts as too many.
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
    """Remove a folder or file of a program, however deep and however locked: inner folders are first moved to the top.

    Nothing outside is touched, even if another process changes the tree meanwhile: links are never followed.
    """
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
                    os.rename(inner, os.urandom(8).hex(), src_dir_fd=folder, dst_dir_fd=top)
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
