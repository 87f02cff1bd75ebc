"""The commands that look at a device, on a GPU."""

from __future__ import annotations

import json

import pytest
from commands import run_process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def as_json(*args: object) -> dict:
    result = run_process(*args, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_info_names_driver_compiler_and_devices():
    found = as_json("info")
    cuda = found["backends"]["cuda"]
    assert cuda["is_available"]
    assert cuda["nvrtc"]
    assert {"driver", "cuda"} <= cuda.keys()
    device = cuda["devices"][0]
    assert device["total_nbytes"] >= device["free_nbytes"] > 0
    assert device["pools"]["release_threshold_nbytes"] >= 0


def test_the_doctor_finds_nothing_wrong_and_measures():
    found = as_json("doctor", "--backend", "cuda")
    assert found["problems"] == []
    assert found["is_right"]
    assert found["source"] == "measured on the device"
    assert found["release_threshold_nbytes"] > found["memory_nbytes"]
    calls = found["measured"]["calls"]
    assert all(calls[name] > 0 for name in ("launch_s", "plain_launch_s"))
    assert min(calls["await_s"], calls["plain_sync_s"]) > 20e-6  # the kernel runs as long


def test_bench_puts_our_copies_beside_the_drivers():
    found = as_json("bench", "--backend", "cuda", "--largest", "20", "--repeat", "3")
    names = ("h2d_s", "d2h_s", "put_s", "get_s")
    assert all(each[name] > 0 for each in found["copies"] for name in names)
    assert found["pipeline"]["nbytes"] == 1 << 20
    assert 0 <= found["pipeline"]["overlap"] <= 1
