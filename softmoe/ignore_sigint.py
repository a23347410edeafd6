"""Importing this module makes the process ignore Ctrl-C. Only the server that data workers are forked from imports it.

It is loaded there before torch: a process that ignored Ctrl-C later could be interrupted, with a traceback, while it
starts.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
