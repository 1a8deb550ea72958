// A chat: the questions and answers of one conversation, which the tab keeps, and which is sent whole with each question.

import { show } from "./blocks.js";
import { askKey, events, keyNeeded, refusal, withKey } from "./events.js";

const PAUSE = 2000; // ms before another try to connect
const NEAR = 80; // pixels from the end, where the page follows an answer
const STORED = "tandem-chat";

const at = (id) => document.getElementById(id);
const [log, scroll, question] = [at("log"), at("scroll"), at("question")];
let turns = []; // { role, content, reasoning_content, note }
let chats = true; // unless the model has no chat template
let running = null; // the AbortController of the answer that is being read

function make(name, kind, text = "") {
  const element = document.createElement(name);
  element.className = kind;
  element.textContent = text;
  return element;
}

// --- what is kept until the tab is closed

function store() {
  const [system, temperature] = [at("system").value, at("temperature").value];
  try {
    sessionStorage.setItem(STORED, JSON.stringify({ turns, system, temperature }));
  } catch {
    sessionStorage.removeItem(STORED); // it is too long to be kept
  }
}

function restore() {
  const kept = JSON.parse(sessionStorage.getItem(STORED) ?? "null");
  if (!kept) return;
  turns = kept.turns;
  at("system").value = kept.system;
  at("temperature").value = kept.temperature;
  at("settings").open = Boolean(kept.system || kept.temperature);
  for (const turn of turns) {
    if (turn.role === "user") addQuestion(turn.content);
    else new AnswerView().show(turn);
  }
}

// --- what is shown

function addQuestion(text) {
  log.append(make("div", "question", text));
}

const isNear = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;

// A window that becomes narrower makes the lines more, and keeps the place of the first one.
let near = true;
scroll.onscroll = () => (near = isNear());
new ResizeObserver(() => {
  if (near) scroll.scrollTop = scroll.scrollHeight;
}).observe(scroll);

function follow(change) {
  const follows = isNear();
  change();
  if (follows) scroll.scrollTop = scroll.scrollHeight;
}

class AnswerView {
  constructor() {
    this.element = make("div", "answer");
    this.thinking = make("details", "thinking");
    this.thoughts = make("div", "");
    this.thinking.append(make("summary", "", "Thinking"), this.thoughts);
    this.thinking.hidden = true;
    this.text = make("div", "text");
    this.note = make("p", "note");
    this.element.append(this.thinking, this.text, this.note);
    log.append(this.element);
  }

  show({ content, reasoning_content: thoughts, note, failed }) {
    follow(() => {
      this.thinking.hidden = !thoughts;
      if (this.thoughts.textContent !== thoughts) this.thoughts.textContent = thoughts ?? "";
      this.thinking.firstChild.textContent = content || note ? "Thoughts" : "Thinking …";
      show(this.text, content);
      this.say(note ?? "", failed);
    });
  }

  say(note, failed = false) {
    this.note.textContent = note;
    this.note.classList.toggle("failed", failed);
  }
}

function setRunning(controller) {
  running = controller;
  log.ariaBusy = String(Boolean(controller));
  at("send").hidden = Boolean(controller);
  at("stop").hidden = !controller;
}

// --- asking

const seconds = (ms) => `${(ms / 1e3).toFixed(ms < 995 ? 2 : ms < 9950 ? 1 : 0)} s`;

// What is said below an answer. `usage`: the server's count, which a stopped answer lacks.
function noteOf({ usage, began, first, last, reason }) {
  const parts = [];
  if (usage) {
    const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = usage;
    const rate = ((tokens - 1) / (last - first)) * 1e3;
    parts.push(`${tokens} tokens${tokens > 1 && last > first ? `, ${rate.toFixed(rate < 10 ? 2 : 1)} tok/s` : ""}`);
    parts.push(`prompt of ${prompt}, ${details.cached_tokens} of them from the cache`);
  }
  if (first) parts.push(`first after ${seconds(first - began)}`);
  if (reason === "length") parts.push("cut at the longest length");
  if (reason === "stopped") parts.push(`stopped after ${seconds(performance.now() - began)}`);
  return parts.join(" · ");
}

