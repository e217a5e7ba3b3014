// Charts: the precision over the steps, and the belief about one pixel, now and over the steps.
import { clamp, color, fit, ratio } from "./sheets.js";

const CHANNELS = { light: ["#c0392b", "#2e8b57", "#2566ad"], dark: ["#ff8a80", "#7fd8a4", "#6fb1f7"] };
const MOST_BARS = 32;
const LEAST_SCALE = 0.25; // with a full scale, a broad belief would be a flat line

function prepare(canvas) {
  const context = fit(canvas), width = canvas.width / ratio(), height = canvas.height / ratio();
  context.setTransform(ratio(), 0, 0, ratio(), 0, 0);
  context.clearRect(0, 0, width, height);
  Object.assign(context, { font: "11px ui-sans-serif, system-ui, sans-serif", lineJoin: "round", textAlign: "left", textBaseline: "alphabetic", globalAlpha: 1 });
  return { context, width, height };
}

// A path through points; null interrupts it.
function path(context, points) {
  context.beginPath();
  points.forEach((point, i) => point && (points[i - 1] ? context.lineTo(...point) : context.moveTo(...point)));
}

function line(context, points, stroke, width, alpha = 1) {
  Object.assign(context, { strokeStyle: stroke, lineWidth: width, globalAlpha: alpha });
  path(context, points);
  context.stroke();
  context.globalAlpha = 1;
}

function dot(context, point, radius) {
  context.beginPath();
  context.arc(...point, radius, 0, 7);
  context.fill();
}

const lineColors = channels => channels === 1 ? [color("belief")] : CHANNELS[document.documentElement.dataset.theme];

// The indices of the channels of a pixel in the values of a step.
export function places({ image, row, column }, [channels, height, width]) {
  return Array.from({ length: channels }, (_, c) => image * channels * height * width + (c * height + row) * width + column);
}

export function drawTimeline(canvas, history, position, about) {
  const { context, width, height } = prepare(canvas), pad = 8;
  const last = history ? history.last : 1, x = i => pad + (width - 2 * pad) * i / Math.max(1, last);
  const [low, high] = [Math.log(about.lowest), Math.log(about.highest)];
  const base = height - 6, tall = base - 24; // captions above
  const y = value => base - tall * clamp((Math.log(value) - low) / (high - low), 0, 1);
  line(context, [[pad, base + 1.5], [width - pad, base + 1.5]], color("line"), 1);
  if (!history) return;
  const moves = history.steps.map(step => step.move), most = Math.max(...moves.filter(move => move !== null), 1e-9);
  line(context, moves.map((move, i) => move === null ? null : [x(i - 0.5), base - tall * move / most]), color("predict"), 1.5, 0.65);
  const points = history.steps.map((step, i) => [x(i), y(step.precision)]);
  line(context, points, color("belief"), 2);
  context.fillStyle = color("belief");
  if (last <= 48) for (const point of points) dot(context, point, 2);
  const now = points[Math.min(Math.round(position), points.length - 1)];
  if (now) {
    dot(context, now, 5.5);
    context.strokeStyle = color("paper"); context.stroke();
  }
  context.fillStyle = color("belief"); context.fillText("precision (log scale)", pad, 11);
  context.fillStyle = color("predict"); context.textAlign = "right";
  context.fillText(width > 360 ? "change of the prediction" : "change of x̂", width - pad, 11);
}

export function tidy(value) {
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) {
    const [digits, power] = value.toExponential(1).split("e");
    const raised = String(Number(power)).replace(/./g, sign => "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign] ?? "⁻");
    return digits === "1.0" ? `10${raised}` : `${digits}·10${raised}`;
  }
  return value.toLocaleString("en", { maximumSignificantDigits: 3 });
}

