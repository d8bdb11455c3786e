// One small chart per metric, with a line per run.

const LABELS = {
  "reward/mean": "Reward",
  "reward/std": "Reward, spread",
  "completion/length_mean": "Length of a response [tokens]",
  "completion/truncated_fraction": "Share of truncated responses",
  "policy/ref_kl": "KL to the reference",
  "policy/approx_kl": "KL to the policy of the rollout",
  "mismatch/abs_mean": "Logprobs: trainer − engine, mean of |difference|",
  "loss/total": "Loss",
  "optim/lr": "Learning rate",
  "optim/grad_norm": "Norm of the gradient",
  "perf/tokens_per_s": "Tokens per second",
};
const PARTS = /^reward\/(?!(mean|std|unscored_fraction)$)/; // a single one is the mean
const DEFAULTS = [
  /^reward\/(mean|std)$/,
  PARTS,
  /^eval\/[^/]+\/accuracy$/,
  /^completion\/(length_mean|truncated_fraction)$/,
  /^policy\/(ref_kl|approx_kl)$/,
  /^mismatch\/abs_mean$/,
];
const SUPERVISED = [/^loss\/total$/, /^eval\/.*loss$/, /^optim\/(lr|grad_norm)$/, /^perf\/tokens_per_s$/];
const PLOT = { left: 46, right: 12, top: 8, bottom: 24, height: 190 };

function metricNames() {
  const names = new Set(runs.flatMap((run) => Object.keys(run.curves)));
  names.delete("time");
  return [...names];
}

function chosenMetrics() {
  const names = metricNames();
  if (settings.metrics !== null) return settings.metrics.filter((name) => names.includes(name));
  const patterns = names.includes("reward/mean") || !names.includes("loss/total") ? DEFAULTS : SUPERVISED;
  return patterns.flatMap((pattern) => {
    const found = names.filter((name) => pattern.test(name));
    return pattern === PARTS && found.length === 1 ? [] : found.slice(0, 4);
  });
}

function label(name) {
  const found = /^eval\/(.+)\/accuracy$/.exec(name);
  if (found) return found[1] === "heldout" ? "Accuracy on held-out prompts" : `Accuracy, ${found[1]}`;
  return LABELS[name] ?? name;
}

function drawCharts() {
  byId("charts").replaceChildren(...chosenMetrics().map(drawChart));
}

function drawChart(name) {
  const lines = runs.filter((run) => run.curves[name]?.x.length).map((run) => lineOf(run, name));
  const latest = make("div", "latest");
  for (const line of lines.slice(0, 6)) {
    latest.append(make("span", "", dot(line.run.color), `${number(line.y[0])} → ${number(line.y.at(-1))}`));
  }
  const box = make("div", "card chart", make("h3", "", label(name)));
  box.dataset.metric = name;
  if (label(name) !== name) box.append(make("div", "name", name));
  box.append(latest, plot(lines));
  return box;
}

function lineOf(run, name) {
  const curve = run.curves[name];
  const x = settings.axis === "step" ? curve.x : curve.x.map((step) => minutesAt(run.curves.time, step));
  const weight = name.startsWith("eval/") ? 0 : settings.smoothing; // evaluations are few, and each is a mean
  return { run, weight, x, raw: curve.y, y: smoothed(curve.y, weight), low: curve.low, high: curve.high };
}

// Linear interpolation between the logged times.
function minutesAt(times, step) {
  const { x, y } = times;
  let next = x.findIndex((other) => other >= step);
  if (next < 0) next = x.length - 1;
  const before = Math.max(0, next - 1);
  const share = x[next] > x[before] ? (step - x[before]) / (x[next] - x[before]) : 1;
  return (y[before] + share * (y[next] - y[before]) - y[0]) / 60;
}

// Exponential moving average, corrected for its start: the first value is the first value.
function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function tickText(value, { digits }) {
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1e4) return number(value);
  if (digits <= 4) return value.toFixed(digits);
  const exponent = Math.floor(Math.log10(size) + 1e-9);
  return value.toExponential(Math.max(0, digits + exponent));  // as many decimals as tell its neighbours apart
}

function yRange(lines) {
  const all = lines.flatMap((line) => [...line.raw, ...(line.low ?? []), ...(line.high ?? [])]);
  let [low, high] = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
  if (low >= 0 && low < 0.5 * high) low = 0;
  if (high - low < 1e-9 * Math.max(1e-6, Math.abs(high))) {
    const room = Math.abs(high) * 0.1 || 1;
    return low === 0 && high === 0 ? [0, 1] : [low - room, high + room];
  }
  const room = 0.06 * (high - low);
  return [low === 0 ? 0 : low - room, high + room];
}

