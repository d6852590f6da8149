"""Execute another program that dies with the parent process: `bound.py PARENT_PID COMMAND...`.

A separate script, because code between fork and exec is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent ended before prctl
        sys.exit(1)
    os.execvp(command[0], command)
