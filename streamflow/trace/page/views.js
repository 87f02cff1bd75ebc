// A view is what the graph shows: nodes (ops, or groups of them) with places, and edges.

const MEMBERS_MAX = 300; // of a group that is opened: more are put together by time
const PARTS_MAX = 48;
const NEIGHBOURS_MAX = 600; // of an open group: an op may be tied to all others

function readView(packed) {
  const { key, labels, scale, of_op: ofOp, ...rest } = packed;
  const view = { key, labels, ...columns(rest) };
  view.x = Float32Array.from(view.x, (place) => place / scale);
  view.y = Float32Array.from(view.y, (place) => place / scale);
  view.bendX = Float32Array.from(view.bend_x, (place) => place / scale);
  view.bendY = Float32Array.from(view.bend_y, (place) => place / scale);
  view.firstBend = new Int32Array(view.num_bends.length + 1);
  view.num_bends.forEach((num, edge) => (view.firstBend[edge + 1] = view.firstBend[edge] + num));
  view.ofOp = ofOp ? column(ofOp) : null;
  return finished(view);
}

// Whom each node stands for, and how they are written.
function finished(view) {
  view.size = view.x.length;
  if (view.ofOp) {
    view.members = Array.from({ length: view.size }, () => []);
    view.ofOp.forEach((node, op) => node >= 0 && view.members[node].push(op));
  }
  const nodeOf = view.ofOp;
  view.nodeOf = (op) => (nodeOf ? nodeOf[op] : op);
  view.opOf = (node) => (view.members ? (view.members[node].length === 1 ? view.members[node][0] : -1) : node);
  view.opsOf = (node) => (view.members ? view.members[node] : [node]);
  view.label = (node) => {
    const op = view.opOf(node);
    if (op >= 0) return nameOf(op);
    return view.labels[node];
  };
  view.engine = (node) => (view.members ? commonEngine(view.members[node]) : ops.engine[node]);
  view.engines = Uint8Array.from({ length: view.size }, (_, node) => view.engine(node));
  view.isStack = Uint8Array.from({ length: view.size }, (_, node) => view.opOf(node) < 0);
  view.detail = (node) => {
    const op = view.opOf(node);
    if (op < 0) return `${plural(view.opsOf(node).length, "op")} ${commonLane(view.opsOf(node))}`;
    const facts = [];
    if (ops.nbytes[op]) facts.push(spellBytes(ops.nbytes[op]));
    facts.push(ops.end[op] < 0 ? text(ops.state[op]) : spellTicks(ops.end[op] - ops.start[op]));
    return facts.join(", ");
  };
  return view;
}

function commonEngine(members) {
  const other = ENGINES.length - 1;
  let found = other;
  for (const op of members) {
    const engine = ops.engine[op];
    if (engine === other || engine === found) continue;
    if (found !== other) return other;
    found = engine;
  }
  return found;
}

function commonLane(members) {
  const found = new Set();
  for (const op of members) {
    found.add(ops.lane[op]);
    if (found.size > 3) break;
  }
  const some = [...found].slice(0, 2).map((lane) => lanes[lane]).join(", ");
  return `on ${some}${found.size > 2 ? ", .." : ""}`;
}

// The members of a group, as a view of their own; `around`, with what they are tied to by data.
function openGroup(inside, label, around) {
  const chunks = inside.length > MEMBERS_MAX;
  const guests = around && !chunks ? neighboursOf(inside) : [];
  const members = inside.concat(guests.slice(0, NEIGHBOURS_MAX)).sort((a, b) => a - b);
  const left = guests.length - NEIGHBOURS_MAX;
  const size = Math.ceil(members.length / Math.min(PARTS_MAX, Math.ceil(members.length / MEMBERS_MAX)));
  const num = chunks ? Math.ceil(members.length / size) : members.length;
  const ofOp = new Int32Array(numOps).fill(-1);
  members.forEach((op, place) => (ofOp[op] = chunks ? Math.floor(place / size) : place));
  const labels = [];
  for (let node = 0; chunks && node < num; node++) {
    const first = members[node * size];
    const last = members[Math.min(members.length, (node + 1) * size) - 1];
    labels.push(`#${ops.id[first]} to #${ops.id[last]}`);
  }
  const merged = new Map();
  for (const op of members) {
    for (const edge of incoming(op)) {
      const src = ofOp[edges.src[edge]];
      const dst = ofOp[op];
      if (src < 0 || src === dst) continue;
      const key = src * num + dst;
      const found = merged.get(key) ?? { src, dst, reason: edges.reason[edge], num: 0 };
      if (found.reason === STREAM_ORDER) found.reason = edges.reason[edge];
      found.num++;
      merged.set(key, found);
    }
  }
  const list = [...merged.values()];
  const view = {
    key: "group", title: clipped(label, 40) + (left > 0 ? `, without ${plural(left, "neighbour")}` : ""), labels, ofOp,
    src: list.map((edge) => edge.src), dst: list.map((edge) => edge.dst),
    reason: list.map((edge) => edge.reason), num: list.map((edge) => edge.num),
    bendX: [], bendY: [], firstBend: new Int32Array(list.length + 1),
    ...placed(num, list),
  };
  const isInside = new Set(inside);
  view.isGuest = Uint8Array.from({ length: num }, (_, node) => (chunks || isInside.has(members[node]) ? 0 : 1));
  view.opened = { inside, label };
  return finished(view);
}

function neighboursOf(inside) {
  const isInside = new Set(inside);
  const found = new Set();
  const meet = (op, edge) => edges.reason[edge] !== STREAM_ORDER && !isInside.has(op) && found.add(op);
  for (const op of inside) {
    for (const edge of incoming(op)) meet(edges.src[edge], edge);
    for (const edge of outgoing(op)) meet(edges.dst[edge], edge);
  }
  return [...found];
}

// In order of the program, in lines; what depends on its neighbour stands beside it.
function placed(num, list) {
  const layer = new Int32Array(num);
  for (const { src, dst } of [...list].sort((a, b) => a.dst - b.dst)) {
    if (src < dst) layer[dst] = Math.max(layer[dst], layer[src] + 1);
  }
  const rows = new Map();
  const x = new Float32Array(num);
  const y = new Float32Array(num);
  const band = new Int32Array(num);
  const deepest = layer.reduce((a, b) => Math.max(a, b), 0) + 1;
  const inLayer = new Uint32Array(deepest);
  for (const each of layer) inLayer[each]++;
  const widest = inLayer.reduce((a, b) => Math.max(a, b), 0);
  // A deep graph is broken into lines; a flat one is a grid.
  const lineLength = deepest > 4 * widest
    ? Math.max(4, Math.round(Math.sqrt(0.5 * (widest + 1) * deepest)))
    : deepest;
  const bandTop = [0];
  for (let first = 0; first < deepest; first += lineLength) {
    const tallest = inLayer.subarray(first, first + lineLength).reduce((a, b) => Math.max(a, b), 0);
    bandTop.push(bandTop.at(-1) + tallest + 1);
  }
  const isFlat = deepest === 1;
  const gridWidth = Math.max(1, Math.round(Math.sqrt(num * 0.5)));
  for (let node = 0; node < num; node++) {
    if (isFlat) {
      x[node] = node % gridWidth;
      y[node] = Math.floor(node / gridWidth);
      continue;
    }
    const row = rows.get(layer[node]) ?? 0;
    rows.set(layer[node], row + 1);
    band[node] = Math.floor(layer[node] / lineLength);
    x[node] = layer[node] % lineLength;
    y[node] = bandTop[band[node]] + row;
  }
  return { x, y, band };
}
