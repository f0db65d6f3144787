// The attention maps of a demo, computed again here, and drawn with the parts of its report.

import { showAttention } from "./attention.js";
import { compare, decode } from "./budget.js";
import { at, make, small, whole } from "./elements.js";
import * as files from "./files.js";
import { Program } from "./program.js";
import { mostTelling } from "./weights.js";

/** A layer that can be computed again and again, at any temperature. */
class Layer {
  static async load(gpu, described, shaders) {
    const data = await files.data(described.data);
    const layer = new Layer();
    const [output] = described.outputs;
    layer.program = await Program.load(gpu, described, shaders, data);
    layer.described = described;
    layer.golden = new Float32Array(data, output.golden[0], output.golden[1] / 4);
    layer.size = output.shape.at(-1);
    return layer;
  }

  /** Probabilities of every head, and their mean as one more. */
  async compute(temperature = 1) {
    for (const { dispatch, byte, value } of this.described.scaled)
      this.program.setParameter(dispatch, byte, value / temperature);
    const [bytes] = await this.program.runAndRead();
    const all = decode(bytes, this.described.outputs[0].dtype);
    const square = this.size * this.size;
    const heads = Array.from({ length: this.described.heads }, (_, h) => all.subarray(h * square, (h + 1) * square));
    const mean = Float32Array.from(
      { length: square },
      (_, i) => heads.reduce((sum, head) => sum + head[i], 0) / heads.length,
    );
    return { all, heads: [...heads, mean] };
  }
}

/** Compute and compare all layers, then show them. Gives the results, a layer each, and what is shown. */
export async function look(gpu, maps, tokens, colours, shaders, report, onTheme) {
  const layers = [];
  const results = [];
  const sample = { tokens, size: tokens.length, layers: [] };
  for (const [i, described] of maps.entries()) {
    report(described.name, i / maps.length);
    try {
      const layer = await Layer.load(gpu, described, shaders);
      const { all, heads } = await layer.compute();
      const [allowed] = described.outputs;
      const { largest, problem, passed } = compare(all, layer.golden, allowed);
      layers.push(layer);
      sample.layers.push({ name: described.name, window: described.window, heads });
      results.push({ name: described.name, passed, problem, largest, allowed: allowed.largest, error: "" });
    } catch (error) {
      if (gpu.lost) throw error;
      results.push({
        name: described.name,
        passed: false,
        problem: "",
        largest: null,
        allowed: null,
        error: error.message,
      });
    }
  }
  tell(results);
  if (sample.layers.length) show(sample, layers, colours, onTheme);
  return { results, sample };
}

function tell(results) {
  const failed = results.filter(({ passed }) => !passed);
  const place = at("agreement");
  place.classList.add(failed.length ? "failed" : "passed");
  if (failed.length) {
    const why = failed.map(
      ({ name, problem, error, largest, allowed }) =>
        `${name}: ${error || problem || `differs by ${small(largest)}, allowed are ${small(allowed)}`}`,
    );
    place.replaceChildren(make("strong", {}, "Not the same maps. "), why.join("; "));
    return;
  }
  const worst = results.reduce((a, b) => (b.largest > a.largest ? b : a));
  place.replaceChildren(
    make("strong", {}, "The same maps. "),
    `Largest difference of a weight from the recorded ones: ${small(worst.largest)} (${worst.name}); up to ${small(worst.allowed)} is within the error budget.`,
  );
}

function show(sample, layers, colourTable, onTheme) {
  at("attention").hidden = false;
  at("attention-about").textContent =
    `${whole(sample.size)} bytes of text, as the demo's model saw them: its queries and keys came with this page, the weights were computed on your GPU just now.` +
    " Warm the softmax up or cool it down, and they are computed again.";
  at("layer").closest(".controls").querySelector(".stepper").before(temperatureControl());
  const { layer, head } = mostTelling(sample);
  // Late in the text there is most to look back at; a letter says more than a space.
  const late = sample.tokens.findLastIndex((byte, i) => i < sample.size * 0.8 && byte > 32 && byte < 127);
  const redraw = showAttention(sample, { layer, head, token: late < 0 ? sample.size - 1 : late }, colourTable);

  // The slider may move faster than the GPU computes: only where it stands by then is computed next.
  let wanted = 1;
  let busy = null;
  const temperature = () => 2 ** Number(at("temperature").value);
  async function follow() {
    let reached = null;
    while (reached !== wanted) {
      reached = wanted;
      const computed = await Promise.all(layers.map((layer) => layer.compute(wanted)));
      computed.forEach(({ heads: made }, i) => (sample.layers[i].heads = made));
    }
    redraw();
    document.documentElement.dataset.temperature = reached;
    busy = null;
  }
  at("temperature").addEventListener("input", () => {
    wanted = temperature();
    at("degree").textContent = wanted.toPrecision(2);
    busy ??= follow().catch(() => {}); // a lost GPU is told by the page itself
  });
  onTheme(redraw);
}

/** From a quarter to four times the temperature that the model was trained with. */
function temperatureControl() {
  const slider = make("input", { type: "range", id: "temperature", min: -2, max: 2, step: 0.05, value: 0 });
  return make("label", { className: "temperature" }, "Temperature ", slider, " ", make("output", { id: "degree" }, "1"));
}
