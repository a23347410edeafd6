"""Imported by the server process that data workers are forked from, and by nobody else: it and they do not hear Ctrl-C.

Loaded before torch: a process that came to know this later could be interrupted, with a traceback, while it starts.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
