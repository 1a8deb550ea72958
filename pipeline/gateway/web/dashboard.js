// The dashboard: server-sent events of the gateway as figures and a heat map.

import { askKey, events, keyNeeded, refusal, withKey } from "./events.js";
import { Experts } from "./experts.js";

// --- figures, of the differences of two `counters` events

const CAUSES = [
  ["waiting for the workers", ["wait"]],
  ["waiting for the link", ["link"]],
  ["waiting for the disk", ["disk"]],
  ["experts on the device", ["device", "shared"]],
  ["attention and routers", ["attention", "read"]],
  ["planning", ["plan"]],
  ["messages and sums", ["submit", "combine"]],
  ["the head", ["head"]],
];
const HELP = [
  "more cores, a smaller format, without a GPU --workers 0 or, with one, a larger expert cache would help",
  "a faster link, a larger expert cache or a policy that computes on the host would help",
  "a larger --host-memory, a smaller format or a faster disk would help",
  "a smaller format would help",
  "a smaller --backbone-dtype (int8, int4) or a shorter context would help",
  "a simpler policy would help",
  "fewer workers (--workers), or none, would help",
  "a smaller --backbone-dtype (int8, int4) would help",
];

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; n >= 999.5 && at < 4; at++) n /= 1000;
  return `${n >= 100 || at === 0 ? n.toFixed(0) : n.toPrecision(2)} ${units[at]}`;
}

const percent = (part) => `${(part * 100).toFixed(0)} %`;

// The difference of the same phase in two events; null after a restart of the engine.
function difference(now, before, phase) {
  const [a, b] = [now.phases[phase], before.phases[phase]];
  if (a.steps < b.steps) return null;
  const of = (x, y) =>
    Object.fromEntries(Object.keys(x).map((k) => [k, typeof x[k] === "object" ? of(x[k], y[k]) : x[k] - y[k]]));
  return of(a, b);
}

function timeParts(decode) {
  const spent = CAUSES.map(([, parts]) => parts.reduce((sum, part) => sum + decode.seconds[part], 0));
  const whole = spent.reduce((a, b) => a + b, 0);
  return whole > 0 ? spent.map((s) => s / whole) : null;
}

function why(parts) {
  const most = parts.indexOf(Math.max(...parts));
  return `Its largest part: ${CAUSES[most][0]}, ${percent(parts[most])}; ${HELP[most]}.`;
}

// --- the page

const at = (id) => document.getElementById(id);
const experts = new Experts(at("experts"));
let before = null;
let restarts = 0;

function make(name, text, kind) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
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
  at("kv").textContent = `KV cache: ${used} of ${scheduler.kv_tokens} tokens used, ${kept} kept`;
  at("policy").textContent = now.policy;
  const options = Object.entries(now.policy_options).map(([name, value]) => `${name}=${value}`);
  at("policy-notes").textContent = [...options, now.prefetch.status].filter(Boolean).join("; ");
  if (!cache) [at("hits").textContent, at("cache").textContent] = ["n/a", "none: the host computes"];
  const passed = before ? now.time - before.time : 0;
  const decode = before && difference(now, before, "decode");
  const prefill = before && difference(now, before, "prefill");
  before = now;
  if (!decode || !prefill || passed <= 0) return;
  for (const [name, counted] of Object.entries({ decode, prefill })) {
    const rate = counted.rows / passed;
    at(name).textContent = rate >= 100 ? rate.toFixed(0) : rate.toFixed(1);
  }
  if (cache && decode.active) at("hits").textContent = percent(decode.hits / decode.active);
  const fetched = bytes((decode.fetched_bytes + prefill.fetched_bytes) / passed);
  const filled = cache && `${bytes(cache.resident_tiles * now.tile_bytes)} of ${bytes(cache.capacity_tiles * now.tile_bytes)}`;
  if (cache) at("cache").textContent = `${filled} filled; ${fetched}/s fetched while a step waited`;
  const parts = timeParts(decode);
  if (decode.steps > 0 && parts) showTime(parts, decode);
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

// --- events

const PAUSE = 1000; // ms before another try
const SILENCE = 15000; // ms; the gateway sends something at least every 10 s

// handlers: event name -> function of its data; `onState(state, text)`.
async function follow(path, handlers, onState) {
  for (;;) {
    try {
      const stop = new AbortController();
      const answer = await fetch(path, { headers: withKey(), signal: stop.signal, cache: "no-store" });
      if (answer.status === 401) {
        onState("gone", keyNeeded());
        await askKey();
        continue;
      }
      if (!answer.ok) throw new Error(await refusal(answer));
      await read(answer.body, stop, handlers);
      onState("gone", "the server has ended; trying again …");
    } catch (error) {
      const lost = error instanceof TypeError || error.name === "AbortError";
      onState("gone", `${lost ? "the server cannot be reached" : error.message}; trying again …`);
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
  }
}

async function read(body, stop, handlers) {
  let timer;
  const watch = (waits) => {
    clearTimeout(timer);
    if (waits) timer = setTimeout(() => stop.abort(), SILENCE);
  };
  for await (const event of events(body, watch)) {
    const match = /^event: (\w+)\ndata: (.*)$/s.exec(event);
    if (match && handlers[match[1]]) handlers[match[1]](JSON.parse(match[2]));
  }
}

const handlers = { about: onAbout, state: onEngine, counters: onCounters, experts: (event) => experts.add(event) };
follow("/dashboard/events", handlers, setState);
