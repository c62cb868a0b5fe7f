"""Two hosts on one machine: network namespaces joined by a link whose rate is limited. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

ADDRESSES = ("10.77.0.1", "10.77.0.2")
RATES = {"200mbit": "200mbit", "1gbit": "1gbit", "none": ""}
"""Names of links and the rate `tc` limits them to; "" for no limit."""


@final
@dataclass(frozen=True, slots=True)
class Hosts:
    """Two namespaces.

    Attributes:
      names: of the namespaces; `ADDRESSES` are theirs.
    """

    names: tuple[str, str]

    def command(self, host: int, command: list[str], core: int | None = None) -> list[str]:
        """The command run on a host, on one core if a number is given."""
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        return ["ip", "netns", "exec", self.names[host], *pinned, *command]


def missing() -> str:
    """What is missing for two hosts on this machine, "" if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} not installed (Debian: iproute2, util-linux)"
    made = subprocess.run(["ip", "netns", "add", f"as-try-{os.getpid()}"], capture_output=True, check=False)
    if made.returncode != 0:
        return "network namespaces cannot be made here"
    subprocess.run(["ip", "netns", "del", f"as-try-{os.getpid()}"], check=False)
    return ""


@contextmanager
def two_hosts(rate: str) -> Iterator[Hosts]:
    """Two hosts joined by a link of a rate that `tc` knows ("200mbit"), or of none; gone at the end.

    Each host's name leads to its own address, which Gloo listens on.
    """
    tag = f"{os.getpid():x}"
    hosts = Hosts((f"as{tag}a", f"as{tag}b"))
    ends = (f"v{tag}a", f"v{tag}b")
    folders = [Path("/etc/netns") / name for name in hosts.names]
    try:
        for name, folder, address in zip(hosts.names, folders, ADDRESSES, strict=True):
            _run("ip", "netns", "add", name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(hosts.names, ends, ADDRESSES, strict=True):
            _run("ip", "link", "set", end, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", end, "up")
            if rate:
                limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", *limit)
        yield hosts
    finally:
        for name, folder in zip(hosts.names, folders, strict=True):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


def run_both(commands: Sequence[Sequence[str]], link: str, folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """The rows that some processes leave in the folder's `rows.json`, each with its link; logs are kept beside it.

    Raises:
      RuntimeError: a process failed; with the ends of all logs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "rows.json"
    out.unlink(missing_ok=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    logs = [folder / f"process{i}.log" for i in range(len(commands))]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, path in zip(commands, logs, strict=True):
            with path.open("wb") as log:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for process in running:
            process.wait(timeout_s)
    finally:
        for process in running:
            process.kill()
            process.wait()
    if any(process.returncode for process in running) or not out.exists():
        ends = "\n---\n".join(path.read_text(errors="replace")[-3000:] for path in logs)
        raise RuntimeError(f"a process failed over {link}:\n{ends}")
    return [{"link": link, **row} for row in json.loads(out.read_text())]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
