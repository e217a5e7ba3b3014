// The page: its settings, the history of the current request, and the step that is shown.
import { Easel } from "./easel.js";
import { History, decode, encode } from "./history.js";
import { drawCurve, drawPast, drawTimeline, places, tidy } from "./pixel.js";
import { MOVES, Sheet, TextSheet, clamp } from "./sheets.js";

const $ = selector => document.querySelector(selector);
const all = selector => document.querySelectorAll(selector);
const write = texts => { for (const [id, text] of Object.entries(texts)) $(`#${id}`).textContent = text; };
const TASKS = {
  draw: { go: "Draw", task: "Draw samples. The first belief is the prior." },
  denoise: { go: "Denoise", task: "Draw samples given a noisy measurement of an image. The first belief has the precision of the measurement." },
  inpaint: { go: "Inpaint", task: "Draw samples given a part of an image. The visible pixels stay as they are, the hidden ones are predicted from them." },
};
const HINTS = {
  posterior: "the paper's", sde2: "noise", ode2: "flow", churn: "some noise",
  paper: "even in t", edm: "as EDM's", geometric: "even in ln Λ",
};
const NAMES = { mean: "Belief mean", x_hat: "Prediction", y: "Measurement" };
const PLAY_SECONDS = 4;

const [about, images] = await Promise.all(["about", "images"].map(async name => (await fetch(name)).json()));
const page = { history: null, position: 0, playing: false, pixel: null, kept: false, kind: "draw", started: 0 };
const noun = about.length ? "text" : "image";
const symbolic = !about.modes.includes("denoise"); // text or images of symbols
const sheets = Object.fromEntries(Object.keys(NAMES).map(name => [name, new (about.length ? TextSheet : Sheet)($(`#${name}`), about)]));
const easel = new Easel(about, decode(images.values), again);

// ---- The request ---------------------------------------------------------------------------------------------------------------

const setting = id => Number($(`#${id}`).value);
const precision = () => 10 ** setting("precision");

function ask() {
  return {
    kind: page.kind, seed: setting("seed"), num: setting("num"), evaluations: setting("evaluations"), solver: $("#solver").value, grid: $("#grid").value,
    ...($("#label").value === "" ? {} : { label: setting("label"), guidance: setting("guidance") }),
    ...(page.kind === "draw" ? {} : { image: encode(easel.values) }),
    ...(page.kind === "denoise" ? { precision: precision() } : {}),
    ...(page.kind === "inpaint" ? { hidden: encode(easel.hidden) } : {}),
  };
}

async function go() {
  if (!$("#ask").reportValidity()) return;
  page.history?.leave();
  const history = new History(ask(), about.length);
  Object.assign(page, { history, position: 0, playing: true, started: performance.now() });
  if (page.pixel && page.pixel.image >= history.num) page.pixel = null;
  for (const sheet of Object.values(sheets)) sheet.num = history.num;
  $("#step").value = 0;
  say("working", "");
  try {
    await history.follow(arrived);
    if (page.history !== history) return;
    $("#adopt").disabled = false;
    say("done", `${history.num} ${noun}${history.num === 1 ? "" : "s"}, ${history.ask.evaluations} evaluations each, in ${tidy((performance.now() - page.started) / 1000)} s`);
  } catch (error) {
    if (error.name !== "AbortError" && page.history === history) say("failed", error.message);
  }
}

// Repeat the request with the changed settings.
function again() { if (page.history?.ask.kind === page.kind) go(); }

function arrived(history) {
  if (page.history !== history) return;
  if (history.steps.length === 1) {
    easel.given = page.kind === "denoise" ? history.given : null;
    easel.draw();
    page.pixel ??= { image: 0, row: Math.floor(about.shape[1] / 2), column: Math.floor(about.shape[2] / 2) };
    run();
  }
  $("#step").max = history.last;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) { page.playing = false; page.position = history.known; }
  show();
}

function say(state, text) {
  document.body.dataset.state = state;
  write({ status: text });
  $("#status").classList.toggle("error", state === "failed");
}

// ---- The step that is shown ---------------------------------------------------------------------------------------------------------

let loop = 0;
function run(before = null) {
  cancelAnimationFrame(loop); // one loop at a time
  loop = requestAnimationFrame(now => {
    if (!page.playing) return;
    const { history } = page, seconds = Math.min(0.1, (now - (before ?? now)) / 1000), shown = Math.floor(page.position);
    page.position = Math.min(history.known, page.position + seconds * history.last / PLAY_SECONDS);
    if (page.position >= history.last) page.playing = false;
    if (Math.floor(page.position) !== shown || !page.playing) show();
    if (page.playing) run(now);
  });
}

