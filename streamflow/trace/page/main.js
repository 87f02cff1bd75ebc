// What ties the parts together: the selection, search, views, keys.

const $ = (id) => document.getElementById(id);

const views = new Map(raw.views.map((packed) => [packed.key, packed]));
const TITLES = { ops: "every op", synopsis: "groups", scope: "one node a scope", name: "one node a name" };
const page = {
  trail: [], // views from the outermost to what is shown
  selected: -1,
  lit: null,
  matches: [],
  match: -1,
};

const counts = (edge) => $("order").checked || edges.reason[edge] !== STREAM_ORDER;

const graph = new Graph($("graph-canvas"), {
  onPick: (node) => (node < 0 ? select(-1) : pickNode(node)),
  onHover: (node, event) => {
    const op = node < 0 ? -1 : graph.view.opOf(node);
    timeline.hover(op);
    tip(event, node < 0 ? "" : op < 0 ? aboutGroup(node) : aboutOp(op));
  },
});

const timeline = new Timeline($("lanes-canvas"), $("memory-canvas"), {
  onPick: ({ op, gap }) => select(op ?? (gap === undefined ? -1 : gaps.before[gap])),
  onHover: ({ op, gap, lane, time }, event) => tip(event,
    op !== undefined ? aboutOp(op) : gap !== undefined ? aboutGap(gap) : time >= 0 ? memoryAt(time) : lane?.title ?? ""),
  onRange: (from, to) => ($("range").textContent = `${spellMoment(from)} to ${spellMoment(to)}`),
});

// -- words

const aboutOp = (op) => {
  const ran = ops.end[op] < 0 ? text(ops.state[op]) : `ran ${spellTicks(ops.end[op] - ops.start[op])}`;
  const after = [...incoming(op).filter(counts)]
    .sort((a, b) => ops.end[edges.src[b]] - ops.end[edges.src[a]])
    .slice(0, 4)
    .map((edge) => `\u2190 ${clipped(nameOf(edges.src[edge]), 60)}: ${reasons[edges.reason[edge]]}`);
  return [`${clipped(nameOf(op), 120)} on ${lanes[ops.lane[op]]}, ${ran}`, clipped(ofOps.headline(op), 200), ...after]
    .filter(Boolean).join("\n");
};
const aboutGap = (gap) => `idle ${spellTicks(gaps.end[gap] - gaps.start[gap])}\nuntil ${clipped(nameOf(gaps.before[gap]), 80)}\n${ofGaps.all(gap).join("\n")}`.trim();
const aboutGroup = (node) => `${clipped(graph.view.label(node), 120)}: ${plural(graph.view.opsOf(node).length, "op")}`;

function tip(event, words) {
  const box = $("tip");
  box.hidden = !words;
  if (!words) return;
  box.textContent = words;
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  box.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}

const announce = (words) => ($("announce").textContent = words);

// -- the selection, the same in all parts

function select(op, { moves = true } = {}) {
  page.selected = op;
  page.lit = op < 0 ? null : ancestorsOf(op, counts);
  while (op >= 0 && page.trail.length > 1 && graph.view.nodeOf(op) < 0) leave();
  graph.light(op, page.lit);
  timeline.light(op, page.lit);
  if (op < 0) {
    showOverview($("panel"), graph.view);
    announce("Nothing selected");
    return;
  }
  if (moves && !graph.isVisible(graph.view.nodeOf(op))) graph.centre(graph.view.nodeOf(op));
  timeline.reveal(op);
  showOp($("panel"), op, counts, page.lit.size);
  const told = ofOps.headline(op) || (ops.start[op] < 0 ? text(ops.state[op]) : "");
  announce(`${nameOf(op)} on ${lanes[ops.lane[op]]}, ${plural(page.lit.size, "ancestor")}${told && `, ${told}`}`);
}

function pickNode(node) {
  const op = graph.view.opOf(node);
  if (op >= 0) select(op);
  else open(node);
}

// -- views

function enter(view) {
  page.trail.push(view);
  graph.show(view);
  showTrail();
}

function leave() {
  page.trail.pop();
  graph.show(page.trail.at(-1));
  showTrail();
}

