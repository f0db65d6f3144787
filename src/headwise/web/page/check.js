// Every op, forward and backward, against golden results.

import { compare, decode } from "./budget.js";
import { at, make, small } from "./elements.js";
import * as files from "./files.js";
import { Program } from "./program.js";
import { showSource } from "./source.js";

/** Have the kernels of a check compiled. What fails there fails again when it is run. */
export function prepare(gpu, described, shaders) {
  for (const { shader } of described.dispatches) gpu.pipeline(shader, shaders[shader]).catch(() => {});
}

/** Run one check. Whatever goes wrong is the check's result, unless the GPU is gone. */
export async function check(gpu, described, shaders) {
  const begin = performance.now();
  const outputs = [];
  let error = "";
  let program;
  try {
    const data = await files.data(described.data);
    program = await Program.load(gpu, described, shaders, data);
    const bytes = await program.runAndRead();
    described.outputs.forEach((output, i) => {
      const golden = new Float32Array(data, output.golden[0], output.golden[1] / 4);
      const result = compare(decode(bytes[i], output.dtype), golden, output);
      outputs.push({ name: output.name, ...result, allowed: { rms: output.rms, largest: output.largest } });
    });
  } catch (caught) {
    if (gpu.lost) throw caught;
    error = caught.message;
  } finally {
    program?.destroy();
  }
  const { op, case: name, dtype } = described;
  const passed = !error && outputs.length > 0 && outputs.every((output) => output.passed);
  return {
    op,
    case: name,
    dtype,
    passed,
    error,
    usage: error ? Infinity : Math.max(0, ...outputs.map(({ usage }) => usage)),
    milliseconds: Math.round(performance.now() - begin),
    outputs,
  };
}

/** A card per op, which fills as its checks are done. */
export class CheckTable {
  constructor(place, checks, shaders) {
    this.shaders = shaders;
    this.ops = new Map();
    for (const { op } of checks) {
      if (this.ops.has(op)) continue;
      const summary = make("summary");
      const body = make("tbody");
      const card = make("details", { className: "card op" }, summary, make("table", { className: "cases" }, body));
      card.dataset.op = op;
      place.append(card);
      this.ops.set(op, { card, summary, body, results: [], total: checks.filter((one) => one.op === op).length });
      this.#summarise(op);
    }
  }

  add(result, described) {
    const { body, results, card } = this.ops.get(result.op);
    results.push(result);
    const [worst] = [...result.outputs].sort((a, b) => b.usage - a.usage);
    const status = make(
      "td",
      { className: `status ${result.passed ? "good" : "bad"}` },
      result.passed ? "✓" : "FAILED",
    );
    const source = make("button", { type: "button", className: "link", title: "The kernels of this case" }, "WGSL");
    source.addEventListener("click", () =>
      showSource(
        described.dispatches.map(({ shader }) => shader),
        this.shaders,
      ),
    );
    const title = make(
      "th",
      { scope: "row", title: described.call },
      make("span", { className: "case" }, result.case),
      " ",
      make("span", { className: "dtype" }, result.dtype),
    );
    const row = make(
      "tr",
      {},
      title,
      make("td", { className: "error" }, ...errorOf(result, worst)),
      make("td", { className: "share" }, meter(result.usage)),
      make("td", { className: "wgsl" }, source),
      status,
    );
    row.classList.toggle("failed", !result.passed);
    body.append(row);
    if (!result.passed) card.open = true;
    this.#summarise(result.op);
  }

  #summarise(op) {
    const { summary, results, total } = this.ops.get(op);
    const failed = results.filter(({ passed }) => !passed).length;
    const done = results.length === total;
    const worst = Math.max(0, ...results.map(({ usage }) => usage));
    const words = failed ? `${failed} of ${total} failed` : done ? `${total} passed` : `${results.length} of ${total}`;
    summary.className = failed ? "bad" : done ? "good" : "";
    summary.replaceChildren(
      make("span", { className: "mark", ariaHidden: "true" }, failed ? "✗" : done ? "✓" : "·"),
      make("span", { className: "name" }, op),
      make("span", { className: "count" }, words),
      results.length ? meter(worst) : make("span"),
    );
  }
}

function errorOf(result, worst) {
  if (result.error) return [result.error];
  if (!worst) return [];
  if (worst.problem) return [`${worst.name}: ${worst.problem}`];
  return [
    make("span", { className: "output" }, worst.name),
    ` ${small(worst.largest)} of ${small(worst.allowed.largest)}`,
  ];
}

/** A share of the budget as a bar; full is all that is allowed. */
export function meter(usage) {
  const bar = make("span", { className: usage <= 1 ? "bar" : "bar over" });
  bar.style.width = `${100 * Math.min(usage, 1)}%`;
  const words = Number.isFinite(usage) ? `${Math.round(100 * usage)} %` : "–";
  return make(
    "span",
    { className: "meter", title: `${words} of the error budget` },
    make("span", { className: "track" }, bar),
    make("span", { className: "value" }, words),
  );
}

export function verdict(results) {
  const failed = results.filter(({ passed }) => !passed).length;
  if (results.length) at("checks-title").textContent = failed ? "Not right" : "Right";
  return failed;
}
