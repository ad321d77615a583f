"""Options of the group `platform` without a file: the chips and device types of other packages."""

from __future__ import annotations

from megalaunch.platform.plugins import plugins


def chips_by_option() -> dict[str, str]:
    """Return the chip that each option means: a chip its own name, a device type the first chip of its package.

    Raises:
        PlatformError: A platform of another package cannot be loaded.
    """
    found: dict[str, str] = {}
    for plugin in plugins():
        if plugin.chips:
            found[plugin.facts.device] = plugin.chips[0].name
        found |= {chip.name: chip.name for chip in plugin.chips}
    return found
