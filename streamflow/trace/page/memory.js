// The axis of time, and below it memory in use and pinned.

const STRIP = 52; // of one device

function drawMemory(timeline) {
  const canvas = timeline.memoryCanvas;
  canvas.style.height = `${AXIS + Math.max(1, memory.length) * STRIP}px`;
  const pen = prepared(canvas);
  const [ink, soft, line] = [css("--ink"), css("--soft"), css("--line")];
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawAxis(pen, timeline, width, { soft, line });
  const title = (words, y) => {
    pen.textAlign = "left";
    pen.font = "600 12px system-ui, sans-serif";
    pen.fillStyle = ink;
    pen.fillText(fitted(pen, words, GUTTER - 20), 12, y);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = soft;
  };
  if (!memory.length) {
    title("memory", AXIS + STRIP / 2);
    pen.fillText("not recorded", GUTTER + 8, AXIS + STRIP / 2);
  }
  memory.forEach((curve, index) => {
    const top = AXIS + index * STRIP + 7;
    const bottom = AXIS + (index + 1) * STRIP - 5;
    curve.most ??= Math.max(1, largest(curve.used), largest(curve.pinned));
    title(curve.title || "memory", top + 8);
    pen.fillText(`to ${spellBytes(curve.most)}`, 12, top + 25);
    pen.fillStyle = line;
    pen.fillRect(0, AXIS + (index + 1) * STRIP - 1, width, 1);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, width - GUTTER, height);
    pen.clip();
    const yOf = (nbytes) => bottom - (nbytes / curve.most) * (bottom - top);
    stroke(pen, timeline, curve.time, curve.used, yOf, { colour: css("--used"), dash: [], isFilled: true });
    stroke(pen, timeline, curve.time, curve.pinned, yOf, { colour: css("--pinned"), dash: [4, 3] });
    pen.restore();
  });
}

const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

// Steps: a value holds until the next one. Many within a pixel become their extremes.
function stroke(pen, timeline, time, values, yOf, { colour, dash, isFilled }) {
  const last = timeline.xOf(raw.end);
  let i = 0;
  while (i + 1 < time.length && time[i + 1] < timeline.from) i++;
  pen.beginPath();
  let x = Math.max(GUTTER - 4, timeline.xOf(time[i]));
  let y = yOf(values[i]);
  const startX = x;
  pen.moveTo(x, y);
  for (i += 1; i < time.length && time[i] <= timeline.to; i++) {
    const next = timeline.xOf(time[i]);
    if (next > x + 0.5) {
      x = next;
      pen.lineTo(x, y);
    }
    y = yOf(values[i]);
    pen.lineTo(x, y);
  }
  const endX = i < time.length ? timeline.xOf(time[i]) : Math.max(x, last);
  pen.lineTo(endX, y);
  pen.strokeStyle = colour;
  pen.lineWidth = 2;
  pen.setLineDash(dash);
  pen.stroke();
  pen.setLineDash([]);
  if (isFilled) {
    pen.lineTo(endX, yOf(0));
    pen.lineTo(startX, yOf(0));
    pen.fillStyle = colour;
    pen.globalAlpha = 0.18;
    pen.fill();
    pen.globalAlpha = 1;
  }
}

function drawAxis(pen, timeline, width, { soft, line }) {
  const span = timeline.to - timeline.from;
  const wanted = (span * raw.tick_s) / Math.max(2, (width - GUTTER) / 110); // seconds
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= wanted) / raw.tick_s;
  const [factor, unit] = unitOf(timeline.to * raw.tick_s);
  const decimals = Math.max(0, -Math.floor(Math.log10((step * raw.tick_s) / factor) + 1e-9));
  pen.textAlign = "center";
  for (let time = Math.max(0, Math.ceil(timeline.from / step) * step); time <= timeline.to; time += step) {
    const x = timeline.xOf(time);
    if (x < GUTTER + 14 || x > width - 26) continue;
    pen.fillStyle = line;
    pen.fillRect(x, 0, 1, 5);
    pen.fillStyle = soft;
    pen.fillText(`${((time * raw.tick_s) / factor).toFixed(decimals)} ${unit}`, x, 13);
  }
  pen.fillStyle = line;
  pen.fillRect(0, AXIS, width, 1);
}

// What is in use and pinned at a moment.
function memoryAt(time) {
  return memory.map(({ title, time: times, used, pinned }) => {
    let i = 0;
    for (let step = 1; step < times.length && times[step] <= time; step++) i = step;
    return `${title} in use ${spellBytes(used[i] ?? 0)}, pinned ${spellBytes(pinned[i] ?? 0)}`.trim();
  }).join("\n");
}
