"""Logs of RMM itself: our reader takes them, and our own have the same form."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

import streamflow as sf
from streamflow.memory import CudaMemoryResource, LogAction, LoggingResourceAdaptor, read_log

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

TOO_MUCH = 1 << 50
LINE = re.compile(
    r"\d+,\d\d:\d\d:\d\d\.\d{6},"
    r"(?:(?:allocate|free),0x[0-9a-f]+|allocate failure,\(nil\)),\d+,(?:0|0x[0-9a-f]+)"
)


def log_of_rmm(path: Path) -> str:
    rmm = pytest.importorskip("rmm")
    logging = rmm.mr.LoggingResourceAdaptor(rmm.mr.CudaMemoryResource(), str(path))
    address = logging.allocate(1000)
    with pytest.raises(MemoryError):
        logging.allocate(TOO_MUCH)
    logging.deallocate(address, 1000)
    logging.flush()
    return str(logging.get_file_name())


def log_of_ours(path: Path) -> str:
    logging = LoggingResourceAdaptor(CudaMemoryResource(), path)

    async def main() -> None:
        async with sf.Device(backend="cuda", memory=logging) as dev:
            array = dev.empty(1000, np.uint8)
            with pytest.raises(sf.OutOfDeviceMemory):
                logging.allocate(TOO_MUCH, stream=dev.stream())
            array.free()

    asyncio.run(main())
    logging.close()
    return logging.get_file_name()


@pytest.mark.parametrize("write", [log_of_rmm, log_of_ours])
def test_both_logs_have_one_form(write, tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv")
    header, *lines = Path(path).read_text().splitlines()
    assert header == "Thread,Time,Action,Pointer,Size,Stream"
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    records = read_log(path)
    assert [(record.action, record.nbytes) for record in records] == [
        (LogAction.ALLOCATE, 1000),
        (LogAction.ALLOCATE_FAILURE, TOO_MUCH),
        (LogAction.FREE, 1000),
    ]
    assert records[0].address == records[2].address != 0
