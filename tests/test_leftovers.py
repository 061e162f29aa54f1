"""What programs leave: their processes end, their files go, nobody else's do, and no two programs share a user."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import hostile
import pytest
from conftest import ROOT

from rewards import leftovers, walls

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="throw-away users need root")


def script(code: str, **kwargs) -> subprocess.Popen:
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport os, time\nfrom rewards import leftovers\n"
    return subprocess.Popen([sys.executable, "-c", start + code], stdout=subprocess.PIPE, text=True, **kwargs)


# ---- files


@pytest.mark.parametrize("moment", ["before it is opened", "after it is opened"])
def test_a_folder_swapped_for_a_link_leads_nowhere(tmp_path, monkeypatch, moment):
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    (outside / "inner").mkdir(parents=True)
    (outside / "inner" / "kept").write_text("")
    (tree / "a" / "inner").mkdir(parents=True)
    open_folder = leftovers._open_folder

    def swap() -> None:
        (tree / "a").rename(tree / "moved")
        (tree / "a").symlink_to(outside)

    def open_late(name: str, folder: int | None) -> int:
        if name == "a" and moment.startswith("before"):
            swap()
        handle = open_folder(name, folder)
        if name == "a" and moment.startswith("after"):
            swap()
        return handle

    monkeypatch.setattr(leftovers, "_open_folder", open_late)
    with pytest.raises(OSError):
        leftovers.remove_tree(str(tree))
    assert (outside / "inner" / "kept").exists()
    monkeypatch.undo()
    leftovers.remove_tree(str(tree))
    assert os.listdir(tmp_path) == ["outside"] and (outside / "inner" / "kept").exists()


def test_a_tree_that_is_a_link_is_removed_itself(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "tree").symlink_to(tmp_path / "outside")
    leftovers.remove_tree(str(tmp_path / "tree"))
    assert os.listdir(tmp_path) == ["outside"]


def test_a_tree_is_measured_until_it_is_too_large(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(bytes(10**5))
    (tmp_path / "link").symlink_to("/")
    count, size = leftovers.measure_tree(str(tmp_path), 100)
    assert count == 4 and 10**5 <= size < 2 * 10**5
    assert leftovers.measure_tree(str(tmp_path), 2)[0] == 3
    assert leftovers.measure_tree(str(tmp_path / "gone"), 100) == (0, 0)


# ---- processes


def test_a_process_that_a_look_has_missed_is_ended_too():
    code = """
real, looks = leftovers.descendants, []
leftovers.descendants = lambda pid: real(pid) if looks else looks.append(1) or {}
if not os.fork():
    time.sleep(1000)
leftovers.end_descendants(None)
print("ended")
"""
    with script(code) as process:
        assert process.communicate(timeout=60)[0] == "ended\n"


def test_a_process_lives_when_its_first_thread_has_ended():
    code = """
uid = leftovers.UIDS[0] if not os.geteuid() else os.getuid()
child = os.fork()
if not child:
    if not os.geteuid():
        os.setresuid(uid, uid, uid)
    end_first_thread(20 << 20)
deadline = time.monotonic() + 60
while b") Z" not in open("/proc/%d/stat" % child, "rb").read() and time.monotonic() < deadline:
    time.sleep(0.01)
print(leftovers.descendants(os.getpid()).get(child, 0) >= 20 << 20, leftovers._lives(uid), flush=True)
leftovers.end_descendants(None)
print("ended")
"""
    with script(hostile.HEADLESS + code) as process:
        try:
            assert process.communicate(timeout=60)[0] == "True True\nended\n"
        finally:
            process.kill()


# ---- throw-away users


HOLD = """
leftovers.LOCK_FOLDERS = ({folder!r},)
leftovers.UIDS = leftovers.UIDS[:{uids}]
os.getpid = lambda: 0  # where the search starts: all want the same
uid, lock = leftovers.take_uid()
if not os.fork():
    os.setsid()
    os.setresuid(uid, uid, uid)
