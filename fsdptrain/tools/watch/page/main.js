// Get data: from the file itself, or again and again from the server.

const POLL_MS = 2000;
const MOST_SAMPLES = 120; // per run
const QUIET_S = 120;
const saved = JSON.parse(byId("data").textContent);
const key = new URLSearchParams(location.search).get("key");

// Returns whether anything has changed.
function take(payloads) {
  let changed = false;
  for (const [i, payload] of payloads.entries()) {
    if (payload.name === undefined) continue; // nothing new
    changed = true;
    const older = payload.keeps_samples ? (runs[i]?.samples ?? []) : [];
    runs[i] = { ...payload, color: COLORS[i % COLORS.length], samples: [...older, ...payload.samples].slice(-MOST_SAMPLES) };
  }
  return changed;
}

function draw() {
  document.title = `${runs.map((run) => run.name).join(", ")} · fsdptrain`;
  drawCharts();
  if (!byId("metrics-menu").open) fillMetricsMenu();
  drawSamples();
}

function drawRuns() {
  byId("runs").replaceChildren(
    ...runs.map((run) => {
      const card = make("div", "card run", make("h3", "", dot(run.color), run.name));
      if (run.title !== run.name) card.append(make("p", "", run.title));
      if (run.total) {
        const bar = make("progress");
        bar.max = run.total;
        bar.value = run.step ?? 0;
        card.append(bar);
      }
      card.append(stateLine(run));
      return card;
    }),
  );
}

function stateLine(run) {
  if (run.step === null) return make("p", "state", "waiting for the first step");
  const parts = [run.total ? `step ${run.step} of ${run.total}` : `step ${run.step}`];
  const age = Math.max(0, (saved ? saved.saved : Date.now() / 1000) - run.updated);
  const isDone = run.total && run.step >= run.total;
  const isQuiet = !isDone && age > Math.max(QUIET_S, 5 * (run.pace ?? 0));
  if (isDone) parts.push("finished");
  else if (run.pace && run.total && !isQuiet) parts.push(`ETA ${duration(run.pace * (run.total - run.step))}`);
  if (run.pace) parts.push(`${number(run.pace)} s per step`);
  parts.push(saved ? `saved ${new Date(saved.saved * 1000).toLocaleString()}` : `last update ${duration(age)} ago`);
  return make("p", isQuiet ? "state quiet" : "state", parts.join(" · "));
}

async function poll() {
  try {
    const seen = runs.map((run) => run.cursor).join(",");
    const answer = await fetch(`/data?seen=${seen}`, { headers: { Authorization: `Bearer ${key}` } });
    if (!answer.ok) throw new Error(await answer.text());
    const changed = take((await answer.json()).runs);
    byId("notice").textContent = "";
    drawRuns();
    if (changed) draw();
  } catch (error) {
    byId("notice").textContent = `no answer from fsdptrain watch: this is what it sent last (${error.message})`;
  }
  setTimeout(poll, POLL_MS);
}

function connect() {
  byId("smoothing").value = settings.smoothing;
  byId("axis").value = settings.axis;
  if (!(settings.color in COLORINGS)) settings.color = "advantage";
  byId("samples-color").value = settings.color;
  const change = (name, id, redraw) => {
    byId(id).oninput = () => {
      settings[name] = name === "smoothing" ? Number(byId(id).value) : byId(id).value;
      keepSettings();
      redraw();
    };
  };
  change("smoothing", "smoothing", drawCharts);
  change("axis", "axis", drawCharts);
  change("color", "samples-color", drawSamples);
  for (const id of ["samples-run", "samples-set", "samples-order", "samples-search"]) {
    byId(id).oninput = () => {
      shownCount = PAGE_SIZE;
      drawSamples();
    };
  }
  byId("samples-more").onclick = () => {
    shownCount += PAGE_SIZE;
    drawSamples();
  };
  byId("metrics-menu").ontoggle = fillMetricsMenu;
  byId("metrics-search").oninput = fillMetricsMenu;
  byId("metrics-defaults").onclick = () => {
    settings.metrics = null;
    keepSettings();
    fillMetricsMenu();
    drawCharts();
  };
}

connect();
if (saved) {
  take(saved.runs);
  drawRuns();
  draw();
} else {
  poll();
}
