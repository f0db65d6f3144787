// The page: finds the GPU, checks, looks, and measures when asked to.
//
// In the address: ?tier=plain takes the kernels of a lower tier; ?only=softmax;attention:causal checks an op, and of
// another op one case; ?maps=no leaves the maps out; ?measure measures at once, ?measure=2 two sizes of each kind.

import { check, CheckTable, prepare, verdict } from "./check.js";
import { at, make, whole } from "./elements.js";
import * as files from "./files.js";
import { chooseTier, open, Trouble } from "./gpu.js";
import { look } from "./looking.js";
import { measureAll, rate } from "./measure.js";
import { followTheme } from "./theme.js";

const AHEAD = 4; // checks

const asked = new URLSearchParams(location.search);
const repaints = [];
const results = {
  headwise: null,
  browser: navigator.userAgent,
  adapter: null,
  tier: null,
  checks: [],
  maps: [],
  measures: [],
};

// For whoever drives the page: running, done, lost or trouble.
const state = (now) => (document.documentElement.dataset.state = now);

followTheme(repaints);
window.headwise = { results };
main().catch(fail);

async function main() {
  state("running");
  const site = await files.json("site.json");
  results.headwise = site.version;
  at("made").textContent =
    `Headwise ${site.version}. The WGSL of this page is what its WebGPU backend renders, word by word.`;
  // Where no subgroups are to be used, the device has none: as on a machine that lacks them.
  const gpu = await open(asked.get("tier") === "plain" ? ["subgroups"] : []);
  window.headwise.gpu = gpu;
  gpu.onLost = (why) =>
    fail(
      new Trouble(
        "lost",
        "The GPU was lost.",
        `The browser says: ${why}`,
        "A driver that resets or a kernel that runs too long does that. Load the page again to start anew.",
      ),
    );
  const shaders = await files.shaders();
  const { tier, why } = await chooseTier(gpu, site, shaders, asked.get("tier"));
  results.adapter = gpu.describe();
  results.tier = { name: tier.name, why };
  describeGpu(gpu, tier, why);
  const programs = await files.json(`programs/${tier.name}.json`);

  await runChecks(gpu, programs.checks, shaders);
  at("looking").hidden = false;
  if (site.tokens && asked.get("maps") !== "no") await runMaps(gpu, programs.maps, site, shaders);
  else sayHowToLook();
  offerResults();
  at("measuring").hidden = false;
  at("measures-about").textContent =
    `Random numbers in growing sizes, as long as this GPU is done with one in a quarter of a second. The clock is ${gpu.timestamps ? "the GPU's own (timestamp queries)" : "the one on the wall, around many dispatches: this browser offers no timestamp queries"}.`;
  at("measure").addEventListener("click", () => runMeasures(gpu, programs.measures, shaders).catch(fail));
  if (asked.has("measure"))
    await runMeasures(gpu, programs.measures, shaders, Number(asked.get("measure")) || Infinity);
  finish();
}

async function runChecks(gpu, all, shaders) {
  const only = asked.get("only")?.split(";");
  const chosen = all.filter(({ op, case: name }) => !only || only.includes(op) || only.includes(`${op}:${name}`));
  at("checking").hidden = false;
  const table = new CheckTable(at("checks"), chosen, shaders);
  for (const [i, described] of chosen.entries()) {
    progress(`${described.op}: ${described.case}, ${described.dtype}`, i / chosen.length);
    // Compilers of browsers work beside each other: the next kernels are on their way while these run.
    for (const next of chosen.slice(i + 1, i + 1 + AHEAD)) prepare(gpu, next, shaders);
    const result = await check(gpu, described, shaders);
    results.checks.push(result);
    table.add(result, described);
    figure(
      "checks",
      "Checks passed",
      `${results.checks.filter(({ passed }) => passed).length} of ${chosen.length}`,
      "forward and backward",
    );
  }
  const failed = verdict(results.checks);
  document.querySelector("[data-figure=checks]")?.classList.add(failed ? "bad" : "good");
}

async function runMaps(gpu, maps, site, shaders) {
  const onTheme = (repaint) => {
    repaints.push(repaint);
    repaint();
  };
  const looked = await look(gpu, maps, site.tokens, site.colours, shaders, progress, onTheme);
  results.maps = looked.results;
  window.headwise.sample = looked.sample;
}

