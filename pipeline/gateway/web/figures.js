// Figures from the differences of two `counters` events.

export const CAUSES = [
  ["waiting for the workers", ["wait"]],
  ["waiting for the link", ["link"]],
  ["experts on the device", ["device", "shared"]],
  ["attention and routers", ["attention", "read"]],
  ["planning", ["plan"]],
  ["messages and sums", ["submit", "combine"]],
  ["the head", ["head"]],
];
const HELP = [
  "more cores, a smaller format or, with a GPU, a larger expert cache would help",
  "a faster link, a larger expert cache or a policy that computes on the host would help",
  "a smaller format would help",
  "a smaller --backbone-dtype (int8, int4) or a shorter context would help",
  "a simpler policy would help",
  "fewer workers (--workers), or none, would help",
  "a smaller --backbone-dtype (int8, int4) would help",
];

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; n >= 999.5 && at < 4; at++) n /= 1000;
  return `${n >= 100 || at === 0 ? n.toFixed(0) : n.toPrecision(2)} ${units[at]}`;
}

export function seconds(s) {
  if (s < 100) return `${s.toFixed(0)} s`;
  if (s < 6000) return `${(s / 60).toFixed(0)} min`;
  return `${(s / 3600).toFixed(1)} h`;
}

export const percent = (part) => `${(part * 100).toFixed(0)} %`;

// The difference of the same phase in two events; null after a restart of the engine.
export function difference(now, before, phase) {
  const [a, b] = [now.phases[phase], before.phases[phase]];
  if (a.steps < b.steps) return null;
  const of = (x, y) =>
    Object.fromEntries(Object.keys(x).map((k) => [k, typeof x[k] === "object" ? of(x[k], y[k]) : x[k] - y[k]]));
  return of(a, b);
}

export function timeParts(decode) {
  const spent = CAUSES.map(([, parts]) => parts.reduce((sum, part) => sum + decode.seconds[part], 0));
  const whole = spent.reduce((a, b) => a + b, 0);
  return whole > 0 ? spent.map((s) => s / whole) : null;
}

export function why(parts) {
  const most = parts.indexOf(Math.max(...parts));
  return `Its largest part: ${CAUSES[most][0]}, ${percent(parts[most])}; ${HELP[most]}.`;
}

export class Line {
  constructor(canvas, colour) {
    Object.assign(this, { canvas, colour, values: [] });
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > 120) this.values.shift();
    const canvas = this.canvas;
    canvas.width = canvas.clientWidth * devicePixelRatio;
    canvas.height = 36 * devicePixelRatio;
    const [w, h] = [canvas.width, canvas.height];
    const pen = canvas.getContext("2d");
    const most = Math.max(...this.values, 1e-9);
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue(this.colour);
    pen.lineWidth = 1.5 * devicePixelRatio;
    pen.beginPath();
    this.values.forEach((v, i) => pen.lineTo((w * i) / 119, h - 2 - (h - 4) * (v / most)));
    pen.stroke();
  }
}
