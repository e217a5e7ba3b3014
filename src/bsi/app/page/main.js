// The page: its settings, the history of the current request, and the step that is shown.
import { Easel } from "./easel.js";
import { History, decode, encode } from "./history.js";
import { drawCurve, drawPast, drawTimeline, places, tidy } from "./pixel.js";
import { Sheet, TextSheet } from "./sheets.js";

const $ = selector => document.querySelector(selector);
const TASKS = {
  draw: { go: "Draw", task: "Draw samples. The first belief is the prior." },
  denoise: { go: "Denoise", task: "Draw samples given a noisy measurement of an image. The first belief has the precision of the measurement." },
  inpaint: { go: "Inpaint", task: "Draw samples given a part of an image. The visible pixels stay as they are, the hidden ones are predicted from them." },
};
const HINTS = {
  posterior: "the paper's", sde2: "noise", ode2: "flow", churn: "some noise",
  paper: "even in t", edm: "as EDM's", geometric: "even in ln Λ",
};
const NAMES = ["mean", "x_hat", "y"];
const PLAY_SECONDS = 4;

const [about, images] = await Promise.all(["about", "images"].map(async name => (await fetch(name)).json()));
const page = { history: null, position: 0, playing: false, pixel: null, kept: false, kind: "draw", started: 0, firstStep: null };
const noun = about.length ? "text" : "image";
const symbolic = !about.modes.includes("denoise"); // text or images of symbols
const sheets = Object.fromEntries(NAMES.map(name => [name, new (about.length ? TextSheet : Sheet)($(`#${name}`), about)]));
const easel = new Easel(about, decode(images.values), () => { if (page.history?.ask.kind === page.kind) go(); });

// ---- The request ---------------------------------------------------------------------------------------------------------------

function ask() {
  const common = {
    kind: page.kind, seed: Number($("#seed").value), num: Number($("#num").value), evaluations: Number($("#evaluations").value),
    solver: $("#solver").value, grid: $("#grid").value, ...asked(),
  };
  if (page.kind === "draw") return common;
  const image = encode(easel.values);
  if (page.kind === "denoise") return { ...common, image, precision: precision() };
  return { ...common, image, hidden: encode(easel.hidden) };
}

// The class by its number, and the guidance.
function asked() {
  const label = $("#label").value;
  return label === "" ? {} : { label: Number(label), guidance: Number($("#guidance").value) };
}

function precision() { return 10 ** Number($("#precision").value); }

async function go() {
  if (!$("#ask").reportValidity()) return;
  page.history?.leave();
  const history = new History(ask(), about.length);
  Object.assign(page, { history, position: 0, playing: true, started: performance.now(), firstStep: null });
  if (page.pixel && page.pixel.image >= history.num) page.pixel = null;
  for (const sheet of Object.values(sheets)) sheet.num = history.num;
  $("#step").value = 0;
  say("");
  document.body.dataset.state = "working";
  try {
    await history.follow(arrived);
    if (page.history !== history) return;
    document.body.dataset.state = "done";
    $("#adopt").disabled = false;
    say(`${history.num} ${history.num === 1 ? noun : `${noun}s`}, ${history.ask.evaluations} evaluations each, in ${tidy((performance.now() - page.started) / 1000)} s`);
  } catch (error) {
    if (error.name === "AbortError" || page.history !== history) return;
    document.body.dataset.state = "failed";
    say(error.message, true);
  }
}

function arrived(history) {
  if (page.history !== history) return;
  if (history.steps.length === 1) {
    page.firstStep = performance.now() - page.started;
    easel.given = page.kind === "denoise" ? history.given : null;
    easel.draw();
    page.pixel ??= { image: 0, row: Math.floor(about.shape[1] / 2), column: Math.floor(about.shape[2] / 2) };
    run();
  }
  $("#step").max = history.last;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) { page.playing = false; page.position = history.known; }
  show();
}

function say(text, wrong = false) {
  $("#status").textContent = text;
  $("#status").classList.toggle("error", wrong);
}

// ---- The step that is shown ---------------------------------------------------------------------------------------------------------