async function runMeasures(gpu, measures, shaders, most) {
  at("measure").disabled = true;
  at("measures").replaceChildren();
  state("running");
  results.measures = await measureAll(gpu, measures, shaders, progress, most);
  for (const [unit, title] of [
    ["flop", "Fastest attention"],
    ["byte", "Fastest copy"],
  ]) {
    const best = results.measures
      .filter((one) => one.unit === unit && one.rate && (unit === "flop" || one.name === "plain copy"))
      .sort((a, b) => b.rate - a.rate)[0];
    if (best)
      figure(
        unit,
        title,
        rate(best.rate, unit),
        `${unit === "flop" ? best.name.split(", H")[0] + ", " : ""}${best.size}`,
      );
  }
  offerResults();
  at("measure").disabled = false;
  finish();
}

function finish() {
  at("progress").hidden = true;
  state("done");
}

function progress(doing, share) {
  at("progress").hidden = false;
  at("doing").textContent = doing;
  at("bar").value = share;
}

/** A number in the row below the title. */
function figure(key, title, value, note) {
  const made = make("div", {}, make("dt", {}, title), make("dd", {}, make("b", {}, value), make("small", {}, note)));
  made.dataset.figure = key;
  const before = document.querySelector(`[data-figure=${key}]`);
  if (before) before.replaceWith(made);
  else at("figures").append(made);
  at("figures").hidden = false;
}

function describeGpu(gpu, tier, why) {
  const { software, subgroups, features, limits } = gpu.describe();
  figure(
    "gpu",
    "GPU",
    gpu.name,
    software ? "in software: right, and slow" : `${gpu.adapter.info.vendor} ${gpu.adapter.info.architecture}`.trim(),
  );
  figure("tier", "Kernels", tier.title, why);
  const facts = {
    Subgroups: subgroups ? `${subgroups.join(" to ")} lanes` : "none",
    "16-bit floats": features.includes("shader-f16") ? "yes (not needed)" : "no (not needed)",
    Timestamps: gpu.timestamps ? "yes" : "no",
    "Largest buffer": bytes(limits.maxBufferSize),
    "Largest binding": bytes(limits.maxStorageBufferBindingSize),
    "Workgroup memory": bytes(limits.maxComputeWorkgroupStorageSize),
    "Threads of a workgroup": whole(limits.maxComputeInvocationsPerWorkgroup),
    Browser: navigator.userAgent,
  };
  at("facts").replaceChildren(
    ...Object.entries(facts).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
  );
  at("details").hidden = false;
}

function bytes(count) {
  const step = count >= 2 ** 30 ? 30 : count >= 2 ** 20 ? 20 : 10;
  return `${whole(count / 2 ** step)} ${{ 30: "GiB", 20: "MiB", 10: "KiB" }[step]}`;
}

function sayHowToLook() {
  at("attention-about").replaceChildren(
    "Attention maps of a model come here when a demo has been run: ",
    make("code", {}, "headwise demo --out run"),
    " trains one, ",
    make("code", {}, "headwise web run"),
    " brings its queries and keys along.",
  );
}

function offerResults() {
  const text = JSON.stringify(
    results,
    (_, value) => (typeof value === "number" && !Number.isFinite(value) ? String(value) : value),
    1,
  );
  at("results").hidden = false;
  URL.revokeObjectURL(at("download").href);
  at("download").href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  at("copy").onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
      at("copied").textContent = "Copied.";
    } catch {
      at("copied").textContent = "This browser lets no page copy here; download it instead.";
    }
  };
}

/** Say what stands in the way, once. */
function fail(error) {
  if (["trouble", "lost"].includes(document.documentElement.dataset.state)) return;
  const trouble =
    error instanceof Trouble ? error : new Trouble("error", "Something went wrong on this page.", error.message);
  state(trouble.kind === "lost" ? "lost" : "trouble");
  document.documentElement.dataset.trouble = trouble.kind;
  const again = make("button", { type: "button", className: "quiet" }, "Load again");
  again.addEventListener("click", () => location.reload());
  at("trouble").replaceChildren(
    make("strong", {}, trouble.message),
    ...trouble.advice.map((line) => make("p", {}, line)),
    again,
  );
  at("trouble").hidden = false;
  at("progress").hidden = true;
}
