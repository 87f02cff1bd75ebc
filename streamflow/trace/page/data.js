// The trace: columns of numbers, as streamflow/trace/page_data.py wrote them.

const raw = JSON.parse(document.getElementById("data").textContent);

function column(packed) {
  if (packed.list) return packed.list;
  const text = atob(packed.base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  if (packed.bits === 8) return new Int8Array(bytes.buffer);
  if (packed.bits === 24) {
    return Int32Array.from({ length: bytes.length / 3 }, (_, i) => bytes[3 * i] | (bytes[3 * i + 1] << 8) | ((bytes[3 * i + 2] << 24) >> 8));
  }
  return packed.bits === 16 ? new Int16Array(bytes.buffer) : new Int32Array(bytes.buffer);
}

function columns(table) {
  const result = {};
  for (const [name, packed] of Object.entries(table)) result[name] = column(packed);
  return result;
}

const ops = { ...columns(raw.ops), name: column(raw.names) };
const edges = columns(raw.edges);
const arrays = column(raw.arrays);
const said = columns(raw.said);
const gaps = columns(raw.gaps);
const critical = column(raw.critical);
const memory = raw.memory.map(({ title, ...curve }) => ({ title, ...columns(curve) }));
const { texts, lanes, reasons } = raw;
const numOps = ops.id.length;
const isCritical = new Uint8Array(numOps);
for (const op of critical) isCritical[op] = 1;
const STREAM_ORDER = reasons.indexOf("stream-order");

const ENGINES = Object.keys(raw.colours).filter((name) => name !== "failed");
const COLOURS = ENGINES.map((name) => raw.colours[name]);
const GLYPHS = { h2d: "\u25BC", d2h: "\u25B2", compute: "\u25A0", other: "\u25CB" };
const WORDS = { h2d: "copy in", d2h: "copy out", compute: "compute", other: "other" };

const text = (index) => (index < 0 ? "" : texts[index]);
const nameOf = (op) => text(ops.name[op]);
const isFailed = (op) => text(ops.state[op]) === "failed";
const signOf = (op) => (isFailed(op) ? "\u2715" : GLYPHS[ENGINES[ops.engine[op]]]);
const clipped = (words, length) => (words.length > length ? `${words.slice(0, length - 1)}\u2026` : words);

// Edges by op, without an object for each: indices of edges, in one array.
function byOp(column) {
  const first = new Int32Array(numOps + 1);
  for (const op of column) first[op + 1]++;
  for (let op = 0; op < numOps; op++) first[op + 1] += first[op];
  const next = first.slice();
  const sorted = new Int32Array(column.length);
  for (let edge = 0; edge < column.length; edge++) sorted[next[column[edge]]++] = edge;
  return (op) => sorted.subarray(first[op], first[op + 1]);
}

const incoming = byOp(edges.dst);
const outgoing = byOp(edges.src);

// What comes before an op, by any number of edges that `counts` lets pass.
function ancestorsOf(op, counts) {
  const found = new Set();
  const open = [op];
  while (open.length) {
    for (const edge of incoming(open.pop())) {
      const src = edges.src[edge];
      if (counts(edge) && src !== op && !found.has(src)) {
        found.add(src);
        open.push(src);
      }
    }
  }
  return found;
}

// -- numbers as people read them

function digits(number) {
  const size = Math.abs(number);
  return number.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

function spellTicks(ticks) {
  const seconds = ticks * raw.tick_s;
  if (!seconds) return "0 s";
  for (const [factor, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "\u00B5s"]]) {
    if (Math.abs(seconds) >= factor * 0.9995) return `${digits(seconds / factor)} ${unit}`;
  }
  return `${digits(seconds / 1e-9)} ns`;
}

// A moment, which must be told from others near it.
function spellMoment(ticks) {
  const seconds = ticks * raw.tick_s;
  if (!seconds) return "0 s";
  const [factor, unit] = unitOf(seconds);
  return `${Number((seconds / factor).toPrecision(6))} ${unit}`;
}

function unitOf(seconds) {
  if (seconds >= 1) return [1, "s"];
  return seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "\u00B5s"];
}

function spellBytes(number) {
  if (number < 1024) return `${number} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let power = 1;
  while (power < units.length && number >= 1023.5 * 1024 ** power) power++;
  return `${digits(number / 1024 ** power)} ${units[power - 1]}`;
}

const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

// What trace.explain says of an op, and what it says of a gap: rows of a table of sentences.
function sentences(table) {
  const first = new Int32Array(table.num.length + 1);
  table.num.forEach((num, item) => (first[item + 1] = first[item] + num));
  const spell = (row) => {
    const words = text(table.form[row]).replace("{length}", () => text(table.length[row]) || "{length}");
    const op = table.op[row];
    const places = { op: () => nameOf(op) + text(ops.on[op]), array: () => text(table.array[row]) };
    return op < 0 ? words : words.replace(/\{(op|array)\}/g, (_, place) => places[place]());
  };
  return {
    all: (item) => Array.from({ length: table.num[item] }, (_, place) => spell(first[item] + place)),
    headline: (item) => (table.headline[item] < 0 ? "" : spell(first[item] + table.headline[item])),
    // The op that the headline names, else the last that is named at all.
    opOf: (item) => {
      const named = table.op.slice(first[item], first[item + 1]);
      const main = named[table.headline[item]] ?? -1;
      return main < 0 ? (named.filter((op) => op >= 0).at(-1) ?? -1) : main;
    },
  };
}

const ofOps = sentences(said);
const ofGaps = sentences(gaps);

const describeArray = (index) => (index < 0 ? "" : text(arrays[index]));

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