function plot(lines) {
  const svg = makeSvg("svg", { height: PLOT.height, role: "img" });
  const draw = () => svg.clientWidth && fillPlot(svg, lines, svg.clientWidth);
  new ResizeObserver(draw).observe(svg);
  return svg;
}

function fillPlot(svg, lines, width) {
  const xs = lines.flatMap((line) => line.x);
  let [first, last] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
  if (last - first < 1e-9) [first, last] = [first - 0.5, last + 0.5];
  const [low, high] = yRange(lines);
  const toX = (x) => PLOT.left + ((x - first) / (last - first)) * (width - PLOT.left - PLOT.right);
  const toY = (y) => PLOT.top + ((high - y) / (high - low)) * (PLOT.height - PLOT.top - PLOT.bottom);
  svg.replaceChildren(...axes(first, last, low, high, width, toX, toY));
  for (const line of lines) svg.append(...drawLine(line, toX, toY));
  const cursor = makeSvg("line", { class: "cursor", y1: PLOT.top, y2: PLOT.height - PLOT.bottom, visibility: "hidden" });
  svg.append(cursor);
  svg.onpointermove = (event) => {
    const at = first + ((event.offsetX - PLOT.left) / (width - PLOT.left - PLOT.right)) * (last - first);
    const x = nearest(xs, at);
    cursor.setAttribute("x1", toX(x));
    cursor.setAttribute("x2", toX(x));
    cursor.setAttribute("visibility", "visible");
    showTip(event, pointText(lines, x));
  };
  svg.onpointerleave = () => {
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  };
}

function axes(first, last, low, high, width, toX, toY) {
  const parts = [];
  const rows = ticks(low, high, 6);
  for (const y of rows.found) {
    parts.push(makeSvg("line", { class: "grid", x1: PLOT.left, x2: width - PLOT.right, y1: toY(y), y2: toY(y) }));
    parts.push(makeSvg("text", { x: PLOT.left - 7, y: toY(y) + 4, "text-anchor": "end" }, tickText(y, rows)));
  }
  const columns = ticks(first, last, Math.max(2, Math.floor(width / 90)));
  const whole = settings.axis === "step" ? columns.found.filter(Number.isInteger) : columns.found;
  for (const x of whole) {
    const anchor = toX(x) > width - 30 ? "end" : "middle";
    parts.push(makeSvg("text", { x: toX(x), y: PLOT.height - 7, "text-anchor": anchor }, tickText(x, columns)));
  }
  return parts;
}

function drawLine(line, toX, toY) {
  const path = (ys) => line.x.map((x, i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${toY(ys[i]).toFixed(1)}`).join("");
  const parts = [];
  if (line.low) {
    const back = line.x.map((x, i) => `L${toX(x).toFixed(1)} ${toY(line.low[i]).toFixed(1)}`).reverse().join("");
    const band = makeSvg("path", { d: `${path(line.high)}${back}Z`, opacity: 0.14 });
    band.style.fill = line.run.color;
    parts.push(band);
  }
  if (line.weight > 0 && line.x.length > 2) {
    parts.push(makeSvg("path", { d: path(line.raw), stroke: line.run.color, "stroke-width": 1, opacity: 0.35 }));
  }
  parts.push(makeSvg("path", { d: path(line.y), stroke: line.run.color, "stroke-width": 2, class: "line" }));
  if (line.x.length <= 12) {
    for (const [i, x] of line.x.entries()) {
      parts.push(makeSvg("circle", { cx: toX(x), cy: toY(line.y[i]), r: 3, fill: line.run.color }));
    }
  }
  return parts;
}

function nearest(values, wanted) {
  return values.reduce((best, x) => (Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best));
}

function pointText(lines, x) {
  const head = settings.axis === "step" ? `step ${x}` : `${number(x)} minutes`;
  const rows = lines.map((line) => {
    const at = line.x.indexOf(nearest(line.x, x));
    const apart = line.x[at] === x || settings.axis !== "step" ? "" : ` (step ${line.x[at]})`;
    const mean = line.weight > 0 ? `, smoothed ${number(line.y[at])}` : "";
    return `${runs.length > 1 ? `${line.run.name}: ` : ""}${number(line.raw[at])}${mean}${apart}`;
  });
  return [head, ...rows].join("\n");
}

function fillMetricsMenu() {
  const wanted = byId("metrics-search").value.toLowerCase();
  const chosen = chosenMetrics();
  const names = metricNames().filter((name) => name.toLowerCase().includes(wanted)).sort();
  byId("metrics-list").replaceChildren(
    ...names.map((name) => {
      const box = make("input");
      box.type = "checkbox";
      box.checked = chosen.includes(name);
      box.onchange = () => {
        const others = chosenMetrics().filter((other) => other !== name);
        settings.metrics = box.checked ? [...others, name] : others;
        keepSettings();
        drawCharts();
      };
      return make("label", "", box, name);
    }),
  );
}