let loop = 0, before = null;
function run() {
  cancelAnimationFrame(loop); // one loop at a time
  before = null;
  loop = requestAnimationFrame(tick);
}

function tick(now) {
  const { history } = page;
  if (!page.playing || !history) return;
  const seconds = before === null ? 0 : Math.min(0.1, (now - before) / 1000), shown = Math.floor(page.position);
  before = now;
  page.position = Math.min(history.known, page.position + seconds * history.last / PLAY_SECONDS);
  if (page.position >= history.last) page.playing = false;
  if (Math.floor(page.position) !== shown || !page.playing) show();
  if (page.playing) loop = requestAnimationFrame(tick);
}

function moveTo(position) {
  if (!page.history?.steps.length) return;
  page.playing = false;
  page.position = Math.min(page.history.known, Math.max(0, position));
  show();
}

function play() {
  if (!page.history) { go(); return; }
  page.playing = !page.playing;
  if (page.playing && page.position >= page.history.last) page.position = 0;
  if (page.playing) run();
  show();
}

function current() { return page.history?.steps[Math.floor(page.position)] ?? null; }

function show() {
  const { history } = page, step = current(), index = Math.floor(page.position);
  for (const name of NAMES) {
    const last = name === "y" && history && index === history.last;
    sheets[name].draw(last ? null : step?.[name] ?? null, page.pixel);
    sheets[name].canvas.setAttribute("aria-label", `${{ mean: "Belief mean", x_hat: "Prediction", y: "Measurement" }[name]} of ${history?.num ?? 0} images at step ${index}`);
  }
  $("#y-more").textContent = history && index === history.last ? "none at the last step" : "of the prediction";
  drawTimeline($("#timeline"), history, index, about);
  if (document.activeElement !== $("#step") || Number($("#step").value) !== index) $("#step").value = index;
  $("#where").textContent = history ? `${index} of ${history.last}` : "–";
  $("#precision-now").textContent = step ? tidy(step.precision) : "–";
  $("#deviation-now").textContent = step ? tidy(step.precision ** -0.5) : "–";
  $("#play").textContent = page.playing ? "❚❚" : "▶";
  $("#play").setAttribute("aria-label", page.playing ? "Pause" : "Play");
  showPixel();
}

// What a sample of text reads: its most probable symbols.
function textOf(name, step, image) {
  const start = 2 * about.length * image;
  return Array.from(page.history.steps[step][name].slice(start, start + about.length), symbol => about.alphabet[symbol]).join("");
}

// The most probable symbol of the position of a text, or the probability of symbol 1 in an image, in words.
function readSymbol(values, { image, row, column }) {
  const position = row * about.shape[2] + column;
  if (!about.length) return `${plain(values[places({ image, row, column }, about.shape)[0]])} for symbol 1`;
  if (position >= about.length) return "–";
  const at = 2 * about.length * image + position;
  return `“${about.alphabet[values[at]]}” with ${plain(values[at + about.length])}`;
}

function showPixel() {
  const step = current(), { pixel, history } = page;
  if (symbolic) {
    for (const name of ["mean", "x_hat"]) $(`#pixel-${name}`).textContent = pixel && step ? readSymbol(step[name], pixel) : "–";
    return;
  }
  drawCurve($("#curve"), step, pixel, about);
  drawPast($("#past"), history, Math.floor(page.position), pixel, about);
  const read = name => step?.[name] ? places(pixel, about.shape).map(place => plain(step[name][place])).join("  ") : "–";
  for (const name of NAMES) $(`#pixel-${name}`).textContent = pixel && step ? read(name) : "–";
  if (pixel && step) {
    const kept = page.kept ? "Kept; click it again to release it." : "Point at a pixel of an image to select it; click to keep it.";
    $("#pixel-note").textContent = `Image ${pixel.image + 1}, row ${pixel.row + 1}, column ${pixel.column + 1}. ${kept}`;
    $("#curve").setAttribute("aria-label", `Belief about the pixel: mean ${read("mean")}, standard deviation ${tidy(step.precision ** -0.5)}`);
  }
}

