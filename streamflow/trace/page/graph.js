// The graph: nodes and edges of a view on a canvas, panned and zoomed.

const COLUMN = 190;
const ROW = 52;
const NODE_WIDTH = 152;
const NODE_HEIGHT = 38;
const SCALE_MIN = 0.005;
const SCALE_MAX = 4;
const SCALE_LABELLED = 0.28; // below it, blocks of colour
const SCALE_READ = 0.8; // where text is comfortable
const DIM = 0.22;

class Graph {
  constructor(canvas, { onPick, onHover }) {
    this.canvas = canvas;
    this.view = null;
    this.scale = 1;
    this.x = 0; // of the page's left upper corner, in the graph's own pixels
    this.y = 0;
    this.selected = -1; // an op
    this.selectedNode = -1;
    this.lit = null; // a set of ops
    this.showsOrder = true;
    this.isFitted = true; // until someone moves the view, it shows all, whatever its size
    this.frame = 0;
    this.listen(onPick, onHover);
  }

  get width() { return this.canvas.clientWidth; }
  get height() { return this.canvas.clientHeight; }

  show(view) {
    this.view = view;
    this.left = Float32Array.from(view.x, (place) => place * COLUMN);
    this.top = Float32Array.from(view.y, (place) => place * ROW);
    this.extent = { width: NODE_WIDTH, height: NODE_HEIGHT };
    for (let node = 0; node < view.size; node++) {
      this.extent.width = Math.max(this.extent.width, this.left[node] + NODE_WIDTH);
      this.extent.height = Math.max(this.extent.height, this.top[node] + NODE_HEIGHT);
    }
    this.light(this.selected, this.lit);
    this.fit();
  }

  // Dims all but `lit` (a set of ops) and `selected`; null lights everything.
  light(selected, lit) {
    this.selected = selected;
    this.lit = lit;
    const { view } = this;
    this.selectedNode = selected >= 0 ? view.nodeOf(selected) : -1;
    this.isLit = null;
    if (lit) {
      this.isLit = new Uint8Array(view.size);
      for (const op of lit) if (view.nodeOf(op) >= 0) this.isLit[view.nodeOf(op)] = 1;
      if (this.selectedNode >= 0) this.isLit[this.selectedNode] = 1;
    }
    this.redraw();
  }

  // -- the part that is seen

  fit() {
    const margin = 24;
    const scale = Math.min(
      (this.width - 2 * margin) / this.extent.width,
      (this.height - 2 * margin) / this.extent.height,
    );
    this.scale = Math.min(1.1, Math.max(SCALE_MIN, scale));
    this.x = this.extent.width / 2 - this.width / 2 / this.scale;
    this.y = this.extent.height / 2 - this.height / 2 / this.scale;
    this.isFitted = true;
    this.redraw();
  }

  zoom(factor, atX = this.width / 2, atY = this.height / 2) {
    const scale = Math.min(SCALE_MAX, Math.max(SCALE_MIN, this.scale * factor));
    this.x += atX / this.scale - atX / scale;
    this.y += atY / this.scale - atY / scale;
    this.scale = scale;
    this.isFitted = false;
    this.redraw();
  }

  pan(dx, dy) {
    this.isFitted = false;
    this.x += dx / this.scale;
    this.y += dy / this.scale;
    this.redraw();
  }

  centre(node, scale = Math.max(this.scale, SCALE_READ)) {
    this.scale = scale;
    this.isFitted = false;
    this.x = this.left[node] + NODE_WIDTH / 2 - this.width / 2 / scale;
    this.y = this.top[node] + NODE_HEIGHT / 2 - this.height / 2 / scale;
    this.redraw();
  }

  isVisible(node) {
    const { x, y } = this.onScreen(node);
    return x > 40 && y > 20 && x < this.width - 40 && y < this.height - 20 && this.scale > 0.3;
  }

  onScreen(node) {
    return {
      x: (this.left[node] + NODE_WIDTH / 2 - this.x) * this.scale,
      y: (this.top[node] + NODE_HEIGHT / 2 - this.y) * this.scale,
    };
  }

