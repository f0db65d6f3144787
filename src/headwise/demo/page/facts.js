// What stands above and beside the pictures: who trained what, how fast, and whether the checks passed.

import { pieces } from "./glyphs.js";
import { at, make, small, whole } from "./elements.js";

const LAST = 20; // steps that the final loss is the mean of

export const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;

const duration = (seconds) =>
  seconds < 100 ? `${seconds.toFixed(1)} s` : `${Math.floor(Math.round(seconds) / 60)} min ${Math.round(seconds) % 60} s`;
const millions = (count) => (count < 1e5 ? whole(count) : `${(count / 1e6).toFixed(2)} M`);
const steps = (count) => `${whole(count)} step${count === 1 ? "" : "s"}`;
const listed = (value) => (Array.isArray(value) ? value.join(", ") : value === null ? "none" : String(value));

export function writeFacts(run) {
  const { losses } = run.curve;
  const seen = run.curve.first_step + losses.length;
  const last = losses.slice(-LAST);
  at("summary").append(
    make("strong", {}, whole(run.parameters)),
    " parameters learned to write, byte by byte, from ",
    make("strong", {}, run.text),
    ": ",
    steps(losses.length),
    " in ",
    duration(run.seconds),
    " on ",
    make("strong", {}, run.device),
    ", with Headwise’s ",
    make("code", {}, run.backend),
    " kernels.",
  );
  if (run.interrupted) {
    const asked = Number.isInteger(run.options.steps) ? ` of ${whole(run.options.steps)}` : "";
    at("interrupted").hidden = false;
    at("interrupted").textContent = `Stopped by hand after ${whole(seen)}${asked} steps; all that follows is of those.`;
  }
  const figures = [
    [
      "Loss at the end",
      losses.length ? mean(last).toFixed(3) : "–",
      losses.length
        ? `nats per byte, ${last.length === 1 ? "one step" : `mean of the last ${last.length} steps`}`
        : "no step was finished",
    ],
    ["Speed", whole(run.curve.tokens_per_second), "tokens per second; a token is a byte"],
    [
      "Training",
      duration(run.seconds),
      run.curve.first_step
        ? `${steps(losses.length)}, resumed at ${whole(run.curve.first_step)}`
        : steps(losses.length),
    ],
  ];
  // The size is told above already.
  const unseen = run.held_out_loss;
  if (unseen === null) figures.push(["Size", millions(run.parameters), "parameters"]);
  else figures.splice(1, 0, ["Loss on other text", unseen.toFixed(3), "nats per byte, not trained on"]);
  at("figures").append(
    ...figures.map(([name, value, note]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, make("b", {}, value), make("small", {}, note))),
    ),
  );
  const facts = [
    ["text", run.text],
    ["device", run.device],
    ["backend", run.backend],
    ...Object.entries(run.options),
    ...Object.entries(run.versions),
  ];
  at("facts").append(
    ...facts.map(([name, value]) =>
      make("div", {}, make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, listed(value))),
    ),
  );
  const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`);
  const seed = "seed" in run.options ? [`seed ${listed(run.options.seed)}`] : [];
  at("made").textContent = [...seed, ...versions].join(" · ");
}

/** Where the two curves overlap: how many steps, the largest difference, and at which step it is. */
export function compare(ours, plain) {
  const from = Math.max(ours.first_step, plain.first_step);
  const to = Math.min(ours.first_step + ours.losses.length, plain.first_step + plain.losses.length);
  let largest = { difference: -1, step: from };
  for (let step = from; step < to; step++) {
    const difference = Math.abs(ours.losses[step - ours.first_step] - plain.losses[step - plain.first_step]);
    if (difference > largest.difference) largest = { difference, step };
  }
  return { count: Math.max(0, to - from), ...largest };
}

export function writeComparison(run) {
  const { curve, plain } = run;
  const none = "This run was not compared with plain PyTorch.";
  if (plain === null) {
    at("difference").append(make("p", { className: "none" }, none));
  } else {
    const { count, difference, step } = compare(curve, plain);
    const there = plain.losses[step - plain.first_step];
    const rows = count
      ? [
          ["steps trained both ways", whole(count)],
          ["largest difference of the loss", `${small(difference)} nats`],
          ["at step", `${whole(step)}, where it is ${there.toFixed(4)}`],
          ["relative to it", small(difference / Math.abs(there))],
        ]
      : [["steps trained both ways", "none"]];
    at("difference").append(
      make(
        "table",
        {},
        make(
          "tbody",
          {},
          ...rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value))),
        ),
      ),
    );
  }
  const most = Math.max(curve.tokens_per_second, plain?.tokens_per_second ?? 0) || 1;
  for (const [each, kind] of [
    [curve, "ours"],
    [plain, "plain"],
  ]) {
    if (each === null) continue;
    const bar = make("span", { className: `bar ${kind}` });
    bar.style.width = `${(100 * each.tokens_per_second) / most}%`;
    at("speed").append(
      make(
        "div",
        { className: "speed" },
        make("span", { className: "name" }, each.name),
        make("span", { className: "value" }, `${whole(each.tokens_per_second)} tokens/s`),
        make("span", { className: "track" }, bar),
      ),
    );
  }
  const ratio = plain && plain.tokens_per_second > 0 ? curve.tokens_per_second / plain.tokens_per_second : null;
  const note =
    ratio === null
      ? none
      : `Headwise trains at ${ratio.toFixed(2)} × the speed of plain PyTorch here. Few steps: a hint, not a benchmark.`;
  at("speed").append(make("p", { className: ratio === null ? "none" : "note" }, note));
}

export function writeSpeech(run) {
  const shown = (text) =>
    pieces(text).map(([part, kind]) => (kind ? make("span", { className: `sign ${kind}` }, part) : part));
  const said = run.prompt || run.generated;
  at("text-about").textContent = said
    ? "It was given the marked words and went on by itself, one byte at a time over a growing cache of keys and values."
    : "This run has generated no text.";
  at("generated").append(make("mark", { title: "the prompt" }, ...shown(run.prompt)), ...shown(run.generated));
  at("generated").parentElement.hidden = !said;
  const decode = run.decode;
  const verdict = at("decode");
  if (decode === null) {
    verdict.textContent = "Decoding was not checked against the full forward pass in this run.";
    return;
  }
  verdict.classList.add(decode.passed ? "passed" : "failed");
  verdict.append(
    make("strong", {}, decode.passed ? "✓ Decoding passed its check" : "✗ Decoding failed its check"),
    ` At ${whole(decode.positions)} positions its logits lie at most ${small(decode.largest_difference)} from those of `,
    `one full forward pass; ${small(decode.allowed)} is allowed.`,
  );
}
