// The timeline: a lane for each stream, what ran there, why nothing did, and memory below.

const GUTTER = Math.round(Math.min(230, Math.max(118, 24 + widest([...lanes, ...memory.map(({ title }) => title)]))));
const BAR = 20;
const LANE_PAD = 5;
const AXIS = 22;
const ARROWS_MAX = 40;

class Timeline {
  constructor(canvas, memoryCanvas, { onPick, onHover, onRange }) {
    this.canvas = canvas;
    this.memoryCanvas = memoryCanvas;
    this.onRange = onRange;
    this.from = 0;
    this.to = raw.end;
    this.selected = -1;
    this.hovered = -1;
    this.lit = null;
    this.frame = 0;
    this.width = canvas.clientWidth; // kept: asking the page for each bar takes long
    this.arrange();
    this.fit();
    this.listen(onPick, onHover);
  }

  // Rows of bars that don't overlap; what takes no time on a lane is a tick under them.
  arrange() {
    this.rowOf = new Int32Array(numOps).fill(-1);
    this.lanes = lanes.map((title) => ({ title, rows: [], ticks: [], gaps: [] }));
    const byStart = Uint32Array.from({ length: numOps }, (_, op) => op)
      .sort((a, b) => ops.start[a] - ops.start[b] || a - b);
    for (const op of byStart) {
      if (ops.start[op] < 0 || ops.end[op] < 0) continue;
      const lane = this.lanes[ops.lane[op]];
      if (ops.end[op] <= ops.start[op]) {
        lane.ticks.push(op);
        continue;
      }
      let row = lane.rows.findIndex((each) => ops.end[each.at(-1)] <= ops.start[op] + 1);
      if (row < 0) row = lane.rows.push([]) - 1;
      lane.rows[row].push(op);
      this.rowOf[op] = row;
    }
    gaps.lane.forEach((lane, gap) => this.lanes[lane].gaps.push(gap));
    let top = BAR + 2 * LANE_PAD; // the critical path comes first
    for (const lane of this.lanes) {
      lane.top = top;
      lane.height = Math.max(1, lane.rows.length) * BAR + 2 * LANE_PAD;
      top += lane.height;
    }
    this.canvas.style.height = `${top + 4}px`;
  }

  light(selected, lit) {
    this.selected = selected;
    this.lit = lit;
    this.redraw();
  }

  hover(op) {
    if (op === this.hovered) return;
    this.hovered = op;
    this.redraw();
  }

  // -- the part of time that is seen

  fit() { this.look(-raw.end * 0.01, raw.end * 1.01); }

  look(from, to) {
    const least = 20; // ticks
    const most = raw.end * 1.2;
    const span = Math.min(most, Math.max(least, to - from));
    const middle = (from + to) / 2;
    const low = Math.max(-raw.end * 0.1, Math.min(middle - span / 2, raw.end * 1.1 - span));
    this.from = low;
    this.to = low + span;
    this.onRange(Math.max(0, this.from), Math.min(raw.end, this.to));
    this.redraw();
  }

  zoom(factor, atX = (GUTTER + this.width) / 2) {
    const at = this.timeAt(atX);
    this.look(at - (at - this.from) / factor, at + (this.to - at) / factor);
  }

  pan(pixels) {
    const shift = (pixels * (this.to - this.from)) / (this.width - GUTTER);
    this.look(this.from + shift, this.to + shift);
  }

  // Brings an op into sight, without a move where it is.
  reveal(op) {
    if (ops.start[op] < 0) return;
    const [start, end] = [ops.start[op], Math.max(ops.end[op], ops.start[op])];
    const span = this.to - this.from;
    const pixels = ((end - start) / span) * (this.width - GUTTER);
    if (start >= this.from && end <= this.to && (pixels > 3 || end === start)) return this.scroll(op);
    const wanted = pixels > 3 && end - start < span ? span : Math.max((end - start) * 20, raw.end / 5000);
    const middle = (start + end) / 2;
    this.look(middle - wanted / 2, middle + wanted / 2);
    return this.scroll(op);
  }

  scroll(op) {
    const box = this.canvas.parentElement;
    const { top, bottom } = this.place(op);
    if (top < box.scrollTop) box.scrollTop = top - LANE_PAD;
    else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom + LANE_PAD - box.clientHeight;
  }

