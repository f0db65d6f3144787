// The attention of a text: heads, the large map, the strip and the choices beside them, kept in step.

import { theme } from "./colours.js";
import { at, make } from "./elements.js";
import { drawScale, headGrid, largeMap } from "./map.js";
import { describePair, tokenStrip } from "./strip.js";
import { headName } from "./weights.js";

/**
 * Shows a sample, from the layer, head and token of `state` on, which keeps what is chosen. `onChoice(layer, head)` is told
 * of every choice. Gives what draws everything anew, for new colours or new weights.
 */
export function showAttention(sample, state, colourTable, onChoice = () => {}) {
  let colours = theme(colourTable);
  const describe = (query, key) => describePair(sample, sample.layers[state.layer], state.head, query, key);
  const chooseToken = (token) => update({ token });
  const heads = headGrid(at("heads"), sample, (layer, head) => update({ layer, head }));
  const map = largeMap(at("map"), sample, describe, chooseToken);
  const strip = tokenStrip(at("strip"), sample, describe, chooseToken);

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
    at("map-title").textContent = name;
    at("map-key").replaceChildren(
      "The red row is the chosen byte; hatched is what may not be seen",
      layer.window === null ? "." : `; the dashed line is the edge of the window of ${layer.window} bytes.`,
    );
    at("map").setAttribute(
      "aria-label",
      `Attention map of ${name}. Arrow keys move over pairs of bytes, Enter chooses the row.`,
    );
    onChoice(layer, state.head);
  }

  return () => {
    colours = theme(colourTable);
    heads.repaint(colours);
    drawScale(at("scale"), colours);
    update({});
  };
}
