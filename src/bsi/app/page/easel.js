// The image that a request starts from: a test image or a sample, with noise or with hidden pixels.
import { Sheet, color, fit, picture } from "./sheets.js";

const STRIP_COLUMNS = 8;

export class Easel {
  // `changed` is called when the image, or the hidden part, has changed.
  constructor(about, images, changed) {
    Object.assign(this, { about, images, changed, kind: "draw", empty: !images.length, given: null, cursor: null, painting: null });
    const [channels, height, width] = about.shape;
    this.size = channels * height * width;
    this.hidden = new Uint8Array(height * width);
    this.chosen = images.length ? 0 : null;
    this.values = images.length ? images.slice(0, this.size) : new Float32Array(this.size);
    this.strip = new Sheet(document.querySelector("#strip"), about, STRIP_COLUMNS);
    this.strip.num = images.length / this.size;
    this.image = document.querySelector("#image");
    this.shown = document.querySelector("#given");
    for (const canvas of [this.image, this.shown]) canvas.style.aspectRatio = `${width} / ${height}`;
    this.hide("bottom");
    this.listen();
  }

  listen() {
    const strip = this.strip.canvas;
    strip.addEventListener("click", event => { const at = this.strip.at(event); if (at) this.choose(at.image); });
    strip.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -STRIP_COLUMNS, ArrowDown: STRIP_COLUMNS }[event.key];
      if (move === undefined || this.chosen === null) return;
      event.preventDefault(); event.stopPropagation();
      this.choose(Math.min(this.strip.num - 1, Math.max(0, this.chosen + move)));
    });
    for (const button of document.querySelectorAll("[data-hide]")) {
      button.addEventListener("click", () => { this.hide(button.dataset.hide); this.changed(); });
    }
    this.image.addEventListener("pointerdown", event => {
      if (this.kind !== "inpaint" || event.button) return;
      this.image.setPointerCapture(event.pointerId);
      this.painting = 1 - this.hidden[this.under(event)];
      this.paint(this.under(event));
    });
    this.image.addEventListener("pointermove", event => { if (this.painting !== null) this.paint(this.under(event)); });
    for (const name of ["pointerup", "pointercancel"]) {
      this.image.addEventListener(name, () => { if (this.painting !== null) { this.painting = null; this.changed(); } });
    }
    this.image.addEventListener("keydown", event => this.key(event));
    this.image.addEventListener("blur", () => { this.cursor = null; this.draw(); });
  }

  key(event) {
    if (this.kind !== "inpaint") return;
    const [, height, width] = this.about.shape, at = this.cursor ?? { row: Math.floor(height / 2), column: Math.floor(width / 2) };
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move && event.key !== " ") return;
    event.preventDefault(); event.stopPropagation();
    if (move) {
      this.cursor = { row: Math.min(height - 1, Math.max(0, at.row + move[0])), column: Math.min(width - 1, Math.max(0, at.column + move[1])) };
    } else {
      this.cursor = at;
      const place = at.row * width + at.column;
      this.hidden[place] = 1 - this.hidden[place];
      this.changed();
    }
    this.draw();
  }

  under(event) {
    const box = this.image.getBoundingClientRect(), [, height, width] = this.about.shape;
    const row = Math.min(height - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * height)));
    const column = Math.min(width - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * width)));
    return row * width + column;
  }

  // The brush grows with the image: one pixel of an 8 x 8 digit, a disc on a larger image.
  paint(place) {
    const [, height, width] = this.about.shape, radius = Math.floor(Math.min(height, width) / 12);
    const [row, column] = [Math.floor(place / width), place % width];
    for (let r = Math.max(0, row - radius); r <= Math.min(height - 1, row + radius); r++) {
      for (let c = Math.max(0, column - radius); c <= Math.min(width - 1, column + radius); c++) {
        if ((r - row) ** 2 + (c - column) ** 2 <= radius ** 2 + 0.5) this.hidden[r * width + c] = this.painting;
      }
    }
    this.draw();
  }

  hide(what) {
    const [, height, width] = this.about.shape;
    const middle = (at, of) => at >= of / 4 && at < 3 * of / 4;
    const rules = {
      left: (r, c) => c < width / 2, bottom: r => r >= height / 2, middle: (r, c) => middle(r, height) && middle(c, width),
      scatter: (r, c) => (7 * r + 11 * c + 5 * ((r * c) % 3)) % 4 !== 0, none: () => false,
    };
    this.hidden = this.hidden.map((_, i) => Number(rules[what](Math.floor(i / width), i % width)));
    this.draw();
  }

  choose(image) {
    this.chosen = image;
    this.take(this.images.slice(image * this.size, (image + 1) * this.size), image);
  }

  take(values, chosen = null) {
    Object.assign(this, { values, chosen, given: null, empty: false });
    this.draw();
    this.changed();
  }

  show(kind) {
    this.kind = kind;
    const easel = document.querySelector("#easel");
    easel.hidden = kind === "draw";
    easel.dataset.kind = kind;
    document.querySelector("#denoise-tools").hidden = kind !== "denoise";
    document.querySelector("#inpaint-tools").hidden = kind !== "inpaint";
    document.querySelector("#image-note").textContent = kind === "inpaint" ? "The image: paint what to hide" : "The image";
    document.querySelector(".strip").hidden = !this.images.length;
    if (!this.images.length) document.querySelector("#source").textContent = "The test set is not on this machine.";
    this.draw();
  }

  draw() {
    if (this.kind === "draw") return;
    if (this.images.length) this.strip.draw(this.images, null, this.chosen);
    this.one(this.image, this.values, this.kind === "inpaint" ? 0.62 : 0, this.cursor);
    if (this.kind === "inpaint") this.one(this.shown, this.values, 1, null);
    else this.one(this.shown, this.given, 0, null);
  }

  one(canvas, values, cover, cursor) {
    const context = fit(canvas), [, height, width] = this.about.shape;
    const unit = [canvas.width / width, canvas.height / height];
    context.imageSmoothingEnabled = false;
    context.fillStyle = color("wash"); context.fillRect(0, 0, canvas.width, canvas.height);
    if (values) context.drawImage(picture(values, 0, this.about), 0, 0, canvas.width, canvas.height);
    context.fillStyle = color(cover === 1 ? "wash" : "measure");
    context.globalAlpha = cover;
    for (let i = 0; cover && i < this.hidden.length; i++) {
      if (!this.hidden[i]) continue;
      // rounded to pixels of the canvas: neighbors must neither overlap nor leave a gap
      const edges = [i % width, i % width + 1].map(x => Math.round(x * unit[0])), rows = [Math.floor(i / width), Math.floor(i / width) + 1].map(y => Math.round(y * unit[1]));
      context.fillRect(edges[0], rows[0], edges[1] - edges[0], rows[1] - rows[0]);
    }
    context.globalAlpha = 1;
    if (cursor) {
      context.lineWidth = 3 * (window.devicePixelRatio || 1); context.strokeStyle = color("belief");
      context.strokeRect(cursor.column * unit[0], cursor.row * unit[1], ...unit);
    }
  }
}
