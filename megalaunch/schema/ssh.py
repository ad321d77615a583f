"""The `launcher.ssh` section: the hosts of a run without a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class SshSpec:
    """Hosts, and how ssh reaches them; everything else is in the user's ssh configuration."""

    hosts: tuple[str, ...] = setting(
        (), "One host or [user@]host for each node, node 0 first; more are spare hosts, which replace those that fail."
    )
    config: str | None = setting(None, "Configuration file of ssh (ssh -F); null: ~/.ssh/config.")
    master_addr: str | None = setting(
        None, "Name or address at which all nodes reach node 0; null: that of the first host in ssh's configuration."
    )
    master_port: int = setting(29400, "First of two ports on node 0.", minimum=1, maximum=65534)
    replace_stragglers: bool = setting(
        False,
        "Save and restart with a spare host in place of one whose ranks compute slower than the others or wait for a "
        "CPU (train.straggler_interval), or whose links are slower (launcher.preflight).",
    )
    connect_timeout: int = setting(10, "Time limit for connecting to a host.", "seconds", minimum=1, maximum=3600)
    environment: tuple[str, ...] = setting(
        (), "Names of variables to copy to the nodes, with `*` for any text: [NCCL_*, HF_TOKEN]."
    )
