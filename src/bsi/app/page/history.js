// A request and the steps of its answer: one line of JSON each, with images as base64 of little-endian float32.

export const decode = text => new Float32Array(Uint8Array.from(atob(text), letter => letter.charCodeAt(0)).buffer);

export function encode(array) {
  const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  return btoa(bytes.reduce((text, byte) => text + String.fromCharCode(byte), ""));
}

// The error message for a failed connection. An AbortError is our own cancellation.
function gone(error) {
  throw error.name === "AbortError" ? error : new Error("the server does not answer: is `bsi view` still running?");
}

async function* lines(body) {
  const reader = body.getReader(), decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(gone);
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function accepted(ask, signal) {
  for (let wait = 200; ; wait = Math.min(2 * wait, 2000)) {
    const answer = await fetch("run", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(ask), signal }).catch(gone);
    if (answer.ok) return answer;
    if (answer.status !== 429) throw new Error(await reason(answer));
    await new Promise(resolve => setTimeout(resolve, wait)); // other requests are in progress
    signal.throwIfAborted();
  }
}

async function reason(answer) {
  const text = await answer.text();
  try { return JSON.parse(text).error; } catch { return text || `the server answered ${answer.status}`; }
}

// All steps of one request. The y of a step is the measurement of its prediction, which arrives with the next step.
export class History {
  constructor(ask, length = 0) {
    // `length` of a text, 0 for images; `given` is the measurement that a denoised image starts from
    Object.assign(this, { ask, length, num: ask.num, steps: [], given: null, last: ask.evaluations, done: false, _leave: new AbortController() });
  }

  async follow(arrived) {
    const answer = await accepted(this.ask, this._leave.signal);
    for await (const line of lines(answer.body)) {
      const frame = JSON.parse(line);
      if (frame.error) throw new Error(frame.error);
      const before = this.steps.at(-1), mean = decode(frame.mean), x_hat = decode(frame.x_hat), y = frame.y && decode(frame.y);
      if (before) before.y = y;
      else this.given = y;
      this.last = frame.last;
      this.steps.push({ precision: frame.precision, mean, x_hat, y: null, move: before ? distance(x_hat, before.x_hat, this.length) : null });
      arrived(this);
    }
    if (this.steps.length <= this.last) throw new Error("the stream ended early: is `bsi view` still running?");
    this.done = true;
  }

  // The last step whose measurement has arrived. The final step has none.
  get known() { return this.steps.length > this.last ? this.last : Math.max(0, this.steps.length - 2); }

  leave() { this._leave.abort(); }
}

// Root mean square of the change of the prediction; of a text, the share of the symbols that change.
function distance(a, b, length) {
  if (length) return 2 * a.reduce((sum, symbol, i) => sum + (i % (2 * length) < length && symbol !== b[i]), 0) / a.length;
  return Math.sqrt(a.reduce((sum, value, i) => sum + (value - b[i]) ** 2, 0) / a.length);
}