  xOf(time) { return GUTTER + ((time - this.from) / (this.to - this.from)) * (this.width - GUTTER); }
  timeAt(x) { return this.from + ((x - GUTTER) / (this.width - GUTTER)) * (this.to - this.from); }

  place(op) {
    const lane = this.lanes[ops.lane[op]];
    const row = this.rowOf[op];
    const top = lane.top + LANE_PAD + Math.max(0, row) * BAR;
    return {
      left: this.xOf(ops.start[op]), right: this.xOf(ops.end[op]),
      top: row < 0 ? lane.top + lane.height - LANE_PAD - 4 : top + 1,
      bottom: row < 0 ? lane.top + lane.height - 1 : top + BAR - 1,
    };
  }

  // { op } or { gap } or { lane } or {}.
  at(x, y) {
    if (x >= GUTTER && y < this.lanes[0]?.top) return { op: this.criticalAt(x) };
    const lane = this.lanes.find((each) => y >= each.top && y < each.top + each.height);
    if (!lane) return {};
    if (x < GUTTER) return { lane };
    const row = lane.rows[Math.floor((y - lane.top - LANE_PAD) / BAR)] ?? [];
    const near = (list, reach) => {
      let best;
      let least = reach;
      for (let i = firstEnding(list, this.timeAt(x - reach)); i < list.length; i++) {
        const [left, right] = [this.xOf(ops.start[list[i]]), this.xOf(ops.end[list[i]])];
        if (left > x + reach) break;
        const distance = x < left ? left - x : x > right ? x - right : 0;
        if (distance < least || (best === undefined && distance <= least)) [best, least] = [list[i], distance];
      }
      return best;
    };
    const isLow = y > lane.top + lane.height - LANE_PAD - 3;
    const op = (isLow ? near(lane.ticks, 4) : undefined) ?? near(row, 1) ?? near(lane.ticks, 2);
    if (op !== undefined) return { op };
    const time = this.timeAt(x);
    const gap = lane.gaps.find((each) => time >= gaps.start[each] && time <= gaps.end[each]);
    return gap === undefined ? {} : { gap };
  }

  criticalAt(x) {
    const time = this.timeAt(x);
    for (const op of critical) if (ops.start[op] <= time && time <= ops.end[op]) return op;
    return undefined;
  }

  nearestToMiddle() {
    const middle = (this.from + this.to) / 2;
    let best = -1;
    let least = Infinity;
    for (let op = 0; op < numOps; op++) {
      if (this.rowOf[op] < 0) continue;
      const distance = Math.abs((ops.start[op] + ops.end[op]) / 2 - middle);
      if (distance < least) [best, least] = [op, distance];
    }
    return best;
  }

  // -- pointers

