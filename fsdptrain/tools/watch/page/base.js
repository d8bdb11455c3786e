"use strict";
// Everything that a run holds is put into the page as text: `textContent`, never markup.

const COLORS = ["#3b82f6", "#e8793a", "#22a06b", "#d1495b", "#8b6fd6", "#c49a1a", "#17a2b8", "#8a8f98"];
const runs = []; // {cursor, name, title, total, step, updated, pace, curves, bars, samples, color}
const settings = readSettings();

function byId(id) {
  return document.getElementById(id);
}

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children); // strings become text
  return element;
}

function makeSvg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function dot(color) {
  const element = make("i", "dot");
  element.style.background = color;
  return element;
}

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toFixed(size >= 1e7 ? 0 : 1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(0) + "k";
  if (size >= 100 || value === 0) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  return size >= 1e-3 ? String(+value.toPrecision(3)) : value.toExponential(1);
}

function duration(seconds) {
  const whole = Math.round(seconds);
  const two = (x) => String(x).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)} days`;
}

function showTip(event, text) {
  const tip = byId("tip");
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const top = event.clientY + 14 + height > innerHeight ? event.clientY - 14 - height : event.clientY + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

function replaceOptions(select, values, first) {
  const wanted = [...first, ...values];
  if (wanted.length === select.options.length && wanted.every((value, i) => select.options[i].value === value)) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map((value) => new Option(value || "all", value)));
  select.value = wanted.includes(chosen) ? chosen : wanted[0];
}

function readSettings() {
  const given = new URLSearchParams(location.hash.slice(1));
  const metrics = given.get("metrics");
  return {
    metrics: metrics === null ? null : metrics.split(",").filter(Boolean), // null: the defaults
    smoothing: Math.min(0.98, Math.max(0, Number(given.get("smoothing") ?? 0.6) || 0)),
    axis: given.get("axis") === "minutes" ? "minutes" : "step",
    color: given.get("color") ?? "advantage",
  };
}

function keepSettings() {
  const kept = new URLSearchParams({ smoothing: settings.smoothing, axis: settings.axis, color: settings.color });
  if (settings.metrics !== null) kept.set("metrics", settings.metrics.join(","));
  history.replaceState(null, "", `#${kept}`);
}
