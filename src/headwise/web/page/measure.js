// How fast the kernels are here: every size that this GPU does quickly, from the smallest on.

import { decode } from "./budget.js";
import { at, draw, make } from "./elements.js";
import * as files from "./files.js";
import { Program } from "./program.js";

const LONG_ENOUGH = 0.05; // seconds of a sample: clocks of browsers tick in steps of a tenth of a millisecond
const TOO_LONG = 0.25; // of one run: four times the work may take a second, and a GPU that is busy so long shows no pictures
const SAMPLES = 3;
const MOST_RUNS = 500;

/** Time one program: the median of a few samples. */
async function measure(gpu, described, shaders) {
  const program = await Program.load(gpu, described, shaders, await files.data(described.data));
  try {
    const [output] = described.outputs;
    const first = {
      ...output,
      shape: [
        Math.min(
          1024,
          output.shape.reduce((a, b) => a * b, 1),
        ),
      ],
    };
    const [bytes] = await program.runAndRead([first]);
    if (!decode(bytes, output.dtype).every(Number.isFinite)) throw new Error("its result is not finite");
    const once = await program.time(1);
    const runs = Math.max(1, Math.min(MOST_RUNS, Math.ceil(LONG_ENOUGH / once.seconds)));
    const samples = [];
    let clock = once.clock;
    for (let i = 0; i < SAMPLES; i++) {
      const sample = runs === 1 && i === 0 ? once : await program.time(runs);
      samples.push(sample.seconds / runs);
      clock = sample.clock;
    }
    const seconds = samples.sort((a, b) => a - b)[SAMPLES >> 1];
    return { seconds, rate: described.work / seconds, runs, clock };
  } finally {
    program.destroy();
  }
}

/** Measure everything; rows appear as they are known. most: sizes of each kind. */
export async function measureAll(gpu, measures, shaders, report, most = Infinity) {
  const kinds = new Map();
  for (const one of measures) kinds.set(one.name, [...(kinds.get(one.name) ?? []), one]);
  const results = [];
  at("measures-card").hidden = false;
  let done = 0;
  for (const [name, sizes] of kinds) {
    const row = new Row(name, sizes[0].unit);
    at("measures").append(row.element);
    for (const described of sizes.slice(0, most)) {
      report(`${name}, ${described.size}`, done / kinds.size);
      let result;
      try {
        result = { name, size: described.size, unit: described.unit, ...(await measure(gpu, described, shaders)) };
      } catch (error) {
        if (gpu.lost) throw error;
        result = { name, size: described.size, unit: described.unit, error: error.message };
      }
      results.push(result);
      row.add(result);
      if (result.error || result.seconds > TOO_LONG) break;
    }
    done++;
  }
  return results;
}

export const rate = (value, unit) => (unit === "flop" ? scaled(value, "FLOP/s") : scaled(value, "B/s"));

function scaled(value, unit) {
  const steps = ["", "k", "M", "G", "T", "P"];
  const step = Math.min(steps.length - 1, Math.max(0, Math.floor(Math.log10(value) / 3)));
  return `${(value / 1000 ** step).toPrecision(3)} ${steps[step]}${unit}`;
}

const time = (seconds) =>
  seconds < 1e-3 ? `${(1e6 * seconds).toPrecision(3)} µs` : `${(1e3 * seconds).toPrecision(3)} ms`;

class Row {
  constructor(name, unit) {
    this.unit = unit;
    this.results = [];
    this.cells = Object.fromEntries(
      ["sizes", "size", "time", "rate"].map((cell) => [cell, make("td", { className: cell })]),
    );
    this.element = make("tr", {}, make("th", { scope: "row" }, name), ...Object.values(this.cells));
  }

  add(result) {
    const { cells } = this;
    if (result.error) {
      cells.rate.append(make("span", { className: "bad" }, `${result.size}: ${result.error}`));
      return;
    }
    this.results.push(result);
    const fastest = Math.max(...this.results.map((one) => one.rate));
    const bars = draw("svg", {
      viewBox: "0 0 60 20",
      class: "bars",
      role: "img",
      "aria-label": this.results.map((one) => `${one.size}: ${rate(one.rate, this.unit)}`).join("; "),
    });
    this.results.forEach((one, i) => {
      const height = Math.max(1, (20 * one.rate) / fastest);
      const bar = draw("rect", { x: 10 * i, y: 20 - height, width: 8, height });
      bar.append(draw("title", {}, `${one.size}: ${rate(one.rate, this.unit)}, ${time(one.seconds)}`));
      bars.append(bar);
    });
    cells.sizes.replaceChildren(bars);
    cells.size.textContent = result.size;
    cells.time.textContent = time(result.seconds);
    cells.rate.replaceChildren(make("b", {}, rate(result.rate, this.unit)));
  }
}