  listen(onPick, onHover) {
    for (const canvas of [this.canvas, this.memoryCanvas]) {
      let held = null;
      canvas.addEventListener("pointerdown", (event) => {
        held = { x: event.offsetX, moved: 0 };
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (held) {
          const dx = event.offsetX - held.x;
          held.x = event.offsetX;
          held.moved += Math.abs(dx);
          if (held.moved > 4) this.pan(-dx);
        } else if (canvas === this.canvas) {
          const found = this.at(event.offsetX, event.offsetY);
          canvas.style.cursor = found.op === undefined ? "default" : "pointer";
          this.hover(found.op ?? -1);
          onHover(found, event);
        } else {
          onHover({ time: this.timeAt(event.offsetX) }, event);
        }
      });
      canvas.addEventListener("pointerup", (event) => {
        if (held && held.moved <= 4 && canvas === this.canvas) onPick(this.at(event.offsetX, event.offsetY));
        held = null;
      });
      canvas.addEventListener("pointercancel", () => (held = null));
      canvas.addEventListener("pointerleave", (event) => {
        this.hover(-1);
        onHover({}, event);
      });
      canvas.addEventListener("wheel", (event) => {
        const step = event.deltaMode ? event.deltaY * 24 : event.deltaY;
        event.preventDefault();
        if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX || step);
        else this.zoom(Math.exp(-step / 400), event.offsetX);
      }, { passive: false });
      new ResizeObserver(() => {
        this.width = this.canvas.clientWidth;
        this.redraw();
      }).observe(canvas);
    }
  }

  // -- drawing

  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
      drawMemory(this);
    });
  }

  draw() {
    const pen = prepared(this.canvas);
    this.colours = {
      ink: css("--ink"), soft: css("--soft"), paper: css("--paper"), line: css("--line"),
      shade: css("--shade"), focus: css("--focus"), gap: css("--gap"), gapLine: css("--gap-line"),
    };
    this.hatch = pen.createPattern(hatching(this.colours), "repeat");
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, this.width - GUTTER, this.canvas.clientHeight);
    pen.clip();
    this.drawRow(pen, critical, LANE_PAD, false);
    for (const lane of this.lanes) {
      this.drawGaps(pen, lane);
      lane.rows.forEach((row, index) => this.drawRow(pen, row, lane.top + LANE_PAD + index * BAR, true));
      this.drawTicks(pen, lane);
    }
    for (const op of new Set([this.selected, this.hovered])) if (op >= 0) this.drawArrows(pen, op);
    pen.restore();
    this.drawTitles(pen);
  }

  drawTitles(pen) {
    const { ink, line } = this.colours;
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    const titles = [{ title: "critical path", top: 0, height: BAR + 2 * LANE_PAD }, ...this.lanes];
    for (const { title, top, height } of titles) {
      pen.font = top ? "12px system-ui, sans-serif" : "600 12px system-ui, sans-serif";
      pen.fillStyle = ink;
      pen.fillText(fitted(pen, title, GUTTER - 20), 12, top + height / 2);
      pen.fillStyle = line;
      pen.fillRect(0, top + height - 0.5, this.width, 1);
    }
    pen.fillRect(GUTTER - 1, 0, 1, this.canvas.clientHeight);
  }

  drawRow(pen, row, top, isOnLane) {
    // Many in one pixel become a column as high as the part of the time that they took.
    const busy = new Float32Array(Math.ceil(this.width) + 1);
    const colours = new Uint8Array(busy.length);
    const isLit = new Uint8Array(busy.length);
    for (let i = firstEnding(row, this.from); i < row.length; i++) {
      const op = row[i];
      if (ops.start[op] > this.to) break;
      const left = this.xOf(ops.start[op]);
      const right = this.xOf(ops.end[op]);
      if (right - left >= 1.5 || op === this.selected || op === this.hovered) {
        if (right > left) this.drawBar(pen, op, left, right, top, isOnLane);
        continue;
      }
      const x = Math.max(0, Math.floor(left));
      busy[x] += right - left;
      colours[x] = ops.engine[op];
      if (!this.lit || this.lit.has(op)) isLit[x] = 1;
    }
    for (let x = GUTTER; x < busy.length; x++) {
      if (!busy[x]) continue;
      const height = Math.max(3, Math.min(1, busy[x]) * (BAR - 2));
      pen.globalAlpha = isLit[x] ? 1 : 0.28;
      pen.fillStyle = COLOURS[colours[x]];
      pen.fillRect(x, top + BAR - 1 - height, 1, height);
    }
    pen.globalAlpha = 1;
  }

  drawBar(pen, op, left, right, top, isOnLane) {
    const { ink, focus } = this.colours;
    const width = Math.max(1, right - left);
    pen.globalAlpha = this.lit && !this.lit.has(op) && op !== this.selected ? 0.28 : 1;
    pen.fillStyle = COLOURS[ops.engine[op]];
    pen.fillRect(left, top + 1, width, BAR - 2);
    if (width > 5) {
      const isHeavy = isOnLane && isCritical[op];
      pen.strokeStyle = isFailed(op) ? raw.colours.failed : ink;
      pen.lineWidth = isHeavy || isFailed(op) ? 2.5 : 0.5;
      const inset = pen.lineWidth / 2;
      pen.strokeRect(left + inset, top + 1 + inset, Math.max(0.5, width - 2 * inset), BAR - 2 - 2 * inset);
    } else if (isOnLane && isCritical[op]) {
      pen.fillStyle = ink; // too narrow for a frame: lines above and below
      pen.fillRect(left, top + 1, width, 2);
      pen.fillRect(left, top + BAR - 3, width, 2);
    }
    if (width > 20) {
      pen.font = "11px system-ui, sans-serif";
      pen.textBaseline = "middle";
      pen.textAlign = "left";
      pen.fillStyle = "#000";
      const from = Math.max(left, GUTTER) + 5;
      const words = signOf(op) + (width > 48 ? ` ${nameOf(op)}` : "");
      pen.fillText(fitted(pen, words, Math.min(right, this.width) - from - 4), from, top + BAR / 2);
    }
    pen.globalAlpha = 1;
    if (op === this.selected) {
      pen.strokeStyle = focus;
      pen.lineWidth = 4;
      pen.strokeRect(left - 2, top - 0.5, width + 4, BAR + 1);
    }
  }

  // Allocations and other work that takes no time there.
  drawTicks(pen, lane) {
    const top = lane.top + lane.height - LANE_PAD - 1;
    let drawnTo = -Infinity;
    pen.fillStyle = this.colours.soft;
    for (let i = firstEnding(lane.ticks, this.from); i < lane.ticks.length; i++) {
      const op = lane.ticks[i];
      if (ops.start[op] > this.to) break;
      const x = this.xOf(ops.start[op]);
      if (op === this.selected) {
        pen.fillStyle = this.colours.focus;
        pen.fillRect(x - 3, top - 4, 6, 9);
        pen.fillStyle = this.colours.soft;
      } else if (x > drawnTo + 1) {
        pen.fillRect(x - 1, top, 2, 5);
        drawnTo = x;
      }
    }
  }

  drawGaps(pen, lane) {
    const { soft } = this.colours;
    const height = Math.max(1, lane.rows.length) * BAR - 2;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    for (const gap of lane.gaps) {
      if (gaps.end[gap] < this.from || gaps.start[gap] > this.to) continue;
      const left = Math.max(GUTTER, this.xOf(gaps.start[gap]));
      const right = Math.min(this.width, this.xOf(gaps.end[gap]));
      if (right - left < 2) continue;
      pen.fillStyle = this.hatch;
      pen.fillRect(left, lane.top + LANE_PAD + 1, right - left, height);
      if (right - left < 44) continue;
      const words = fitted(pen, ofGaps.all(gap).join("; "), right - left - 12);
      if (words.length < 4) continue;
      const middle = lane.top + LANE_PAD + 1 + height / 2;
      pen.fillStyle = this.colours.paper;
      pen.fillRect(left + 3, middle - 7, pen.measureText(words).width + 6, 14);
      pen.fillStyle = soft;
      pen.fillText(words, left + 6, middle + 0.5);
    }
  }

  drawArrows(pen, op) {
    if (ops.start[op] < 0) return;
    const { ink, soft } = this.colours;
    const draw = (list, isIncoming) => {
      for (const edge of list.subarray(0, ARROWS_MAX)) {
        const [src, dst] = [edges.src[edge], edges.dst[edge]];
        if (ops.end[src] < 0 || ops.start[dst] < 0) continue;
        const [from, to] = [this.place(src), this.place(dst)];
        const [x, y] = [from.right, (from.top + from.bottom) / 2];
        const [endX, endY] = [to.left, (to.top + to.bottom) / 2];
        const reach = Math.max(24, Math.abs(endX - x) / 2);
        pen.strokeStyle = isIncoming ? ink : soft;
        pen.fillStyle = pen.strokeStyle;
        pen.lineWidth = isIncoming ? 2 : 1.4;
        pen.setLineDash(isIncoming ? [] : [5, 3]);
        pen.beginPath();
        pen.moveTo(x, y);
        pen.bezierCurveTo(x + reach, y, endX - reach, endY, endX, endY);
        pen.stroke();
        pen.setLineDash([]);
        pen.beginPath();
        pen.moveTo(endX, endY);
        pen.lineTo(endX - 8, endY - 4);
        pen.lineTo(endX - 8, endY + 4);
        pen.fill();
      }
    };
    draw(outgoing(op), false);
    draw(incoming(op), true);
  }
}

// How much room the titles of lanes and devices ask for.
function widest(titles) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = "600 12px system-ui, sans-serif";
  return titles.reduce((most, title) => Math.max(most, pen.measureText(clipped(title, 64)).width), 0);
}

// The first of a list of ops, in order of their times, that ends at `time` or later.
function firstEnding(list, time) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ops.end[list[middle]] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function hatching({ gap, gapLine }) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = gap;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = gapLine;
  pen.beginPath();
  for (const shift of [-8, 0, 8]) {
    pen.moveTo(shift, 8);
    pen.lineTo(shift + 8, 0);
  }
  pen.stroke();
  return tile;
}