  nodeAt(screenX, screenY) {
    const x = screenX / this.scale + this.x;
    const y = screenY / this.scale + this.y;
    const slack = Math.max(0, 3 / this.scale - 3);
    for (let node = 0; node < this.view.size; node++) {
      const left = this.left[node];
      const top = this.top[node];
      if (x >= left - slack && x <= left + NODE_WIDTH + slack
        && y >= top - slack && y <= top + NODE_HEIGHT + slack) return node;
    }
    return -1;
  }

  nearestToMiddle() {
    const x = this.x + this.width / 2 / this.scale - NODE_WIDTH / 2;
    const y = this.y + this.height / 2 / this.scale - NODE_HEIGHT / 2;
    let best = -1;
    let least = Infinity;
    for (let node = 0; node < this.view.size; node++) {
      const distance = (this.left[node] - x) ** 2 + (this.top[node] - y) ** 2;
      if (distance < least) [best, least] = [node, distance];
    }
    return best;
  }

  // -- pointers

  listen(onPick, onHover) {
    const { canvas } = this;
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.offsetX, y: event.offsetY, moved: 0 };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) {
        const node = this.nodeAt(event.offsetX, event.offsetY);
        canvas.style.cursor = node >= 0 ? "pointer" : "grab";
        onHover(node, event);
        return;
      }
      const [dx, dy] = [event.offsetX - held.x, event.offsetY - held.y];
      held.moved += Math.abs(dx) + Math.abs(dy);
      held.x = event.offsetX;
      held.y = event.offsetY;
      if (held.moved > 4) this.pan(-dx, -dy);
    });
    canvas.addEventListener("pointerup", (event) => {
      onHover(-1, event);
      if (held && held.moved <= 4) onPick(this.nodeAt(event.offsetX, event.offsetY));
      held = null;
    });
    canvas.addEventListener("pointercancel", () => (held = null));
    canvas.addEventListener("pointerleave", (event) => onHover(-1, event));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const step = event.deltaMode ? event.deltaY * 24 : event.deltaY;
      this.zoom(Math.exp(-step / 400), event.offsetX, event.offsetY);
    }, { passive: false });
    new ResizeObserver(() => (this.isFitted && this.view ? this.fit() : this.redraw())).observe(canvas);
  }

  // -- drawing

  redraw() {
    if (!this.frame && this.view) {
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.draw();
      });
    }
  }

  draw() {
    const pen = prepared(this.canvas);
    const scale = this.scale;
    pen.scale(scale, scale);
    pen.translate(-this.x, -this.y);
    this.seen = {
      left: this.x, top: this.y,
      right: this.x + this.width / scale, bottom: this.y + this.height / scale,
    };
    this.drawEdges(pen);
    this.drawNodes(pen);
  }

  drawEdges(pen) {
    const { view, isLit } = this;
    const plain = [new Path2D(), new Path2D()]; // implied by streams, or by anything else
    const marked = new Path2D();
    const direct = new Path2D();
    const heads = [];
    for (let edge = 0; edge < view.src.length; edge++) {
      const isOrder = view.reason[edge] === STREAM_ORDER;
      if (isOrder && !this.showsOrder) continue;
      const [src, dst] = [view.src[edge], view.dst[edge]];
      const isMarked = isLit && isLit[src] && isLit[dst];
      if (!this.isNear(src, dst)) continue;
      if (!isMarked) {
        this.trace(plain[isOrder ? 1 : 0], edge, false);
      } else {
        this.trace(dst === this.selectedNode ? direct : marked, edge, true);
        heads.push(dst);
      }
    }
    const thin = Math.max(1, 0.6 / this.scale);
    pen.strokeStyle = css("--edge");
    pen.globalAlpha = isLit ? DIM : 0.9;
    pen.lineWidth = thin;
    pen.stroke(plain[0]);
    pen.setLineDash([3 * thin, 4 * thin]);
    pen.stroke(plain[1]);
    pen.setLineDash([]);
    pen.globalAlpha = 1;
    pen.strokeStyle = css("--lit");
    pen.lineWidth = Math.max(1.6, 1 / this.scale);
    pen.stroke(marked);
    pen.lineWidth = Math.max(3.2, 2 / this.scale);
    pen.stroke(direct);
    this.drawHeads(pen, heads);
    if (this.selectedNode >= 0 && this.scale > 0.45) this.drawReasons(pen);
  }

  isNear(src, dst) {
    const { seen, left, top } = this;
    return Math.max(left[src], left[dst]) + COLUMN > seen.left
      && Math.min(left[src], left[dst]) - COLUMN < seen.right
      && Math.max(top[src], top[dst]) + 2 * ROW > seen.top
      && Math.min(top[src], top[dst]) - 2 * ROW < seen.bottom;
  }

  // From the right side of one node to the left side of the other, past the nodes between.
  trace(path, edge, isWhole) {
    const { view, left, top } = this;
    const [src, dst] = [view.src[edge], view.dst[edge]];
    const [fromX, fromY] = [left[src] + NODE_WIDTH, top[src] + NODE_HEIGHT / 2];
    const [toX, toY] = [left[dst], top[dst] + NODE_HEIGHT / 2];
    path.moveTo(fromX, fromY);
    if (view.band[src] !== view.band[dst] && !isWhole) {
      path.lineTo(fromX + 16, fromY); // goes on in another line: two stubs
      path.moveTo(toX - 16, toY);
      path.lineTo(toX, toY);
      return;
    }
    if (toX <= fromX) {
      const above = Math.min(fromY, toY) - ROW * 1.4; // back, over what stands between
      path.bezierCurveTo(fromX + 90, fromY, fromX + 40, above, (fromX + toX) / 2, above);
      path.bezierCurveTo(toX - 40, above, toX - 90, toY, toX, toY);
      return;
    }
    let [x, y] = [fromX, fromY];
    const bend = (nextX, nextY) => {
      const half = (nextX - x) / 2;
      path.bezierCurveTo(x + half, y, nextX - half, nextY, nextX, nextY);
      [x, y] = [nextX, nextY];
    };
    for (let i = view.firstBend[edge]; i < view.firstBend[edge + 1]; i++) {
      const bendY = view.bendY[i] * ROW + NODE_HEIGHT / 2;
      bend(view.bendX[i] * COLUMN, bendY);
      path.lineTo(x += NODE_WIDTH, bendY);
    }
    bend(toX, toY);
  }

  drawHeads(pen, nodes) {
    pen.fillStyle = css("--lit");
    pen.beginPath();
    for (const node of new Set(nodes)) {
      const [x, y] = [this.left[node], this.top[node] + NODE_HEIGHT / 2];
      pen.moveTo(x, y);
      pen.lineTo(x - 10, y - 5);
      pen.lineTo(x - 10, y + 5);
    }
    pen.fill();
  }

  // Why the selected node comes after each of those before it, beside them.
  drawReasons(pen) {
    const { view } = this;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let edge = 0; edge < view.src.length; edge++) {
      if (view.dst[edge] !== this.selectedNode) continue;
      if (view.reason[edge] === STREAM_ORDER && !this.showsOrder) continue;
      const src = view.src[edge];
      const times = view.num[edge] > 1 ? ` \u00D7${view.num[edge]}` : "";
      const words = reasons[view.reason[edge]] + times;
      const [x, y] = [this.left[src] + 24, this.top[src] - 7];
      pen.fillStyle = css("--paper");
      pen.fillRect(x - 3, y - 7, pen.measureText(words).width + 6, 14);
      pen.fillStyle = css("--lit");
      pen.fillText(words, x, y);
    }
  }

  drawNodes(pen) {
    const { view, seen, left, top, isLit } = this;
    const isSmall = this.scale < 0.6;
    pen.font = `${10.5 / this.scale}px system-ui, sans-serif`;
    const look = { ink: css("--ink"), soft: css("--soft"), paper: css("--paper"), line: css("--edge") };
    for (let node = 0; node < view.size; node++) {
      if (left[node] > seen.right || left[node] + NODE_WIDTH < seen.left
        || top[node] > seen.bottom || top[node] + NODE_HEIGHT < seen.top) continue;
      pen.globalAlpha = isLit && !isLit[node] ? DIM : 1;
      pen.setLineDash(view.isGuest?.[node] ? [6, 4] : []);
      if (isSmall) this.drawBlock(pen, node, look);
      else this.drawCard(pen, node, look);
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  drawBlock(pen, node, look) {
    const [left, top] = [this.left[node], this.top[node]];
    const engine = this.view.engines[node];
    const isGuest = this.view.isGuest?.[node]; // beside the members of a group that is open: hollow
    pen.fillStyle = pen.strokeStyle = COLOURS[engine];
    pen.lineWidth = 2 / this.scale;
    if (isGuest) pen.strokeRect(left, top, NODE_WIDTH, NODE_HEIGHT);
    else pen.fillRect(left, top, NODE_WIDTH, NODE_HEIGHT);
    const op = this.view.opOf(node);
    if (this.scale > SCALE_LABELLED) {
      pen.fillStyle = isGuest ? look.ink : "#000";
      pen.textBaseline = "middle";
      pen.textAlign = "left";
      const label = `${op < 0 ? GLYPHS[ENGINES[engine]] : signOf(op)} ${this.view.label(node)}`;
      let words = op < 0 ? `${label} \u00D7${this.view.opsOf(node).length}` : label;
      if (op < 0 && pen.measureText(words).width > NODE_WIDTH - 10) words = label;
      pen.fillText(fitted(pen, words, NODE_WIDTH - 10), left + 5, top + NODE_HEIGHT / 2);
    }
    const isTall = this.scale * NODE_HEIGHT > 8; // a frame would hide a smaller one
    if (node === this.selectedNode || (op >= 0 && ((isCritical[op] && isTall) || isFailed(op)))) {
      pen.lineWidth = (node === this.selectedNode ? 4 : 1.5) / this.scale;
      pen.strokeStyle = op >= 0 && isFailed(op) ? raw.colours.failed : look.ink;
      if (node === this.selectedNode) pen.strokeStyle = css("--focus");
      pen.strokeRect(left, top, NODE_WIDTH, NODE_HEIGHT);
    }
  }

  drawCard(pen, node, look) {
    const { view } = this;
    const [left, top] = [this.left[node], this.top[node]];
    const engine = view.engines[node];
    const op = view.opOf(node);
    const frame = op >= 0 && isFailed(op) ? raw.colours.failed : look.line;
    const isHeavy = op >= 0 && (isCritical[op] || isFailed(op));
    if (view.isStack[node]) {
      for (const shift of [6, 3]) card(pen, left + shift, top - shift, look.paper, look.line, 1);
    }
    card(pen, left, top, look.paper, isHeavy && frame === look.line ? look.ink : frame, isHeavy ? 3 : 1);
    pen.fillStyle = COLOURS[engine];
    pen.beginPath();
    pen.roundRect(left + 2, top + 2, 20, NODE_HEIGHT - 4, [4, 0, 0, 4]);
    pen.fill();
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillStyle = "#000";
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(op < 0 ? GLYPHS[ENGINES[engine]] : signOf(op), left + 12, top + NODE_HEIGHT / 2);
    pen.textAlign = "left";
    const detail = view.detail(node);
    const room = NODE_WIDTH - 34;
    pen.fillStyle = look.ink;
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillText(fitted(pen, view.label(node), room), left + 28, top + (detail ? 13 : NODE_HEIGHT / 2));
    if (detail) {
      pen.fillStyle = look.soft;
      pen.font = "11px system-ui, sans-serif";
      pen.fillText(fitted(pen, detail, room), left + 28, top + 28);
    }
    if (node === this.selectedNode) {
      card(pen, left - 4, top - 4, "transparent", css("--focus"), 4, 8);
    }
  }
}

function card(pen, left, top, fill, frame, thickness, larger = 0) {
  pen.beginPath();
  pen.roundRect(left, top, NODE_WIDTH + larger, NODE_HEIGHT + larger, 5);
  pen.fillStyle = fill;
  pen.fill();
  pen.lineWidth = thickness;
  pen.strokeStyle = frame;
  pen.stroke();
}

// A cleared context in the page's own pixels, whatever the screen's are.
function prepared(canvas) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

// As much of a text as there is room for.
function fitted(pen, words, room) {
  let shown = clipped(words.replace(/\s+/g, " "), 64);
  if (pen.measureText(shown).width <= room) return shown;
  let [fits, over] = [0, shown.length];
  while (over - fits > 1) {
    const middle = (fits + over) >> 1;
    if (pen.measureText(`${shown.slice(0, middle)}\u2026`).width <= room) fits = middle;
    else over = middle;
  }
  return fits ? `${shown.slice(0, fits)}\u2026` : "";
}
