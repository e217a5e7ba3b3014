// Images side by side on a canvas: values in [low, high] as gray levels or colors, enlarged without smoothing.

export function fit(canvas) {
  const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  const width = Math.max(1, Math.round(box.width * ratio)), height = Math.max(1, Math.round(box.height * ratio));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  return canvas.getContext("2d");
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// One image as a canvas of its own size.
export function picture(values, offset, { shape: [channels, height, width], low, high }) {
  const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d");
  const image = context.createImageData(width, height), area = width * height;
  for (let i = 0; i < area; i++) {
    for (let c = 0; c < 3; c++) {
      const value = values[offset + (channels === 3 ? c * area : 0) + i];
      image.data[4 * i + c] = Math.round(255 * Math.min(1, Math.max(0, (value - low) / (high - low))));
    }
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

export class Sheet {
  constructor(canvas, about, columns = null) {
    Object.assign(this, { canvas, about, fixed: columns, num: 1 });
    const [channels, height, width] = about.shape;
    this.size = channels * height * width;
  }

  // Columns, and the side of a cell with its gap, in canvas pixels.
  layout() {
    const columns = this.fixed ?? Math.ceil(Math.sqrt(this.num));
    const [, height, width] = this.about.shape, gap = Math.max(2, Math.round(this.canvas.width / columns / 24));
    const cell = (this.canvas.width + gap) / columns;
    return { columns, gap, cell, wide: cell - gap, high: (cell - gap) * height / width };
  }

  place(image) {
    const { columns, cell, gap, high } = this.layout();
    return { left: (image % columns) * cell, top: Math.floor(image / columns) * (high + gap) };
  }

  // The width determines the size of the cells, and the cells determine the height.
  grow() {
    fit(this.canvas);
    const { columns, gap, high } = this.layout(), tall = Math.ceil(this.num / columns) * (high + gap) - gap;
    this.canvas.style.height = `${tall / (window.devicePixelRatio || 1)}px`;
    return fit(this.canvas);
  }

  draw(values, mark = null, chosen = null) {
    const context = this.grow(), { wide, high } = this.layout();
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = false;
    for (let i = 0; i < this.num; i++) {
      const { left, top } = this.place(i);
      if (values) context.drawImage(picture(values, i * this.size, this.about), left, top, wide, high);
      else { context.fillStyle = color("wash"); context.fillRect(left, top, wide, high); }
    }
    if (chosen !== null) this.outline(context, chosen, null);
    if (mark && values) this.outline(context, mark.image, mark);
  }

  outline(context, image, pixel) {
    const [, height, width] = this.about.shape, { wide, high } = this.layout(), { left, top } = this.place(image);
    const unit = [wide / width, high / height], ratio = window.devicePixelRatio || 1;
    const box = pixel ? [left + pixel.column * unit[0], top + pixel.row * unit[1], ...unit] : [left, top, wide, high];
    context.lineWidth = 4 * ratio; context.strokeStyle = color("paper"); context.strokeRect(...box);
    context.lineWidth = 2 * ratio; context.strokeStyle = color("belief"); context.strokeRect(...box);
  }

  // The image, row and column under a pointer; null between images.
  at(event) {
    const box = this.canvas.getBoundingClientRect(), [, height, width] = this.about.shape;
    const x = (event.clientX - box.left) / box.width * this.canvas.width, y = (event.clientY - box.top) / box.height * this.canvas.height;
    const { columns, cell, gap, wide, high } = this.layout();
    const across = Math.floor(x / cell), down = Math.floor(y / (high + gap)), image = down * columns + across;
    const column = Math.floor((x - across * cell) / wide * width), row = Math.floor((y - down * (high + gap)) / high * height);
    const inside = across >= 0 && across < columns && image >= 0 && image < this.num && column >= 0 && column < width && row >= 0 && row < height;
    return inside ? { image, row, column } : null;
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

  draw(values, mark = null) {
    const context = this.grow(), { wide, high } = this.layout(), [, rows, columns] = this.about.shape, { length, alphabet } = this.about;
    const unit = [wide / columns, high / rows];
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.font = `${Math.round(1.3 * unit[0])}px ui-monospace, monospace`;
    context.textAlign = "center"; context.textBaseline = "middle";
    for (let i = 0; i < this.num; i++) {
      const { left, top } = this.place(i);
      for (let j = 0; j < length; j++) {
        const x = left + (j % columns) * unit[0], y = top + Math.floor(j / columns) * unit[1];
        const at = i * this.size + j;
        context.fillStyle = values ? probabilityColor(values[at + length]) : color("wash");
        context.fillRect(x, y, unit[0] + 0.5, unit[1] + 0.5);
        if (!values) continue;
        context.fillStyle = values[at + length] > 0.5 ? "#ffffff" : "#1d2733";
        context.fillText(alphabet[values[at]], x + unit[0] / 2, y + unit[1] / 2);
      }
    }
    if (mark && values) this.outline(context, mark.image, mark);
  }
}

// From white at 0 to blue at 1.
export function probabilityColor(p) {
  const mix = [37, 102, 173].map(end => Math.round(255 + (end - 255) * Math.min(1, Math.max(0, p))));
  return `rgb(${mix.join(", ")})`;
}
