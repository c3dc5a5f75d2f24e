"""The process of a run: environment, signals, watchdog, memory, and the job's other processes."""
