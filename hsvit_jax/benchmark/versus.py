"""Measures two programs in turn."""

import contextlib
import json
import os
import subprocess
import tempfile
from typing import Any

from hsvit_jax.benchmark import jobs, machine


def compare(ours: list[str], theirs: str, rounds: int) -> dict:
    """Runs two commands in turn, and pairs their results.

    Args:
        ours: the words of a command that prints a JSON line with `images_per_second`.
        theirs: the same, for a shell.

    Returns:
        the fields of the JSON line; `ratio` is the median over rounds of ours/theirs.

    Raises:
        ValueError: a command fails or prints no such line; the message ends with its last lines.
    """
    runs: dict[str, list[dict]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        runs["ours"].append(_run(ours, "our own run"))
        runs["theirs"].append(_run(theirs, "the command of --vs"))
    rates = {who: [r["images_per_second"] for r in records] for who, records in runs.items()}
    ratios = [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]
    memory = {who: max(r["peak_memory_bytes"] for r in records) for who, records in runs.items()}
    return {
        **jobs.summary("ratio", ratios),
        "ratios": ratios,
        "memory_ratio": memory["ours"] / memory["theirs"],
        "rounds": rounds,
        "vs": theirs,
        **{
            who: {
                **jobs.summary("images_per_second", rates[who]),
                "peak_memory_bytes": memory[who],
                "runs": rates[who],
                "last": runs[who][-1],
            }
            for who in runs
        },
    }


def _run(command: list[str] | str, what: str) -> dict:
    """Runs a command and returns its JSON line, with `peak_memory_bytes` where it states none."""
    # Output goes through files, as `wait4` must reap the process.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        shell = isinstance(command, str)
        process = subprocess.Popen(command, shell=shell, stdout=out, stderr=err)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        printed, errors = (stream.read().decode("utf-8", "replace") for stream in (out, err))
    record = next(filter(None, map(_parse, reversed(printed.splitlines()))), None)
    if process.returncode or record is None:
        why = "printed no JSON line with a positive images_per_second"
        if process.returncode:
            why = f"failed with code {process.returncode}"
        tail = "\n".join(errors.strip().splitlines()[-10:]) or "(standard error is empty)"
        raise ValueError(f"{what} {why}; its last lines:\n{tail}")
    if not _is_positive(record.get("peak_memory_bytes")):
        record["peak_memory_bytes"] = usage.ru_maxrss * machine.RSS_UNIT
    return record


def _parse(line: str) -> dict | None:
    """Parses a JSON object with a positive `images_per_second`; None for another line."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and _is_positive(record.get("images_per_second")):
            return record
    return None


def _is_positive(value: Any) -> bool:
    """Whether a value of JSON is a finite number above 0."""
    return type(value) in (int, float) and 0 < value < float("inf")
