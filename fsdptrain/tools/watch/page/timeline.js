// What rank 0 did when: one row per stage, one color per rollout.

const STAGES = ["generate", "reward", "logprobs", "train", "sync", "check", "eval", "save"];
const ROW = { left: 66, right: 12, height: 26, bottom: 24 };

function drawTimeline() {
  const drawn = runs.filter((run) => run.bars.length);
  byId("timeline-section").hidden = !drawn.length;
  if (!drawn.length) return;
  replaceOptions(byId("timeline-run"), drawn.map((run) => run.name), []);
  byId("timeline-run-label").hidden = drawn.length < 2;
  const run = drawn.find((one) => one.name === byId("timeline-run").value) ?? drawn[0];
  const last = run.bars.reduce((most, bar) => Math.max(most, bar[1]), 0);
  const first = last - Number(byId("timeline-rollouts").value);
  const bars = run.bars.filter((bar) => bar[1] > first);
  const legend = make("div", "legend");
  for (const rollout of [...new Set(bars.map((bar) => bar[1]))].sort((a, b) => a - b)) {
    legend.append(make("span", "", dot(COLORS[rollout % COLORS.length]), `rollout ${rollout}`));
  }
  const rows = STAGES.filter((stage) => bars.some((bar) => bar[0] === stage));
  const svg = makeSvg("svg", { height: rows.length * ROW.height + ROW.bottom, role: "img" });
  byId("timeline").replaceChildren(svg, legend);
  new ResizeObserver(() => svg.clientWidth && fillTimeline(svg, rows, bars, svg.clientWidth)).observe(svg);
}

function fillTimeline(svg, rows, bars, width) {
  const begin = bars.reduce((least, bar) => Math.min(least, bar[2]), Infinity);
  const end = Math.max(begin + 1e-3, bars.reduce((most, bar) => Math.max(most, bar[3]), 0));
  const toX = (seconds) => ROW.left + ((seconds - begin) / (end - begin)) * (width - ROW.left - ROW.right);
  const foot = rows.length * ROW.height;
  const parts = [];
  const columns = ticks(0, end - begin, Math.max(2, Math.floor(width / 110)));
  for (const seconds of columns.found) {
    const x = toX(begin + seconds);
    parts.push(makeSvg("line", { class: "grid", x1: x, x2: x, y1: 0, y2: foot }));
    const anchor = x > width - 34 ? "end" : "middle";
    parts.push(makeSvg("text", { x, y: foot + 16, "text-anchor": anchor }, `${tickText(seconds, columns)} s`));
  }
  for (const [i, stage] of rows.entries()) {
    parts.push(makeSvg("text", { x: ROW.left - 8, y: (i + 0.5) * ROW.height + 4, "text-anchor": "end" }, stage));
    const own = bars.filter((bar) => bar[0] === stage);
    const lanes = 1 + own.reduce((most, bar) => Math.max(most, bar[4]), 0);
    const height = (ROW.height - 6) / lanes;
    for (const [, rollout, from, to, lane] of own) {
      const place = { x: toX(from), y: i * ROW.height + 3 + lane * height, rx: 1.5 };
      const size = { width: Math.max(1, toX(to) - toX(from)), height: Math.max(1, height - 1) };
      const bar = makeSvg("rect", { ...place, ...size, fill: COLORS[rollout % COLORS.length], class: "bar" });
      bar.onpointermove = (event) => showTip(event, `${stage} of rollout ${rollout}\n${number(to - from)} s`);
      bar.onpointerleave = hideTip;
      parts.push(bar);
    }
  }
  svg.replaceChildren(...parts);
}
