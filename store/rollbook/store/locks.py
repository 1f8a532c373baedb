"""Files and folders that have one owner: locks that end with the process, and who has one that is taken."""

import fcntl
import os


def take(fd: int) -> str | None:
    """Lock what a descriptor is open on, for as long as it is open. None if that went well, else who has the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(fd)
    return None


def _owner(fd: int) -> str:
    """In words: this process may have it too, by another object, which is another thing to do about."""
    inode = str(os.fstat(fd).st_ino)
    try:
        with open("/proc/locks") as file:  # 1: FLOCK  ADVISORY  WRITE 4711 08:01:1315 0 EOF
            locks = [line.split() for line in file]
    except OSError:
        locks = []
    pids = {lock[4] for lock in locks if len(lock) > 5 and lock[1] == "FLOCK" and lock[5].split(":")[-1] == inode}
    if str(os.getpid()) in pids:
        return "this process"
    return f"another process ({pids.pop()})" if len(pids) == 1 else "another process"
