// The image that a request starts from: a test image or a sample, with noise or with hidden pixels.
import { MOVES, Sheet, clamp, color } from "./sheets.js";

const STRIP_COLUMNS = 8;
const $ = selector => document.querySelector(selector);
const middle = (at, size) => at >= size / 4 && at < 3 * size / 4;
const HIDE = { // whether to hide the pixel in row r and column c of an image of height h and width w
  left: (r, c, h, w) => c < w / 2, bottom: (r, c, h) => r >= h / 2, middle: (r, c, h, w) => middle(r, h) && middle(c, w),
  scatter: (r, c) => (7 * r + 11 * c + 5 * ((r * c) % 3)) % 4 !== 0, none: () => false,
};

export class Easel {
  // `changed` is called when the image, or the hidden part, has changed.
  constructor(about, images, changed) {
    Object.assign(this, { about, images, changed, kind: "draw", empty: !images.length, given: null, cursor: null, painting: null });
    const [, height, width] = about.shape;
    this.strip = new Sheet($("#strip"), about, STRIP_COLUMNS);
    this.image = new Sheet($("#image"), about, 1);
    this.input = new Sheet($("#given"), about, 1); // of the model
    this.size = this.strip.size;
    this.strip.num = images.length / this.size;
    this.hidden = new Uint8Array(height * width);
    this.chosen = images.length ? 0 : null;
    this.values = images.length ? images.slice(0, this.size) : new Float32Array(this.size);
    $(".strip").hidden = !images.length;
    if (!images.length) $("#source").textContent = "The test set is not on this machine.";
    this.hide("bottom");
    this.listen();
  }

  listen() {
    const strip = this.strip.canvas, image = this.image.canvas;
    strip.addEventListener("click", event => { const at = this.strip.at(event); if (at) this.choose(at.image); });
    strip.addEventListener("keydown", event => {
      if (!(event.key in MOVES) || this.chosen === null) return;
      event.preventDefault(); event.stopPropagation();
      const [down, across] = MOVES[event.key];
      this.choose(clamp(this.chosen + STRIP_COLUMNS * down + across, 0, this.strip.num - 1));
    });
    for (const button of document.querySelectorAll("[data-hide]")) {
      button.addEventListener("click", () => { this.hide(button.dataset.hide); this.changed(); });
    }
    image.addEventListener("pointerdown", event => {
      const at = this.image.at(event);
      if (this.kind !== "inpaint" || event.button || !at) return;
      image.setPointerCapture(event.pointerId);
      this.painting = 1 - this.hidden[at.row * this.about.shape[2] + at.column];
      this.paint(at);
    });
    image.addEventListener("pointermove", event => { if (this.painting !== null) this.paint(this.image.at(event)); });
    for (const name of ["pointerup", "pointercancel"]) {
      image.addEventListener(name, () => { if (this.painting !== null) { this.painting = null; this.changed(); } });
    }
    image.addEventListener("keydown", event => this.key(event));
    image.addEventListener("blur", () => { this.cursor = null; this.draw(); });
  }

  key(event) {
    if (this.kind !== "inpaint" || !(event.key in MOVES || event.key === " ")) return;
    event.preventDefault(); event.stopPropagation();
    const [, height, width] = this.about.shape, [down, across] = MOVES[event.key] ?? [0, 0];
    const at = this.cursor ?? { row: Math.floor(height / 2), column: Math.floor(width / 2) };
    this.cursor = { image: 0, row: clamp(at.row + down, 0, height - 1), column: clamp(at.column + across, 0, width - 1) };
    if (event.key === " ") {
      this.hidden[at.row * width + at.column] ^= 1;
      this.changed();
    }
    this.draw();
  }

  // The brush grows with the image: one pixel of an 8 x 8 digit, a disc on a larger image.
  paint(at) {
    if (!at) return;
    const [, height, width] = this.about.shape, radius = Math.floor(Math.min(height, width) / 12);
    this.hidden = this.hidden.map((old, i) => {
      const near = (Math.floor(i / width) - at.row) ** 2 + (i % width - at.column) ** 2 <= radius ** 2 + 0.5;
      return near ? this.painting : old;
    });
    this.draw();
  }

  hide(what) {
    const [, height, width] = this.about.shape;
    this.hidden = this.hidden.map((_, i) => Number(HIDE[what](Math.floor(i / width), i % width, height, width)));
    this.draw();
  }

  choose(image) {
    this.take(this.images.slice(image * this.size, (image + 1) * this.size), image);
  }

  take(values, chosen = null) {
    Object.assign(this, { values, chosen, given: null, empty: false });
    this.draw();
    this.changed();
  }

  show(kind) {
    this.kind = kind;
    $("#easel").hidden = kind === "draw";
    $("#easel").dataset.kind = kind;
    for (const each of ["denoise", "inpaint"]) $(`#${each}-tools`).hidden = kind !== each;
    $("#image-note").textContent = kind === "inpaint" ? "The image: paint what to hide" : "The image";
    this.draw();
  }

  draw() {
    if (this.kind === "draw") return;
    const inpaint = this.kind === "inpaint";
    if (this.images.length) this.strip.draw(this.images, null, this.chosen);
    const image = this.image.draw(this.values), input = this.input.draw(inpaint ? this.values : this.given);
    if (inpaint) { this.cover(image, "measure", 0.62); this.cover(input, "wash", 1); }
    if (this.cursor) this.image.outline(image, 0, this.cursor);
  }

  // Cover the hidden pixels, rounded to pixels of the canvas: neighbors must neither overlap nor leave a gap.
  cover(context, name, alpha) {
    const width = this.about.shape[2], { unit } = this.image.place(0), edge = (at, side) => Math.round(at * unit[side]);
    context.fillStyle = color(name); context.globalAlpha = alpha;
    this.hidden.forEach((hidden, i) => {
      const row = Math.floor(i / width), column = i % width, left = edge(column, 0), top = edge(row, 1);
      if (hidden) context.fillRect(left, top, edge(column + 1, 0) - left, edge(row + 1, 1) - top);
    });
    context.globalAlpha = 1;
  }
}
