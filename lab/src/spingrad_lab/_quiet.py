"""Importing this makes a process end without a traceback at Ctrl-C; for worker processes."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
