// The panel: all that is known of the selected op, or of a group. Data only ever become text.

const EDGES_LISTED_MAX = 60;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

// A name may hold any characters, such as those that turn the direction of writing.
const name = (words) => element("bdi", { textContent: clipped(words, 300) });

function showOverview(panel, view) {
  const busiest = Object.entries(raw.overlap.busy_s);
  const span = raw.overlap.span_s || 1;
  panel.replaceChildren(
    element("h2", { textContent: "This trace" }),
    facts([
      ["ops", numOps.toLocaleString("en")],
      ["edges", edges.src.length.toLocaleString("en")],
      raw.num_dropped ? ["dropped", `${raw.num_dropped.toLocaleString("en")} older ops`] : null,
      ["span", spellTicks(raw.overlap.span_s / raw.tick_s)],
      ["overlap", `${Math.round(raw.overlap.ratio * 100)}% of what could be`],
      ...busiest.map(([engine, busy]) => [`${engine} busy`, `${spellTicks(busy / raw.tick_s)} (${Math.round((busy / span) * 100)}%)`]),
    ]),
    element("h3", { textContent: "Longest idle gaps" }),
    gapList(),
    element("h3", { textContent: "How to" }),
    element("p", { textContent: "Click an op, in the graph or on the timeline: what it depends on stays lit, and this panel says what it waited for." }),
    ...(view.members ? [element("p", { textContent: "A stack of cards is a group: click it to see its members." })] : []),
    keys([["/", "search"], ["Enter", "next match; select; open a group"], ["[ ]", "previous, next op"],
      ["P", "to what the op waited for"], ["+ - 0", "zoom, all of it"], ["Esc", "clear, or leave a group"]]),
  );
}

function keys(pairs) {
  return element("dl", {}, ...pairs.flatMap(([key, meaning]) => [
    element("dt", {}, element("kbd", { textContent: key })),
    element("dd", { textContent: meaning }),
  ]));
}

function facts(pairs) {
  return element("dl", {}, ...pairs.filter(Boolean).flatMap(([term, value]) => [
    element("dt", { textContent: term }),
    element("dd", {}, typeof value === "string" ? name(value) : value),
  ]));
}

function gapList() {
  const longest = Array.from(gaps.lane.keys())
    .sort((a, b) => gaps.end[b] - gaps.start[b] - (gaps.end[a] - gaps.start[a]))
    .slice(0, 5);
  if (!longest.length) return element("p", { textContent: "None: no stream stood still between its ops." });
  return element("ul", {}, ...longest.map((gap) => link(
    gaps.before[gap],
    `${lanes[gaps.lane[gap]]}: ${spellTicks(gaps.end[gap] - gaps.start[gap])}`,
    ofGaps.all(gap).join("; "),
  )));
}

// A button that selects an op.
function link(op, words, detail) {
  const button = element("button", { type: "button" }, name(words), element("small", {}, name(detail)));
  button.dataset.op = op;
  return element("li", {}, button);
}

function showOp(panel, op, counts, numAncestors) {
  const moment = (ticks) => (ticks < 0 ? null : spellMoment(ticks));
  const between = (from, to) => (from < 0 || to < 0 ? null : spellTicks(Math.max(0, to - from)));
  const pair = (term, value) => (value === null || value === "" ? null : [term, value]);
  panel.replaceChildren(
    element("h2", {}, `${signOf(op)} `, name(nameOf(op))),
    whyNotEarlier(op),
    facts([
      ["what", `${text(ops.kind[op])} on ${lanes[ops.lane[op]]}${isCritical[op] ? ", on the critical path" : ""}`],
      ["state", text(ops.state[op])],
      pair("line", text(ops.where[op])),
      pair("scope", text(ops.scope[op])),
      pair("task", text(ops.task[op])),
      ["op", String(ops.id[op])],
      ops.nbytes[op] ? ["bytes", spellBytes(ops.nbytes[op]) + (ops.staged[op] ? ", through pinned chunks" : "")] : null,
      pair("host needs", text(ops.needs[op])),
    ]),
    element("h3", { textContent: "Times" }),
    facts([
      pair("called", moment(ops.submitted[op])),
      pair("work on host", moment(ops.begun[op])),
      pair("issued", moment(ops.issued[op])),
      pair("started", moment(ops.start[op])),
      pair("ended", moment(ops.end[op])),
      pair("queued for", between(ops.issued[op] < 0 ? ops.submitted[op] : ops.issued[op], ops.start[op])),
      pair("ran for", between(ops.start[op], ops.end[op])),
      pair("seen after", between(ops.end[op], ops.seen[op])),
    ]),
    element("h3", { textContent: `Comes after (${plural(numAncestors, "ancestor")})` }),
    edgeList(incoming(op).filter(counts), edges.src),
    element("h3", { textContent: "Comes before" }),
    edgeList(outgoing(op).filter(counts), edges.dst),
  );
  panel.scrollTop = 0;
}

function whyNotEarlier(op) {
  const all = ofOps.all(op);
  const headline = ofOps.headline(op);
  if (!all.length) {
    const told = ops.start[op] < 0 ? `It is ${text(ops.state[op])}, and no time of it on the device is known.` : "It waited for nothing.";
    return element("div", { className: "why" }, element("p", { textContent: told }));
  }
  const other = ofOps.opOf(op);
  const button = element("button", { type: "button", textContent: "Go to what it waited for (P)" });
  button.dataset.op = other;
  return element("div", { className: "why" },
    element("p", {}, element("strong", {}, name(headline))),
    all.length > 1 ? element("ul", {}, ...all.filter((words) => words !== headline).map((words) => element("li", {}, name(words)))) : null,
    other < 0 ? null : button,
  );
}

function edgeList(list, ends) {
  if (!list.length) return element("p", { textContent: "Nothing." });
  const latest = [...list].sort((a, b) => ops.end[ends[b]] - ops.end[ends[a]]);
  const items = latest.slice(0, EDGES_LISTED_MAX).map((edge) => {
    const op = ends[edge];
    const array = describeArray(edges.array[edge]);
    const wait = edges.issued[edge] ? "" : " (implied)";
    const ended = ops.end[op] < 0 ? "" : `, ended ${spellMoment(ops.end[op])}`;
    return link(op, `${nameOf(op)} on ${lanes[ops.lane[op]]}`,
      `${reasons[edges.reason[edge]]}${array ? ` on ${array}` : ""}${wait}${ended}`);
  });
  if (latest.length > items.length) {
    items.push(element("li", { textContent: `and ${latest.length - items.length} more` }));
  }
  return element("ul", {}, ...items);
}
