"""Becomes another program that dies with its parent. Run as a script; knows nothing of specsplit.

    python -S launcher.py PARENT_PID PROGRAM ARGUMENT...

The kernel's parent-death signal survives exec, and setting it here rather than between fork and exec keeps
the parent, which has threads, from running Python code in a forked child.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the signal was armed
        raise SystemExit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