function open(node) {
  const { view } = graph;
  const label = view.label(node);
  enter(openGroup(view.opsOf(node), label, $("around").checked));
  if (page.selected >= 0 && graph.view.nodeOf(page.selected) < 0) select(-1);
  else if (page.selected < 0) showOverview($("panel"), graph.view);
  announce(`Opened ${label}, ${plural(graph.view.size, "node")}`);
}

function showTrail() {
  $("around").parentElement.hidden = page.trail.length < 2;
  $("trail").replaceChildren(...page.trail.slice(0, -1).map((view, depth) => {
    const button = element("button", { type: "button", textContent: `\u2039 ${clipped(view.title, 28)}` });
    button.addEventListener("click", () => {
      while (page.trail.length > depth + 1) leave();
      graph.canvas.focus(); // the button is gone
    });
    return button;
  }));
  if (page.trail.length > 1) $("trail").append(name(page.trail.at(-1).title));
}

function choose(key) {
  const view = readView(views.get(key));
  view.title = TITLES[key];
  $("around").checked = key === "synopsis"; // ops of one kind say little by themselves
  page.trail = [];
  enter(view);
  if (page.selected >= 0) graph.centre(view.nodeOf(page.selected), graph.scale);
  else showOverview($("panel"), view);
}

// -- search

let haystack = null;

function search(words) {
  const wanted = words.trim().toLowerCase();
  page.match = -1;
  if (!wanted) page.matches = [];
  else {
    haystack ??= Array.from({ length: numOps }, (_, op) => [nameOf(op), text(ops.kind[op]), `#${ops.id[op]}`,
      text(ops.where[op]), text(ops.scope[op]), lanes[ops.lane[op]]].join("\n").toLowerCase());
    const exact = (op) => nameOf(op).toLowerCase() === wanted || String(ops.id[op]) === wanted;
    const found = [];
    const best = [];
    for (let op = 0; op < numOps; op++) {
      if (exact(op)) best.push(op);
      else if (haystack[op].includes(wanted)) found.push(op);
    }
    page.matches = best.concat(found);
  }
  const num = page.matches.length;
  $("found").textContent = wanted ? (num ? plural(num, "op") : "no op") : "";
  if (wanted) announce(num ? `${plural(num, "op")} found` : "No op found");
}

function goToMatch(step) {
  const num = page.matches.length;
  if (!num) return;
  page.match = page.match < 0 ? (step > 0 ? 0 : num - 1) : (page.match + step + num) % num;
  $("found").textContent = `${page.match + 1} of ${num.toLocaleString("en")}`;
  const op = page.matches[page.match];
  select(op, { moves: false });
  graph.centre(graph.view.nodeOf(op));
}

$("query").addEventListener("input", () => search($("query").value));
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  goToMatch(1);
});
$("previous-match").addEventListener("click", () => goToMatch(-1));
$("query").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.shiftKey) {
    event.preventDefault();
    goToMatch(-1);
  } else if (event.key === "Escape") {
    event.preventDefault();
    $("query").value = "";
    search("");
    $("graph-canvas").focus();
  }
});

// -- buttons and keys

$("view").append(...[...views.keys()].map((key) => element("option", { value: key, textContent: TITLES[key] })));
$("view").addEventListener("change", () => choose($("view").value));
$("order").addEventListener("change", () => {
  graph.showsOrder = $("order").checked;
  select(page.selected, { moves: false });
});
$("around").addEventListener("change", () => {
  const { inside, label } = page.trail.pop().opened;
  enter(openGroup(inside, label, $("around").checked));
  select(graph.view.nodeOf(page.selected) < 0 ? -1 : page.selected, { moves: false });
});
$("panel").addEventListener("click", (event) => {
  const op = event.target.closest("button[data-op]")?.dataset.op;
  if (op === undefined) return;
  select(Number(op));
  $("panel").focus(); // the button is gone
});

function zoom(part, way) {
  if (way === "fit") part.fit();
  else part.zoom(way === "in" ? 1.5 : 1 / 1.5);
}
for (const button of document.querySelectorAll("[data-zoom]")) {
  const [part, way] = button.dataset.zoom.split(" ");
  button.addEventListener("click", () => zoom(part === "graph" ? graph : timeline, way));
}

function step(by) {
  if (!numOps) return;
  select(page.selected < 0 ? 0 : Math.min(numOps - 1, Math.max(0, page.selected + by)));
}