function moveTo(position) {
  if (!page.history?.steps.length) return;
  page.playing = false;
  page.position = clamp(position, 0, page.history.known);
  show();
}

const moveBy = steps => moveTo(Math.floor(page.position) + steps);

function play() {
  if (!page.history) return go();
  page.playing = !page.playing;
  if (page.playing && page.position >= page.history.last) page.position = 0;
  if (page.playing) run();
  show();
}

function show() {
  const { history } = page, index = Math.floor(page.position), step = history?.steps[index] ?? null, last = history && index === history.last;
  for (const [name, title] of Object.entries(NAMES)) {
    sheets[name].draw(name === "y" && last ? null : step?.[name] ?? null, page.pixel);
    sheets[name].canvas.setAttribute("aria-label", `${title} of ${history?.num ?? 0} images at step ${index}`);
  }
  drawTimeline($("#timeline"), history, index, about);
  if (document.activeElement !== $("#step") || setting("step") !== index) $("#step").value = index;
  write({
    "y-more": last ? "none at the last step" : "of the prediction", where: history ? `${index} of ${history.last}` : "–", play: page.playing ? "❚❚" : "▶",
    "precision-now": step ? tidy(step.precision) : "–", "deviation-now": step ? tidy(step.precision ** -0.5) : "–",
  });
  $("#play").setAttribute("aria-label", page.playing ? "Pause" : "Play");
  for (const name of Object.keys(NAMES)) write({ [`pixel-${name}`]: page.pixel && step?.[name] ? read(step[name], page.pixel) : "–" });
  if (symbolic) return;
  drawCurve($("#curve"), step, page.pixel, about);
  drawPast($("#past"), history, index, page.pixel, about);
  if (!page.pixel || !step) return;
  const { image, row, column } = page.pixel, kept = page.kept ? "Kept; click it again to release it." : "Point at a pixel of an image to select it; click to keep it.";
  write({ "pixel-note": `Image ${image + 1}, row ${row + 1}, column ${column + 1}. ${kept}` });
  $("#curve").setAttribute("aria-label", `Belief about the pixel: mean ${read(step.mean, page.pixel)}, standard deviation ${tidy(step.precision ** -0.5)}`);
}

// The values of a pixel; of a text, the most probable symbol of the position; of an image of symbols, the probability of symbol 1.
function read(values, pixel) {
  if (!about.length) {
    const found = places(pixel, about.shape).map(place => plain(values[place])).join("  ");
    return symbolic ? `${found} for symbol 1` : found;
  }
  const position = pixel.row * about.shape[2] + pixel.column, at = 2 * about.length * pixel.image + position;
  return position < about.length ? `“${about.alphabet[values[at]]}” with ${plain(values[at + about.length])}` : "–";
}

const plain = value => value.toFixed(2).replace(/^-(?=0\.00$)/, "").replace("-", "−");

// ---- Controls --------------------------------------------------------------------------------------------------------------------

function choose(kind) {
  page.kind = kind;
  $(`input[name="kind"][value="${kind}"]`).checked = true;
  write(TASKS[kind]);
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
  write({
    "num-value": setting("num"), "evaluations-value": setting("evaluations"), "guidance-value": setting("guidance").toFixed(1),
    "precision-value": tidy(precision()), "precision-std": tidy(precision() ** -0.5),
  });
  $("#guidance").disabled = $("#label").value === "";
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  write({ theme: name === "dark" ? "Light" : "Dark" });
  easel.draw();
  show();
}

const same = (a, b) => ["image", "row", "column"].every(name => a?.[name] === b[name]);

function pointAt(pixel) {
  if (!same(page.pixel, pixel)) page.pixel = pixel;
  show();
}

function reseed() { $("#seed").value = setting("seed") + 1; go(); }

for (const sheet of Object.values(sheets)) {
  sheet.canvas.addEventListener("pointermove", event => { const at = sheet.at(event); if (at && !page.kept) pointAt(at); });
  sheet.canvas.addEventListener("click", event => {
    const at = sheet.at(event);
    if (!at || !page.history) return;
    page.kept = !(page.kept && same(page.pixel, at));
    pointAt(at);
  });
  sheet.canvas.addEventListener("keydown", event => {
    if (!(event.key in MOVES) || !page.history) return;
    event.preventDefault(); event.stopPropagation();
    page.kept = true;
    pointAt(next(page.pixel ?? { image: 0, row: 0, column: 0 }, MOVES[event.key]));
  });
}

