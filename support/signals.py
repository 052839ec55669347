"""Signals that ask a script to stop, as a flag that its loop reads."""

import contextlib
import os
import signal
import sys
import time

from support.script import under_torchrun

# Signals that ask a program to stop. A closed terminal sends SIGHUP (not under nohup), and batch
# systems one of the last three, some minutes before they kill a job. (torchrun passes these on only
# with --signals-to-handle.)
MUST_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_SIGNALS = (*MUST_STOP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Stopper:
    """Turn STOP_SIGNALS into a flag, until `restore` is called. The loop reads
    `stopper.signal` (None, or the signal's number) between updates, saves and ends.

    A second ctrl-C raises KeyboardInterrupt at once. Under torchrun each ctrl-C arrives twice, from
    the terminal and from the launcher, so that a second one within a second is ignored. The ranks
    must agree on the flag (all-reduce) before they act on it. A Stopper must be created in the main
    thread, because Python handles signals there."""

    def __init__(self):
        self.signal = None
        self.time = 0.0  # of the first signal
        self.handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self.handlers.items():
            # A library, such as NCCL, may use one of the last three for something else.
            is_ours = number in MUST_STOP and handler != signal.SIG_IGN
            if is_ours or handler == signal.SIG_DFL:
                signal.signal(number, self.handle)

    def restore(self) -> None:
        """Restore the former handlers, because a notebook goes on after a run. Under torchrun they
        stay: it sends SIGTERM to a rank that is about to print that another one died."""
        for number, handler in self.handlers.items():
            if handler is not None and not under_torchrun():  # None: not installed by Python
                signal.signal(number, handler)

    def handle(self, number: int, frame: object) -> None:
        """Set the flag."""
        if self.signal is None:
            self.signal, self.time = number, time.monotonic()
            with contextlib.suppress(OSError):  # the terminal is gone; print is not safe here
                os.write(2, b'\nstopping after this update or the next (ctrl-C again: at once)\n')
        elif number == signal.SIGINT and time.monotonic() - self.time > under_torchrun():
            raise KeyboardInterrupt


def exit_at_signals() -> None:
    """Let STOP_SIGNALS end the program by SystemExit, so that its `finally` blocks end what it has
    started. A ctrl-C raises KeyboardInterrupt anyway, and what is ignored or handled stays so."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