os.write(1, b"%d\\n" % uid)  # at once: two processes say it
time.sleep(60)  # ends by itself if the test fails
"""


@as_root
def test_a_user_belongs_to_one_keeper_and_its_processes_end_before_the_next(tmp_path):
    """Three keepers that share three users are killed; their programs live on until somebody takes the users again."""
    folder = str(tmp_path / "locks")
    keepers = [script(HOLD.format(folder=folder, uids=3)) for _ in range(3)]
    try:
        taken = sorted(int(keeper.stdout.readline()) for keeper in keepers)
        assert taken == list(leftovers.UIDS[:3])
        for keeper in keepers:
            keeper.stdout.readline()  # its program runs
            keeper.kill()
            keeper.wait()
        assert all(leftovers._lives(uid) for uid in taken)
        clean = f"leftovers.LOCK_FOLDERS = ({folder!r},)\nleftovers.clean_after_the_killed({str(tmp_path / 'none')!r})"
        with script(clean) as cleaner:
            assert cleaner.wait(60) == 0
        assert not any(leftovers._lives(uid) for uid in taken)
        assert [os.path.getsize(f"{folder}/{uid}") for uid in taken] == [0, 0, 0]
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.communicate()


@as_root
def test_a_user_of_a_killed_keeper_is_cleaned_before_it_is_given_on(tmp_path):
    folder = str(tmp_path / "locks")
    with script(HOLD.format(folder=folder, uids=1)) as first:
        uid = int(first.stdout.readline())
        first.stdout.readline()
        first.kill()
    assert leftovers._lives(uid)
    code = f"leftovers.LOCK_FOLDERS = ({folder!r},)\nleftovers.UIDS = leftovers.UIDS[:2]\nos.getpid = lambda: 0\n"
    with script(code + "leftovers.END_SECONDS = -1\nprint(leftovers.take_uid()[0])") as hasty:
        assert hasty.communicate(timeout=60)[0] == f"{leftovers.UIDS[1]}\n" and os.path.getsize(f"{folder}/{uid}")
    with script(code + "uid, lock = leftovers.take_uid()\nprint(uid, leftovers._lives(uid))") as second:
        assert second.communicate(timeout=60)[0] == f"{uid} False\n"


@as_root
def test_a_program_cannot_stop_who_ends_it():
    code = """
uid, lock = leftovers.take_uid()
reads, writes = os.pipe()
if not os.fork():
    os.setresuid(uid, uid, uid)
    os.write(writes, b"1")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.kill(-1, 19)  # SIGSTOP
        except ProcessLookupError:
            pass
    os._exit(0)
os.read(reads, 1)
become = os.setresuid
os.setresuid = lambda *users: (become(*users), time.sleep(0.2))  # time to stop it
leftovers.end_descendants(uid)
leftovers.give_back(uid, lock)
print("ended")
"""
    with script(code) as process:
        try:
            assert process.communicate(timeout=50)[0] == "ended\n"
        finally:
            process.kill()


@as_root
def test_files_in_places_for_everybody_go_with_their_user(tmp_path, monkeypatch):
    monkeypatch.setattr(walls, "landlock_version", lambda: 0)
    monkeypatch.setattr(leftovers, "WORLD_WRITABLE", (str(tmp_path), "/no/such/place"))
    uid = leftovers.UIDS[0]
    for name in ("of the user", "of another"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "file").write_text("")
    for name in ("of the user", "of the user/deep", "of the user/file"):
        os.chown(tmp_path / name, uid, uid)
    with open(tmp_path / "lock", "w") as lock:
        lock.write("in use")
        leftovers.give_back(uid, lock.fileno())
    assert sorted(os.listdir(tmp_path)) == ["lock", "of another"] and (tmp_path / "of another" / "file").exists()


@as_root
def test_locks_lie_in_a_folder_of_root_alone(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "link").symlink_to("/root")
    monkeypatch.setattr(leftovers, "LOCK_FOLDERS", tuple(str(tmp_path / name) for name in ("open", "link", "own")))
    (tmp_path / "open").chmod(0o777)
    assert leftovers._lock_folder() == str(tmp_path / "own") and Path(tmp_path / "own").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(leftovers, "LOCK_FOLDERS", (str(tmp_path / "open"),))
    with pytest.raises(OSError, match="no folder for locks"):
        leftovers._lock_folder()


def test_users_are_outside_the_ranges_of_others():
    for low, high in ((0, 60577), (60578, 60705), (61184, 65519), (65534, 65535)):  # systemd's table of users
        assert not {leftovers.KILLER, *leftovers.UIDS} & set(range(low, high + 1))
    assert leftovers.KILLER not in leftovers.UIDS
    assert signal.SIGKILL == leftovers.signal.SIGKILL
