// Server-sent events by fetch: EventSource can send no API key, and says nothing about a refusal.

const PAUSE = 1000; // ms before another try
const SILENCE = 15000; // ms; the gateway sends something at least every 10 s

// handlers: event name -> function of its data; `onState(state, text)`; `askKey()` resolves to a key.
export async function follow(path, handlers, onState, askKey) {
  let key = sessionStorage.getItem("tandem-key") || "";
  for (;;) {
    try {
      const stop = new AbortController();
      const headers = key ? { Authorization: `Bearer ${key}` } : {};
      const answer = await fetch(path, { headers, signal: stop.signal, cache: "no-store" });
      if (answer.status === 401) {
        key = await askKey();
        sessionStorage.setItem("tandem-key", key);
        continue;
      }
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      await read(answer.body.getReader(), stop, handlers);
      onState("gone", "the server has ended; trying again …");
    } catch (error) {
      const lost = error instanceof TypeError || error.name === "AbortError";
      onState("gone", `${lost ? "the server cannot be reached" : error.message}; trying again …`);
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
  }
}

async function read(reader, stop, handlers) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const timer = setTimeout(() => stop.abort(), SILENCE);
    const { done, value } = await reader.read().finally(() => clearTimeout(timer));
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const match = /^event: (\w+)\ndata: (.*)$/s.exec(event);
      if (match && handlers[match[1]]) handlers[match[1]](JSON.parse(match[2]));
    }
  }
}
