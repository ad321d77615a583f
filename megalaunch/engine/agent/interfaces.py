"""Find the network interface of an address, so that workers listen on that interface only."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912  # netdevice(7)
_ENTRY, _MAX_ENTRIES = 40, 1024  # bytes of a struct ifreq on 64-bit Linux


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 or IPv6 address; None if it cannot be determined."""
    if ":" in address:
        return _ipv6_interfaces().get(socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex())
    return _ipv4_interfaces().get(socket.inet_aton(address))


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, which no other machine can reach."""
    return address == "::1" or address.startswith("127.")


def _ipv4_interfaces() -> dict[bytes, str]:
    entries = array.array("B", bytes(_ENTRY * _MAX_ENTRIES))
    request = struct.pack("iP", len(entries), entries.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            (length, _) = struct.unpack("iP", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))
        except OSError:
            return {}
    found = {}
    for start in range(0, length, _ENTRY):
        entry = entries[start : start + _ENTRY].tobytes()
        name = entry[:16].partition(b"\0")[0].decode().partition(":")[0]  # eth0:1 is a second address of eth0
        found[entry[20:24]] = name
    return found


def _ipv6_interfaces() -> dict[str, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {fields[0]: fields[-1] for fields in map(str.split, lines)}
