import { Experts } from "./experts.js";
import { CAUSES, Line, bytes, difference, percent, seconds, timeParts, why } from "./figures.js";
import { follow } from "./stream.js";

const at = (id) => document.getElementById(id);
const experts = new Experts(at("experts"), at("cell"));
const lines = { decode: new Line(at("decode-line"), "--device"), prefill: new Line(at("prefill-line"), "--host") };
let before = null;
let known = null; // pid -> name of the processes of the last event
let restarts = 0;

function make(name, text, kind) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function fill(table, rows) {
  table.replaceChildren(
    ...rows.map(([kind, ...cells]) => {
      const row = make("tr", undefined, kind);
      row.append(...cells.map((cell) => make("td", cell)));
      return row;
    }),
  );
}

function setState(state, text) {
  at("state").dataset.state = state;
  at("state").textContent = text;
}

function onAbout(about) {
  const emulated = about.emulation ? `, emulated: ${about.emulation}` : "";
  at("about").textContent =
    `${about.model} on ${about.device}${emulated}; experts ${about.format}, rest ${about.backbone_dtype}; ` +
    `${about.layers} layers of ${about.experts} experts, ${about.tiles} tiles each; engine ${about.engine}`;
  document.title = `Tandem: ${about.model}`;
  before = null;
  experts.begin(about);
}

function onEngine({ engine, restarts: seen }) {
  restarts = seen;
  const again = restarts ? `; restarted ${restarts === 1 ? "once" : `${restarts} times`}` : "";
  if (engine === "up") setState("up", `live${again}`);
  else setState("away", "the engine is away: it is being started or restarted; answers go on when it is back");
}

function onCounters(now) {
  const { scheduler, cache } = now;
  at("running").textContent = scheduler.running;
  at("waiting").textContent = scheduler.waiting;
  const [used, kept] = [scheduler.kv_tokens_used, scheduler.kv_tokens_kept];
  at("kv").textContent =
    `KV cache: ${used} of ${scheduler.kv_tokens} tokens used, ${kept} kept; ${scheduler.ended} ended` +
    (scheduler.preemptions ? `, ${scheduler.preemptions} preemptions` : "");
  at("policy").textContent = now.policy;
  const options = Object.entries(now.policy_options).map(([name, value]) => `${name}=${value}`);
  const notes = [...options, now.emulation && `emulated: ${now.emulation}`, now.prefetch?.status];
  at("policy-notes").textContent = notes.filter(Boolean).join("; ") || `messages by ${now.exchange || "none: no workers"}`;
  fill(at("memory").tBodies[0], memoryRows(now, cache));
  showProcesses(now);
  const passed = before ? now.time - before.time : 0;
  const decode = before && difference(now, before, "decode");
  const prefill = before && difference(now, before, "prefill");
  before = now;
  if (!decode || !prefill || passed <= 0) return;
  for (const [name, counted] of Object.entries({ decode, prefill })) {
    const rate = counted.rows / passed;
    at(name).textContent = rate >= 100 ? rate.toFixed(0) : rate.toFixed(1);
    lines[name].add(rate);
  }
  const moved = ["decode", "prefill"].map((name) => movedBytes({ decode, prefill }[name], now.tile_bytes));
  fill(at("links").tBodies[0], linkRows(moved, passed, decode, now));
  const parts = timeParts(decode);
  if (decode.steps > 0 && parts) showTime(parts, decode);
}

function movedBytes(phase, size) {
  return { demanded: phase.fetched_bytes, predicted: phase.predicted_tiles * size, wasted: phase.wasted_tiles * size };
}

function linkRows(moved, passed, decode, now) {
  const rate = (kind) => `${bytes(moved.reduce((sum, phase) => sum + phase[kind], 0) / passed)}/s`;
  const whole = now.phases.decode;
  const hits = decode.active ? percent(decode.hits / decode.active) : whole.active ? percent(whole.hits / whole.active) : "–";
  const tiles = decode.host_tiles + decode.resident_tiles + decode.fetched_tiles;
  return [
    ["", "fetched while a step waited", rate("demanded")],
    ["", "fetched ahead", rate("predicted")],
    ["", "of that evicted unused", rate("wasted")],
    ["", "needed experts that were resident", hits],
    ["", "tiles computed on the host", tiles ? percent(decode.host_tiles / tiles) : "–"],
  ];
}

function memoryRows(now, cache) {
  const rows = [];
  if (cache) {
    const size = (count) => bytes(count * now.tile_bytes);
    rows.push(["", "expert cache, filled", `${size(cache.resident_tiles)} of ${size(cache.capacity_tiles)}`]);
    rows.push(["", "share of all tiles that fits", percent(cache.capacity_tiles / cache.all_tiles)]);
  } else rows.push(["", "expert cache", "none: the host computes"]);
  const own = now.processes.reduce((sum, process) => sum + process.memory, 0);
  rows.push(["", "processes' own memory", bytes(own)]);
  return rows;
}

function showTime(parts, decode) {
  at("time").replaceChildren(
    ...parts.map((part, i) => {
      const piece = make("span", undefined, `k${i}`);
      piece.style.width = `${part * 100}%`;
      piece.title = `${CAUSES[i][0]}: ${percent(part)}`;
      return piece;
    }),
  );
  const words = parts.map((part, i) => [part, i]).filter(([part]) => part >= 0.005);
  at("time-words").replaceChildren(
    ...words.map(([part, i]) => {
      const word = make("span");
      word.append(make("span", undefined, `key k${i}`), `${CAUSES[i][0]} ${percent(part)}`);
      return word;
    }),
  );
  const spent = Object.values(decode.seconds).reduce((a, b) => a + b, 0);
  at("why").textContent = `A step takes ${((spent / decode.steps) * 1e3).toPrecision(3)} ms. ${why(parts)}`;
}

function showProcesses(now) {
  const named = new Map();
  const rows = now.processes.map((process) => {
    const name = process.role === "worker" ? `worker ${process.index}` : process.role;
    named.set(process.pid, name);
    const old = lastCpu.get(process.pid);
    const cores = old && now.time > old.time ? (process.cpu - old.cpu) / (now.time - old.time) : null;
    lastCpu.set(process.pid, { cpu: process.cpu, time: now.time });
    const young = process.alive < 10 && known && restartedNames.has(name) ? "new" : "";
    return [young, name, seconds(process.alive), cores === null ? "–" : cores.toFixed(2), bytes(process.memory)];
  });
  if (known) {
    for (const [pid, name] of known) if (!named.has(pid)) tellLife(`${name} (${pid}) has ended`, name);
    for (const [pid, name] of named) if (!known.has(pid)) tellLife(`${name} (${pid}) was started`, name);
  }
  known = named;
  for (const pid of lastCpu.keys()) if (!named.has(pid)) lastCpu.delete(pid);
  fill(at("processes").tBodies[0], rows);
}

const lastCpu = new Map();
const restartedNames = new Set();

function tellLife(text, name) {
  restartedNames.add(name);
  at("lives").prepend(make("li", `${new Date().toLocaleTimeString()} ${text}`));
  while (at("lives").children.length > 8) at("lives").lastChild.remove();
}

function askKey() {
  setState("gone", "an API key is needed");
  at("ask").hidden = false;
  return new Promise((resolve) => {
    at("ask").onsubmit = (event) => {
      event.preventDefault();
      at("ask").hidden = true;
      resolve(at("key").value);
    };
  });
}

const handlers = { about: onAbout, state: onEngine, counters: onCounters, experts: (event) => experts.add(event) };
follow("/dashboard/events", handlers, setState, askKey);
