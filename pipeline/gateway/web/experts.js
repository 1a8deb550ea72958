// The heat map: a pixel of the canvas for each expert, enlarged by the style sheet.

const FADE = 0.82; // of a use's colour, from one frame to the next
const COLOURS = ["empty", "resident", "host", "device", "demanded", "gained"];

function planeOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function rgb(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

export class Experts {
  constructor(canvas) {
    this.canvas = canvas;
    this.frames = 0;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
    this.readColours();
  }

  readColours() {
    this.colours = Object.fromEntries(COLOURS.map((name) => [name, rgb(name)]));
  }

  begin({ layers, experts, tiles }) {
    const cells = layers * experts;
    Object.assign(this, { layers, experts, tiles, resident: new Uint8Array(cells) });
    for (const name of ["host", "device", "demanded", "gained"]) this[name] = new Float32Array(cells);
    this.canvas.width = experts;
    this.canvas.height = layers;
    const ratio = Math.min(0.375, Math.max(layers / experts, 0.08));
    this.canvas.style.aspectRatio = `${1 / ratio}`;
    this.image = this.canvas.getContext("2d").createImageData(experts, layers);
    if (!this.drawing) {
      this.drawing = true;
      setInterval(() => this.fade(), 100);
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

  draw() {
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
    this.canvas.getContext("2d").putImageData(this.image, 0, 0);
    this.frames += 1;
    this.canvas.dataset.frames = this.frames;
  }
}
