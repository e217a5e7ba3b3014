// Images side by side on a canvas: values in [low, high] as gray levels or colors, enlarged without smoothing.

export const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }; // rows, columns

export const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

export const ratio = () => window.devicePixelRatio || 1;

export const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// From white at 0 to blue at 1.
export const probabilityColor = p => `rgb(${[37, 102, 173].map(end => Math.round(255 + (end - 255) * clamp(p, 0, 1))).join(", ")})`;

export function fit(canvas) {
  const box = canvas.getBoundingClientRect();
  const [width, height] = [box.width, box.height].map(side => Math.max(1, Math.round(side * ratio())));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  return canvas.getContext("2d");
}

// One image as a canvas of its own size.
function picture(values, offset, { shape: [channels, height, width], low, high }) {
  const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d");
  const image = context.createImageData(width, height), area = width * height;
  for (let i = 0; i < area; i++) {
    for (let c = 0; c < 3; c++) {
      const value = values[offset + (channels === 3 ? c * area : 0) + i];
      image.data[4 * i + c] = Math.round(255 * clamp((value - low) / (high - low), 0, 1));
    }
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

export class Sheet {
  constructor(canvas, about, columns = null) {
    Object.assign(this, { canvas, about, fixed: columns, num: 1, size: about.shape.reduce((a, b) => a * b) });
  }

  // Columns, and the side of a cell with its gap, in canvas pixels.
  layout() {
    const columns = this.fixed ?? Math.ceil(Math.sqrt(this.num));
    const [, height, width] = this.about.shape, gap = Math.max(2, Math.round(this.canvas.width / columns / 24));
    const cell = (this.canvas.width + gap) / columns;
    return { columns, gap, cell, wide: cell - gap, high: (cell - gap) * height / width };
  }

  // The left and top edge of an image, and the size of its pixels.
  place(image) {
    const { columns, cell, gap, wide, high } = this.layout(), [, height, width] = this.about.shape;
    return { left: (image % columns) * cell, top: Math.floor(image / columns) * (high + gap), unit: [wide / width, high / height] };
  }

  // The width determines the size of the cells, and the cells determine the height.
  grow() {
    fit(this.canvas);
    const { columns, gap, high } = this.layout(), tall = Math.ceil(this.num / columns) * (high + gap) - gap;
    this.canvas.style.height = `${tall / ratio()}px`;
    const context = fit(this.canvas);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = false;
    return context;
  }

  draw(values, mark = null, chosen = null) {
    const context = this.grow();
    for (let i = 0; i < this.num; i++) this.one(context, values, i);
    if (chosen !== null) this.outline(context, chosen, null);
    if (mark && values) this.outline(context, mark.image, mark);
    return context;
  }

  one(context, values, image) {
    const { left, top } = this.place(image), { wide, high } = this.layout();
    context.fillStyle = color("wash");
    if (values) context.drawImage(picture(values, image * this.size, this.about), left, top, wide, high);
    else context.fillRect(left, top, wide, high);
  }

  outline(context, image, pixel) {
    const { left, top, unit } = this.place(image), { wide, high } = this.layout();
    const box = pixel ? [left + pixel.column * unit[0], top + pixel.row * unit[1], ...unit] : [left, top, wide, high];
    for (const [width, name] of [[4, "paper"], [2, "belief"]]) {
      context.lineWidth = width * ratio(); context.strokeStyle = color(name); context.strokeRect(...box);
    }
  }

  // The image, row and column under a pointer; null between images.
  at(event) {
    const box = this.canvas.getBoundingClientRect(), { columns, cell, gap, high } = this.layout();
    const x = (event.clientX - box.left) / box.width * this.canvas.width, y = (event.clientY - box.top) / box.height * this.canvas.height;
    const across = Math.floor(x / cell), image = Math.floor(y / (high + gap)) * columns + across;
    if (across < 0 || across >= columns || image < 0 || image >= this.num) return null;
    const { left, top, unit } = this.place(image), [, height, width] = this.about.shape;
    const column = Math.floor((x - left) / unit[0]), row = Math.floor((y - top) / unit[1]);
    return column >= 0 && column < width && row >= 0 && row < height ? { image, row, column } : null;
  }
}

// Text: the most probable symbol of each position on a color for its probability. A sample has the indices of its symbols, then their probabilities.
export class TextSheet extends Sheet {
  constructor(canvas, about) {
    super(canvas, about, 1);
    this.size = 2 * about.length;
  }

  // One sample per row of samples; a character is twice as high as wide.
  layout() {
    const [, rows, columns] = this.about.shape, gap = Math.max(6, Math.round(this.canvas.width / 60)), wide = this.canvas.width;
    return { columns: 1, gap, cell: wide + gap, wide, high: 2 * wide * rows / columns };
  }

  one(context, values, image) {
    const { left, top, unit } = this.place(image), { length, alphabet, shape: [, , columns] } = this.about;
    context.font = `${Math.round(1.3 * unit[0])}px ui-monospace, monospace`;
    context.textAlign = "center"; context.textBaseline = "middle";
    for (let j = 0; j < length; j++) {
      const x = left + (j % columns) * unit[0], y = top + Math.floor(j / columns) * unit[1], at = image * this.size + j;
      context.fillStyle = values ? probabilityColor(values[at + length]) : color("wash");
      context.fillRect(x, y, unit[0] + 0.5, unit[1] + 0.5);
      if (!values) continue;
      context.fillStyle = values[at + length] > 0.5 ? "#ffffff" : "#1d2733";
      context.fillText(alphabet[values[at]], x + unit[0] / 2, y + unit[1] / 2);
    }
  }
}
