"""Become another program that dies with the process that started this one: `bound.py PARENT_PID COMMAND...`.

A script of its own, because code between fork and exec is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before prctl
        sys.exit(1)
    os.execvp(command[0], command)
