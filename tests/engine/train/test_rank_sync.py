"""Where the numbers that ranks share are reduced."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from megalaunch.engine.train import rank_sync


def test_token_counts_are_reduced_on_a_stream_of_their_own(monkeypatch):
    streams, entered = [], []

    class Stream:
        def __enter__(self):
            entered.append(self)

        def __exit__(self, *error):
            entered.remove(self)

    def make_stream(device):
        streams.append(Stream())
        return streams[-1]

    monkeypatch.setattr(
        rank_sync, "platform_of", lambda device: SimpleNamespace(has_streams=True, make_stream=make_stream)
    )
    monkeypatch.setattr(dist, "all_reduce", lambda sums: sums.mul_(2) if entered else None)
    device = torch.device("meta")
    monkeypatch.setattr(rank_sync, "_on_device", lambda numbers, dtype, device: torch.tensor(numbers, dtype=dtype))
    assert [rank_sync.total_valid_tokens([3, 4], None, 0, device) for _ in range(2)] == [(6, 8)] * 2
    assert (len(streams), entered) == (1, [])
