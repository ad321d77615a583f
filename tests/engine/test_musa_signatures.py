"""What runs ask of torch.musa, held to the signatures of torch_musa's published sources: its wheels are a vendor's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megalaunch.engine.platform.musa import MusaPlatform
from megalaunch.platform.platforms import PLATFORMS

# MooreThreads/torch_musa v2.7.1, commit 8b583b3f2fd0d9d3d9e74b9ec588a25d8bed1a30: device.py, stream.py, memory.py,
# random.py and amp/common.py of torch_musa/core, whose names torch_musa/__init__.py exports and sets as torch.musa.
PUBLISHED = """
def is_available(): return True
def device_count(): return 8
def current_device(): return 0
def set_device(device): pass
def synchronize(device=None): pass
def current_stream(device=None): return Stream()
def stream(stream): return stream
def max_memory_allocated(device=None): return 5
def get_amp_supported_dtype(): return [torch.float16, torch.bfloat16]
def get_rng_state(device="musa"): return torch.zeros(16)
def set_rng_state(new_state, device="musa"): pass
def manual_seed(seed): pass
def manual_seed_all(seed): pass
class Stream:
    def __new__(cls, device=None, priority=0, **kwargs): return object.__new__(cls)
    def wait_event(self, event): pass
    def record_event(self, event=None): return Event()
    def wait_stream(self, stream): pass
    def synchronize(self): pass
class Event:
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False): return object.__new__(cls)
    def record(self, stream=None): pass
    def wait(self, stream=None): pass
    def elapsed_time(self, end_event): return 0.0
"""


@pytest.fixture
def musa(monkeypatch) -> Any:
    """Return torch.musa with the published functions, and nothing else."""
    module = ModuleType("torch_musa")
    module.torch = torch
    exec(PUBLISHED, vars(module))
    monkeypatch.setitem(sys.modules, "torch_musa", module)
    monkeypatch.setattr(torch, "get_device_module", {"musa": module}.__getitem__)
    return module


def test_a_platform_calls_what_torch_musa_publishes(musa):
    platform, device = MusaPlatform(PLATFORMS["musa"]), torch.device("privateuseone", 0)  # "musa" once it is renamed
    assert platform.unusable() is None
    assert platform.device_count() == 8
    platform.set_device(device)
    platform.synchronize(device)
    assert isinstance(platform.current_stream(device), musa.Stream)
    assert platform.max_memory_allocated(device) == 5
    assert platform.autocast_dtypes() == (torch.float16, torch.bfloat16)
    assert platform.process_group_backends == "cpu:gloo,musa:mccl"


def test_what_torch_accelerator_cannot_answer_is_asked_of_the_module(musa):
    # torch_musa registers no DeviceAllocator, which torch.accelerator's memory functions assert.
    for name in ("max_memory_allocated", "current_stream", "synchronize"):
        assert hasattr(torch.accelerator, name)
        assert name in MusaPlatform.in_device_module
        assert hasattr(musa, name)


def test_sharding_calls_what_torch_musa_publishes(musa):
    """Make the calls of torch.distributed.fsdp (_fsdp_param_group.py), which asks the device's module for streams."""
    stream = musa.Stream(priority=-1)
    with_event = musa.Event()
    with_event.record()
    musa.current_stream().wait_event(with_event)
    stream.wait_stream(musa.current_stream())
    assert musa.stream(stream) is stream
    assert musa.current_device() == 0
