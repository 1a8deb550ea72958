// Server-sent events by fetch: EventSource can send no API key, and says nothing about a refusal.

const KEY = "tandem-key"; // kept until the tab is closed

export function withKey(headers = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

export const keyNeeded = () => (sessionStorage.getItem(KEY) ? "this API key is not known" : "an API key is needed");

let asked = null; // one promise for all that wait

// Ask for an API key by the page's form; resolves when one was given.
export function askKey() {
  const form = document.getElementById("ask");
  form.hidden = false;
  form.key.focus();
  form.key.select();
  asked ??= new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      form.hidden = true;
      sessionStorage.setItem(KEY, form.key.value);
      asked = null;
      resolve();
    };
  });
  return asked;
}

// The message of an answer that is no success.
export async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server has answered ${answer.status}`;
  }
}

// Yields the text of each event. `onRead` is called before each wait and after it, with whether it waits.
export async function* events(body, onRead = () => {}) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      onRead(true);
      const { done, value } = await reader.read().finally(() => onRead(false));
      if (done) return;
      text += decoder.decode(value, { stream: true });
      const found = text.split("\n\n");
      text = found.pop();
      yield* found;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