function plain(value) { return value.toFixed(2).replace(/^-(?=0\.00$)/, "").replace("-", "−"); }

// ---- Controls --------------------------------------------------------------------------------------------------------------------

function choose(kind) {
  page.kind = kind;
  $(`input[name="kind"][value="${kind}"]`).checked = true;
  $("#task").textContent = TASKS[kind].task;
  $("#go").textContent = TASKS[kind].go;
  $("#adopt").disabled = !page.history?.done;
  // Denoising draws from p(x | y) only with solvers that add the noise of measurements, and has its own grid.
  for (const option of $("#solver").options) option.disabled = kind === "denoise" && !about.measuring_solvers.includes(option.value);
  if ($("#solver").selectedOptions[0].disabled) $("#solver").value = about.measuring_solver;
  $("#grid").disabled = kind === "denoise";
  easel.show(kind);
  if (easel.empty) adopt();
  show();
}

// Use a sample as the image to start from: the one that was pointed at last.
function adopt() {
  const { history } = page, image = page.pixel?.image ?? 0;
  if (history?.done) easel.take(history.steps.at(-1).x_hat.slice(image * easel.size, (image + 1) * easel.size));
}

function labels() {
  $("#num-value").textContent = $("#num").value;
  $("#evaluations-value").textContent = $("#evaluations").value;
  $("#guidance-value").textContent = Number($("#guidance").value).toFixed(1);
  $("#guidance").disabled = $("#label").value === "";
  $("#precision-value").textContent = tidy(precision());
  $("#precision-std").textContent = tidy(precision() ** -0.5);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("#theme").textContent = name === "dark" ? "Light" : "Dark";
  easel.draw();
  show();
}

function pointAt(pixel) {
  const same = ["image", "row", "column"].every(name => page.pixel?.[name] === pixel[name]);
  if (same) return;
  page.pixel = pixel;
  show();
}

function reseed() {
  $("#seed").value = Number($("#seed").value) + 1;
  go();
}

for (const sheet of Object.values(sheets)) {
  const { canvas } = sheet;
  canvas.addEventListener("pointermove", event => { const at = sheet.at(event); if (at && !page.kept) pointAt(at); });
  canvas.addEventListener("click", event => {
    const at = sheet.at(event);
    if (!at || !page.history) return;
    const same = page.kept && ["image", "row", "column"].every(name => page.pixel[name] === at[name]);
    page.kept = !same;
    pointAt(at);
    showPixel();
  });
  canvas.addEventListener("keydown", event => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move || !page.history) return;
    event.preventDefault(); event.stopPropagation();
    page.kept = true;
    pointAt(step(page.pixel ?? { image: 0, row: 0, column: 0 }, move));
  });
}

// Moves to the next pixel, and across the edge of an image to the next image.
function step({ image, row, column }, [down, across]) {
  const [, height, width] = about.shape, columns = sheets.mean.layout().columns;
  row += down; column += across;
  if (column < 0 || column >= width) { const next = image + Math.sign(across); if (next >= 0 && next < page.history.num) { image = next; column = (column + width) % width; } }
  if (row < 0 || row >= height) { const next = image + columns * Math.sign(down); if (next >= 0 && next < page.history.num) { image = next; row = (row + height) % height; } }
  return { image, row: Math.min(height - 1, Math.max(0, row)), column: Math.min(width - 1, Math.max(0, column)) };
}

