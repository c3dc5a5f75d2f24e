"""The modes of the command line: one module each, whose `run(request)` returns the exit code."""
