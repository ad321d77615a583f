"""The command line of ssh for each node, and the order that goes over it: variables are in the order alone."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from megalaunch.launchers.attached.orders import commands_on_fewer, copied_variables, hidden_values, node_orders
from megalaunch.launchers.attached.remote_agent import NodeOrder
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.ssh import SshSpec

_AGENT = "megalaunch.launchers.attached.remote_agent"
_ALIVE_SECONDS = 5  # between two questions of ssh to its server; it ends after three without an answer


def ssh_commands(settings: LauncherSpec, hosts: Sequence[str]) -> list[list[str]]:
    """Return the command line for each host, in order. It asks no question, and shares no connection with others."""
    ssh, python = settings.ssh, settings.python or sys.executable
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(ssh.connect_timeout),
        "ServerAliveInterval": str(_ALIVE_SECONDS),
        "ServerAliveCountMax": "3",
        "ControlPath": "none",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    agent = shlex.join([python, "-m", _AGENT])  # the login shell of the host splits it again
    return [["ssh", "-T", *_config(ssh), *words, host, agent] for host in hosts]


def ssh_orders(job: Job, first_host: str, copied: Mapping[str, str], shared_text: str, attempt: int) -> list[NodeOrder]:
    """Return what each node runs. Raises LauncherError if ssh does not tell the address of node 0, on `first_host`."""
    ssh = job.settings.ssh
    address = ssh.master_addr or _address(ssh, first_host)
    return node_orders(job, copied, address, ssh.master_port, shared_text, attempt)


def shown_plan(job: Job, environment: Mapping[str, str]) -> str:
    """Return the command line and the order of each node, with the names of copied variables in place of values."""
    hidden = copied_variables(hidden_values(environment), job.settings.ssh.environment)
    hosts, spares = job.settings.ssh.hosts[: job.nodes], job.settings.ssh.hosts[job.nodes :]
    lines = []
    orders = ssh_orders(job, hosts[0], hidden, "<text of this file>", attempt=0)
    for node, (command, order) in enumerate(zip(ssh_commands(job.settings, hosts), orders, strict=True)):
        text = order.to_line().decode()
        lines += [f"# node {node}: {hosts[node]}, with the second line on stdin", shlex.join(command), text]
    if spares:
        lines.append(f"# spare hosts: {', '.join(spares)}")
    lines += commands_on_fewer(job)
    return "\n".join(line.rstrip("\n") for line in lines) + "\n"


def _config(ssh: SshSpec) -> list[str]:
    return [] if ssh.config is None else ["-F", ssh.config]


def _address(ssh: SshSpec, host: str) -> str:
    """Return the name or address of a host, as ssh's configuration has it; nothing is connected."""
    try:
        shown = subprocess.run(
            ["ssh", "-G", *_config(ssh), host], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
    except FileNotFoundError:
        raise LauncherError("ssh is not found on this machine", "install the client of OpenSSH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LauncherError(f"ssh does not work: {error}") from error
    if shown.returncode != 0:
        raise LauncherError(f"ssh: {shown.stderr.strip()}", "repair the configuration of ssh (launcher.ssh.config)")
    fields = dict(line.partition(" ")[::2] for line in shown.stdout.splitlines())
    return fields.get("hostname") or host.rpartition("@")[2]