function scrub(event) {
  const box = $("#timeline").getBoundingClientRect();
  moveTo(Math.round((event.clientX - box.left - 8) / (box.width - 16) * (page.history?.last ?? 0)));
}
$("#timeline").addEventListener("pointerdown", event => { $("#timeline").setPointerCapture(event.pointerId); scrub(event); });
$("#timeline").addEventListener("pointermove", event => { if (event.buttons) scrub(event); });
$("#step").addEventListener("input", () => moveTo(Number($("#step").value)));
$("#play").addEventListener("click", play);
$("#back").addEventListener("click", () => moveTo(Math.floor(page.position) - 1));
$("#forth").addEventListener("click", () => moveTo(Math.floor(page.position) + 1));
$("#reseed").addEventListener("click", reseed);
$("#theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("#ask").addEventListener("submit", event => { event.preventDefault(); go(); });
$("#ask").addEventListener("input", labels);
for (const radio of document.querySelectorAll('input[name="kind"]')) radio.addEventListener("change", () => choose(radio.value));
for (const id of ["seed", "num", "evaluations", "solver", "grid", "label", "guidance", "precision"]) $(`#${id}`).addEventListener("change", () => { if (page.history && page.history.ask.kind === page.kind) go(); });
$("#adopt").addEventListener("click", adopt);

const KEYS = {
  " ": play, ArrowLeft: () => moveTo(Math.floor(page.position) - 1), ArrowRight: () => moveTo(Math.floor(page.position) + 1),
  Home: () => moveTo(0), End: () => moveTo(Infinity), n: reseed, 1: () => choose("draw"), 2: () => symbolic || choose("denoise"), 3: () => symbolic || choose("inpaint"), Enter: () => go(),
};
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  const { tagName, type } = event.target;
  if (tagName === "BUTTON" && [" ", "Enter"].includes(event.key)) return; // the button handles it
  if (tagName === "SELECT" || (tagName === "INPUT" && (type !== "range" || event.key.startsWith("Arrow") || ["Home", "End"].includes(event.key)))) return;
  event.preventDefault();
  KEYS[event.key]();
});

// ---- Initialization ----------------------------------------------------------------------------------------------------------------

for (const name of about.solvers) $("#solver").add(new Option(`${name}: ${HINTS[name] ?? ""}`.replace(/: $/, ""), name, name === about.solver, name === about.solver));
for (const name of about.grids) $("#grid").add(new Option(`${name}: ${HINTS[name] ?? ""}`.replace(/: $/, ""), name, name === about.grid, name === about.grid));
about.classes.forEach((name, number) => $("#label").add(new Option(name, number)));
for (const element of document.querySelectorAll("[data-labeled]")) element.hidden = !about.classes.length;
$(".settings").classList.toggle("labeled", about.classes.length > 0);
for (const element of document.querySelectorAll("[data-numbers]")) element.hidden = symbolic;
for (const element of document.querySelectorAll("[data-symbols]")) element.hidden = !symbolic;
document.body.classList.toggle("symbolic", symbolic);
for (const element of document.querySelectorAll("[data-symbol]")) element.textContent = about.symbol;
Object.assign($("#num"), { max: Math.min(about.limits.num, 36), value: Math.min(about.limits.num, about.length ? 4 : 9) });
Object.assign($("#evaluations"), { max: about.limits.evaluations, value: about.evaluations });
$("#span").textContent = tidy(about.high - about.low);
const [channels, height, width] = about.shape;
$("#what").textContent = `${about.name} · ${about.method} · ${about.parameters.toLocaleString("en")} parameters, ${about.trained_steps.toLocaleString("en")} steps · ${about.length ? `text of ${about.length} symbols of ${about.alphabet.length}` : `${width} × ${height}`}${channels === 3 ? " in color" : ""}${about.bins ? `, ${about.bins} levels` : ""}`;
document.title = `${about.name}: a belief sharpens`;
labels();
choose("draw");
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => theme(event.matches ? "dark" : "light"));
new ResizeObserver(() => { easel.draw(); show(); }).observe(document.body);
addEventListener("pagehide", () => page.history?.leave());

// The state of the page, for tests and for the console.
window.bsi = {
  about, go,
  state: () => ({
    kind: page.kind, position: Math.floor(page.position), playing: page.playing, steps: page.history?.steps.length ?? 0, last: page.history?.last ?? 0,
    done: page.history?.done ?? false, pixel: page.pixel, firstStep: page.firstStep, hidden: [...easel.hidden], image: [...easel.values],
    seed: Number($("#seed").value), solver: $("#solver").value, asked: page.history?.ask ?? null,
  }),
  text: textOf,
  values: (name, step) => [...(page.history.steps[step][name] ?? [])],
};
go();
