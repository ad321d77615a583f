"""What every test shares: the forked-ranks fixture. The fixtures of one part live in a file of their own."""

from __future__ import annotations

pytest_plugins = ["forked_ranks"]