// N(mean, 1 / precision) over the gray levels: a curve, and bars if the levels are few.
export function drawCurve(canvas, step, pixel, about) {
  const { context, width, height } = prepare(canvas), { low, high, bins, shape } = about;
  const reach = 0.12 * (high - low), x = value => width * (value - low + reach) / (high - low + 2 * reach);
  const base = height - 22, tall = base - 12, count = bins ?? 256, gap = (high - low) / (count - 1);
  const centers = Array.from({ length: count }, (_, j) => low + j * gap);
  line(context, [[0, base + 0.5], [width, base + 0.5]], color("line"), 1);
  context.fillStyle = color("soft"); context.textAlign = "center";
  for (const [value, name] of [[low, "black"], [(low + high) / 2, "gray"], [high, "white"]]) {
    context.fillText(shape[0] === 3 ? { black: "none", gray: "half", white: "full" }[name] : name, x(value), height - 6);
  }
  if (!step || !pixel) return;
  const found = places(pixel, shape), colors = lineColors(shape[0]), bars = count <= MOST_BARS;
  found.forEach((place, c) => {
    const mean = step.mean[place], log = value => -0.5 * step.precision * (value - mean) ** 2;
    const logs = centers.map(log), top = Math.max(...logs);
    // Few levels: probabilities, on a scale from 0 to the largest one or LEAST_SCALE. Many: relative to the likeliest value.
    const ends = bars ? [low - gap / 2, high + gap / 2] : [low - reach, high + reach];
    const total = bars ? top + Math.log(logs.reduce((sum, value) => sum + Math.exp(value - top), 0)) : log(clamp(mean, ...ends));
    const scale = bars ? Math.max(LEAST_SCALE, Math.exp(top - total)) : 1;
    const up = value => base - tall * Math.min(1, Math.exp(log(value) - total) / scale);
    if (bars) {
      context.globalAlpha = 0.28 / shape[0] ** 0.5; context.fillStyle = colors[c];
      for (const center of centers) context.fillRect(x(center - 0.42 * gap), up(center), x(center + 0.42 * gap) - x(center - 0.42 * gap), base - up(center));
      context.globalAlpha = 1;
    }
    // Dense points around the mean: a sharp belief would fall between the others.
    const std = step.precision ** -0.5, dense = Array.from({ length: 81 }, (_, i) => mean + (i - 40) / 10 * std);
    const at = [...Array.from({ length: 161 }, (_, i) => ends[0] + (ends[1] - ends[0]) * i / 160), ...dense].filter(value => value >= ends[0] && value <= ends[1]).sort((a, b) => a - b);
    line(context, at.map(value => [x(value), up(value)]), colors[c], 2);
    context.globalAlpha = bars ? 0 : 0.14; context.fillStyle = colors[c];
    context.lineTo(x(ends[1]), base); context.lineTo(x(ends[0]), base); context.fill(); context.globalAlpha = 1;
    const predicted = clamp(x(step.x_hat[place]), 1, width - 1);
    context.setLineDash([4, 3]);
    line(context, [[predicted, base], [predicted, base - tall - 6]], color("predict"), 1.5);
    context.setLineDash([]);
    if (step.y) arrow(context, x(step.y[place]), base, width);
  });
}

// A triangle at a measurement; at the edge it points to a measurement outside.
function arrow(context, x, base, width) {
  const edge = x < 6 ? 0 : x > width - 6 ? width : null, inwards = edge === 0 ? 7 : width - 7;
  context.fillStyle = color("measure");
  path(context, edge === null ? [[x, base - 1], [x - 5, base - 10], [x + 5, base - 10]] : [[edge, base - 6], [inwards, base - 11], [inwards, base - 1]]);
  context.fill();
}

// The mean with one and two standard deviations, the prediction and the measurements at each step.
export function drawPast(canvas, history, position, pixel, about) {
  const { context, width, height } = prepare(canvas), { low, high, shape } = about, left = 40, bottom = height - 22;
  const reach = 0.12 * (high - low), last = history ? history.last : 1;
  const x = i => left + (width - left - 8) * i / Math.max(1, last), y = value => bottom - (bottom - 6) * (value - low + reach) / (high - low + 2 * reach);
  context.fillStyle = color("soft"); context.textAlign = "right"; context.textBaseline = "middle";
  for (const [value, name] of [[low, "black"], [high, "white"]]) context.fillText(shape[0] === 3 ? { black: "none", white: "full" }[name] : name, left - 8, y(value));
  context.textAlign = "center"; context.textBaseline = "alphabetic";
  context.fillText("first step", left + 24, height - 6); context.fillText("sample", width - 26, height - 6);
  for (const value of [low, high]) line(context, [[left, y(value)], [width - 8, y(value)]], color("line"), 1);
  if (!history || !pixel) return;
  context.save();
  context.beginPath(); context.rect(left, 0, width - left, bottom); context.clip();
  const colors = lineColors(shape[0]);
  places(pixel, shape).forEach((place, c) => {
    const { steps } = history;
    for (const widths of [2, 1]) {
      const edge = sign => steps.map((step, i) => [x(i), y(step.mean[place] + sign * widths * step.precision ** -0.5)]);
      Object.assign(context, { globalAlpha: 0.13 / shape[0] ** 0.5, fillStyle: colors[c] });
      path(context, [...edge(1), ...edge(-1).reverse()]); context.fill();
    }
    line(context, steps.map((step, i) => [x(i), y(step.mean[place])]), colors[c], 2);
    line(context, steps.map((step, i) => [x(i), y(step.x_hat[place])]), color("predict"), 1.75);
    context.fillStyle = color("measure");
    steps.forEach((step, i) => { if (step.y) dot(context, [x(i + 0.5), y(step.y[place])], 1.8); });
  });
  line(context, [[x(position), 0], [x(position), bottom]], color("ink"), 1, 0.35);
  context.restore();
}
