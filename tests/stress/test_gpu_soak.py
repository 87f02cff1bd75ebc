"""The command that soaks a GPU: eight minutes of it there, a moment of it on the simulator."""

from __future__ import annotations

import json
import os

import pytest

from tests.stress.gpu_soak import main


def last_line(text: str) -> dict[str, object]:
    told: dict[str, object] = json.loads(text.splitlines()[-1])
    return told


def test_the_command_tells_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "1", "--backend", "sim"]) == 0
    told = last_line(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["good"]


@pytest.mark.gpu
@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_random_ops_with_real_kernels_equal_a_serial_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = os.environ.get("SOAK_SECONDS", "480")
    assert main(["--seconds", seconds]) == 0, last_line(capsys.readouterr().out)
