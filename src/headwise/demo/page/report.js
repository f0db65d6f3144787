// The page: reads the data it carries, writes the facts, and keeps maps, strip and choices in step.

import { isDark, theme } from "./colours.js";
import { at, make, percent, whole } from "./elements.js";
import { writeComparison, writeFacts, writeSpeech } from "./facts.js";
import { writeLoss } from "./loss.js";
import { drawScale, headGrid, largeMap } from "./map.js";
import { describePair, tokenStrip } from "./strip.js";
import { character, headName, mostTelling, unpack } from "./weights.js";

const data = JSON.parse(at("data").textContent);
const onTheme = [];

writeFacts(data.run);
writeLoss(data.run);
writeComparison(data.run);
writeSpeech(data.run);
if (data.sample) showAttention(unpack(data.sample));
else {
  at("attention").hidden = true;
  at("attention-about").textContent = "This run ended before it could look at its attention.";
}
followTheme();

function showAttention(sample) {
  const { layer, head, token } = mostTelling(sample);
  const state = { layer, head, token };
  let colours = theme(data.colours);

  const describe = (query, key) => describePair(sample, sample.layers[state.layer], state.head, query, key);
  const chooseToken = (token) => update({ token });
  const chooseHead = (layer, head) => update({ layer, head });
  const heads = headGrid(at("heads"), sample, chooseHead);
  const map = largeMap(at("map"), sample, describe, chooseToken);
  const strip = tokenStrip(at("strip"), sample, describe, chooseToken);

  const windows = sample.layers.some((layer) => layer.window !== null);
  at("attention-about").textContent =
    `${whole(sample.size)} bytes of the text, seen by ${sample.layers.length} layers. ` +
    "Choose a byte: the stronger the colour of another, the more it looks at it." +
    (windows
      ? " Layers with a window see only the last bytes; hatched is what a byte may not see."
      : " Hatched is what a byte may not see: what comes after it.");
  at("layer").append(...sample.layers.map((layer, i) => make("option", { value: i }, layer.name)));
  at("layer").addEventListener("change", (event) => update({ layer: Number(event.target.value) }));
  at("head").addEventListener("change", (event) => update({ head: Number(event.target.value) }));
  at("before").addEventListener("click", () => update({ token: Math.max(0, state.token - 1) }));
  at("after").addEventListener("click", () => update({ token: Math.min(sample.size - 1, state.token + 1) }));

  function update(change) {
    Object.assign(state, change);
    const layer = sample.layers[state.layer];
    state.head = Math.min(state.head, layer.heads.length - 1);
    const name = `${layer.name}, ${headName(layer, state.head)}`;
    at("layer").value = state.layer;
    at("head").replaceChildren(
      ...layer.heads.map((_, h) => make("option", { value: h, selected: h === state.head }, headName(layer, h))),
    );
    heads.mark(state.layer, state.head);
    map.show(state.layer, state.head, state.token, colours);
    strip.show(layer, state.head, state.token, colours);
    const { itself, before, spread } = character(layer.heads[state.head], sample.size);
    at("map-title").textContent = name;
    at("map-about").textContent =
      `On average ${percent(itself)} on the byte itself, ${percent(before)} on the one before; ` +
      `spread over about ${spread.toFixed(1)} bytes.`;
    at("map-key").replaceChildren(
      "The red row is the chosen byte; hatched is what may not be seen",
      layer.window === null ? "." : `; the dashed line is the edge of the window of ${layer.window} bytes.`,
    );
    at("map").setAttribute(
      "aria-label",
      `Attention map of ${name}. Arrow keys move over pairs of bytes, Enter chooses the row.`,
    );
  }

  onTheme.push(() => {
    colours = theme(data.colours);
    heads.repaint(colours);
    drawScale(at("scale"), colours);
    update({});
  });
}

/** Light or dark as the system has it, until the button says otherwise; what it said is remembered. */
function followTheme() {
  const button = at("theme");
  const apply = () => {
    button.setAttribute("aria-pressed", isDark());
    button.textContent = isDark() ? "☀ Light" : "☾ Dark";
    button.setAttribute(
      "aria-label",
      isDark() ? "Dark colours are on; switch to light" : "Light colours are on; switch to dark",
    );
    for (const repaint of onTheme) repaint();
  };
  try {
    const remembered = localStorage.getItem("headwise-theme");
    if (remembered === "dark" || remembered === "light") document.documentElement.dataset.theme = remembered;
  } catch {
    // No storage here: the system's choice it is.
  }
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("headwise-theme", document.documentElement.dataset.theme);
    } catch {
      // It holds until the page is closed.
    }
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
