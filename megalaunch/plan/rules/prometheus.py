"""Rules of the Prometheus endpoint. Whether its port is free is known only at the launch."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule

register_inert(
    InertSetting(
        "logging.prometheus_host_idle",
        "logging.prometheus_host is set only with logging.prometheus_port.",
        "Without a port there is no endpoint.",
        ("logging.prometheus_host",),
        "logging.prometheus_port",
        lambda spec: spec.logging.prometheus_port is not None,
        "logging.prometheus_port is null",
        ({"logging.prometheus_port": 9464},),
    )
)


@rule("logging.prometheus_host", "logging.prometheus_host is an IP address.")
def prometheus_host(at: RuleContext) -> Iterator[Violation]:
    """A name may stand for several addresses, and the endpoint listens on one."""
    host = at.spec.logging.prometheus_host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        yield Violation(
            "logging.prometheus_host",
            f"{host!r} is not an IP address",
            fixes=({"logging.prometheus_host": "127.0.0.1"},),
        )


@rule("logging.prometheus_port", "logging.prometheus_port is none of the ports on which the nodes of a run meet.")
def prometheus_port(at: RuleContext) -> Iterator[Violation]:
    """Node 0 has the endpoint and listens on launcher.ssh.master_port and the port after it."""
    port, first = at.spec.logging.prometheus_port, at.spec.launcher.ssh.master_port
    if at.spec.launcher.name == "ssh" and port in (first, first + 1):
        yield Violation(
            "logging.prometheus_port",
            f"node 0 listens on {port} for the other nodes (launcher.ssh.master_port={first})",
            {"port": port},
            ({"logging.prometheus_port": 9464},),
        )