const KEYS = {
  "+": (part) => zoom(part, "in"),
  "=": (part) => zoom(part, "in"),
  "-": (part) => zoom(part, "out"),
  "0": (part) => zoom(part, "fit"),
  "[": () => step(-1),
  "]": () => step(1),
  p: () => page.selected >= 0 && ofOps.opOf(page.selected) >= 0 && select(ofOps.opOf(page.selected)),
  ArrowLeft: (part) => part.pan(-60, 0),
  ArrowRight: (part) => part.pan(60, 0),
  ArrowUp: (part) => (part === graph ? part.pan(0, -60) : ($("lanes").scrollTop -= 40)),
  ArrowDown: (part) => (part === graph ? part.pan(0, 60) : ($("lanes").scrollTop += 40)),
  Enter: (part) => {
    const found = part.nearestToMiddle();
    if (found >= 0) (part === graph ? pickNode : select)(found);
  },
  "/": () => {
    $("query").focus();
    $("query").select();
  },
  Escape: () => {
    if (page.selected >= 0) select(-1);
    else if (page.trail.length > 1) leave();
  },
};
document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  const isTyping = /^(INPUT|SELECT)$/.test(target.tagName) && target.type !== "checkbox";
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const isFree = key.length === 1 || key === "Escape"; // others scroll and press what has the focus
  const act = isFree || target.tagName === "CANVAS" ? KEYS[key.length === 1 ? key.toLowerCase() : key] : null;
  if (!act) return;
  event.preventDefault();
  act(target === timeline.canvas ? timeline : graph);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  graph.redraw();
  timeline.redraw();
});

// -- begin

$("facts").textContent = [
  plural(numOps, "op"), plural(edges.src.length, "edge"),
  `span ${spellTicks(raw.overlap.span_s / raw.tick_s)}`, `overlap ${Math.round(raw.overlap.ratio * 100)}%`, raw.title,
].filter(Boolean).join(" \u00B7 ");
$("legend").append(...ENGINES.map((engine, index) => {
  const sample = element("i", { textContent: GLYPHS[engine] });
  sample.style.background = COLOURS[index];
  return element("li", {}, sample, WORDS[engine]);
}));
const failure = element("i", { textContent: "\u2715" });
failure.style.outline = `2px solid ${raw.colours.failed}`;
failure.style.color = "inherit";
$("legend").append(element("li", {}, failure, "failed"));
choose(raw.views[0].key);

// For tests and the console: what is shown, as data.
const idsOf = (list) => [...list].map((op) => ops.id[op]);
window.streamflow = Object.freeze({
  state: () => ({
    view: page.trail[0].key,
    depth: page.trail.length - 1,
    numNodes: graph.view.size,
    labels: Array.from({ length: Math.min(graph.view.size, 1000) }, (_, node) => graph.view.label(node)),
    selected: page.selected < 0 ? null : ops.id[page.selected],
    lit: page.lit && idsOf(page.lit),
    matches: idsOf(page.matches),
    graph: { scale: graph.scale, x: graph.x, y: graph.y },
    // How many ops each part shows as lit: the selection is one and the same in all.
    numLit: page.lit && [graph.lit, timeline.lit].map((lit) => lit.size),
    range: [timeline.from * raw.tick_s, timeline.to * raw.tick_s],
    hovered: timeline.hovered < 0 ? null : ops.id[timeline.hovered],
    critical: idsOf(critical),
    gaps: Array.from(gaps.lane.slice(0, 1000).keys(), (gap) => ({ lane: lanes[gaps.lane[gap]], cause: ofGaps.all(gap).join("; ") })),
  }),
  // Where on the page an op is drawn; of a group, by the id of one of its ops.
  whereInGraph: (id) => inPage(graph.canvas, graph.onScreen(graph.view.nodeOf(ops.id.indexOf(id)))),
  whereOnTimeline: (id) => {
    const { left, right, top, bottom } = timeline.place(ops.id.indexOf(id));
    return inPage(timeline.canvas, { x: (left + right) / 2, y: (top + bottom) / 2 });
  },
});

function inPage(canvas, { x, y }) {
  const box = canvas.getBoundingClientRect();
  return { x: x + box.left, y: y + box.top };
}
