// Samples with one color per token.

const PAGE_SIZE = 20;
const RED = "209, 73, 91";
const GREEN = "34, 160, 107";
const PURPLE = "139, 111, 214";
const MOST_TOKENS = 1024; // of a response that a run logs
let shownCount = PAGE_SIZE;
let scaled = { color: "", most: 0 }; // the value with the full color

// value of token i, and its colors below and above 0
const COLORINGS = {
  none: { value: () => null, colors: [RED, RED] },
  advantage: { value: (sample) => sample.advantage ?? null, colors: [RED, GREEN] },
  surprise: { value: (sample, i) => sample.rollout_logprobs?.[i] ?? null, colors: [PURPLE, PURPLE] },
};

function generated(sample, i) {
  return sample.rollout_logprobs?.[i] != null; // else a token of an environment
}

function valueAt(sample, i) {
  return generated(sample, i) ? COLORINGS[settings.color].value(sample, i) : null;
}

function matchingSamples() {
  const run = byId("samples-run").value;
  const set = byId("samples-set").value;
  const text = byId("samples-search").value.toLowerCase();
  const order = byId("samples-order").value;
  const found = runs.filter((one) => !run || one.name === run).flatMap((one) => one.samples.map((sample) => [one, sample]));
  const kept = found.filter(
    ([, sample]) => (!set || sample.set === set) && (!text || `${sample.prompt}\n${sample.response}`.toLowerCase().includes(text)),
  );
  const lost = order === "high" ? -Infinity : Infinity; // samples without a reward come last
  const reward = ([, sample]) => (typeof sample.reward === "number" ? sample.reward : lost);
  kept.sort((a, b) => b[1].step - a[1].step || b[1].id - a[1].id);
  if (order) kept.sort((a, b) => (order === "high" ? reward(b) - reward(a) : reward(a) - reward(b)));
  return kept;
}

function drawSamples() {
  const all = runs.flatMap((run) => run.samples);
  byId("samples-section").hidden = !all.length;
  const sampled = runs.filter((run) => run.samples.length).map((run) => run.name);
  replaceOptions(byId("samples-run"), sampled, [""]);
  byId("samples-run-label").hidden = sampled.length < 2;
  replaceOptions(byId("samples-set"), [...new Set(all.map((sample) => String(sample.set)))].sort(), [""]);
  const matching = matchingSamples();
  const shown = matching.slice(0, shownCount);
  const scale = colorScale(shown.map(([, sample]) => sample));
  drawLegend(scale);
  placeCards(shown, scale);
  byId("samples-more").hidden = matching.length <= shownCount;
}

// Cards that stay are not touched: they keep what the reader has scrolled to or selected.
function placeCards(shown, scale) {
  const box = byId("samples");
  const older = new Map([...box.children].map((card) => [card.dataset.key, card]));
  const keyOf = (run, sample) => [runs.indexOf(run), run.cursor.split(".")[0], sample.id, settings.color, scale].join(" ");
  let next = box.firstElementChild;
  for (const [run, sample] of shown) {
    const key = keyOf(run, sample);
    const card = older.get(key) ?? sampleCard(run, sample, scale);
    older.delete(key);
    card.dataset.key = key;
    if (card === next) next = next.nextElementSibling;
    else box.insertBefore(card, next);
  }
  for (const card of older.values()) card.remove();
  if (!shown.length) box.append(make("p", "note", "no sample matches"));
}

// The largest value that is shown gets the full color; the scale stays until a larger one comes.
function colorScale(samples) {
  let most = scaled.color === settings.color ? scaled.most : 0;
  for (const sample of samples) {
    for (let i = 0; i < (sample.tokens?.length ?? 0); i++) most = Math.max(most, Math.abs(valueAt(sample, i) ?? 0));
  }
  scaled = { color: settings.color, most };
  return most;
}

function tokenColor(value, scale) {
  const [below, above] = COLORINGS[settings.color].colors;
  return `rgba(${value < 0 ? below : above}, ${(0.6 * Math.min(1, Math.abs(value) / scale)).toFixed(3)})`;
}

function drawLegend(scale) {
  const legend = byId("legend");
  legend.replaceChildren();
  if (settings.color === "none") return;
  if (!scale) {
    legend.append("no token to color");
    return;
  }
  const box = (share) => {
    const element = make("i");
    element.style.background = tokenColor(share * scale, scale);
    return element;
  };
  legend.append(number(-scale), box(-1), box(-0.5), "0");
  if (settings.color !== "surprise") legend.append(box(0.5), box(1), `+${number(scale)}`);
}

function sampleCard(run, sample, scale) {
  const head = make("div", "head");
  if (runs.length > 1) head.append(make("span", "", dot(run.color), ` ${run.name}`));
  const facts = { step: sample.step, set: sample.set, reward: sample.reward === null ? "none" : number(sample.reward) };
  if (typeof sample.advantage === "number") facts.advantage = number(sample.advantage);
  if (sample.label != null) facts.label = String(sample.label).slice(0, 200);
  for (const [name, value] of Object.entries(facts)) head.append(make("span", "", `${name} `, make("b", "", String(value))));
  const card = make("article", "card sample", head, make("pre", "text prompt", String(sample.prompt ?? "")));
  card.append(sample.tokens?.length ? tokenText(sample, scale) : make("pre", "text", String(sample.response ?? "")));
  return card;
}

function tokenText(sample, scale) {
  const text = make("pre", "text");
  for (const [i, token] of sample.tokens.entries()) {
    if (token === "") continue; // the beginning of a character
    const span = make("span", generated(sample, i) ? "token" : "token given", token.replaceAll("\n", "⏎\n"));
    const value = valueAt(sample, i);
    if (value !== null && scale) span.style.background = tokenColor(value, scale);
    span.dataset.i = i;
    text.append(span);
  }
  if (sample.tokens.length >= MOST_TOKENS) text.append(String(sample.response ?? "").slice(sample.tokens.join("").length));
  text.onpointermove = (event) => {
    const i = event.target.dataset?.i;
    if (i === undefined) hideTip();
    else showTip(event, tokenFacts(sample, Number(i)));
  };
  text.onpointerleave = hideTip;
  return text;
}

function tokenFacts(sample, i) {
  const rows = [`${JSON.stringify(sample.tokens[i])}, token ${i + 1}`];
  if (!generated(sample, i)) return [...rows, "from the environment"].join("\n");
  rows.push(`rollout logprob ${sample.rollout_logprobs[i].toFixed(4)}`);
  const advantage = COLORINGS.advantage.value(sample, i);
  if (advantage !== null) rows.push(`advantage ${number(advantage)}`);
  return rows.join("\n");
}