async function ask() {
  const view = new AnswerView();
  const turn = { role: "assistant", content: "", reasoning_content: "" };
  const seen = { began: performance.now(), first: 0, last: 0, usage: null, reason: "" };
  const stop = new AbortController();
  const asked = turns.slice();
  let drawn = 0;
  const draw = () => {
    drawn ||= requestAnimationFrame(() => {
      drawn = 0;
      view.show(turn);
    });
  };
  const waiting = setInterval(() => {
    if (!at("ask").hidden) {
      seen.began = performance.now(); // the time in which a key is asked for is not the engine's
      view.say("waiting for an API key");
    } else if (!seen.first) view.say(`reading the prompt, ${seconds(performance.now() - seen.began)}`);
  }, 500);
  setRunning(stop);
  try {
    await read(asked, stop.signal, (event) => {
      const { choices, usage, error } = event;
      if (error) throw new Error(error.message);
      if (usage) seen.usage = usage;
      for (const { delta, finish_reason: reason } of choices) {
        if (reason) seen.reason = reason;
        if (!delta.content && !delta.reasoning_content) continue;
        seen.last = performance.now();
        seen.first ||= seen.last;
        turn.content += delta.content ?? "";
        turn.reasoning_content += delta.reasoning_content ?? "";
        draw();
      }
    });
    turn.note = noteOf(seen);
  } catch (error) {
    if (stop.signal.aborted) turn.note = noteOf({ ...seen, reason: "stopped" });
    else {
      turn.note = error instanceof TypeError ? "the server cannot be reached" : error.message;
      turn.failed = true;
    }
  } finally {
    clearInterval(waiting);
    cancelAnimationFrame(drawn);
  }
  if (running !== stop) return; // another chat was begun
  setRunning(null);
  view.show(turn);
  if (turn.content || turn.reasoning_content) turns.push(turn);
  if (turn.failed && chats) follow(() => view.note.append(retryButton(view, asked)));
  store();
}

// Asks again for an answer that has failed.
function retryButton(view, asked) {
  const button = make("button", "", "Try again");
  button.type = "button";
  button.onclick = () => {
    if (running) return;
    turns = asked;
    while (view.element.nextSibling) view.element.nextSibling.remove();
    view.element.remove();
    ask();
  };
  return button;
}

async function read(asked, signal, onEvent) {
  const messages = asked.map(({ role, content, reasoning_content }) =>
    reasoning_content ? { role, content, reasoning_content } : { role, content },
  );
  if (at("system").value.trim()) messages.unshift({ role: "system", content: at("system").value });
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
  const headers = withKey({ "Content-Type": "application/json" });
  const answer = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (answer.status === 401) {
    const stopped = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
    await Promise.race([askKey(), stopped]);
    question.focus();
    return read(asked, signal, onEvent);
  }
  if (!answer.ok) throw new Error(await refusal(answer));
  for await (const event of events(answer.body)) {
    if (event.startsWith("data: {")) onEvent(JSON.parse(event.slice("data: ".length)));
  }
}

// --- the keys and buttons

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

at("composer").onsubmit = (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (running || !text || !chats) return;
  question.value = "";
  fit();
  turns.push({ role: "user", content: text });
  addQuestion(text);
  scroll.scrollTop = scroll.scrollHeight;
  store();
  ask();
};
question.oninput = fit;
question.onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
};
document.onkeydown = (event) => {
  if (event.key === "Escape") running?.abort();
};
at("stop").onclick = () => running?.abort();
at("new").onclick = () => {
  const before = running;
  setRunning(null);
  before?.abort();
  turns = [];
  log.replaceChildren();
  store();
  question.focus();
};
at("system").onchange = at("temperature").onchange = store;

async function connect() {
  for (;;) {
    try {
      const answer = await fetch("/props", { headers: withKey(), cache: "no-store" });
      if (answer.status === 401) {
        at("about").textContent = keyNeeded();
        await askKey();
        continue;
      }
      if (!answer.ok) throw new Error(await refusal(answer));
      const { model_alias: model, default_generation_settings: settings, chat_template: template } = await answer.json();
      at("about").textContent = `${model}, a context of ${settings.n_ctx} tokens${template ? "" : "; it has no chat template"}`;
      chats = Boolean(template);
      if (!chats) question.placeholder = "This model continues texts, and cannot chat";
      question.disabled = at("send").disabled = !chats;
      at("temperature").placeholder = settings.params.temperature;
      document.title = `${model}: chat`;
      return;
    } catch (error) {
      at("about").textContent = error instanceof TypeError ? "the server cannot be reached" : error.message;
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
  }
}

restore();
connect();
