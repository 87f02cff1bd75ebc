"""RMM's CSV log: written as RMM does, whole lines only, and read back."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from upstreams import Ground, Upstream, simulated

from streamflow.errors import Closed
from streamflow.memory import LogAction, LoggingResourceAdaptor, LogRecord, read_log

HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"
TIME = r"\d\d:\d\d:\d\d\.\d{6}"

# As RMM 26 writes it, with the default stream and one more; and as older versions did.
OF_RMM = f"""{HEADER}14523,10:27:13.601394,allocate,0x7f3c4a000000,1024,0
14523,10:27:13.601402,allocate failure,(nil),99999999999,0x55d0c8a3e1f0
14524,10:27:14.000007,free,0x7f3c4a000000,1024,0x55d0c8a3e1f0
"""
OF_OLD_RMM = f"""{HEADER}21,10:27:13:601394,allocate,0x7f3c4a000000,1024,2
21,10:27:13:601402,free,7f3c4a000000,1024,0x0
"""


@pytest.fixture
def ground() -> Iterator[Ground]:
    with simulated() as found:
        yield found


def test_it_writes_the_lines_that_rmm_writes(ground: Ground, tmp_path: Path) -> None:
    stream = ground.stream()
    handle = hex(stream.handle)
    path = tmp_path / "log.csv"
    logging = LoggingResourceAdaptor(Upstream(fails_at={1}, device=0), path)
    assert path.read_text() == HEADER
    block = logging.allocate(1000, stream=stream)
    with pytest.raises(MemoryError):
        logging.allocate(55, stream=stream)
    address = hex(block.address)
    logging.deallocate(block, stream=stream)
    me = threading.get_native_id()
    expected = (
        re.escape(HEADER)
        + rf"{me},{TIME},allocate,{address},1000,{handle}\n"
        + rf"{me},{TIME},allocate failure,\(nil\),55,{handle}\n"
        + rf"{me},{TIME},free,{address},1000,{handle}\n"
    )
    assert re.fullmatch(expected, path.read_text())  # at once: nothing waits in a buffer
    logging.flush()


def test_the_default_stream_is_0(ground: Ground, tmp_path: Path) -> None:
    logging = LoggingResourceAdaptor(Upstream(device=0), tmp_path / "log.csv")
    place = ground.space.place(ground.stream())

    class Null:
        handle = 0

    place.stream = Null()
    logging._write(LogAction.ALLOCATE, 16, 1, place)
    assert (tmp_path / "log.csv").read_text().endswith(",allocate,0x10,1,0\n")


def test_what_was_written_can_be_read(ground: Ground, tmp_path: Path) -> None:
    stream = ground.stream()
    logging = LoggingResourceAdaptor(Upstream(fails_at={1}, device=0), tmp_path / "log.csv")
    block = logging.allocate(1000, stream=stream)
    with pytest.raises(MemoryError):
        logging.allocate(55, stream=stream)
    address = block.address
    logging.deallocate(block, stream=stream)
    records = read_log(logging.get_file_name())
    assert [(r.line, r.action, r.address, r.nbytes) for r in records] == [
        (2, LogAction.ALLOCATE, address, 1000),
        (3, LogAction.ALLOCATE_FAILURE, 0, 55),
        (4, LogAction.FREE, address, 1000),
    ]
    assert {record.stream for record in records} == {stream.handle}
    assert {record.thread for record in records} == {threading.get_native_id()}
    times = [record.time_us for record in records]
    assert times == sorted(times) or times[0] > times[-1]  # at midnight


def test_lines_of_8_threads_stay_whole_and_no_address_is_given_before_its_free(
    ground: Ground, tmp_path: Path
) -> None:
    path = tmp_path / "log.csv"

    class Reusing(Upstream):
        """Hands addresses out again at once."""

        def __init__(self) -> None:
            super().__init__(device=0)
            self.kept: list[int] = []

        def _take(self, nbytes: int, alignment: int, place: Any) -> Any:
            with self._lock:
                piece = super()._take(nbytes, alignment, place)
                if self.kept:
                    del self.live[piece.address]
                    piece.address = self.kept.pop()
                    self.live[piece.address] = piece
                return piece

        def _give(self, piece: Any, place: Any) -> None:
            with self._lock:
                super()._give(piece, place)
                self.kept.append(piece.address)

    logging = LoggingResourceAdaptor(Reusing(), path)

    def work() -> None:
        stream = ground.stream()
        for turn in range(100):
            block = logging.allocate(turn + 1, stream=stream)
            logging.deallocate(block, stream=stream)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live: set[int] = set()
    records = read_log(path)
    assert len(records) == 1600
    for record in records:
        if record.action is LogAction.ALLOCATE:
            assert record.address not in live
            live.add(record.address)
        else:
            live.remove(record.address)


def test_the_variable_of_rmm_names_the_file(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMM_LOG_FILE", str(tmp_path / "named.csv"))
    assert LoggingResourceAdaptor(Upstream()).get_file_name() == str(tmp_path / "named.csv")
    monkeypatch.delenv("RMM_LOG_FILE")
    with pytest.raises(ValueError, match="RMM_LOG_FILE"):
        LoggingResourceAdaptor(Upstream())


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        LoggingResourceAdaptor(Upstream(), tmp_path / "no" / "log.csv")


def test_closing_waits_for_the_last_free(ground: Ground, tmp_path: Path) -> None:
    stream = ground.stream()
    path = tmp_path / "log.csv"
    logging = LoggingResourceAdaptor(Upstream(device=0), path)
    block = logging.allocate(10, stream=stream)
    logging.close()
    with pytest.raises(Closed):
        logging.allocate(10, stream=stream)
    assert not logging._file.closed
    logging.deallocate(block, stream=stream)
    assert logging._file.closed
    assert [record.action.value for record in read_log(path)] == ["allocate", "free"]
    logging.flush()


def test_dropping_it_closes_the_file(tmp_path: Path) -> None:
    logging = LoggingResourceAdaptor(Upstream(), tmp_path / "log.csv")
    file = logging._file
    del logging
    assert file.closed


class FullDisk:
    closed = False

    def write(self, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed = True


def test_a_full_disk_leaves_nothing_half_made(ground: Ground, tmp_path: Path) -> None:
    stream = ground.stream()
    upstream = Upstream(fails_at={2}, device=0)
    logging = LoggingResourceAdaptor(upstream, tmp_path / "log.csv")
    block = logging.allocate(10, stream=stream)
    logging._file.close()
    logging._file = FullDisk()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        logging.allocate(10, stream=stream)
    assert len(upstream.live) == 1
    with pytest.raises(MemoryError, match="take 2") as caught:
        logging.allocate(10, stream=stream)
    assert "could not be written" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="No space left"):
        logging.deallocate(block, stream=stream)
    assert not upstream.live


def test_logs_of_rmm_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rmm.csv"
    path.write_text(OF_RMM)
    at = ((10 * 60 + 27) * 60 + 13) * 10**6 + 601394
    address, stream = 0x7F3C4A000000, 0x55D0C8A3E1F0
    assert read_log(path) == [
        LogRecord(2, 14523, at, LogAction.ALLOCATE, address, 1024, 0),
        LogRecord(3, 14523, at + 8, LogAction.ALLOCATE_FAILURE, 0, 99999999999, stream),
        LogRecord(4, 14524, at + 398613, LogAction.FREE, address, 1024, stream),
    ]
    path.write_text(OF_OLD_RMM.replace("\n", "\r\n"), newline="")
    assert [(r.address, r.stream, r.time_us) for r in read_log(path)] == [
        (address, 2, at),
        (address, 0, at + 8),
    ]


GOOD = "1,10:00:00.000001,allocate,0x10,8,0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r":1: a log begins with Thread,Time.*; found an empty line"),
        ("a,b\n", r":1: a log begins with .* found a,b"),
        (f"{GOOD}\n", r":1: a log begins with"),
        (f"{HEADER}{GOOD}\n1,2,3\n", r":3: 6 fields are needed, found 3: '1,2,3'. Was the file"),
        (f"{HEADER}{GOOD},9\n", r":2: 6 fields are needed, found 7"),
        (f"{HEADER}\n\n{GOOD.replace('1,', 'x,', 1)}\n", r":4: Thread is a number, found 'x'"),
        (f"{HEADER}{GOOD.replace('10:', '25:')}", r":2: Time lies outside of a day: '25:"),
        (f"{HEADER}{GOOD.replace('10:', '')}", r":2: Time is hours:minutes:seconds"),
        (f"{HEADER}{GOOD.replace('allocate', 'alocate')}", r":2: Action is one of 'allocate', "),
        (f"{HEADER}{GOOD.replace('0x10', '0x')}", r":2: Pointer is a hexadecimal .* found '0x'"),
        (f"{HEADER}{GOOD.replace('0x10', '-16')}", r":2: Pointer is a hexadecimal"),
        (f"{HEADER}{GOOD.replace(',8', ',-8')}", r":2: Size is a number, found '-8'"),
        (f"{HEADER}{GOOD.replace(',8', ',')}", r":2: Size is a number, found ''"),
        (f"{HEADER}{GOOD[:-1]}s", r":2: Stream is a handle such as 0 or 0x1f, found 's'"),
        (f"{HEADER}\xff\n", r"is no log of allocations: .*decode"),
        (f'{HEADER}"{"9" * 200000}",\n', r"is no log of allocations: field larger"),
    ],
)
def test_what_is_no_log_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"bad\.csv.*{message}"):
        read_log(path)


def test_a_log_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_log(tmp_path / "none.csv")
