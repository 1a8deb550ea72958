// The heat map: a row for each layer, a column for each expert. Large cells have borders, and say how often the expert was
// used since the page was opened.

const FADE = 0.82; // of a use's colour, from one frame to the next
const COLOURS = ["empty", "resident", "host", "device", "demanded", "gained", "panel", "ink", "faint"];
const [LOWEST, TALLEST] = [16, 28]; // pixels of a row, as the following
const LOW = 320; // the height within which rows are not made lower
const BORDERED = 5; // the least side of a cell with a border
const COUNTED = [34, 15]; // the least width and height of a cell with a count
const MARGIN = [30, 18]; // at the left, for the layers' numbers, and above, for the experts'
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500]; // between numbers that would overlap

function planeOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function rgb(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

// How bright a colour looks, 0 to 1.
const brightness = (colour) =>
  [0.2126, 0.7152, 0.0722].reduce((sum, share, at) => sum + share * (colour[at] / 255) ** 2.2, 0);
const BRIGHT = 0.18; // where black and white are equally well read

const css = (colour) => `rgb(${colour.join(" ")})`;

export class Experts {
  constructor(canvas) {
    this.canvas = canvas;
    this.cells = document.createElement("canvas"); // a pixel for each expert
    this.frames = 0;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
    this.readColours();
  }

  readColours() {
    this.colours = Object.fromEntries(COLOURS.map((name) => [name, rgb(name)]));
    this.moving = true;
  }

  begin({ layers, experts, tiles }) {
    const cells = layers * experts;
    Object.assign(this, { layers, experts, tiles, resident: new Uint8Array(cells), uses: new Uint32Array(cells) });
    for (const name of ["host", "device", "demanded", "gained"]) this[name] = new Float32Array(cells);
    this.cells.width = experts;
    this.cells.height = layers;
    this.image = this.cells.getContext("2d").createImageData(experts, layers);
    if (!this.drawing) {
      this.drawing = true;
      setInterval(() => this.fade(), 100);
      new ResizeObserver(() => (this.moving = true)).observe(this.canvas.parentElement);
    }
    this.moving = true;
  }

  add(event) {
    if (!this.image) return;
    const [used, share, demanded, gained] = ["used", "device", "demanded", "gained"].map((name) => planeOf(event[name]));
    this.resident = planeOf(event.resident);
    for (let i = 0; i < used.length; i++) {
      if (used[i]) {
        const part = share[i] / 255;
        this.device[i] = Math.max(this.device[i], part);
        this.host[i] = Math.max(this.host[i], 1 - part);
        this.uses[i] += used[i];
      }
      if (demanded[i]) this.demanded[i] = 1;
      else if (gained[i]) this.gained[i] = 1;
    }
    this.moving = true;
  }

  fade() {
    if (!this.moving || document.hidden) return;
    this.draw();
    let most = 0;
    for (const plane of [this.host, this.device, this.demanded, this.gained]) {
      for (let i = 0; i < plane.length; i++) {
        plane[i] *= FADE;
        if (plane[i] > most) most = plane[i];
      }
    }
    this.moving = most > 0.02;
  }

  // Fills `cells` with the colours of this moment.
  colour() {
    const { empty, resident, host, device, demanded, gained } = this.colours;
    const data = this.image.data;
    for (let i = 0, at = 0; i < this.resident.length; i++, at += 4) {
      const part = this.resident[i] / this.tiles;
      for (let c = 0; c < 3; c++) {
        let value = empty[c] + (resident[c] - empty[c]) * part;
        value += (gained[c] - value) * this.gained[i];
        value += (device[c] - value) * this.device[i];
        value += (host[c] - value) * this.host[i];
        value += (demanded[c] - value) * this.demanded[i];
        data[at + c] = value;
      }
      data[at + 3] = 255;
    }
    this.cells.getContext("2d").putImageData(this.image, 0, 0);
  }

  draw() {
    const { canvas, layers, experts } = this;
    const [left, top] = MARGIN;
    const whole = canvas.parentElement.clientWidth;
    const width = whole - left;
    const ratio = Math.min(0.375, Math.max(layers / experts, 0.08));
    const least = Math.min(layers * LOWEST, LOW);
    const height = Math.round(Math.min(Math.max(width * ratio, least), layers * TALLEST));
    const scale = devicePixelRatio;
    const [columns, rows] = [whole, height + top].map((side) => Math.round(side * scale));
    if (canvas.width !== columns || canvas.height !== rows) {
      [canvas.width, canvas.height] = [columns, rows];
      canvas.style.height = `${height + top}px`;
    }
    this.colour();
    const paper = canvas.getContext("2d");
    paper.setTransform(scale, 0, 0, scale, 0, 0);
    paper.clearRect(0, 0, whole, height + top);
    paper.imageSmoothingEnabled = false;
    paper.drawImage(this.cells, left, top, width, height);
    const [across, down] = [width / experts, height / layers];
    if (Math.min(across, down) >= BORDERED) this.drawBorders(paper, width, height);
    paper.font = "11px system-ui, sans-serif";
    paper.textBaseline = "middle";
    if (across >= COUNTED[0] && down >= COUNTED[1]) this.drawCounts(paper, across, down);
    paper.fillStyle = css(this.colours.faint);
    paper.textAlign = "center";
    numbers(experts, across, 30, (number, middle) => paper.fillText(number, left + middle, top - 9));
    paper.textAlign = "right";
    numbers(layers, down, 13, (number, middle) => paper.fillText(number, left - 7, top + middle));
    this.frames += 1;
    canvas.dataset.frames = this.frames;
  }

  drawBorders(paper, width, height) {
    const [left, top] = MARGIN;
    paper.fillStyle = css(this.colours.panel);
    for (let column = 1; column < this.experts; column++) {
      paper.fillRect(Math.round(left + (column * width) / this.experts), top, 1, height);
    }
    for (let row = 1; row < this.layers; row++) {
      paper.fillRect(left, Math.round(top + (row * height) / this.layers), width, 1);
    }
  }

  drawCounts(paper, across, down) {
    const { ink, panel } = this.colours;
    const [dark, light] = [ink, panel].sort((a, b) => brightness(a) - brightness(b)).map(css);
    paper.textAlign = "center";
    for (let i = 0; i < this.uses.length; i++) {
      if (!this.uses[i]) continue;
      paper.fillStyle = brightness(this.image.data.subarray(4 * i, 4 * i + 3)) > BRIGHT ? dark : light;
      const [row, column] = [Math.floor(i / this.experts), i % this.experts];
      paper.fillText(short(this.uses[i]), MARGIN[0] + (column + 0.5) * across, MARGIN[1] + (row + 0.5) * down);
    }
  }
}

// Calls `put` with each number from 0 that has room, and its place.
function numbers(count, size, room, put) {
  const step = STEPS.find((each) => each * size >= room) ?? 1000;
  for (let number = 0; number < count; number += step) put(number, (number + 0.5) * size);
}

function short(count) {
  if (count < 10000) return `${count}`;
  return count < 1e7 ? `${Math.round(count / 1e3)}k` : `${Math.round(count / 1e6)}M`;
}