// The next pixel, across the edge of an image that of the next image.
function next({ image, row, column }, [down, across]) {
  const [, height, width] = about.shape, columns = sheets.mean.layout().columns;
  row += down; column += across;
  const neighbor = image + (column < 0 || column >= width ? across : row < 0 || row >= height ? columns * down : 0);
  if (neighbor !== image && neighbor >= 0 && neighbor < page.history.num) return { image: neighbor, row: (row + height) % height, column: (column + width) % width };
  return { image, row: clamp(row, 0, height - 1), column: clamp(column, 0, width - 1) };
}

function scrub(event) {
  const box = $("#timeline").getBoundingClientRect();
  moveTo(Math.round((event.clientX - box.left - 8) / (box.width - 16) * (page.history?.last ?? 0)));
}

$("#timeline").addEventListener("pointerdown", event => { $("#timeline").setPointerCapture(event.pointerId); scrub(event); });
$("#timeline").addEventListener("pointermove", event => { if (event.buttons) scrub(event); });
$("#step").addEventListener("input", () => moveTo(setting("step")));
const CLICKS = { play, back: () => moveBy(-1), forth: () => moveBy(1), reseed, adopt, theme: () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark") };
for (const [id, action] of Object.entries(CLICKS)) $(`#${id}`).addEventListener("click", action);
$("#ask").addEventListener("submit", event => { event.preventDefault(); go(); });
$("#ask").addEventListener("input", labels);
for (const radio of all('input[name="kind"]')) radio.addEventListener("change", () => choose(radio.value));
for (const id of ["seed", "num", "evaluations", "solver", "grid", "label", "guidance", "precision"]) $(`#${id}`).addEventListener("change", again);

const KEYS = {
  " ": play, ArrowLeft: CLICKS.back, ArrowRight: CLICKS.forth, Home: () => moveTo(0), End: () => moveTo(Infinity), n: reseed, Enter: go,
  1: () => choose("draw"), 2: () => symbolic || choose("denoise"), 3: () => symbolic || choose("inpaint"),
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

for (const [id, names] of [["solver", about.solvers], ["grid", about.grids]]) {
  for (const name of names) $(`#${id}`).add(new Option(HINTS[name] ? `${name}: ${HINTS[name]}` : name, name, name === about[id], name === about[id]));
}
about.classes.forEach((name, number) => $("#label").add(new Option(name, number)));
for (const [kind, visible] of [["labeled", about.classes.length > 0], ["numbers", !symbolic], ["symbols", symbolic]]) {
  for (const element of all(`[data-${kind}]`)) element.hidden = !visible;
}
$(".settings").classList.toggle("labeled", about.classes.length > 0);
document.body.classList.toggle("symbolic", symbolic);
for (const element of all("[data-symbol]")) element.textContent = about.symbol;
Object.assign($("#num"), { max: Math.min(about.limits.num, 36), value: Math.min(about.limits.num, about.length ? 4 : 9) });
Object.assign($("#evaluations"), { max: about.limits.evaluations, value: about.evaluations });
const [channels, height, width] = about.shape;
const kind = about.length ? `text of ${about.length} symbols of ${about.alphabet.length}` : `${width} × ${height}`;
const trained = `${about.parameters.toLocaleString("en")} parameters, ${about.trained_steps.toLocaleString("en")} steps`;
write({
  span: tidy(about.high - about.low),
  what: `${about.name} · ${about.method} · ${trained} · ${kind}${channels === 3 ? " in color" : ""}${about.bins ? `, ${about.bins} levels` : ""}`,
});
document.title = `${about.name}: a belief sharpens`;
labels();
choose("draw");
const dark = matchMedia("(prefers-color-scheme: dark)");
theme(dark.matches ? "dark" : "light");
dark.addEventListener("change", event => theme(event.matches ? "dark" : "light"));
new ResizeObserver(() => { easel.draw(); show(); }).observe(document.body);
addEventListener("pagehide", () => page.history?.leave());

// The state of the page, for tests and for the console.
window.bsi = {
  state: () => ({
    kind: page.kind, position: Math.floor(page.position), playing: page.playing, steps: page.history?.steps.length ?? 0, last: page.history?.last ?? 0,
    done: page.history?.done ?? false, pixel: page.pixel, hidden: [...easel.hidden], image: [...easel.values],
    seed: setting("seed"), solver: $("#solver").value, asked: page.history?.ask ?? null,
  }),
  text: (name, step, image) => { // the most probable symbols of a sample of text
    const start = 2 * about.length * image, symbols = page.history.steps[step][name].slice(start, start + about.length);
    return Array.from(symbols, symbol => about.alphabet[symbol]).join("");
  },
  values: (name, step) => [...(page.history.steps[step][name] ?? [])],
};
go();
